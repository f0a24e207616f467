//! Programs that evaluate and fetch: confined, and with nothing of this process's environment but what they need.

use std::env;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::process::Command;

use crate::config::Config;
use crate::credentials::Credential;
use crate::sandbox::{Network, Sandbox};

/// What Nix and git know of the world around them: how to reach it, and whom to trust.
const PASSED: [&str; 6] =
    ["PATH", "NIX_CONF_DIR", "NIX_SSL_CERT_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR", "SSH_AUTH_SOCK"];

/// A place to work in; it vanishes with this.
#[derive(Debug)]
pub struct Workplace {
    directory: PathBuf,
    bin: Option<PathBuf>,
    remote: String,
    sandbox: Arc<Sandbox>,
    user: Option<u32>,
    /// What is evaluated where it is.
    local: Vec<PathBuf>,
    proxy: Vec<(&'static str, String)>,
    /// What Nix is told beside its options.
    secret_config: String,
}

impl Workplace {
    /// An empty one, for a worker's children; `local` is what they read of this machine.
    pub fn make(
        config: &Config,
        sandbox: &Arc<Sandbox>,
        name: &str,
        worker: usize,
        local: Option<&Path>,
    ) -> io::Result<Self> {
        let directory = directory(&config.state).join(name);
        clear(&directory)?;
        let user = sandbox.user(worker, local);
        let parts = ["", "home", "tmp", "repository", "flake", "source"].map(|part| directory.join(part));
        for part in &parts {
            std::fs::create_dir_all(part)?;
            chown(part, user, user)?;
        }
        // Directories that are evaluated in place belong to whoever works in them.
        std::fs::write(directory.join("home/.gitconfig"), "[safe]\n\tdirectory = *\n")?;
        // A bare repository Nix would fetch from, and old ones cannot where a commit's parents are missing; this one it reads in place.
        let repository = format!("gitdir: {}\n", directory.join("repository").display());
        std::fs::write(directory.join("flake/.git"), repository)?;
        let socket = config.daemon.display();
        let remote = match config.root.as_path() {
            root if root == Path::new("/") => format!("unix://{socket}"),
            root => format!("unix://{socket}?root={}", root.display()),
        };
        Ok(Self {
            directory,
            bin: config.bin.clone(),
            remote,
            sandbox: Arc::clone(sandbox),
            user,
            local: local.map(Path::to_owned).into_iter().collect(),
            proxy: sandbox.proxy_variables(),
            secret_config: String::new(),
        })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// What git and Nix show to the hosts that the credential names, and to no other.
    pub fn lend(&mut self, credential: &Credential) -> io::Result<()> {
        let file = self.path("home/.netrc");
        std::fs::write(&file, credential.netrc())?;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
        chown(&file, self.user, self.user)?;
        self.secret_config =
            format!("netrc-file = {}\naccess-tokens = {}\n", file.display(), credential.access_tokens());
        Ok(())
    }

    /// Foreign code is about to run that could read it.
    pub fn take_back(&mut self) -> io::Result<()> {
        self.secret_config = String::new();
        match std::fs::remove_file(self.path("home/.netrc")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// One of Nix's programs, with the store that the settings name.
    pub fn nix(&self, program: &str) -> Command {
        let program = self.bin.as_ref().map_or_else(|| PathBuf::from(program), |bin| bin.join(program));
        let mut command = self.command(&program, Network::Proxy);
        command.env("NIX_REMOTE", &self.remote).args(["--extra-experimental-features", "nix-command flakes"]);
        if !self.secret_config.is_empty() {
            command.env("NIX_CONFIG", &self.secret_config);
        }
        command
    }

    /// Whether there is such a program beside Nix's.
    pub fn has(&self, program: &str) -> bool {
        let path = self.bin.is_none().then(|| env::var_os("PATH")).flatten().unwrap_or_default();
        let mut places = self.bin.iter().cloned().chain(env::split_paths(&path));
        places.any(|place| place.join(program).is_file())
    }

    /// git, which asks nobody anything.
    pub fn git(&self) -> Command {
        self.command(Path::new("git"), Network::Fetch)
    }

    fn command(&self, program: &Path, network: Network) -> Command {
        let mut command =
            self.sandbox.command(Some(program), &self.directory, network, &self.local, self.user);
        command.env_clear().current_dir(&self.directory);
        command.envs(PASSED.iter().filter_map(|name| Some((name, env::var_os(name)?))));
        command.envs(self.proxy.iter().map(|(name, value)| (name, value)));
        command
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
            .env("LC_ALL", "C.UTF-8")
            .env("NIX_PATH", "")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GIT_SSH_COMMAND", "ssh -oBatchMode=yes");
        command
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if let Err(error) = clear(&self.directory) {
            tracing::warn!(directory = %self.directory.display(), %error, "cannot be removed");
        }
    }
}

/// Where the workplaces are.
pub fn directory(state: &Path) -> PathBuf {
    state.join("work")
}

/// Removes a directory, if it is there.
pub fn clear(directory: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
