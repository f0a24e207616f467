//! Why a farm on this machine does not start, or ended.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use harmonia_nix::key::KeyError;
use harmonia_queue::migrate::MigrateError;
use harmonia_service::settings::SettingsError;
use thiserror::Error;

/// So long a process that was killed, and its parts, have to end.
const PATIENCE: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug, Error)]
pub enum UpError {
    #[error("there is no home directory to keep data in: give --data DIR")]
    NoHome,
    #[error("{} cannot be used", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("`harmonia-ci up` already runs on {} as process {pid}: stop it, or give another --data", data.display())]
    Runs { data: PathBuf, pid: String },
    #[error("{} was written by a newer release (layout {found}, this one knows {known}): use that release, or give another --data", data.display())]
    Newer { data: PathBuf, found: String, known: u32 },
    #[error("{address} is taken by another program: stop it, or give another {option} ADDRESS:PORT")]
    PortTaken { address: SocketAddr, option: &'static str },
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("only {free} MiB are free in {}, at least {least} are needed: make room, or give another --data", data.display())]
    DiskFull { data: PathBuf, free: u64, least: u64 },
    #[error(
        "Nix is not installed: `apt-get install nix-bin` on Debian and Ubuntu, https://nixos.org/download elsewhere"
    )]
    NoNix,
    #[error("the Nix daemon at {} cannot be used", socket.display())]
    Daemon { socket: PathBuf, source: Box<harmonia_nix::daemon::Error> },
    #[error(
        "the Nix daemon at {} does not trust this user, who could build nothing with it: add `trusted-users = {user}` to its \
         nix.conf and restart it, or leave --nix-daemon out, so that a private store is used", socket.display()
    )]
    NotTrusted { socket: PathBuf, user: String },
    #[error("--nix-daemon is {0:?}: write the socket's path, or unix://PATH?root=DIR")]
    DaemonAddress(String),
    #[error("the private Nix store in {} cannot be made: {output}", root.display())]
    Store { root: PathBuf, output: String },
    #[error(
        "PostgreSQL is not installed: `apt-get install postgresql` on Debian and Ubuntu; or give --database URL"
    )]
    NoPostgres,
    #[error("PostgreSQL {version} is too old: install 15 or newer, or give --database URL")]
    OldPostgres { version: u32 },
    #[error(
        "the database in {} was made by PostgreSQL {version}, and {newest} is what is installed: `apt-get install \
         postgresql-{version}`; docs/up.md says how data comes from one to the other", data.display()
    )]
    OtherPostgres { data: PathBuf, version: u32, newest: u32 },
    #[error(
        "the database in {} does not take the password in {}: put that file back from when the database was made",
        data.display(), password.display()
    )]
    Password { data: PathBuf, password: PathBuf, source: harmonia_queue::Error },
    #[error(
        "PostgreSQL does not run as root, and its account {account} may not enter {0}: `chmod o+x {0}`, or give a --data that \
         everybody may enter, such as /var/lib/harmonia-ci", directory.display()
    )]
    Closed { directory: PathBuf, account: String },
    #[error("PostgreSQL does not run as root, and this machine has neither an account postgres nor nobody")]
    NoAccount,
    #[error("{program} failed: {output}")]
    Failed { program: &'static str, output: String },
    #[error("{program} cannot be started")]
    Start { program: String, source: io::Error },
    #[error("{} sets {key}, which is for {option} to say: remove it there", file.display())]
    Own { file: PathBuf, key: &'static str, option: &'static str },
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("--s3 {0}: write http://KEY:SECRET@HOST:PORT/BUCKET?region=REGION")]
    S3Url(&'static str),
    #[error("{name} does not stay up, see {}: {last}", log.display())]
    Unstable { name: &'static str, log: PathBuf, last: String },
    #[error("the signing key cannot be used")]
    Key(#[from] KeyError),
    #[error(transparent)]
    Migrate(#[from] MigrateError),
    #[error("the database cannot be prepared")]
    Queue(#[from] harmonia_queue::Error),
    #[error("HTTP cannot be used")]
    Http(#[from] harmonia_builder::upload::UploadError),
}

impl UpError {
    /// Whether the person has to say something else, rather than mend something.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::NoHome
                | Self::Runs { .. }
                | Self::Newer { .. }
                | Self::PortTaken { .. }
                | Self::Listen { .. }
                | Self::NotTrusted { .. }
                | Self::DaemonAddress(_)
                | Self::Closed { .. }
                | Self::S3Url(_)
                | Self::Own { .. }
                | Self::Settings(_)
                | Self::Key(_)
        )
    }
}

/// Tries again for a while if another process is in the way, which may be about to end.
pub fn patiently<T>(attempt: impl Fn() -> Result<T, UpError>) -> Result<T, UpError> {
    let until = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(UpError::Runs { .. } | UpError::PortTaken { .. }) if Instant::now() < until => sleep(LOOK),
            outcome => return outcome,
        }
    }
}

/// What to say of a file.
pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> UpError {
    let path = path.into();
    move |source| UpError::File { path, source }
}
