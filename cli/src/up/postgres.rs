//! A PostgreSQL of this farm's own: on a unix socket only, for the roles' logins only.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use harmonia_service::sentence::sentence;
use rustix::process::Signal;
use sqlx::{Connection, PgConnection};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::account::Account;
use super::error::{UpError, file};
use super::layout::Layout;
use super::ready::PATIENCE;
use super::supervise::{Kind, Program, State, Supervisor};
use super::terminal::Terminal;
use super::{environment, find, secrets};

pub const NAME: &str = "postgres";
const SUPERUSER: &str = "postgres";
/// The secret by which it logs in.
const PASSWORD: &str = "postgres-password";
/// Part of the socket's name.
const PORT: u16 = 5432;
/// How soon after it was started it is asked again whether it answers.
const LOOK: Duration = Duration::from_millis(20);
/// After so many ends it is not waited for any longer.
const TRIES: u32 = 3;

/// How a database is reached.
#[derive(Debug, Clone)]
pub struct Database {
    /// By who may do everything.
    pub admin_url: String,
}

impl Database {
    /// The same database by another login.
    pub fn url_of(&self, login: &str, password: &str) -> String {
        let rest = self.admin_url.split_once("://").map_or("", |(_, rest)| rest);
        let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
        format!("postgres://{login}:{password}@{place}")
    }
}

/// Starts it, on data that is made first if there is none, and waits until it answers.
pub async fn start(
    layout: &Layout,
    supervisor: &Supervisor,
    terminal: &Terminal,
) -> Result<Database, UpError> {
    let account = Account::unprivileged()?;
    let cluster = Cluster::find(layout, account)?;
    let password = secrets::once(&layout.secret(PASSWORD), secrets::password)?;
    let admin_url = cluster.url(&password);
    let command = cluster.server();
    spawn_blocking(move || cluster.prepare(&password))
        .await
        .map_err(|error| UpError::Failed { program: "initdb", output: error.to_string() })??;
    let command = Box::new(move || command.to_command());
    // Fast shutdown: it does not wait for clients.
    supervisor.start(layout, Program { name: NAME, command, kind: Kind::Foreign(Signal::INT) });
    answers(layout, supervisor, terminal, &admin_url).await?;
    Ok(Database { admin_url })
}

async fn answers(
    layout: &Layout,
    supervisor: &Supervisor,
    terminal: &Terminal,
    url: &str,
) -> Result<(), UpError> {
    let (begun, mut said) = (Instant::now(), String::new());
    loop {
        let error = match PgConnection::connect(url).await {
            Ok(connection) => {
                drop(connection.close().await);
                return Ok(());
            }
            Err(error) => harmonia_queue::Error::from(error),
        };
        if error.is_login() {
            let (data, password) = (layout.path(NAME), layout.secret(PASSWORD));
            return Err(UpError::Password { data, password, source: error });
        }
        let reason = sentence(&error);
        if begun.elapsed() > PATIENCE && said != reason {
            terminal.say(&format!("waiting for {NAME}: {reason}"));
            said = reason;
        }
        for (name, state) in supervisor.states() {
            if let (NAME, State::Failed(TRIES.., last)) = (name, state) {
                return Err(UpError::Unstable { name: NAME, log: layout.log(NAME), last });
            }
        }
        sleep(LOOK).await;
    }
}

/// What to run, without the parts of a command that cannot be used twice.
struct Server {
    program: PathBuf,
    data: PathBuf,
    sockets: PathBuf,
    account: Option<Account>,
}

impl Server {
    fn to_command(&self) -> Command {
        let mut command = as_account(&self.program, &self.sockets, self.account.as_ref());
        command.arg("-D").arg(&self.data).arg("-k").arg(&self.sockets).args(["-p", &PORT.to_string()]);
        for (name, value) in SETTINGS {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command
    }
}

/// A farm on one machine needs little: some thirty connections, and memory for the queue's few hot tables.
const SETTINGS: &[(&str, &str)] = &[
    ("listen_addresses", ""),
    ("unix_socket_permissions", "0700"),
    ("max_connections", "100"),
    ("shared_buffers", "64MB"),
    ("fsync", "on"),
    ("jit", "off"),
    ("log_line_prefix", "%m %q%u "),
];

struct Cluster {
    programs: PathBuf,
    data: PathBuf,
    sockets: PathBuf,
    account: Option<Account>,
}

impl Cluster {
    fn find(layout: &Layout, account: Option<Account>) -> Result<Self, UpError> {
        let data = layout.path("postgres");
        let (_, programs) = find::postgres_for(&data)?;
        if let Some(account) = &account {
            account.can_reach(layout.root())?;
        }
        Ok(Self { programs, data, sockets: layout.sockets("postgres"), account })
    }

    fn url(&self, password: &str) -> String {
        let sockets = percent_encode(&self.sockets);
        format!("postgres://{SUPERUSER}:{password}@{sockets}:{PORT}/postgres")
    }

    fn server(&self) -> Server {
        Server {
            program: self.programs.join("postgres"),
            data: self.data.clone(),
            sockets: self.sockets.clone(),
            account: self.account.clone(),
        }
    }

    /// Makes the data if there is none, and ends a server that outlived whoever started it.
    fn prepare(&self, password: &str) -> Result<(), UpError> {
        self.make_directory(&self.sockets)?;
        if self.data.join("PG_VERSION").exists() { self.end_orphan() } else { self.initialise(password) }
    }

    /// Beside its place, to which it moves when it is whole.
    fn initialise(&self, password: &str) -> Result<(), UpError> {
        let new = self.data.with_extension("new");
        match fs::remove_dir_all(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file(&new)(error)),
            _ => {}
        }
        self.make_directory(&new)?;
        let password_file = self.sockets.join("password");
        secrets::write(&password_file, password)?;
        if let Some(account) = &self.account {
            account.owns(&password_file)?;
        }
        let mut command = self.command("initdb");
        command.args([
            "--username",
            SUPERUSER,
            "--auth",
            "scram-sha-256",
            "--encoding",
            "UTF8",
            "--locale",
            "C",
        ]);
        let made = run("initdb", command.arg("--pwfile").arg(&password_file).arg("--pgdata").arg(&new));
        fs::remove_file(&password_file).map_err(file(&password_file))?;
        made?;
        fs::rename(&new, &self.data).map_err(file(&self.data))
    }

    /// One that is named in its data, runs, and runs on this data.
    fn end_orphan(&self) -> Result<(), UpError> {
        let named = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
        let Some(pid) = named.lines().next().and_then(|line| line.trim().parse::<u32>().ok()) else {
            return Ok(());
        };
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let ours = self.data.as_os_str().as_encoded_bytes();
        if line.split(|byte| *byte == 0).any(|word| word == ours) {
            let mut command = self.command("pg_ctl");
            command.args(["--wait", "--silent", "--mode", "fast", "--pgdata"]).arg(&self.data).arg("stop");
            // It may have been about to end anyway; if it still runs, the next one says so.
            let _ = run("pg_ctl", &mut command);
        }
        Ok(())
    }

    /// For the account only.
    fn make_directory(&self, path: &Path) -> Result<(), UpError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(file(path))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(file(path))?;
        self.account.as_ref().map_or(Ok(()), |account| account.owns(path))
    }

    fn command(&self, program: &str) -> Command {
        as_account(&self.programs.join(program), &self.sockets, self.account.as_ref())
    }
}

fn as_account(program: &Path, directory: &Path, account: Option<&Account>) -> Command {
    let mut command = environment::foreign(program);
    command.current_dir(directory).env("LC_ALL", "C");
    if let Some(account) = account {
        account.runs(&mut command);
    }
    command
}

fn run(program: &'static str, command: &mut Command) -> Result<(), UpError> {
    let output = command.stdin(std::process::Stdio::null()).output();
    let output = output.map_err(|source| UpError::Start { program: program.to_owned(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
    Err(UpError::Failed { program, output: said })
}

/// A path as the host of a URL.
fn percent_encode(path: &Path) -> String {
    let byte = |byte: &u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(*byte).to_string(),
        other => format!("%{other:02X}"),
    };
    path.as_os_str().as_encoded_bytes().iter().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_login_reaches_the_same_database() {
        let database = Database { admin_url: "postgres://postgres:pass@%2Frun%2Fa%20b:5432/postgres".into() };
        let url = database.url_of("harmonia_up_signer", "secret");
        assert_eq!(url, "postgres://harmonia_up_signer:secret@%2Frun%2Fa%20b:5432/postgres");
    }

    #[test]
    fn a_path_becomes_a_host() {
        assert_eq!(percent_encode(Path::new("/run/a b@c")), "%2Frun%2Fa%20b%40c");
    }
}
