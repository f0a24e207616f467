//! What a build that did not succeed means: a table, first match wins.

use harmonia_nix::daemon::BuildStatus;
use harmonia_queue::builder::Failure;

use crate::witness::NO_SPACE;

/// What is known about the end of a build.
#[derive(Debug, Clone, Copy)]
pub struct Ending<'a> {
    /// What the daemon calls it; none if it refused to build at all.
    pub status: Option<BuildStatus>,
    /// The daemon's words.
    pub message: &'a str,
    /// The end of the log.
    pub log: &'a str,
    /// Whether its outputs have fixed hashes: such a build fetches.
    pub fetches: bool,
    /// Whether it had been silent for as long as it may.
    pub silent: bool,
    /// Whether the store's disk was nearly full when the log said so, or is now.
    pub disk_full: bool,
}

type Sign = fn(&Ending<'_>) -> bool;

/// What daemons say, from 2.8 to 2.34, that lack a system or a feature.
const LACKS: [&str; 4] = [
    "is required to build",
    "required system or feature",
    "Reason: missing system features",
    "Reason: platform mismatch",
];

/// How an ending is recognised, and what it is. A build's own log is its author's word: it is believed only where it
/// makes the build be tried again, and only together with what the machine says.
const TABLE: [(Sign, Failure); 12] = [
    (|end| end.status == Some(BuildStatus::HashMismatch), Failure::HashMismatch),
    (|end| end.says(&["hash mismatch in fixed-output derivation"]), Failure::HashMismatch),
    (|end| end.status == Some(BuildStatus::TimedOut) && end.silent, Failure::Silent),
    (|end| end.status == Some(BuildStatus::TimedOut), Failure::Timeout),
    (|end| end.says(&[NO_SPACE, "database or disk is full"]), Failure::DiskFull),
    (|end| end.disk_full && end.log.contains(NO_SPACE), Failure::DiskFull),
    (
        |end| end.says(&["Cannot allocate memory", "signal 9", "exit code 137", "std::bad_alloc"]),
        Failure::Oom,
    ),
    (|end| end.says(&LACKS), Failure::MissingFeature),
    (|end| end.status == Some(BuildStatus::InputRejected), Failure::NotBuildable),
    (|end| end.fetches && end.status.is_some(), Failure::Fetch),
    (|end| end.status.is_some(), Failure::BuildError),
    (|_| true, Failure::DaemonGone),
];

impl Ending<'_> {
    /// What it means.
    pub fn failure(&self) -> Failure {
        TABLE.iter().find(|(sign, _)| sign(self)).map_or(Failure::BuildError, |(_, failure)| *failure)
    }

    fn says(&self, words: &[&str]) -> bool {
        // A daemon ends its own words with the last ones of the log.
        let own = self.message.split("log lines:").next().unwrap_or_default();
        words.iter().any(|words| own.contains(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Ending<'static> =
        Ending { status: None, message: "", log: "", fetches: false, silent: false, disk_full: false };

    #[test]
    fn every_row_of_the_table() {
        let failed = Ending { status: Some(BuildStatus::PermanentFailure), ..NOTHING };
        let rows = [
            (Ending { message: "builder for 'x' failed with exit code 1", ..failed }, Failure::BuildError),
            (Ending { message: "builder for 'x' failed due to signal 9 (Killed)", ..failed }, Failure::Oom),
            (Ending { message: "builder for 'x' failed with exit code 137", ..failed }, Failure::Oom),
            (Ending { log: "cp: No space left on device", disk_full: true, ..failed }, Failure::DiskFull),
            (Ending { log: "cp: No space left on device", ..failed }, Failure::BuildError),
            (
                Ending {
                    message: "builder for 'x' failed with exit code 1;\n last 1 log lines:\n > exit code 137",
                    ..failed
                },
                Failure::BuildError,
            ),
            (
                Ending {
                    status: Some(BuildStatus::OutputRejected),
                    message: "hash mismatch in fixed-output derivation 'x'",
                    fetches: true,
                    ..NOTHING
                },
                Failure::HashMismatch,
            ),
            (Ending { status: Some(BuildStatus::HashMismatch), ..NOTHING }, Failure::HashMismatch),
            (Ending { status: Some(BuildStatus::TimedOut), ..NOTHING }, Failure::Timeout),
            (Ending { status: Some(BuildStatus::TimedOut), silent: true, ..NOTHING }, Failure::Silent),
            (
                Ending { status: Some(BuildStatus::TransientFailure), fetches: true, ..NOTHING },
                Failure::Fetch,
            ),
            (Ending { status: Some(BuildStatus::InputRejected), ..NOTHING }, Failure::NotBuildable),
            (
                Ending { message: "a 'aarch64-linux' with features {} is required to build 'x'", ..NOTHING },
                Failure::MissingFeature,
            ),
            (
                Ending {
                    status: Some(BuildStatus::InputRejected),
                    message: "Cannot build 'x'.\nReason: platform mismatch\nRequired system: 'i686-linux'",
                    ..NOTHING
                },
                Failure::MissingFeature,
            ),
            (Ending { message: "error: database or disk is full", ..NOTHING }, Failure::DiskFull),
            (Ending { message: "something else", ..NOTHING }, Failure::DaemonGone),
        ];
        for (ending, failure) in rows {
            assert_eq!(ending.failure(), failure, "{ending:?}");
        }
    }
}
