//! Who writes. Every replica watches and keeps warm caches; only the one that holds PostgreSQL's lock writes, and each of
//! its writes to PostgreSQL carries the generation that it leads with.
//!
//! When PostgreSQL goes away, nobody can take the lock: the last leader, and nobody else, goes on applying workloads as they
//! are. Once it is back, either that replica has the lock again or another one does, and it follows.

use std::time::Duration;

use harmonia_queue::leader::{Leadership, Office};
use harmonia_queue::replica::Replica;
use harmonia_service::sentence::sentence;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::database::{Database, DatabaseError};
use crate::ready::{INSTALLATION, Readiness};

/// What this replica may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Everything; what goes to PostgreSQL carries the generation.
    Leader {
        /// A former leader's is refused.
        generation: i64,
    },
    /// It led when PostgreSQL went away: workloads as they are, with as many replicas as they have, and nothing in PostgreSQL.
    Frozen,
    /// Nothing.
    Follower,
}

impl Standing {
    /// Whether objects of Kubernetes may be written.
    pub fn may_apply(self) -> bool {
        match self {
            Self::Leader { .. } | Self::Frozen => true,
            Self::Follower => false,
        }
    }

    /// What goes with writes to PostgreSQL. None: there are none.
    pub fn generation(self) -> Option<i64> {
        match self {
            Self::Leader { generation } => Some(generation),
            Self::Frozen | Self::Follower => None,
        }
    }
}

/// What an attempt at the lock came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// It is this replica's.
    Taken(i64),
    /// It was this replica's until now.
    Lost,
    /// Another replica has it.
    Elsewhere,
    /// PostgreSQL cannot be asked.
    Unknown,
}

/// What follows from an attempt.
fn after(attempt: Attempt, before: Standing) -> Standing {
    match (attempt, before) {
        (Attempt::Taken(generation), _) => Standing::Leader { generation },
        (Attempt::Elsewhere, _) => Standing::Follower,
        (Attempt::Lost | Attempt::Unknown, Standing::Leader { .. } | Standing::Frozen) => Standing::Frozen,
        (Attempt::Lost | Attempt::Unknown, Standing::Follower) => Standing::Follower,
    }
}

/// How soon a lock that another holds, or a database that is away, is tried again.
const RETRY: Duration = Duration::from_secs(2);
/// Those that are not the oldest give it a start.
const YIELD: Duration = Duration::from_secs(1);

/// Tries to lead until `done`, and says how this replica stands.
pub async fn campaign(
    database: &Database,
    replica: &Replica,
    ready: &Readiness,
    say: &watch::Sender<Standing>,
    done: &CancellationToken,
) {
    loop {
        let attempt = attempt(database, replica, ready, say, done).await;
        put(say, attempt);
        // A lock that was lost is asked for at once: it is free, or another's, and then this replica is frozen no longer.
        let pause = if attempt == Attempt::Lost { Duration::ZERO } else { RETRY };
        if done.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
    }
}

/// One attempt; if it succeeds, for as long as the lock is held.
async fn attempt(
    database: &Database,
    replica: &Replica,
    ready: &Readiness,
    say: &watch::Sender<Standing>,
    done: &CancellationToken,
) -> Attempt {
    if !is_oldest(database, replica).await {
        tokio::time::sleep(YIELD).await;
    }
    let mut lead = match take(database, replica).await {
        Ok(Some(lead)) => lead,
        Ok(None) => {
            ready.meet(INSTALLATION);
            return Attempt::Elsewhere;
        }
        Err(error) => {
            ready.wait(INSTALLATION, sentence(&error));
            tracing::debug!(error = sentence(&error), "cannot try to lead");
            return Attempt::Unknown;
        }
    };
    put(say, Attempt::Taken(lead.generation));
    tokio::select! {
        error = lead.lost() => {
            tracing::warn!(error = sentence(&error), "leadership is lost");
            Attempt::Lost
        }
        () = done.cancelled() => {
            if let Err(error) = lead.release().await {
                tracing::debug!(error = sentence(&error), "the lock goes with the connection");
            }
            Attempt::Elsewhere
        }
    }
}

/// The lock, with the schema as this release needs it. A database without a schema has no lock either: that is made first, one
/// replica at a time, which the migration itself sees to.
async fn take(database: &Database, replica: &Replica) -> Result<Option<Leadership>, DatabaseError> {
    let url = database.direct_url()?;
    let taken = match Leadership::try_take(&url, Office::Operator, replica.id).await {
        Err(error) if !error.is_transient() && database.migrate().await? => {
            Leadership::try_take(&url, Office::Operator, replica.id).await?
        }
        taken => taken?,
    };
    if taken.is_some() {
        database.migrate().await?;
    }
    Ok(taken)
}

/// Whether no operator has run for longer. One that cannot tell is not.
async fn is_oldest(database: &Database, replica: &Replica) -> bool {
    let healthy = tokio::time::timeout(YIELD, harmonia_queue::replica::healthy(&database.db)).await;
    let Ok(Ok(replicas)) = healthy else { return false };
    replicas.iter().find(|other| other.role == replica.role).is_some_and(|oldest| oldest.id == replica.id)
}

fn put(say: &watch::Sender<Standing>, attempt: Attempt) {
    say.send_if_modified(|standing| {
        let next = after(attempt, *standing);
        let changed = next != *standing;
        if changed {
            tracing::info!(?next, "this replica's standing");
        }
        *standing = next;
        changed
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: Standing = Standing::Leader { generation: 7 };

    #[test]
    fn only_the_last_leader_goes_on_without_a_database() {
        assert_eq!(after(Attempt::Lost, LEADER), Standing::Frozen);
        assert_eq!(after(Attempt::Unknown, Standing::Frozen), Standing::Frozen);
        assert_eq!(after(Attempt::Unknown, Standing::Follower), Standing::Follower);
    }

    #[test]
    fn who_finds_another_leading_follows_at_once() {
        for before in [LEADER, Standing::Frozen, Standing::Follower] {
            assert_eq!(after(Attempt::Elsewhere, before), Standing::Follower);
        }
    }

    #[test]
    fn a_lock_taken_again_is_a_new_generation() {
        assert_eq!(after(Attempt::Taken(8), Standing::Frozen), Standing::Leader { generation: 8 });
    }

    #[test]
    fn what_goes_to_the_database_needs_a_generation() {
        assert_eq!(LEADER.generation(), Some(7));
        assert_eq!(Standing::Frozen.generation(), None);
        assert!(Standing::Frozen.may_apply() && !Standing::Follower.may_apply());
    }
}
