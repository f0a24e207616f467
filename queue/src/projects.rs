//! Projects, as people see them.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::{Db, Result};

/// A project and what it uses.
#[derive(Debug, Clone, PartialEq)]
pub struct Project {
    /// Its name.
    pub name: String,
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
    /// Seconds of builder time that count against it; old ones count less.
    pub used: f64,
    /// Builds that could be claimed for it,
    pub ready: i64,
    /// and that run for it.
    pub running: i64,
}

const COLUMNS: &str = "p.name, p.shares, p.max_concurrent,
    CASE WHEN p.pools IS NOT NULL THEN ARRAY(SELECT q.name FROM ci.pool q WHERE q.id = ANY (p.pools) ORDER BY q.name) END AS pools,
    ARRAY(SELECT q.name FROM ci.pool q WHERE q.id = ANY (p.untrusted_pools) ORDER BY q.name) AS untrusted_pools, p.paused,
    extract(epoch FROM p.retention)::float8 AS retention,
    coalesce((SELECT sum(l.used + l.inflight) FROM ci.lane l WHERE l.project_id = p.id), 0) AS used,
    (SELECT count(*) FROM ci.offer o WHERE o.project_id = p.id) AS ready,
    (SELECT count(*) FROM ci.running r JOIN ci.lane l ON l.id = r.lane_id WHERE l.project_id = p.id) AS running
  FROM ci.project p WHERE p.deleted_at IS NULL";

/// All of them, by name.
pub async fn list(db: &Db) -> Result<Vec<Project>> {
    let text = format!("SELECT {COLUMNS} ORDER BY p.name");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text))).await?;
    rows.iter().map(read).collect()
}

/// One of them.
pub async fn get(db: &Db, name: &str) -> Result<Option<Project>> {
    let text = format!("SELECT {COLUMNS} AND p.name = $1");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(name)).await?;
    rows.first().map(read).transpose()
}

fn read(row: &PgRow) -> Result<Project> {
    Ok(Project {
        name: row.try_get("name")?,
        shares: row.try_get("shares")?,
        max_concurrent: row.try_get("max_concurrent")?,
        pools: row.try_get("pools")?,
        untrusted_pools: row.try_get("untrusted_pools")?,
        paused: row.try_get("paused")?,
        retention: Duration::try_from_secs_f64(row.try_get("retention")?).unwrap_or_default(),
        used: row.try_get("used")?,
        ready: row.try_get("ready")?,
        running: row.try_get("running")?,
    })
}
