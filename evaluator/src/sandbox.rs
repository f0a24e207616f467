//! Where foreign code runs: as another user, in a root without secrets, with no way out but the proxy. The strongest that this
//! machine lets us have; what that is is found out once, by trying.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use harmonia_service::settings::Settings;
use tokio::process::Command;

use crate::config::Config;
use crate::confine::{Report, Spec};
use crate::run::EvaluatorError;

/// What programs need of a machine: themselves, their libraries, names and certificates. Nothing of `/etc` that could be a secret.
const SYSTEM: [&str; 28] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/etc/static",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/localtime",
    "/etc/gitconfig",
    "/etc/ssh/ssh_known_hosts",
];
/// Whose directories are looked up in `PATH`.
const PROGRAMS: [&str; 6] = ["nix", "nix-instantiate", "nix-eval-jobs", "git", "ssh", "sh"];
const PROXIES: [&str; 6] = ["http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"];
/// Processes and threads of an evaluation. Nix and git have a few for each processor.
const PROCESSES: u64 = 512;
/// A file may be larger than a source, for it may be a pack of its history.
const FILE_PER_SOURCE: u64 = 4;

/// How much of the network a child sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// git fetches what somebody named, and runs nothing of it.
    Fetch,
    /// Foreign code: the proxy, and nothing else.
    Proxy,
}

/// What all children of this evaluator share.
#[derive(Debug)]
pub struct Sandbox {
    /// This program, as `confine` is a verb of it.
    own: PathBuf,
    /// Words before it that make namespaces; none: there are none to be had.
    unshare: Vec<&'static str>,
    root: PathBuf,
    visible: Vec<PathBuf>,
    is_root: bool,
    first_user: u32,
    proxy: u16,
    limits: Limits,
    /// What is in force.
    pub report: Report,
}

#[derive(Debug, Clone, Copy)]
struct Limits {
    memory: u64,
    file: u64,
}

impl Sandbox {
    /// The strongest that there is here.
    pub async fn find(config: &Config, proxy: u16) -> io::Result<Self> {
        let own = match &config.own {
            Some(own) => own.clone(),
            None => std::env::current_exe()?,
        };
        let root = config.state.join("root");
        std::fs::create_dir_all(&root)?;
        let is_root = rustix::process::geteuid().is_root();
        let mut sandbox = Self {
            own,
            unshare: unshare(is_root),
            root,
            visible: visible(config),
            is_root,
            first_user: config.first_user,
            proxy,
            limits: Limits {
                memory: config.limits.memory,
                file: config.limits.source.saturating_mul(FILE_PER_SOURCE),
            },
            report: Report::default(),
        };
        let place = config.state.join("tried");
        std::fs::create_dir_all(&place)?;
        if sandbox.try_out(&place).await.is_none() {
            sandbox.unshare = Vec::new();
        }
        sandbox.report = sandbox.try_out(&place).await.unwrap_or_default();
        Ok(sandbox)
    }

    async fn try_out(&self, place: &Path) -> Option<Report> {
        let mut command = self.command(None, place, Network::Proxy, &[], self.user(0, None));
        command.current_dir(place).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let output = command.output().await.ok()?;
        if !output.status.success() {
            tracing::info!(reason = %String::from_utf8_lossy(&output.stderr).trim(), "a part of the sandbox is not possible here");
        }
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Whose processes a worker's children are; None: this process's own. What is on this machine is evaluated as whoever owns it.
    pub fn user(&self, worker: usize, local: Option<&Path>) -> Option<u32> {
        let owner = local.and_then(|path| path.metadata().ok()).map(|file| file.uid());
        let worker = u32::try_from(worker).unwrap_or_default();
        self.is_root.then(|| owner.unwrap_or(self.first_user.saturating_add(worker)))
    }

    /// The program, or none for a report, confined to a place to work in and further paths to read.
    pub fn command(
        &self,
        program: Option<&Path>,
        place: &Path,
        network: Network,
        more: &[PathBuf],
        user: Option<u32>,
    ) -> Command {
        let spec = Spec {
            read: self.visible.iter().chain(more).cloned().collect(),
            write: vec![place.to_owned()],
            root: (!self.unshare.is_empty()).then(|| self.root.clone()),
            user,
            port: (network == Network::Proxy).then_some(self.proxy),
            memory: self.limits.memory,
            // Counted by user, and by namespace of users: elsewhere it would be counted with everybody else's.
            processes: (user.is_some_and(|user| user >= self.first_user)
                || !self.is_root && !self.unshare.is_empty())
            .then_some(PROCESSES),
            file: self.limits.file,
        };
        let mut words =
            self.unshare.iter().map(|word| (*word).into()).chain([self.own.clone().into_os_string()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).arg("confine").arg(serde_json::to_string(&spec).unwrap_or_default());
        command.args(program);
        command
    }

    /// How children find the way out.
    pub fn proxy_variables(&self) -> Vec<(&'static str, String)> {
        match own_proxy() {
            Some(_) => PROXIES.iter().filter_map(|&name| Some((name, std::env::var(name).ok()?))).collect(),
            None => {
                let url = format!("http://127.0.0.1:{}", self.proxy);
                ["http_proxy", "https_proxy"].map(|name| (name, url.clone())).into()
            }
        }
    }

    /// Whether nothing is missing.
    pub fn is_full(&self) -> bool {
        self.layers().iter().all(|layer| layer.holds)
    }

    /// In a few words: what is in force, what is missing and what that leaves open.
    pub fn words(&self) -> String {
        words(&self.layers())
    }

    fn layers(&self) -> Vec<Layer> {
        let Report { namespaces, user, landlock, network, seccomp } = self.report;
        let version = landlock.map(|version| format!(" {version}")).unwrap_or_default();
        let layer = |holds, name: &str, open| Layer { name: name.to_owned(), holds, open };
        vec![
            layer(
                namespaces,
                "namespaces",
                "names of processes are seen, and sockets whose path is known are reached",
            ),
            // That needs root, and without root there is another user than root already: this process's own.
            layer(user || !self.is_root, if user { "another user" } else { "no root" }, "children are root"),
            layer(
                landlock.is_some(),
                &format!("Landlock{version}"),
                match namespaces {
                    true => "only the mount namespace hides files",
                    false => "a child reads all that this user can read",
                },
            ),
            layer(
                network,
                "no network but the proxy",
                "a child that ignores the proxy reaches whatever this machine reaches",
            ),
            layer(seccomp, "seccomp", "a child reaches all corners of the kernel"),
            layer(
                user || namespaces,
                "a count of processes",
                "a fork bomb ends only where this user's processes do",
            ),
            layer(true, "memory by a watch over all processes and rlimits", ""),
        ]
    }
}

/// One part of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Layer {
    name: String,
    holds: bool,
    /// What is open without it.
    open: &'static str,
}

fn words(layers: &[Layer]) -> String {
    let (have, lack): (Vec<_>, Vec<_>) = layers.iter().partition(|layer| layer.holds);
    let have: Vec<&str> = have.iter().map(|layer| layer.name.as_str()).collect();
    let lack: String = lack.iter().map(|layer| format!("; without {}: {}", layer.name, layer.open)).collect();
    format!("{}{lack}", have.join(", "))
}

/// What evaluations would be confined by on this machine: whether nothing is missing, and in words.
pub async fn try_out(place: &Path) -> Result<(bool, String), EvaluatorError> {
    let config = Config::read(&Settings::default().with("state_dir", place.to_string_lossy()))?;
    let failed = |source| EvaluatorError::State { path: place.to_owned(), source };
    // Nothing is fetched: any port will do.
    let sandbox = Sandbox::find(&config, own_proxy().unwrap_or(1)).await.map_err(failed)?;
    Ok((sandbox.is_full(), sandbox.words()))
}

fn unshare(is_root: bool) -> Vec<&'static str> {
    let mut words = vec![
        "unshare",
        "--mount",
        "--pid",
        "--ipc",
        "--uts",
        "--fork",
        "--kill-child",
        "--propagation",
        "private",
    ];
    if !is_root {
        words.extend(["--user", "--map-current-user"]);
    }
    words.push("--");
    words
}

/// The port of the proxy that this process itself was told to use: it is the children's too, and whom it reaches is its own business.
pub fn own_proxy() -> Option<u16> {
    let set = PROXIES.iter().filter(|name| !name.eq_ignore_ascii_case("no_proxy"));
    let url = set.filter_map(|name| std::env::var(name).ok()).find(|url| !url.is_empty())?;
    let host = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
    let authority = host.split('/').next().unwrap_or(host);
    Some(authority.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(1080))
}

/// Files that every child reads.
fn visible(config: &Config) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).collect();
    let store = config.root.join("nix/store");
    paths.extend([store, "/nix/store".into(), config.daemon.clone()]);
    paths.extend(config.bin.clone());
    paths.extend(config.visible.iter().cloned());
    for name in ["NIX_SSL_CERT_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR", "SSH_AUTH_SOCK"] {
        paths.extend(std::env::var_os(name).map(PathBuf::from));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .filter(|directory| PROGRAMS.iter().any(|name| directory.join(name).exists()));
    paths.extend(found.filter(|directory| directory.is_absolute()));
    // What a directory of links leads to, such as a profile.
    let targets: Vec<PathBuf> = paths.iter().filter_map(|path| path.canonicalize().ok()).collect();
    paths.extend(targets);
    // Parents first: what lies in another is seen there already.
    paths.sort();
    paths.dedup();
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !kept.iter().any(|other| path.starts_with(other)) {
            kept.push(path);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_it_leaves_open() {
        let layer = |name: &str, holds, open| Layer { name: name.to_owned(), holds, open };
        let all = [layer("namespaces", true, "processes"), layer("Landlock 6", true, "files")];
        assert_eq!(words(&all), "namespaces, Landlock 6");
        let some = [layer("namespaces", true, "processes"), layer("Landlock", false, "files are read")];
        assert_eq!(words(&some), "namespaces; without Landlock: files are read");
    }
}
