//! What the operator keeps equal to custom resources, and what it shows of them in their status.
//!
//! Every write carries the leader's generation; one of a former leader is refused. Of one resource, known by its uid, a
//! later generation stands; a resource that was made anew under the same name begins at 1 again and takes over.

use sqlx::Row;

use crate::people::{Pool, Project};
use crate::{Db, Result};

/// Which custom resource, and how new a word of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resource<'a> {
    /// `metadata.uid`.
    pub uid: &'a str,
    /// `metadata.generation`.
    pub generation: i64,
}

/// Keeps a project as its resource says. Pools that do not exist yet are waited for: until then nothing of it is built
/// there, and [`ProjectCounts::missing_pools`] names them. False: a later word stands, nothing was changed.
pub async fn project(db: &Db, leader: i64, resource: Resource<'_>, project: &Project<'_>) -> Result<bool> {
    let query = sqlx::query(
        "SELECT ci.mirror_project($1, $2, $3, $4, $5, $6, $7, $8, $9, make_interval(secs => $10))",
    )
    .bind(leader)
    .bind(resource.uid)
    .bind(resource.generation)
    .bind(project.name)
    .bind(project.shares)
    .bind(project.max_concurrent)
    .bind(project.pools.as_deref())
    .bind(&project.untrusted_pools)
    .bind(project.paused)
    .bind(project.retention.as_secs_f64());
    db.value(query).await
}

/// The resource is gone: cancels the project's evaluations and hides it. False: there is none that this resource keeps.
pub async fn project_gone(db: &Db, leader: i64, uid: &str, name: &str) -> Result<bool> {
    db.value(sqlx::query("SELECT ci.unmirror_project($1, $2, $3)").bind(leader).bind(uid).bind(name)).await
}

/// Keeps a pool as its resource says. False: a later word stands.
pub async fn pool(db: &Db, leader: i64, resource: Resource<'_>, pool: &Pool<'_>) -> Result<bool> {
    let query = sqlx::query(
        "SELECT ci.mirror_pool($1, $2, $3, $4, $5::text::name, $6, coalesce($7, '{benchmark,big-parallel,nixos-test}'), $8, $9, $10)",
    )
    .bind(leader)
    .bind(resource.uid)
    .bind(resource.generation)
    .bind(pool.name)
    .bind(pool.login)
    .bind(&pool.systems)
    .bind(pool.features.as_deref())
    .bind(&pool.mandatory_features)
    .bind(pool.slots)
    .bind(pool.memory);
    db.value(query).await
}

/// What stands between a pool and more nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// It has as many as it may.
    pub at_maximum: bool,
    /// It should have some that do not run, and why.
    pub note: Option<String>,
}

/// Writes it down for who asks why nothing is built. False: there is no pool that this resource keeps.
pub async fn note_pool(db: &Db, leader: i64, uid: &str, name: &str, bounds: &Bounds) -> Result<bool> {
    // More would be refused.
    let note = bounds.note.as_deref().map(|note| note.chars().take(500).collect::<String>());
    let query = sqlx::query("SELECT ci.note_pool($1, $2, $3, $4, $5)").bind(leader).bind(uid).bind(name);
    db.value(query.bind(bounds.at_maximum).bind(note)).await
}

/// The resource is gone: nobody registers under the pool any more. False: there is none that this resource keeps.
pub async fn pool_gone(db: &Db, leader: i64, uid: &str, name: &str) -> Result<bool> {
    db.value(sqlx::query("SELECT ci.unmirror_pool($1, $2, $3)").bind(leader).bind(uid).bind(name)).await
}

/// A pool in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolCounts {
    /// Its name.
    pub name: String,
    /// The uid of the resource that keeps it. None: people do.
    pub uid: Option<String>,
    /// Nodes that live,
    pub nodes: i64,
    /// that build or upload something,
    pub busy: i64,
    /// and that claim nothing more.
    pub draining: i64,
    /// Builds that run,
    pub building: i64,
    /// and that are on their way to the cache.
    pub uploading: i64,
    /// Ready builds that its nodes could claim, limits of projects aside.
    pub queued: i64,
}

/// All pools, by name, in one query.
pub async fn pool_counts(db: &Db) -> Result<Vec<PoolCounts>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.pool_counts()")).await?;
    rows.iter()
        .map(|row| {
            Ok(PoolCounts {
                name: row.try_get("name")?,
                uid: row.try_get("uid")?,
                nodes: row.try_get("nodes")?,
                busy: row.try_get("busy")?,
                draining: row.try_get("draining")?,
                building: row.try_get("building")?,
                uploading: row.try_get("uploading")?,
                queued: row.try_get("queued")?,
            })
        })
        .collect()
}

/// Ready builds that the same pools could take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// The pools, by name, each with how many of its features these builds do not ask for.
    pub pools: Vec<(String, i32)>,
    /// How many builds, as far as their projects' limits let them run.
    pub jobs: i64,
}

/// All ready builds, by who could take them, in one query.
pub async fn demand(db: &Db) -> Result<Vec<Demand>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.demand()")).await?;
    rows.iter()
        .map(|row| {
            let (names, surplus): (Vec<String>, Vec<i32>) = (row.try_get("pools")?, row.try_get("surplus")?);
            Ok(Demand { pools: names.into_iter().zip(surplus).collect(), jobs: row.try_get("jobs")? })
        })
        .collect()
}

/// A project in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct ProjectCounts {
    /// Its name.
    pub name: String,
    /// The uid of the resource that keeps it.
    pub uid: String,
    /// Ready builds,
    pub queued: i64,
    /// and those that run for it.
    pub running: i64,
    /// Its part, 0 to 1, of all builder time that still counts.
    pub used_share: f64,
    /// Pools that it names and that do not exist.
    pub missing_pools: Vec<String>,
    /// The newest evaluation.
    pub last: Option<LastEvaluation>,
}

/// A project's newest evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastEvaluation {
    /// Its number.
    pub id: i64,
    /// Its commit, once that is known.
    pub commit: Option<String>,
    /// `queued`, `evaluating`, `building`, `succeeded`, `failed` or `cancelled`.
    pub status: String,
    /// When it was asked for, in UTC, as RFC 3339 writes it.
    pub time: String,
}

/// All projects that resources keep, by name, in one query.
pub async fn project_counts(db: &Db) -> Result<Vec<ProjectCounts>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.project_counts()")).await?;
    rows.iter()
        .map(|row| {
            let evaluation: Option<i64> = row.try_get("evaluation")?;
            let last = |id| {
                Ok::<_, crate::Error>(LastEvaluation {
                    id,
                    commit: row.try_get("commit_id")?,
                    status: row.try_get("status")?,
                    time: row.try_get("created_at")?,
                })
            };
            Ok(ProjectCounts {
                name: row.try_get("name")?,
                uid: row.try_get("uid")?,
                queued: row.try_get("queued")?,
                running: row.try_get("running")?,
                used_share: row.try_get("used_share")?,
                missing_pools: row.try_get("missing_pools")?,
                last: evaluation.map(last).transpose()?,
            })
        })
        .collect()
}
