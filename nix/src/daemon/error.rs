use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nix_derivation::StorePath;
use thiserror::Error;

use super::wire;

/// The result of an operation of the daemon.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation of the daemon gave no answer.
#[derive(Debug, Error)]
pub enum Error {
    /// Nobody listens on the socket, or it may not be opened.
    #[error("the Nix daemon's socket {} cannot be connected to: is the daemon running, and may this user use it?", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The daemon refused or failed. The connection is as good as before.
    #[error("{0}")]
    Daemon(#[source] DaemonError),
    /// The daemon went away or said something else than the protocol has. The connection is closed.
    #[error(transparent)]
    Wire(#[from] wire::Error),
    /// The operation took longer than its caller allows. The connection is closed.
    #[error("the Nix daemon did not finish {operation} within {} s", limit.as_secs_f32())]
    TimedOut {
        /// The operation.
        operation: &'static str,
        /// How long it had.
        limit: Duration,
    },
    /// An earlier operation did not come to its end, so its answer would be taken for another's: connect again.
    #[error(
        "this connection to the Nix daemon is closed, because an earlier operation on it was not completed"
    )]
    Broken,
    /// A path cannot be deleted, for this one is held. Nothing was deleted.
    #[error("{path} cannot be deleted: the garbage collector root {root} holds {alive}")]
    Alive {
        /// The path that was to be deleted.
        path: StorePath,
        /// It, or the one of its referrers that is held.
        alive: StorePath,
        /// What holds it: a link, or a process in braces.
        root: String,
    },
}

impl Error {
    /// Whether the daemon could not be reached or went away: nothing is known about the operation's effect, and the
    /// same may succeed on a new connection.
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Broken | Self::Wire(wire::Error::Closed | wire::Error::Io(_))
        )
    }
}

/// What the daemon said went wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonError {
    /// Nix's level, 0 for an error.
    pub level: u64,
    /// The message, as the daemon coloured it.
    pub message: String,
    /// What it was doing, innermost first.
    pub traces: Vec<String>,
    /// The exit status that it suggests; newer daemons suggest none.
    pub status: u64,
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&plain(&self.message))?;
        self.traces.iter().try_for_each(|trace| write!(f, " ({})", plain(trace)))
    }
}

impl std::error::Error for DaemonError {}

/// The daemon's words without the escape sequences that colour them.
pub fn plain(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(char) = rest.next() {
        match char {
            // A control sequence: from ESC [ to its first letter.
            '\u{1b}' if rest.next_if_eq(&'[').is_some() => {
                while rest.next().is_some_and(|char| !('@'..='~').contains(&char)) {}
            }
            _ => kept.push(char),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_left_out_of_sentences() {
        let error = DaemonError {
            level: 0,
            message: "builder for '\u{1b}[35;1m/nix/store/x\u{1b}[0m' failed".into(),
            traces: vec!["while \u{1b}[1mbuilding".into()],
            status: 1,
        };
        assert_eq!(error.to_string(), "builder for '/nix/store/x' failed (while building)");
    }

    #[test]
    fn an_unfinished_sequence_swallows_only_itself() {
        assert_eq!(plain("a\u{1b}[35"), "a");
        assert_eq!(plain("a\u{1b}b"), "a\u{1b}b");
    }
}
