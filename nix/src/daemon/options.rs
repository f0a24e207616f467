use std::collections::BTreeMap;
use std::time::Duration;

use super::wire::{Op, Request};

/// The settings of a connection. All of them are sent, so that nothing depends on the daemon's own configuration but
/// what a daemon keeps from users that it does not trust.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How much of its own log the daemon sends.
    pub verbosity: Verbosity,
    /// Builds at once on this connection. Up to Nix 2.15 substitutions count too, so one would fetch them one by one.
    pub max_build_jobs: u64,
    /// How long a build may print nothing; zero for any time.
    pub max_silent: Duration,
    /// How long a build may take; zero for any time.
    pub timeout: Duration,
    /// Send the log lines of builds.
    pub verbose_build: bool,
    /// What builds see as `NIX_BUILD_CORES`; 0 for all.
    pub build_cores: u64,
    /// Fetch what substituters have.
    pub use_substitutes: bool,
    /// Any other setting of `nix.conf`.
    pub overrides: BTreeMap<String, String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            verbosity: Verbosity::Info,
            max_build_jobs: 16,
            max_silent: Duration::ZERO,
            timeout: Duration::ZERO,
            verbose_build: true,
            build_cores: 0,
            use_substitutes: true,
            overrides: BTreeMap::new(),
        }
    }
}

/// The levels of Nix's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u64)]
pub enum Verbosity {
    /// Errors.
    Error,
    /// Warnings too.
    Warn,
    /// What should be noticed.
    Notice,
    /// What happens.
    Info,
    /// More of it.
    Talkative,
    /// Still more.
    Chatty,
    /// For finding faults.
    Debug,
    /// Everything.
    Vomit,
}

impl Options {
    /// With one more setting of `nix.conf`.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.overrides.insert(name.to_owned(), value.to_owned());
        self
    }

    pub(super) fn request(&self) -> Request {
        let build_level = if self.verbose_build { Verbosity::Error } else { Verbosity::Vomit };
        let mut overrides = BTreeMap::from([("timeout".to_owned(), self.timeout.as_secs().to_string())]);
        overrides.extend(self.overrides.clone());
        Request::new(Op::SetOptions)
            // The directory of a failed build goes, nothing goes on after a failure, what cannot be substituted is not built.
            .flag(false)
            .flag(false)
            .flag(false)
            .number(self.verbosity as u64)
            .number(self.max_build_jobs)
            .number(self.max_silent.as_secs())
            // Obsolete: use the build hook.
            .flag(true)
            .number(build_level as u64)
            // Obsolete: the type of log, and whether to print a trace.
            .number(0)
            .number(0)
            .number(self.build_cores)
            .flag(self.use_substitutes)
            .list(&overrides, |request, (name, value)| request.string(name).string(value))
    }
}
