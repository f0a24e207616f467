//! The builders, as people see them.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::{Db, Error, Result};

/// A builder that was seen lately.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Its number.
    pub id: i32,
    /// Its name, unique in its pool.
    pub name: String,
    /// Its pool.
    pub pool: String,
    /// Builds at once; 0 if it is not alive.
    pub slots: i32,
    /// What it builds,
    pub building: i64,
    /// and what it has built and not published yet.
    pub uploading: i64,
    /// Against the fleet, for the same names.
    pub speed: f32,
    /// Why it drains, the earliest deadline first.
    pub drains: Vec<Drain>,
    /// The Kubernetes node that it runs on.
    pub kube_node: Option<String>,
    /// Its release.
    pub version: Option<String>,
    /// How long ago it was heard; none if its session is over.
    pub seen: Option<Duration>,
}

/// A reason to drain.
#[derive(Debug, Clone, PartialEq)]
pub struct Drain {
    /// In words.
    pub reason: String,
    /// For how long.
    pub since: Duration,
    /// The time that is left, if there is a deadline.
    pub left: Option<Duration>,
}

impl Node {
    /// Why it drains, if that is a reason.
    pub fn drains_for(&self, reason: &str) -> Option<&Drain> {
        self.drains.iter().find(|drain| drain.reason == reason)
    }

    /// In one word.
    pub fn state(&self) -> &'static str {
        let idle = self.building + self.uploading == 0;
        match (self.seen, self.drains.is_empty()) {
            (None, _) => "gone",
            (Some(_), true) => "active",
            (Some(_), false) if idle => "drained",
            (Some(_), false) => "draining",
        }
    }
}

/// Those that live, or drain, by pool and name.
pub async fn list(db: &Db) -> Result<Vec<Node>> {
    let query = sqlx::query(
        "SELECT n.id, n.name, p.name, coalesce(s.slots, 0), n.speed, n.kube_node, s.version,
           (SELECT count(*) FROM ci.running r WHERE r.session_id = s.id AND r.phase = 'building'),
           (SELECT count(*) FROM ci.running r WHERE r.session_id = s.id AND r.phase <> 'building'),
           x.reasons, x.since, x.remaining, extract(epoch FROM ci.clock() - s.last_seen)::float8
         FROM ci.node n JOIN ci.pool p ON p.id = n.pool_id
         LEFT JOIN ci.session s ON s.node_id = n.id AND s.ended_at IS NULL
         CROSS JOIN LATERAL (
           SELECT coalesce(array_agg(d.reason ORDER BY d.deadline NULLS LAST, d.reason), '{}') AS reasons,
             array_agg(extract(epoch FROM ci.clock() - d.since)::float8 ORDER BY d.deadline NULLS LAST, d.reason) AS since,
             array_agg(extract(epoch FROM d.deadline - ci.clock())::float8 ORDER BY d.deadline NULLS LAST, d.reason) AS remaining
           FROM ci.drain d WHERE d.node_id = n.id AND d.session_id IN (0, s.id)) x
         WHERE s.id IS NOT NULL OR EXISTS (SELECT FROM ci.drain d WHERE d.node_id = n.id) ORDER BY p.name, n.name",
    );
    let rows = db.rows(query).await?;
    rows.iter()
        .map(|row| {
            Ok(Node {
                id: row.try_get(0)?,
                name: row.try_get(1)?,
                pool: row.try_get(2)?,
                slots: row.try_get(3)?,
                speed: row.try_get(4)?,
                kube_node: row.try_get(5)?,
                version: row.try_get(6)?,
                building: row.try_get(7)?,
                uploading: row.try_get(8)?,
                drains: drains(row)?,
                seen: row.try_get::<Option<f64>, _>(12)?.map(seconds),
            })
        })
        .collect()
}

fn drains(row: &PgRow) -> Result<Vec<Drain>> {
    let reasons: Vec<String> = row.try_get(9)?;
    let since: Vec<f64> = row.try_get::<Option<_>, _>(10)?.unwrap_or_default();
    let left: Vec<Option<f64>> = row.try_get::<Option<_>, _>(11)?.unwrap_or_default();
    let times = since.into_iter().zip(left);
    let drain = |(reason, (since, left)): (String, (f64, Option<f64>))| Drain {
        reason,
        since: seconds(since),
        left: left.map(seconds),
    };
    Ok(reasons.into_iter().zip(times).map(drain).collect())
}

/// What is over is none.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// The number of the only node of that name.
pub async fn named(db: &Db, name: &str) -> Result<i32> {
    let found: Vec<i32> = db.column(sqlx::query("SELECT id FROM ci.node WHERE name = $1").bind(name)).await?;
    match found[..] {
        [node] => Ok(node),
        [] => Err(Error::NotFound(format!("there is no node {name}: `harmonia-ci nodes` lists them"))),
        _ => Err(Error::Invalid(format!("{} pools have a node {name}", found.len()))),
    }
}
