//! What an evaluator is told.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use harmonia_builder::collect::Marks;
use harmonia_builder::machine_name;
use harmonia_nix::key::PublicKey;
use harmonia_service::quantity::{Size, Span};
use harmonia_service::settings::{Settings, SettingsError};

use crate::proxy::{Net, NetError};

/// Far from those of people, of services and of Nix's own builds.
const FIRST_USER: u32 = 64_100;

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
    /// Processes that share an evaluation.
    pub processes: usize,
    /// The program whose verb `confine` is; None: this one.
    pub own: Option<PathBuf>,
    /// The first of the users as which evaluations run.
    pub first_user: u32,
    /// Nothing is evaluated in less than the whole sandbox.
    pub full_sandbox: bool,
    /// Private networks that may be reached.
    pub networks: Vec<Net>,
    /// Further files that may be read.
    pub visible: Vec<PathBuf>,
    /// Binary caches that are asked for what is built already,
    pub substituters: Vec<String>,
    /// and whose word counts there.
    pub trusted_keys: Vec<PublicKey>,
    /// Where credentials are.
    pub credentials: Option<PathBuf>,
    /// When the store's garbage is collected.
    pub marks: Marks,
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
    /// Bytes of a source's files.
    pub source: u64,
}

/// How much of a sandbox is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Demand {
    Strongest,
    Full,
}

impl FromStr for Demand {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "strongest" => Ok(Self::Strongest),
            "full" => Ok(Self::Full),
            _ => Err("write strongest or full"),
        }
    }
}

fn words(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.unwrap_or_default().split([',', ' ', '\t', '\n']).filter(|word| !word.is_empty())
}

struct TrustedKeys(Vec<PublicKey>);

impl FromStr for TrustedKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let keys =
            words(Some(text)).map(|word| PublicKey::parse(word).map_err(|error| format!("{word}: {error}")));
        keys.collect::<Result<_, _>>().map(Self)
    }
}

struct Networks(Vec<Net>);

impl FromStr for Networks {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        words(Some(text)).map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

/// A machine has more to do than to evaluate.
fn processes() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).clamp(1, 4))
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
                source: settings.parse::<Size>("eval_max_source")?.map_or(1 << 30, |size| size.0),
            },
            processes: settings.parse::<usize>("eval_processes")?.unwrap_or_else(processes).clamp(1, 64),
            own: settings.get("eval_confine").map(PathBuf::from),
            first_user: settings.parse("eval_user")?.unwrap_or(FIRST_USER),
            full_sandbox: settings.parse::<Demand>("eval_sandbox")? == Some(Demand::Full),
            networks: settings
                .parse::<Networks>("eval_networks")?
                .map(|networks| networks.0)
                .unwrap_or_default(),
            visible: settings
                .get("eval_visible")
                .map(|paths| std::env::split_paths(paths).collect())
                .unwrap_or_default(),
            substituters: words(settings.get("substituters")).map(str::to_owned).collect(),
            trusted_keys: settings
                .parse::<TrustedKeys>("trusted_public_keys")?
                .map(|keys| keys.0)
                .unwrap_or_default(),
            credentials: settings.get("credentials_dir").map(PathBuf::from),
            marks: Marks::read(settings)?,
        })
    }

    /// The name under which a worker claims: what one of them gives back is not another's.
    pub fn claimant(&self, worker: usize) -> String {
        if worker == 0 { self.node.clone() } else { format!("{}.{worker}", self.node) }
    }
}
