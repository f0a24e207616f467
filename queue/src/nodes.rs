//! The builders, as people see them.

use std::time::Duration;

use sqlx::Row;

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
    /// Why it drains.
    pub drains: Vec<String>,
    /// The Kubernetes node that it runs on.
    pub kube_node: Option<String>,
    /// Its release.
    pub version: Option<String>,
    /// How long ago it was heard; none if its session is over.
    pub seen: Option<Duration>,
}

impl Node {
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
           ARRAY(SELECT d.reason FROM ci.drain d WHERE d.node_id = n.id AND d.session_id IN (0, s.id) ORDER BY d.deadline NULLS LAST, d.reason),
           extract(epoch FROM ci.clock() - s.last_seen)::float8
         FROM ci.node n JOIN ci.pool p ON p.id = n.pool_id
         LEFT JOIN ci.session s ON s.node_id = n.id AND s.ended_at IS NULL
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
                drains: row.try_get(9)?,
                seen: row
                    .try_get::<Option<f64>, _>(10)?
                    .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
            })
        })
        .collect()
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
