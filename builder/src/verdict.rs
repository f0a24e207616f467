//! What a build that did not succeed means: a table, first match wins.

use std::time::Duration;

use harmonia_nix::daemon::BuildStatus;
use harmonia_queue::builder::Failure;

use crate::witness::{NO_ROOM, NO_SPACE};

/// What is known about the end of a build.
#[derive(Debug, Clone, Copy)]
pub struct Ending<'a> {
    /// What the daemon calls it; none if it refused to build at all.
    pub status: Option<BuildStatus>,
    /// The daemon's own words, see [`own_words`].
    pub message: &'a str,
    /// The end of the log.
    pub log: &'a str,
    /// Whether its outputs have fixed hashes: such a build fetches.
    pub fetches: bool,
    /// Whether it timed out because it said nothing, see [`was_silent`].
    pub silent: bool,
    /// Whether the store's disk was nearly full when the log said so, or is now.
    pub disk_full: bool,
}

/// How Nix says that it lacks a system or a feature, older words first.
const LACKING: [&str; 5] = [
    "is required to build",
    "required system or feature not available",
    "Reason: platform mismatch",
    "Reason: missing system features",
    "experimental Nix feature",
];

/// What a derivation's author did, in Nix's words where it has no status for it: the end of a remote builder's program, a
/// file that no store holds, attributes that nobody accepts.
const AUTHORS: [&str; 11] = [
    "failed with exit code",
    "failed due to signal",
    "has an unsupported type",
    "'__noChroot'",
    "sandbox profile",
    "impure path",
    "exportReferencesGraph",
    "attribute '",
    "JSON value",
    "json.exception",
    "__json",
];

type Sign = fn(&Ending<'_>) -> bool;

/// How an ending is recognised, and what it is. A build's own log is its author's word: it is believed only where it
/// makes the build be tried again, and only together with what the machine says.
const TABLE: [(Sign, Failure); 14] = [
    (|end| end.status == Some(BuildStatus::HashMismatch), Failure::HashMismatch),
    (|end| end.says(&["hash mismatch in fixed-output derivation"]), Failure::HashMismatch),
    (|end| end.status == Some(BuildStatus::TimedOut) && end.silent, Failure::Silent),
    (|end| end.status == Some(BuildStatus::TimedOut), Failure::Timeout),
    (|end| end.says(&[NO_SPACE, NO_ROOM]), Failure::DiskFull),
    (|end| end.disk_full && end.log.contains(NO_SPACE), Failure::DiskFull),
    (
        |end| end.says(&["Cannot allocate memory", "signal 9", "exit code 137", "std::bad_alloc"]),
        Failure::Oom,
    ),
    (|end| end.says(&LACKING), Failure::MissingFeature),
    (|end| end.status == Some(BuildStatus::InputRejected), Failure::NotBuildable),
    (|end| end.fetches && end.status.is_some(), Failure::Fetch),
    // Of what does not fetch Nix says so only if a disk was nearly full when it failed.
    (|end| end.status == Some(BuildStatus::TransientFailure), Failure::DiskFull),
    // No process, no pseudoterminal, an input that is gone: Nix itself has failed, before the build or after it.
    (|end| end.is_nixs_own() && !end.says(&AUTHORS), Failure::DaemonGone),
    (|end| end.status.is_some(), Failure::BuildError),
    (|_| true, Failure::DaemonGone),
];

impl Ending<'_> {
    /// What it means.
    pub fn failure(&self) -> Failure {
        TABLE.iter().find(|(sign, _)| sign(self)).map_or(Failure::BuildError, |(_, failure)| *failure)
    }

    fn is_nixs_own(&self) -> bool {
        use BuildStatus::{Cancelled, DependencyFailed, MiscFailure};
        matches!(self.status, Some(MiscFailure | DependencyFailed | Cancelled))
    }

    fn says(&self, words: &[&str]) -> bool {
        words.iter().any(|words| self.message.contains(words))
    }
}

/// What the daemon itself says about a failure. It adds the end of the log, which is the word of the build's author: who
/// prints `signal 9` was not killed.
pub fn own_words(message: &str) -> String {
    let begins_log = |line: &str| {
        let line = line.trim().to_ascii_lowercase();
        line.starts_with("last ") && line.ends_with("log lines:")
    };
    let own: Vec<&str> = message.lines().take_while(|line| !begins_log(line)).collect();
    own.join("\n").trim_end_matches([';', '\n', ' ']).to_owned()
}

/// Whether a build that timed out had said nothing for too long. Newer daemons tell only after how many seconds they ended
/// it, which is one limit or the other.
pub fn was_silent(message: &str, silent: Duration, timeout: Duration) -> bool {
    message.contains("seconds of silence")
        || silent != timeout && message.contains(&format!(" after {} seconds", silent.as_secs()))
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
                    message: "Cannot build 'x'.\nReason: missing system features\nRequired features: {kvm}",
                    ..NOTHING
                },
                Failure::MissingFeature,
            ),
            (Ending { message: "error: database or disk is full", ..NOTHING }, Failure::DiskFull),
            (Ending { status: Some(BuildStatus::TransientFailure), ..NOTHING }, Failure::DiskFull),
            (Ending { status: Some(BuildStatus::OutputRejected), ..NOTHING }, Failure::BuildError),
            (Ending { status: Some(BuildStatus::Cancelled), ..NOTHING }, Failure::DaemonGone),
            (Ending { message: "something else", ..NOTHING }, Failure::DaemonGone),
        ];
        for (ending, failure) in rows {
            assert_eq!(ending.failure(), failure, "{ending:?}");
        }
    }

    #[test]
    fn what_nix_has_no_status_for_is_its_own_failure_or_the_authors() {
        let nixs = [
            "unable to fork: Resource temporarily unavailable",
            "opening pseudoterminal master: No such file or directory",
            "opening file '/nix/store/x': Too many open files",
            "while setting up the build environment: mounting /proc: Operation not permitted",
            "dependency '/nix/store/x' of '/nix/store/y.drv' does not exist, and substitution is disabled",
            "unexpected EOF reading a line",
            "writing to file: Input/output error",
        ];
        let authors = [
            "builder for '/nix/store/x.drv' failed with exit code 1",
            "Cannot build '/nix/store/x.drv'.\nReason: builder failed due to signal 11 (Segmentation fault).",
            "file '/nix/store/x/pipe' has an unsupported type",
            "file \"/nix/store/x/pipe\" has an unsupported type",
            "derivation 'x' has '__noChroot' set, but that's not allowed when 'sandbox' is 'true'",
            "derivation 'x' requested impure path '/dev/kvm', but it was not in allowed-impure-host-deps",
            "invalid file name 'a/b' in 'exportReferencesGraph'",
            "attribute 'allowedReferences' of derivation 'x' must be a list of strings",
            "cannot process __json attribute of 'x': parse error",
            "[json.exception.type_error.302] type must be array, but is string",
            "Expected JSON value to be of type 'array' but it is of type 'string': \"x\"",
        ];
        let failure =
            |message| Ending { status: Some(BuildStatus::MiscFailure), message, ..NOTHING }.failure();
        for message in nixs {
            assert_eq!(failure(message), Failure::DaemonGone, "{message}");
        }
        for message in authors {
            assert_eq!(failure(message), Failure::BuildError, "{message}");
        }
    }

    #[test]
    fn what_a_build_printed_is_not_the_daemons_word() {
        let messages = [
            "builder for 'x' failed with exit code 3;\nlast 2 log lines:\n> signal 9\n> last 1 log lines:",
            "builder for 'x' failed with exit code 3;\n       last 1 log lines:\n       > signal 9",
            "builder for 'x' failed with exit code 3\nLast 1 log lines:\n> signal 9\nFor full logs, run: nix log x",
            "builder for 'x' failed with exit code 3",
        ];
        for message in messages {
            assert_eq!(own_words(message), "builder for 'x' failed with exit code 3");
        }
    }

    #[test]
    fn silence_is_told_by_its_words_or_by_its_length() {
        let (silent, timeout) = (Duration::from_secs(2), Duration::from_secs(20));
        let cases = [
            ("building of 'x' timed out after 2 seconds of silence", true),
            ("building of 'x' timed out after 20 seconds", false),
            ("timed out after 2 seconds", true),
            ("timed out after 20 seconds", false),
        ];
        for (message, expected) in cases {
            assert_eq!(was_silent(message, silent, timeout), expected, "{message}");
        }
    }
}
