//! Programs that evaluate and fetch: with nothing of this process's environment but what they need.

use std::env;
use std::io;
use std::path::{Path, PathBuf};

use tokio::process::Command;

use crate::config::Config;

/// What Nix and git know of the world around them: how to reach it, and whom to trust.
const PASSED: [&str; 12] = [
    "PATH",
    "NIX_CONF_DIR",
    "NIX_SSL_CERT_FILE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "SSH_AUTH_SOCK",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
];

/// A place to work in; it vanishes with this.
#[derive(Debug)]
pub struct Workplace {
    directory: PathBuf,
    bin: Option<PathBuf>,
    remote: String,
}

impl Workplace {
    /// An empty one.
    pub fn make(config: &Config, name: &str) -> io::Result<Self> {
        let directory = directory(&config.state).join(name);
        clear(&directory)?;
        for part in ["home", "tmp"] {
            std::fs::create_dir_all(directory.join(part))?;
        }
        // Directories that are evaluated in place belong to whoever works in them.
        std::fs::write(directory.join("home/.gitconfig"), "[safe]\n\tdirectory = *\n")?;
        let socket = config.daemon.display();
        let remote = match config.root.as_path() {
            root if root == Path::new("/") => format!("unix://{socket}"),
            root => format!("unix://{socket}?root={}", root.display()),
        };
        Ok(Self { directory, bin: config.bin.clone(), remote })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// One of Nix's programs, with the store that the settings name.
    pub fn nix(&self, program: &str) -> Command {
        let program = self.bin.as_ref().map_or_else(|| PathBuf::from(program), |bin| bin.join(program));
        let mut command = self.command(&program);
        command.env("NIX_REMOTE", &self.remote).args(["--extra-experimental-features", "nix-command flakes"]);
        command
    }

    /// git, which asks nobody anything.
    pub fn git(&self) -> Command {
        self.command(Path::new("git"))
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().current_dir(&self.directory);
        command.envs(PASSED.iter().filter_map(|name| Some((name, env::var_os(name)?))));
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
