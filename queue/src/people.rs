//! What people and the operator change and ask.

use std::time::Duration;

use sqlx::Row;

use crate::db::LONG;
use crate::{Db, Error, Result};

/// A project, as wanted.
#[derive(Debug, Clone)]
pub struct Project<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its part of the builders' time against the others'.
    pub shares: i32,
    /// Builds at once, at most.
    pub max_concurrent: Option<i32>,
    /// Only in these pools. None: in all.
    pub pools: Option<Vec<String>>,
    /// Pools for changes from outside.
    pub untrusted_pools: Vec<String>,
    /// Nothing is claimed for it.
    pub paused: bool,
    /// How long its evaluations are kept.
    pub retention: Duration,
}

impl<'a> Project<'a> {
    /// A project with the defaults.
    pub fn new(name: &'a str) -> Self {
        Self {
            name,
            shares: 100,
            max_concurrent: None,
            pools: None,
            untrusted_pools: Vec::new(),
            paused: false,
            retention: Duration::from_secs(90 * 86_400),
        }
    }
}

/// A pool of builders, as wanted.
#[derive(Debug, Clone)]
pub struct Pool<'a> {
    /// Its name.
    pub name: &'a str,
    /// The database login of its builders.
    pub login: &'a str,
    /// What it builds for; Nix's extra platforms come by themselves.
    pub systems: Vec<String>,
    /// None: Nix's own default features.
    pub features: Option<Vec<String>>,
    /// Only jobs that ask for these.
    pub mandatory_features: Vec<String>,
    /// Builds at once on one node, at most.
    pub slots: i32,
    /// Bytes that a build has which is alone on a node. 0: nobody knows. What runs out of them goes to a pool with more.
    pub memory: i64,
}

/// Why an evaluation ends before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It could not be evaluated.
    Aborted,
    /// A person or a newer push.
    Cancelled,
}

/// Makes a project or changes it.
pub async fn put_project(db: &Db, project: &Project<'_>) -> Result<i32> {
    let query = sqlx::query("SELECT ci.put_project($1, $2, $3, $4, $5, $6, make_interval(secs => $7))")
        .bind(project.name)
        .bind(project.shares)
        .bind(project.max_concurrent)
        .bind(project.pools.as_deref())
        .bind(&project.untrusted_pools)
        .bind(project.paused)
        .bind(project.retention.as_secs_f64());
    db.value(query).await
}

/// Cancels a project's evaluations and hides it; its history stays. False: there was none.
pub async fn remove_project(db: &Db, name: &str) -> Result<bool> {
    db.value(sqlx::query("SELECT ci.remove_project($1)").bind(name)).await
}

/// Makes a pool or changes it. Its login is made by [`crate::logins`].
pub async fn put_pool(db: &Db, pool: &Pool<'_>) -> Result<i32> {
    let query = sqlx::query(
        "SELECT ci.put_pool($1, $2::text::name, $3, coalesce($4, '{benchmark,big-parallel,nixos-test}'), $5, $6, false, $7)",
    );
    let query = query.bind(pool.name).bind(pool.login).bind(&pool.systems).bind(pool.features.as_deref());
    db.value(query.bind(&pool.mandatory_features).bind(pool.slots).bind(pool.memory)).await
}

/// The pool is gone: nobody registers under it any more.
pub async fn remove_pool(db: &Db, name: &str) -> Result<bool> {
    db.value(sqlx::query("SELECT ci.remove_pool($1)").bind(name)).await
}

/// Ends an evaluation; what only it wanted is cancelled. False: it had ended so before.
pub async fn end_evaluation(db: &Db, evaluation: i64, ending: Ending, error: Option<&str>) -> Result<bool> {
    let state = match ending {
        Ending::Aborted => "aborted",
        Ending::Cancelled => "cancelled",
    };
    let query = sqlx::query("SELECT ci.end_evaluation($1, $2::text::ci.evaluation_state, $3)");
    db.value(query.bind(evaluation).bind(state).bind(error)).await
}

/// Builds a failed or cancelled job again, first in line. False: there is nothing to rebuild.
pub async fn rebuild(db: &Db, job: i64) -> Result<bool> {
    let rebuilt = db.value(sqlx::query("SELECT ci.rebuild($1)").bind(job)).await?;
    crate::forges::look_again_at(db, job).await;
    Ok(rebuilt)
}

/// Cancels one build; a running one is stopped by its builder. False: it had ended.
pub async fn cancel(db: &Db, job: i64) -> Result<bool> {
    let cancelled = db.value(sqlx::query("SELECT ci.cancel($1)").bind(job)).await?;
    hint_builders(db).await;
    Ok(cancelled)
}

/// Why a job is not running: codes and sentences, most telling first.
pub async fn why(db: &Db, job: i64) -> Result<Vec<(String, String)>> {
    let rows = db.rows(sqlx::query("SELECT code, sentence FROM ci.why($1)").bind(job)).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Adds a reason for a node to drain, or moves its deadline. Nothing is claimed by it after this returns.
pub async fn drain(db: &Db, node: i32, reason: &str, within: Option<Duration>) -> Result<()> {
    let query = sqlx::query("SELECT ci.drain($1, $2, ci.clock() + make_interval(secs => $3))")
        .bind(node)
        .bind(reason);
    db.row(query.bind(within.map(|left| left.as_secs_f64()))).await?;
    hint_builders(db).await;
    Ok(())
}

/// Takes one reason back. False: it was not there.
pub async fn resume(db: &Db, node: i32, reason: &str) -> Result<bool> {
    let resumed = db.value(sqlx::query("SELECT ci.resume($1, $2)").bind(node).bind(reason)).await?;
    hint_builders(db).await;
    Ok(resumed)
}

/// They would ask within half a minute anyway: what was done is done, heard or not.
async fn hint_builders(db: &Db) {
    if let Err(error) = crate::listen::notify(db, crate::listen::Channel::Stop, "").await {
        tracing::debug!(%error, "builders hear of it with their next heartbeat");
    }
}

/// Marks those of the nodes that hold nothing, and only those; answers them.
pub async fn drain_idle(db: &Db, nodes: &[i32], reason: &str) -> Result<Vec<i32>> {
    let marked = db.column(sqlx::query("SELECT ci.drain_idle($1, $2)").bind(nodes).bind(reason)).await?;
    hint_builders(db).await;
    Ok(marked)
}

/// What is wrong with the queue; nothing, if it is sound.
pub async fn audit(db: &Db) -> Result<Vec<(String, String)>> {
    let rows = db.within(LONG).rows(sqlx::query("SELECT violation, subject FROM ci.audit()")).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// What a token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Looking, and fetching from the cache.
    Read,
    /// Rebuilding, cancelling, draining.
    Operate,
    /// Everything.
    Admin,
}

impl Scope {
    /// As the database has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
        }
    }
}

impl std::str::FromStr for Scope {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Read, Self::Operate, Self::Admin]
            .into_iter()
            .find(|scope| scope.as_str() == text)
            .ok_or_else(|| Error::Invalid(format!("there is no scope {text}: read, operate and admin are")))
    }
}

/// Makes a token; the secret is shown this once.
pub async fn create_token(db: &Db, name: &str, scope: Scope, expires_in: Option<Duration>) -> Result<String> {
    let query = sqlx::query("SELECT ci.create_token($1, $2, make_interval(secs => $3))");
    db.value(query.bind(name).bind(scope.as_str()).bind(expires_in.map(|left| left.as_secs_f64()))).await
}

/// A token, without its secret. Moments are in UTC, as RFC 3339 writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its name.
    pub name: String,
    /// What it allows.
    pub scope: Scope,
    /// Since when.
    pub created_at: String,
    /// Until when. None: until it is revoked.
    pub expires_at: Option<String>,
    /// That moment has passed.
    pub expired: bool,
}

/// All tokens, by name.
pub async fn list_tokens(db: &Db) -> Result<Vec<Token>> {
    let query = sqlx::query(
        "SELECT name, scope, ci.moment(created_at), ci.moment(expires_at), (expires_at <= ci.clock()) IS TRUE
         FROM ci.token ORDER BY name",
    );
    let rows = db.rows(query).await?;
    rows.iter()
        .map(|row| {
            Ok(Token {
                name: row.try_get(0)?,
                scope: row.try_get::<&str, _>(1)?.parse()?,
                created_at: row.try_get(2)?,
                expires_at: row.try_get(3)?,
                expired: row.try_get(4)?,
            })
        })
        .collect()
}

/// From now on it allows nothing.
pub async fn revoke_token(db: &Db, name: &str) -> Result<()> {
    db.row(sqlx::query("SELECT ci.revoke_token($1)").bind(name)).await?;
    Ok(())
}

/// Whose secret it is and what it allows.
pub async fn token_scope(db: &Db, secret: &str) -> Result<Option<(String, Scope)>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.token_scope($1)").bind(secret)).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some((row.try_get(0)?, row.try_get::<&str, _>(1)?.parse()?)))
}

/// Somebody, as a forge knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who<'a> {
    /// The forge.
    pub instance: &'a str,
    /// What it calls them.
    pub login: &'a str,
}

/// Makes a token of somebody of a forge, which allows what the forge lets them do; the secret is shown this once.
pub async fn create_member_token(db: &Db, name: &str, who: Who<'_>, expires_in: Duration) -> Result<String> {
    let query =
        sqlx::query("SELECT ci.create_member_token($1, $2, $3, make_interval(secs => $4))").bind(name);
    db.value(query.bind(who.instance).bind(who.login).bind(expires_in.as_secs_f64())).await
}

/// Whose token a secret is: the forge, and what it calls them.
pub async fn token_member(db: &Db, secret: &str) -> Result<Option<(String, String)>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.token_member($1)").bind(secret)).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some((row.try_get(0)?, row.try_get(1)?)))
}

/// The tokens of somebody, each with the moment until which it is one.
pub async fn member_tokens(db: &Db, who: Who<'_>) -> Result<Vec<(String, String)>> {
    let query = sqlx::query("SELECT * FROM ci.member_tokens($1, $2)").bind(who.instance).bind(who.login);
    db.rows(query).await?.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// A token of theirs allows nothing any more. False: they have none of this name.
pub async fn revoke_member_token(db: &Db, name: &str, who: Who<'_>) -> Result<bool> {
    let query = sqlx::query("SELECT ci.revoke_member_token($1, $2, $3)").bind(name);
    db.value(query.bind(who.instance).bind(who.login)).await
}
