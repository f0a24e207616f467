//! Leadership by session advisory lock, on a connection on which nothing else runs.
//!
//! The lock is the connection's: a crash gives it back at once, a lost network when the *server's* keepalives give up
//! (about 20 s). The leader notices sooner: a round trip that takes longer than 5 s, tried every 5 s, ends its work.

use std::future::Future;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection, Row};
use uuid::Uuid;

use crate::error::no_answer;
use crate::{Db, Result, replica};

const ROUND_TRIP: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(2);

/// What there is one of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Office {
    /// Reaper, unsupported, decay, retention, pruning. Any control-plane process may hold it.
    Janitor,
    /// The operator's reconcile loops.
    Operator,
}

impl Office {
    fn name(self) -> &'static str {
        match self {
            Self::Janitor => "janitor",
            Self::Operator => "operator",
        }
    }
}

/// The lock, held.
#[derive(Debug)]
pub struct Leadership {
    connection: PgConnection,
    /// Goes with every leader-only write; a former leader's is refused.
    pub generation: i64,
}

/// Who leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    /// The replica that last began to lead.
    pub replica: Option<Uuid>,
    /// Where it is reached.
    pub url: Option<String>,
    /// How often leadership has changed.
    pub generation: i64,
    /// Since when, in UTC, as RFC 3339 writes it.
    pub since: Option<String>,
    /// Whether the lock is held at this moment.
    pub held: bool,
}

impl Leadership {
    /// Takes the lock if it is free. `direct_url` must reach PostgreSQL itself: a pooler would keep the lock.
    pub async fn try_take(direct_url: &str, office: Office, replica: Uuid) -> Result<Option<Self>> {
        let options: PgConnectOptions = direct_url.parse()?;
        let options = options.application_name("harmonia-ci leader").options([
            ("tcp_keepalives_idle", "10"),
            ("tcp_keepalives_interval", "5"),
            ("tcp_keepalives_count", "3"),
            ("tcp_user_timeout", "20000"),
            ("statement_timeout", "5000"),
            ("idle_session_timeout", "0"),
        ]);
        let connect = tokio::time::timeout(ROUND_TRIP, options.connect());
        let mut connection = connect.await.map_err(|_| no_answer(ROUND_TRIP))??;
        let lock = sqlx::query_scalar("SELECT pg_try_advisory_lock(ci.lock_key($1))").bind(office.name());
        if !lock.fetch_one(&mut connection).await? {
            return Ok(None);
        }
        let begin = sqlx::query_scalar("SELECT ci.lead($1, $2)").bind(office.name()).bind(replica);
        let generation = begin.fetch_one(&mut connection).await?;
        Ok(Some(Self { connection, generation }))
    }

    /// Returns when the lock may be lost: a round trip failed or took too long.
    pub async fn lost(&mut self) -> crate::Error {
        loop {
            tokio::time::sleep(ROUND_TRIP).await;
            match tokio::time::timeout(ROUND_TRIP, self.connection.ping()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error.into(),
                Err(_) => return no_answer(ROUND_TRIP).into(),
            }
        }
    }

    /// Gives the lock back.
    pub async fn release(self) -> Result<()> {
        Ok(self.connection.close().await?)
    }
}

/// Tries to lead for as long as it lives, and does `work(generation)` whenever it does. Work is dropped the moment the
/// lock may be lost. The oldest healthy replica tries at once, the others a second later.
pub async fn campaign<F>(
    db: &Db,
    direct_url: &str,
    office: Office,
    replica: Uuid,
    mut work: impl FnMut(i64) -> F,
) where
    F: Future<Output = ()>,
{
    loop {
        let healthy = replica::healthy(db).await;
        if !healthy.is_ok_and(|replicas| replicas.first().is_some_and(|oldest| oldest.id == replica)) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        match Leadership::try_take(direct_url, office, replica).await {
            Ok(Some(mut lead)) => {
                tracing::info!(office = office.name(), generation = lead.generation, "acquired leadership");
                let generation = lead.generation;
                tokio::select! {
                    error = lead.lost() => tracing::warn!(%error, office = office.name(), "leadership is lost"),
                    () = work(generation) => tracing::info!(office = office.name(), "the leader's work ended"),
                }
            }
            Ok(None) => tracing::debug!(office = office.name(), "another replica leads"),
            Err(error) => tracing::warn!(%error, office = office.name(), "could not try to lead"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Who leads now.
pub async fn current(db: &Db, office: Office) -> Result<Leader> {
    let row = db
        .row(sqlx::query("SELECT l.*, ci.moment(l.since) AS moment FROM ci.leader($1) l").bind(office.name()))
        .await?;
    Ok(Leader {
        replica: row.try_get("replica_id")?,
        url: row.try_get("url")?,
        generation: row.try_get("generation")?,
        since: row.try_get("moment")?,
        held: row.try_get("held")?,
    })
}
