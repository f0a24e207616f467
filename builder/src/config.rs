//! What a builder is told.

use std::path::PathBuf;
use std::time::Duration;

use harmonia_service::quantity::{Size, Span};
use harmonia_service::settings::{Settings, SettingsError};

use crate::collect::Marks;

/// How a builder is configured.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name in the pool.
    pub node: String,
    /// The Kubernetes node it runs on.
    pub kube_node: Option<String>,
    /// Where its secret and the logs of running builds are kept.
    pub state: PathBuf,
    /// Builds at once.
    pub slots: i32,
    /// None: all that the pool has.
    pub systems: Option<Vec<String>>,
    /// None: all that the pool has.
    pub features: Option<Vec<String>>,
    /// The Nix daemon's socket.
    pub daemon: PathBuf,
    /// Where the store's files are: `/`, or what the daemon was given as `root`.
    pub root: PathBuf,
    /// What a build may take.
    pub limits: Limits,
    /// When garbage is collected.
    pub marks: Marks,
    /// Bytes built but not uploaded at which nothing more is claimed.
    pub backlog: u64,
    /// How long it may go on after SIGTERM.
    pub grace: Duration,
    /// How long before a deadline builds are given back.
    pub margin: Duration,
}

/// What a build may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// What it sees as `NIX_BUILD_CORES`; 0 for all.
    pub cores: u64,
    /// From its beginning to its end.
    pub timeout: Duration,
    /// Without a line of log.
    pub silent: Duration,
    /// Bytes of NARs of all its outputs.
    pub output: u64,
    /// Bytes of its log that are kept.
    pub log: u64,
}

impl Config {
    /// As the settings say.
    pub fn read(settings: &Settings) -> Result<Self, SettingsError> {
        let span = |key, default: u64| {
            let set = settings.parse::<Span>(key)?;
            Ok::<_, SettingsError>(set.map_or(Duration::from_secs(default), |span| span.0))
        };
        // The bounds of a BuilderPool. Nix takes 0 for no limit.
        let limit = |key, default| match span(key, default)? {
            limit if (1..=720 * 3600).contains(&limit.as_secs()) => Ok(limit),
            _ => Err(SettingsError::Invalid {
                key,
                value: settings.get(key).unwrap_or_default().to_owned(),
                why: "is no limit: write a time from 1s to 720h".to_owned(),
            }),
        };
        let size = |key, default: u64| {
            Ok::<_, SettingsError>(settings.parse::<Size>(key)?.map_or(default, |size| size.0))
        };
        let list = |key| {
            let words = |text: &str| text.split(',').map(|word| word.trim().to_owned()).collect();
            settings.get(key).map(words)
        };
        let path = |key, default: &str| PathBuf::from(settings.get(key).unwrap_or(default));
        Ok(Self {
            node: settings.get("node").map_or_else(machine_name, str::to_owned),
            kube_node: settings.get("kube_node").map(str::to_owned),
            state: path("state_dir", "/var/lib/harmonia-ci/builder"),
            slots: settings.parse("slots")?.unwrap_or(2),
            systems: list("systems"),
            features: list("features"),
            daemon: path("nix_daemon", "/nix/var/nix/daemon-socket/socket"),
            root: path("nix_root", "/"),
            limits: Limits {
                cores: settings.parse("build_cores")?.unwrap_or(0),
                timeout: limit("build_timeout", 4 * 3600)?,
                silent: limit("max_silent", 1800)?,
                output: size("max_output_size", 4_000_000_000)?,
                log: size("max_log_size", 64_000_000)?,
            },
            marks: Marks::read(settings)?,
            backlog: size("upload_backlog", 32_000_000_000)?,
            grace: span("grace", 3600)?,
            margin: span("margin", 30)?,
        })
    }
}

/// What this machine calls itself.
pub fn machine_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_time_are_within_those_of_a_pool() {
        let read = |timeout| Config::read(&Settings::default().with("build_timeout", timeout));
        assert_eq!(read("720h").unwrap().limits.timeout, Duration::from_secs(720 * 3600));
        for timeout in ["0", "0s", "721h"] {
            let error = read(timeout).unwrap_err().to_string();
            assert!(error.ends_with("is no limit: write a time from 1s to 720h"), "{error}");
        }
    }
}
