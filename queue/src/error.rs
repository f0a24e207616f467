use std::io;
use std::time::Duration;

use thiserror::Error;

/// The result of a call to the queue.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call to the queue had no effect. The sentence of a refusal comes from the database, which knows the facts.
#[derive(Debug, Error)]
pub enum Error {
    /// The session does not exist for this login, or has ended: register again.
    #[error("{0}")]
    SessionOver(String),
    /// An argument is out of bounds.
    #[error("{0}")]
    Invalid(String),
    /// Another living node has this name.
    #[error("{0}")]
    NameTaken(String),
    /// This login may not do that.
    #[error("{0}")]
    Forbidden(String),
    /// Another replica leads.
    #[error("{0}")]
    NotLeader(String),
    /// A derivation graph that cannot be.
    #[error("{0}")]
    Graph(String),
    /// What was known of the graph is not in the queue any more: ask again what is.
    #[error("{0}")]
    Vanished(String),
    /// There is no such project, pool, node or build.
    #[error("{0}")]
    NotFound(String),
    /// What is asked does not fit the state it is in.
    #[error("{0}")]
    WrongState(String),
    /// The database cannot be reached, or broke off: nothing is known about the call's effect.
    #[error("the database cannot be reached")]
    Unreachable(#[source] sqlx::Error),
    /// Anything else the database said.
    #[error("the database refused a call")]
    Database(#[source] sqlx::Error),
}

impl Error {
    /// Whether the same call may succeed later without anything being changed by a person.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Vanished(_) => true,
            // 40: serialisation or deadlock; 53: out of resources; 55: lock not available; 57: shutting down.
            error => error.is_of_class(&["40", "53", "55", "57"]),
        }
    }

    /// Whether whoever has begun something waits: also if the login was refused, perhaps until the password that was changed
    /// has arrived here too.
    pub fn may_pass(&self) -> bool {
        self.is_transient() || self.is_login()
    }

    /// Whether the login was refused.
    pub fn is_login(&self) -> bool {
        self.is_of_class(&["28"])
    }

    fn is_of_class(&self, classes: &[&str]) -> bool {
        let Self::Database(sqlx::Error::Database(source)) = self else { return false };
        source.code().is_some_and(|code| classes.contains(&code.get(..2).unwrap_or_default()))
    }
}

impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        let sqlx::Error::Database(database) = &source else {
            return match source {
                sqlx::Error::Io(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::Tls(_) => Self::Unreachable(source),
                other => Self::Database(other),
            };
        };
        let sentence = || database.message().to_owned();
        match database.code().as_deref() {
            Some("HC001") => Self::SessionOver(sentence()),
            Some("HC002") => Self::Invalid(sentence()),
            Some("HC003") => Self::NameTaken(sentence()),
            Some("HC004") => Self::Forbidden(sentence()),
            Some("HC005") => Self::NotLeader(sentence()),
            Some("HC006") => Self::Graph(sentence()),
            Some("HC007") => Self::NotFound(sentence()),
            Some("HC008") => Self::WrongState(sentence()),
            Some("HC009") => Self::Vanished(sentence()),
            Some("42501") => Self::Forbidden(sentence()),
            Some(code) if is_away(code) => Self::Unreachable(source),
            _ => Self::Database(source),
        }
    }
}

/// 08: the connection, and all that PgBouncer has to say; 25006: this was the primary; 25P03, 25P04: its transaction was idle or
/// open for too long; 57P: it ends, or begins.
fn is_away(code: &str) -> bool {
    code.starts_with("08") || code.starts_with("57P") || ["25006", "25P03", "25P04"].contains(&code)
}

pub(crate) fn no_answer(within: Duration) -> sqlx::Error {
    let sentence = format!("no answer within {} s", within.as_secs());
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, sentence))
}
