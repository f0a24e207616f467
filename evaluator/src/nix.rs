//! Programs that evaluate and fetch: confined, and with nothing of this process's environment but what they need.

use std::env;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::process::Command;

use crate::conf;
use crate::config::Config;
use crate::credentials::Credential;
use crate::sandbox::{Network, Sandbox};

/// What Nix and git know of the world around them: how to reach it, and whom to trust.
const PASSED: [&str; 5] = ["PATH", "NIX_SSL_CERT_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR", "SSH_AUTH_SOCK"];
/// Where git, and what Nix downloads, look for secrets; and where Nix looks for settings of its user.
const NETRC: &str = "home/.netrc";
const OWN_CONFIG: &str = "home/.config/nix/nix.conf";

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
    /// What its children could read at this moment.
    lent: Option<Credential>,
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
        let parts = ["", "home", "home/.config", "home/.config/nix", "tmp", "repository", "flake", "source"];
        for part in parts.map(|part| directory.join(part)) {
            std::fs::create_dir_all(&part)?;
            chown(&part, user, user)?;
        }
        std::fs::set_permissions(directory.join("home"), Permissions::from_mode(0o700))?;
        conf::write(&directory)?;
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
            lent: None,
        })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A registry of flakes in which there is none.
    pub fn no_registry(&self) -> PathBuf {
        self.path(conf::NO_REGISTRY)
    }

    /// What git and Nix show to the hosts that the credential names, and to no other. Until it is taken back, nothing foreign may be
    /// evaluated, not even purely: whoever may say what is to be fetched has any file read whose path can be known.
    pub fn lend(&mut self, credential: Credential) -> io::Result<()> {
        self.write_secret(NETRC, &credential.netrc())?;
        let (netrc, tokens) = (self.path(NETRC), credential.access_tokens());
        self.write_secret(
            OWN_CONFIG,
            &format!("netrc-file = {}\naccess-tokens = {tokens}\n", netrc.display()),
        )?;
        self.lent = Some(credential);
        Ok(())
    }

    /// What is lent.
    pub fn lent(&self) -> Option<&Credential> {
        self.lent.as_ref()
    }

    /// From here on foreign code may run.
    pub fn take_back(&mut self) -> io::Result<()> {
        for name in [NETRC, OWN_CONFIG] {
            match std::fs::remove_file(self.path(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        self.lent = None;
        Ok(())
    }

    /// A file that is nobody else's from its first moment on.
    fn write_secret(&self, name: &str, text: &str) -> io::Result<()> {
        let path = self.path(name);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(text.as_bytes())?;
        chown(&path, self.user, self.user)
    }

    /// One of Nix's programs, with the store that the settings name.
    pub fn nix(&self, program: &str) -> Command {
        let program = self.bin.as_ref().map_or_else(|| PathBuf::from(program), |bin| bin.join(program));
        let mut command = self.command(&program, Network::Proxy);
        command.env("NIX_REMOTE", &self.remote).args(["--extra-experimental-features", "nix-command flakes"]);
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
            .env("NIX_CONF_DIR", self.path(conf::DIRECTORY))
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
