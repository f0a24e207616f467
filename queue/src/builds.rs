//! Builds, as people see them: one job each, with its attempts.

use std::collections::HashMap;

use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};

use crate::{Db, Result};

/// A build. Moments are in UTC, as RFC 3339 writes them.
#[derive(Debug, Clone, PartialEq)]
pub struct Build {
    /// Its number.
    pub id: i64,
    /// Its derivation.
    pub drv_path: String,
    /// What it is built on.
    pub system: String,
    /// What its node must offer.
    pub features: Vec<String>,
    /// blocked, ready, building, uploading, publishing, succeeded, cached, failed, dep_failed or cancelled.
    pub state: String,
    /// The node that has it,
    pub node: Option<String>,
    /// by this attempt,
    pub attempt: Option<i64>,
    /// for so many seconds.
    pub running_for: Option<f64>,
    /// What kind of failure it ended with, or its last attempt did,
    pub failure: Option<String>,
    /// in a sentence.
    pub error: Option<String>,
    /// Not tried because this one failed.
    pub root: Option<i64>,
    /// When it was first asked for,
    pub created_at: String,
    /// and ended.
    pub ended_at: Option<String>,
}

impl Build {
    /// What people call it.
    pub fn name(&self) -> &str {
        name_of(&self.drv_path)
    }

    /// Whether something can still come of it by itself.
    pub fn is_open(&self) -> bool {
        matches!(self.state.as_str(), "blocked" | "ready" | "building" | "uploading" | "publishing")
    }
}

/// `/nix/store/<hash>-hello-2.12.drv` is called `hello-2.12`.
pub fn name_of(drv_path: &str) -> &str {
    let base = drv_path.rsplit('/').next().unwrap_or(drv_path);
    let name = base.split_once('-').map_or(base, |(_, name)| name);
    name.strip_suffix(".drv").unwrap_or(name)
}

/// An output of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Its path, once that is known.
    pub path: Option<String>,
}

/// One try at a build.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// Its number. Connections draw them in batches: a later attempt may have a smaller one.
    pub id: i64,
    /// Where.
    pub node: Option<String>,
    /// When it was claimed,
    pub started_at: String,
    /// and was over.
    pub ended_at: Option<String>,
    /// How many seconds it took, or has taken so far.
    pub seconds: f64,
    /// succeeded, interrupted, cancelled, or a kind of failure. None: it runs.
    pub outcome: Option<String>,
    /// In a sentence.
    pub message: Option<String>,
}

const COLUMNS: &str = "j.id, j.drv_path, c.system, c.features, ci.state_of(j) AS state, n.name AS node, r.attempt,
    extract(epoch FROM ci.clock() - r.claimed_at)::float8 AS running_for, j.failure, j.error, j.root,
    ci.moment(j.created_at) AS created_at, ci.moment(j.ended_at) AS ended_at
  FROM ci.job j JOIN ci.class c ON c.id = j.class_id LEFT JOIN ci.running r ON r.job_id = j.id LEFT JOIN ci.node n ON n.id = r.node_id";

/// Which builds.
#[derive(Debug, Clone, Default)]
pub struct Filter<'a> {
    /// Wanted by this evaluation.
    pub evaluation: Option<i64>,
    /// In this state, as [`Build::state`] has it.
    pub state: Option<&'a str>,
    /// Wanted by an evaluation of this project.
    pub project: Option<&'a str>,
    /// With smaller numbers than this.
    pub before: Option<i64>,
}

/// One build.
pub async fn get(db: &Db, id: i64) -> Result<Option<Build>> {
    let text = format!("SELECT {COLUMNS} WHERE j.id = $1");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(id)).await?;
    rows.first().map(read).transpose()
}

/// Builds, those that were asked for last first.
pub async fn list(db: &Db, filter: &Filter<'_>, limit: i64) -> Result<Vec<Build>> {
    // Of what is not asked for no word: PostgreSQL begins where the fewest rows are, if no OR stands in its way.
    let mut query = QueryBuilder::<Postgres>::new(format!("SELECT {COLUMNS} WHERE true"));
    if let Some(evaluation) = filter.evaluation {
        query.push(" AND j.id IN (SELECT w.job_id FROM ci.want w WHERE w.evaluation_id = ");
        query.push_bind(evaluation).push(")");
    }
    if let Some(state) = filter.state {
        query.push(" AND ").push(is_in(state));
    }
    if let Some(project) = filter.project {
        query.push(" AND j.id IN (SELECT w.job_id FROM ci.want w JOIN ci.evaluation e ON e.id = w.evaluation_id JOIN ci.project p ON p.id = e.project_id WHERE p.name = ");
        query.push_bind(project).push(")");
    }
    if let Some(before) = filter.before {
        query.push(" AND j.id < ").push_bind(before);
    }
    query.push(" ORDER BY j.id DESC LIMIT ").push_bind(limit);
    let rows = db.rows(query.build()).await?;
    rows.iter().map(read).collect()
}

/// `ci.state_of` as a condition, without a call for each job: what is open is in one of three small tables.
fn is_in(state: &str) -> &'static str {
    match state {
        "blocked" => "j.id IN (SELECT b.job_id FROM ci.blocked b)",
        "ready" => "j.id IN (SELECT y.job_id FROM ci.ready y)",
        "building" => "r.phase = 'building'",
        "uploading" => "r.phase = 'uploading'",
        "publishing" => "r.phase = 'accepted'",
        "succeeded" => "j.state = 'succeeded'",
        "cached" => "j.state = 'cached'",
        "failed" => "j.state = 'failed'",
        "dep_failed" => "j.state = 'dep_failed'",
        "cancelled" => "j.state = 'cancelled'",
        _ => "false",
    }
}

/// What runs now, longest first.
pub async fn running(db: &Db, limit: i64) -> Result<Vec<Build>> {
    let text = format!("SELECT {COLUMNS} WHERE r.job_id IS NOT NULL ORDER BY r.claimed_at, j.id LIMIT $1");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(limit)).await?;
    rows.iter().map(read).collect()
}

fn read(row: &PgRow) -> Result<Build> {
    Ok(Build {
        id: row.try_get("id")?,
        drv_path: row.try_get("drv_path")?,
        system: row.try_get("system")?,
        features: row.try_get("features")?,
        state: row.try_get("state")?,
        node: row.try_get("node")?,
        attempt: row.try_get("attempt")?,
        running_for: row.try_get("running_for")?,
        failure: row.try_get("failure")?,
        error: row.try_get("error")?,
        root: row.try_get("root")?,
        created_at: row.try_get("created_at")?,
        ended_at: row.try_get("ended_at")?,
    })
}

/// What a build makes, by name.
pub async fn outputs(db: &Db, id: i64) -> Result<Vec<Output>> {
    let query = sqlx::query("SELECT name, path FROM ci.output WHERE job_id = $1 ORDER BY name");
    let rows = db.rows(query.bind(id)).await?;
    rows.iter().map(|row| Ok(Output { name: row.try_get(0)?, path: row.try_get(1)? })).collect()
}

/// All attempts at a build, the first one first.
pub async fn attempts(db: &Db, id: i64) -> Result<Vec<Attempt>> {
    let query = sqlx::query(
        "SELECT a.id, n.name, ci.moment(a.claimed_at), ci.moment(a.ended_at), extract(epoch FROM coalesce(a.ended_at, ci.clock()) - a.claimed_at)::float8,
           a.outcome, a.message
         FROM (SELECT id, session_id, claimed_at, ended_at, outcome, message FROM ci.attempt WHERE job_id = $1
               UNION ALL SELECT attempt, session_id, claimed_at, NULL, NULL, NULL FROM ci.running WHERE job_id = $1) a
         LEFT JOIN ci.session s ON s.id = a.session_id LEFT JOIN ci.node n ON n.id = s.node_id ORDER BY a.claimed_at, a.id",
    );
    let rows = db.rows(query.bind(id)).await?;
    rows.iter()
        .map(|row| {
            Ok(Attempt {
                id: row.try_get(0)?,
                node: row.try_get(1)?,
                started_at: row.try_get(2)?,
                ended_at: row.try_get(3)?,
                seconds: row.try_get(4)?,
                outcome: row.try_get(5)?,
                message: row.try_get(6)?,
            })
        })
        .collect()
}

/// What somebody meant by a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// This build.
    Build(i64),
    /// An attribute that could not be evaluated, in Nix's own words.
    Error(String),
    /// Several attributes end like this.
    Several(Vec<String>),
    /// Nothing.
    Nothing,
}

/// Finds a build by its number, its `.drv` path, one of its output paths, or an attribute of the latest evaluation that has
/// it (of a project, if one is named). An attribute's first or last words are enough where only one is like that.
pub async fn find(db: &Db, target: &str, project: Option<&str>) -> Result<Found> {
    if let Ok(id) = target.parse::<i64>() {
        return Ok(get(db, id).await?.map_or(Found::Nothing, |build| Found::Build(build.id)));
    }
    if target.starts_with('/') {
        let query = sqlx::query(
            "SELECT id FROM (SELECT id FROM ci.job WHERE drv_path = $1 UNION SELECT job_id FROM ci.output WHERE path = $1) j ORDER BY id DESC LIMIT 1",
        );
        let ids: Vec<i64> = db.column(query.bind(target)).await?;
        return Ok(ids.first().map_or(Found::Nothing, |&id| Found::Build(id)));
    }
    let exact = sqlx::query(
        "SELECT a.attr, a.job_id, a.error FROM (SELECT e.id FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id
           WHERE e.state = 'complete' AND ($2::text IS NULL OR p.name = $2) ORDER BY e.id DESC LIMIT 100) e
         JOIN ci.evaluation_attr a ON a.evaluation_id = e.id AND a.attr = $1 ORDER BY e.id DESC LIMIT 1",
    );
    let mut rows = db.rows(exact.bind(target).bind(project)).await?;
    if rows.is_empty() {
        // Every attribute has to be looked at, so of few evaluations.
        let part = sqlx::query(
            "WITH found AS MATERIALIZED (SELECT a.* FROM (SELECT e.id FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id
                 WHERE e.state = 'complete' AND ($2::text IS NULL OR p.name = $2) ORDER BY e.id DESC LIMIT 3) e
               JOIN ci.evaluation_attr a ON a.evaluation_id = e.id WHERE right(a.attr, length($1) + 1) = '.' || $1 OR starts_with(a.attr, $1 || '.'))
             SELECT attr, job_id, error FROM found WHERE evaluation_id = (SELECT max(evaluation_id) FROM found) ORDER BY attr LIMIT 10",
        );
        rows = db.rows(part.bind(target).bind(project)).await?;
    }
    match &rows[..] {
        [] => Ok(Found::Nothing),
        [row] => Ok(match row.try_get::<Option<i64>, _>(1)? {
            Some(id) => Found::Build(id),
            None => Found::Error(row.try_get::<Option<String>, _>(2)?.unwrap_or_default()),
        }),
        several => Ok(Found::Several(
            several.iter().map(|row| row.try_get(0)).collect::<std::result::Result<_, _>>()?,
        )),
    }
}

/// A piece of the live end of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Which attempt says this.
    pub attempt: i64,
    /// Where in its log.
    pub offset: i64,
    /// What.
    pub data: Vec<u8>,
}

/// What is known of a running build's log from an offset on, in order. What is older than the last 64 KiB is not.
pub async fn tail(db: &Db, id: i64, attempt: i64, offset: i64) -> Result<Vec<Piece>> {
    let query = sqlx::query(
        "SELECT attempt, greatest(starts, $3), substr(data, (greatest(starts, $3) - starts + 1)::int) FROM ci.log_tail
         WHERE job_id = $1 AND attempt = $2 AND starts + octet_length(data) > $3 ORDER BY starts",
    );
    let rows = db.rows(query.bind(id).bind(attempt).bind(offset)).await?;
    rows.iter()
        .map(|row| Ok(Piece { attempt: row.try_get(0)?, offset: row.try_get(1)?, data: row.try_get(2)? }))
        .collect()
}

/// Up to where a reader has the log of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The build.
    pub build: i64,
    /// Of which attempt; none: nothing was read yet.
    pub attempt: Option<i64>,
    /// Up to which byte.
    pub offset: i64,
}

/// What is new in the log of a build.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct News {
    /// More may come, by this attempt or another.
    pub open: bool,
    /// The attempt that writes it at the moment.
    pub attempt: Option<i64>,
    /// What was added since the reader's place; the whole tail where that is in another attempt.
    pub pieces: Vec<Piece>,
}

/// What is new in any number of logs, by build. What is not there any more has no news.
pub async fn news(db: &Db, places: &[Place]) -> Result<HashMap<i64, News>> {
    let query = sqlx::query(
        "SELECT p.id, j.state = 'open', r.attempt, greatest(t.starts, f.seen), substr(t.data, (greatest(t.starts, f.seen) - t.starts + 1)::int)
         FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) p (id, attempt, seen) JOIN ci.job j ON j.id = p.id
         LEFT JOIN ci.running r ON r.job_id = p.id
         CROSS JOIN LATERAL (SELECT CASE WHEN r.attempt = p.attempt THEN p.seen ELSE 0 END AS seen) f
         LEFT JOIN ci.log_tail t ON t.job_id = p.id AND t.attempt = r.attempt AND t.starts + octet_length(t.data) > f.seen
         ORDER BY p.id, t.starts",
    );
    let column = |of: fn(&Place) -> i64| places.iter().map(of).collect::<Vec<_>>();
    let attempts: Vec<Option<i64>> = places.iter().map(|place| place.attempt).collect();
    let query = query.bind(column(|place| place.build)).bind(attempts).bind(column(|place| place.offset));
    let mut news: HashMap<i64, News> = HashMap::new();
    for row in db.rows(query).await? {
        let of = news.entry(row.try_get(0)?).or_default();
        of.open = row.try_get(1)?;
        of.attempt = row.try_get(2)?;
        // The offset is there without data too: it is the reader's own.
        if let (Some(attempt), Some(data)) = (of.attempt, row.try_get(4)?) {
            of.pieces.push(Piece { attempt, offset: row.try_get(3)?, data });
        }
    }
    Ok(news)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_neither_hash_nor_ending() {
        assert_eq!(name_of("/nix/store/vbb1lilif8558y8qx1m16hz3yn7zpax5-hello-2.12.drv"), "hello-2.12");
        assert_eq!(name_of("odd"), "odd");
    }
}
