//! What an evaluator is told.

use std::path::PathBuf;
use std::time::Duration;

use harmonia_builder::machine_name;
use harmonia_service::quantity::{Size, Span};
use harmonia_service::settings::{Settings, SettingsError};

/// How an evaluator is configured.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name, under which it claims.
    pub node: String,
    /// Where sources are while they are evaluated.
    pub state: PathBuf,
    /// Evaluations at once.
    pub workers: usize,
    /// The Nix daemon's socket.
    pub daemon: PathBuf,
    /// Where the store's files are: `/`, or what the daemon was given as `root`.
    pub root: PathBuf,
    /// The directory of Nix's programs; None: they are in PATH.
    pub bin: Option<PathBuf>,
    /// Whether this machine's own directories are evaluated.
    pub local_sources: bool,
    /// What an evaluation may take.
    pub limits: Limits,
}

/// What an evaluation may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From its beginning until Nix has ended.
    pub timeout: Duration,
    /// Bytes of memory of all its processes.
    pub memory: u64,
    /// Attributes.
    pub attrs: usize,
}

impl Config {
    /// As the settings say.
    pub fn read(settings: &Settings) -> Result<Self, SettingsError> {
        let path = |key, default: &str| PathBuf::from(settings.get(key).unwrap_or(default));
        let timeout =
            settings.parse::<Span>("eval_timeout")?.map_or(Duration::from_secs(1800), |span| span.0);
        Ok(Self {
            node: settings.get("node").map_or_else(machine_name, str::to_owned),
            state: path("state_dir", "/var/lib/harmonia-ci/evaluator"),
            workers: settings.parse::<usize>("eval_workers")?.unwrap_or(1).max(1),
            daemon: path("nix_daemon", "/nix/var/nix/daemon-socket/socket"),
            root: path("nix_root", "/"),
            bin: settings.get("nix_bin").map(PathBuf::from),
            local_sources: settings.parse("local_sources")?.unwrap_or(false),
            limits: Limits {
                timeout,
                memory: settings.parse::<Size>("eval_memory")?.map_or(4 << 30, |size| size.0),
                attrs: settings.parse("eval_max_attrs")?.unwrap_or(50_000),
            },
        })
    }

    /// The name under which a worker claims: what one of them gives back is not another's.
    pub fn claimant(&self, worker: usize) -> String {
        if worker == 0 { self.node.clone() } else { format!("{}.{worker}", self.node) }
    }
}
