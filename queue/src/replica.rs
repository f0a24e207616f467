//! The registry of control-plane replicas.

use std::time::Duration;

use sqlx::Row;
use uuid::Uuid;

use crate::{Db, Result};

/// A replica says that it lives this often; it is stale after three times as long and pruned after six.
pub const BEAT: Duration = Duration::from_secs(10);

/// A control-plane process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    /// Stays the same over a restart of the process, where it has somewhere to keep it.
    pub id: Uuid,
    /// `operator`, `signer`, `frontend`, `evaluator` or `up`.
    pub role: String,
    /// Where it is reached.
    pub url: String,
}

impl Replica {
    /// Registers, or says that it lives.
    pub async fn beat(&self, db: &Db) -> Result<()> {
        let query = sqlx::query("SELECT ci.beat($1, $2, $3)").bind(self.id).bind(&self.role);
        db.row(query.bind(&self.url)).await?;
        Ok(())
    }

    /// Beats until it is dropped. An unreachable database is waited for.
    pub async fn keep_beating(&self, db: &Db) {
        let mut tick = tokio::time::interval(BEAT);
        loop {
            tick.tick().await;
            if let Err(error) = self.beat(db).await {
                tracing::warn!(%error, replica = %self.id, "could not say that this replica lives");
            }
        }
    }

    /// Signs off.
    pub async fn leave(&self, db: &Db) -> Result<()> {
        db.row(sqlx::query("SELECT ci.leave($1)").bind(self.id)).await?;
        Ok(())
    }
}

/// Replicas that beat within the last 30 s, the oldest first.
pub async fn healthy(db: &Db) -> Result<Vec<Replica>> {
    let rows = db.rows(sqlx::query("SELECT id, role, url FROM ci.healthy_replicas()")).await?;
    rows.iter()
        .map(|row| Ok(Replica { id: row.try_get(0)?, role: row.try_get(1)?, url: row.try_get(2)? }))
        .collect()
}
