//! The Nix daemon that builds: the machine's, where it answers and trusts this user; else one of this farm's own, with a
//! store in the data directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use harmonia_builder::canary::{self, CanaryError};
use harmonia_builder::store::StoreError;
use harmonia_nix::daemon::wire::Error as WireError;
use harmonia_nix::daemon::{Connection, Error, Options, Trust};
use harmonia_service::sentence::sentence;
use rustix::process::{Signal, geteuid};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

use super::account::own_name;
use super::environment;
use super::error::{UpError, file};
use super::find::which;
use super::layout::{Layout, make_directory};
use super::ready::PATIENCE;
use super::supervise::{Kind, Program, State, Supervisor};
use super::terminal::Terminal;

pub const NAME: &str = "nix";
/// Where installers put the daemon's socket.
pub const MACHINE: &str = "/nix/var/nix/daemon-socket/socket";
const ANSWER: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);
/// After so many ends it is not waited for any longer.
const TRIES: u32 = 3;

/// A daemon that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daemon {
    pub socket: PathBuf,
    /// What stands for `/` in its store's paths.
    pub root: PathBuf,
    /// Somebody else's: its substituters are the machine's.
    pub is_machines: bool,
}

/// Whether a daemon can be built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Usable {
    Yes,
    /// It answers, and builds nothing for this user.
    NotTrusted,
}

/// What was found of a daemon.
#[derive(Debug)]
pub enum Found {
    Usable(Daemon),
    /// The machine's, which builds nothing for this user.
    NotTrusted,
    None,
}

/// What the private daemon is told of caches.
pub struct Caches<'a> {
    /// The farm's own, and those that the person has named.
    pub urls: &'a str,
    pub public_keys: &'a str,
    pub slots: i32,
    /// For a cache that wants a token.
    pub netrc: Option<PathBuf>,
}

/// The daemon that `given` names, the machine's, or none: then [`start`] makes one.
pub async fn find(given: Option<&str>) -> Result<Found, UpError> {
    let (daemon, must) = match given {
        Some(address) => (parse(address)?, true),
        None => (Daemon { socket: MACHINE.into(), root: "/".into(), is_machines: true }, false),
    };
    match try_daemon(&daemon.socket).await {
        Ok(Usable::Yes) => Ok(Found::Usable(daemon)),
        Ok(Usable::NotTrusted) if must => {
            Err(UpError::NotTrusted { socket: daemon.socket, user: own_name() })
        }
        Err(error) if must => Err(UpError::Daemon { socket: daemon.socket, source: Box::new(error) }),
        Ok(Usable::NotTrusted) => Ok(Found::NotTrusted),
        Err(_) => Ok(Found::None),
    }
}

/// Asks a daemon whether it would build for this user. Those that do not say so are asked to build something.
async fn try_daemon(socket: &Path) -> Result<Usable, Error> {
    match greet(socket).await?.server().trust {
        Trust::Trusted => Ok(Usable::Yes),
        Trust::NotTrusted => Ok(Usable::NotTrusted),
        Trust::Unknown if geteuid().is_root() => Ok(Usable::Yes),
        Trust::Unknown => {
            let options = Options { use_substitutes: false, ..Options::default() };
            let mut connection = Connection::connect(socket, &options).await?;
            match canary::sing(&mut connection).await {
                Ok(()) => Ok(Usable::Yes),
                Err(CanaryError::Store(StoreError::Daemon(error))) if error.is_lost() => Err(error),
                Err(_) => Ok(Usable::NotTrusted),
            }
        }
    }
}

/// A connection to a daemon that answers soon.
pub async fn greet(socket: &Path) -> Result<Connection, Error> {
    let options = Options::default();
    let connected = timeout(ANSWER, Connection::connect(socket, &options)).await;
    connected.unwrap_or(Err(Error::TimedOut { operation: "the handshake", limit: ANSWER }))
}

/// Starts a daemon on a store in the data directory.
pub async fn start(
    layout: &Layout,
    supervisor: &Supervisor,
    terminal: &Terminal,
    caches: &Caches<'_>,
) -> Result<Daemon, UpError> {
    let store = Private::find(layout)?;
    store.configure(caches)?;
    let made = spawn_blocking(move || store.initialise().map(|()| store)).await;
    let store =
        made.map_err(|error| UpError::Failed { program: "nix-store", output: error.to_string() })??;
    let daemon = Daemon { socket: store.socket.clone(), root: store.root.clone(), is_machines: false };
    let command = Box::new(move || store.command(&store.daemon));
    supervisor.start(layout, Program { name: NAME, command, kind: Kind::Foreign(Signal::TERM) });
    let (begun, mut said) = (Instant::now(), String::new());
    loop {
        let error = match greet(&daemon.socket).await {
            Ok(_) => return Ok(daemon),
            // It will not be another one a moment later.
            Err(source @ Error::Wire(WireError::Unsupported { .. } | WireError::NotADaemon(_))) => {
                return Err(UpError::Daemon { socket: daemon.socket, source: Box::new(source) });
            }
            Err(error) => sentence(&error),
        };
        if begun.elapsed() > PATIENCE && said != error {
            terminal.say(&format!("waiting for {NAME}: {error}"));
            said = error;
        }
        for (name, state) in supervisor.states() {
            if let (NAME, State::Failed(TRIES.., last)) = (name, state) {
                return Err(UpError::Unstable { name: NAME, log: layout.log(NAME), last });
            }
        }
        sleep(LOOK).await;
    }
}

struct Private {
    daemon: PathBuf,
    tool: PathBuf,
    root: PathBuf,
    socket: PathBuf,
}

impl Private {
    fn find(layout: &Layout) -> Result<Self, UpError> {
        let program = |name| which(name).ok_or(UpError::NoNix);
        let (root, sockets) = (layout.path("nix"), layout.sockets("nix"));
        for directory in [&root, &root.join("conf"), &root.join("home"), &root.join("tmp")] {
            make_directory(directory)?;
        }
        // Whoever may connect is trusted: nobody else may.
        make_directory(&sockets)?;
        let own = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(&sockets, own).map_err(file(&sockets))?;
        Ok(Self {
            daemon: program("nix-daemon")?,
            tool: program("nix-store")?,
            root,
            socket: sockets.join("socket"),
        })
    }

    fn configure(&self, caches: &Caches<'_>) -> Result<(), UpError> {
        let path = self.root.join("conf/nix.conf");
        fs::write(&path, settings(caches)).map_err(file(path))
    }

    /// Two daemons that are the first to open a store would stand in each other's way.
    fn initialise(&self) -> Result<(), UpError> {
        if self.root.join("nix/var/nix/db/db.sqlite").exists() {
            return Ok(());
        }
        let output = self.command(&self.tool).arg("--init").stdin(Stdio::null()).output();
        let output = output.map_err(|source| UpError::Start { program: "nix-store".into(), source })?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        Err(UpError::Store { root: self.root.clone(), output: said })
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = environment::foreign(program);
        command
            .current_dir(&self.root)
            .env("NIX_CONF_DIR", self.root.join("conf"))
            .env("NIX_REMOTE", format!("local?root={}", self.root.display()))
            .env("NIX_DAEMON_SOCKET_PATH", &self.socket)
            .env("HOME", self.root.join("home"))
            .env("XDG_CACHE_HOME", self.root.join("home/.cache"))
            .env("TMPDIR", self.root.join("tmp"));
        command
    }
}

/// `nix.conf`. What is in `extra.conf` beside it wins, and is never touched.
fn settings(caches: &Caches<'_>) -> String {
    let netrc =
        caches.netrc.as_ref().map(|path| format!("netrc-file = {}\n", path.display())).unwrap_or_default();
    format!(
        "# Written by `harmonia-ci up` at every start; put your own lines into extra.conf beside this file.\n\
         build-users-group =\nbuilders =\nexperimental-features = nix-command flakes\nmax-jobs = {slots}\n\
         sandbox = true\nsandbox-fallback = false\nsubstituters = {urls}\ntrusted-public-keys = {keys}\n\
         trusted-users = *\n{netrc}!include extra.conf\n",
        slots = caches.slots,
        urls = caches.urls,
        keys = caches.public_keys,
    )
}

/// A list as nix.conf has it, of our own word and of a setting's, which has commas if it was a list in TOML.
pub fn list(own: &str, more: &str) -> String {
    let words = [own, more].into_iter().flat_map(|text| text.split([',', ' ', '\t', '\n']));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A socket's path, or what Nix itself calls such a store.
pub fn parse(address: &str) -> Result<Daemon, UpError> {
    let invalid = || UpError::DaemonAddress(address.to_owned());
    let (socket, root) = match address.strip_prefix("unix://") {
        None => (address, "/"),
        Some(rest) => match rest.split_once('?') {
            None => (rest, "/"),
            Some((socket, query)) => (socket, query.strip_prefix("root=").ok_or_else(invalid)?),
        },
    };
    match socket.starts_with('/') && root.starts_with('/') {
        true => Ok(Daemon { socket: socket.into(), root: root.into(), is_machines: true }),
        false => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_named_by_its_socket_or_as_nix_does() {
        let daemon =
            |socket: &str, root: &str| Daemon { socket: socket.into(), root: root.into(), is_machines: true };
        assert_eq!(parse("/run/nix").unwrap(), daemon("/run/nix", "/"));
        assert_eq!(parse("unix:///run/nix?root=/data").unwrap(), daemon("/run/nix", "/data"));
        for wrong in ["daemon", "unix://relative", "unix:///run/nix?store=/x", ""] {
            assert!(matches!(parse(wrong), Err(UpError::DaemonAddress(_))), "{wrong}");
        }
    }

    #[test]
    fn a_list_of_toml_is_one_of_nix() {
        assert_eq!(
            list("http://own", "https://a,https://b  https://c"),
            "http://own https://a https://b https://c"
        );
        assert_eq!(list("own", ""), "own");
    }

    #[test]
    fn the_private_store_trusts_our_key_and_always_has_a_sandbox() {
        let urls = "http://127.0.0.1:7777/cache https://cache.example.org";
        let text = settings(&Caches { urls, public_keys: "k-1:AAAA", slots: 2, netrc: None });
        for line in [
            "trusted-public-keys = k-1:AAAA",
            "sandbox = true",
            "sandbox-fallback = false",
            "max-jobs = 2",
            "substituters = http://127.0.0.1:7777/cache https://cache.example.org",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
        }
        assert!(!text.contains("netrc"));
    }
}
