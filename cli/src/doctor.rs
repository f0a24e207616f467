//! `harmonia-ci doctor`

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use harmonia_builder::upload::local_http_client;
use harmonia_nix::daemon::Trust;
use harmonia_service::sentence::sentence;
use rustix::process::geteuid;
use serde_json::json;

use crate::outcome::Failure;
use crate::output::Output;
use crate::up::{self, find, nix};

/// The oldest Nix whose daemon we speak to.
const OLDEST_NIX: (u32, u32) = (2, 8);
/// How long a farm has to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Check whether this machine has what `harmonia-ci up` needs, and say what to do about what it lacks
#[derive(Args)]
pub struct Arguments {
    /// The data directory that `up` would use
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,

    /// The address that `up` would listen on
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = up::LISTEN)]
    listen: SocketAddr,

    /// The Nix daemon, by its socket, or as unix://SOCKET?root=DIR
    #[arg(long, value_name = "SOCKET", default_value = nix::MACHINE)]
    nix_daemon: String,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// What was found, and whether it will do.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    Ok(String),
    /// It works without.
    Note(String),
    /// It does not.
    Missing(String),
}

impl Finding {
    fn parts(&self) -> (&'static str, &str) {
        match self {
            Self::Ok(text) => ("ok", text),
            Self::Note(text) => ("note", text),
            Self::Missing(text) => ("missing", text),
        }
    }
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let data = arguments.data.map_or_else(up::default_root, Ok)?;
    let farm = farm(arguments.listen).await;
    let daemon = daemon(&nix::parse(&arguments.nix_daemon)?.socket).await;
    let sandbox = sandbox(matches!(daemon, Finding::Ok(_)));
    let findings = [
        ("nix", nix_version(find::which("nix").and_then(version_of))),
        ("daemon", daemon),
        ("sandbox", sandbox),
        ("confined", confined().await),
        ("postgres", postgres(&data)),
        ("git", git()),
        ("disk", disk(&data)),
        ("port", port(arguments.listen, farm.is_some())),
        (
            "farm",
            farm.map_or_else(
                || Finding::Note("none runs here: `harmonia-ci up` starts one".into()),
                Finding::Ok,
            ),
        ),
    ];
    match arguments.output {
        Output::Json => println!("{}", findings.iter().map(object).collect::<serde_json::Value>()),
        Output::Table => findings.iter().for_each(|(name, finding)| {
            let (state, text) = finding.parts();
            println!("{name:9} {state:8} {text}");
        }),
    }
    let missing = findings.iter().any(|(_, finding)| matches!(finding, Finding::Missing(_)));
    if missing { Err(Failure::Reported) } else { Ok(()) }
}

fn object((name, finding): &(&str, Finding)) -> serde_json::Value {
    let (state, text) = finding.parts();
    json!({ "check": name, "state": state, "text": text })
}

fn version_of(program: PathBuf) -> Option<String> {
    find::output_of(Command::new(program).arg("--version"))
}

/// From what Nix says of itself: `nix (Nix) 2.8.0`.
fn nix_version(said: Option<String>) -> Finding {
    let Some(said) = said else { return Finding::Missing(up::UpError::NoNix.to_string()) };
    let version = said.split_whitespace().last().unwrap_or_default();
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or_default());
    let found = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    match found >= OLDEST_NIX {
        true => Finding::Ok(format!("Nix {version}")),
        false => Finding::Missing(format!("Nix {version} is too old: 2.8 or newer is needed")),
    }
}

async fn daemon(socket: &Path) -> Finding {
    let private = "`up` starts one with a private store";
    if !socket.exists() {
        return Finding::Note(format!("there is none at {}: {private}", socket.display()));
    }
    let connection = match nix::greet(socket).await {
        Ok(connection) => connection,
        Err(error) => return Finding::Note(format!("{}; {private}", sentence(&error))),
    };
    let version = connection.server().nix_version.clone();
    let user = up::own_name();
    match connection.server().trust {
        Trust::Trusted => Finding::Ok(format!("Nix {version} answers, and trusts {user}")),
        Trust::Unknown if geteuid().is_root() => {
            Finding::Ok(format!("Nix {version} answers, and trusts root"))
        }
        Trust::Unknown => {
            Finding::Ok(format!("Nix {version} answers; it does not say whether it trusts {user}"))
        }
        Trust::NotTrusted => Finding::Note(format!(
            "Nix {version} answers and does not trust {user}: {private}, or add `trusted-users = root {user}` to \
             /etc/nix/nix.conf and restart it"
        )),
    }
}

/// Builds run in namespaces, which a daemon of the machine's makes itself.
fn sandbox(daemon: bool) -> Finding {
    let Some(unshare) = find::which("unshare") else {
        return Finding::Note("it cannot be tried without the program unshare, of util-linux".into());
    };
    let own: &[&str] = if geteuid().is_root() { &[] } else { &["--user", "--map-root-user"] };
    let mut command = Command::new(unshare);
    command.args(own).args(["--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc", "true"]);
    match find::output_of(&mut command) {
        Some(_) => Finding::Ok("this user can make namespaces".into()),
        None if daemon => Finding::Note("this user cannot make namespaces; the machine's daemon does".into()),
        None if geteuid().is_root() => Finding::Missing(
            "root cannot make namespaces here, as in a container without CAP_SYS_ADMIN: start it with more rights"
                .into(),
        ),
        None => Finding::Missing(
            "this user cannot make namespaces: install a Nix daemon that trusts this user, or allow it by `sysctl \
             kernel.unprivileged_userns_clone=1` (on Ubuntu, kernel.apparmor_restrict_unprivileged_userns=0)"
                .into(),
        ),
    }
}

/// What stands between this machine and what it evaluates.
async fn confined() -> Finding {
    let tried = async {
        let place = tempfile::tempdir().map_err(|error| error.to_string())?;
        harmonia_evaluator::try_sandbox(place.path()).await.map_err(|error| sentence(&error))
    };
    match tried.await {
        Ok((true, words)) => Finding::Ok(format!("evaluations run with {words}")),
        Ok((false, words)) => Finding::Note(format!("evaluations run with {words}; see docs/security.md")),
        Err(reason) => Finding::Note(format!("what confines evaluations cannot be tried: {reason}")),
    }
}

/// For the data that there is, perhaps.
fn postgres(data: &Path) -> Finding {
    match find::postgres_for(&data.join("postgres")) {
        Ok((version, programs)) => Finding::Ok(format!("PostgreSQL {version} in {}", programs.display())),
        Err(error) => Finding::Missing(sentence(&error)),
    }
}

fn git() -> Finding {
    match find::which("git").and_then(version_of) {
        Some(version) => Finding::Ok(version),
        None => Finding::Note(
            "git is not installed: only directories can be evaluated; `apt-get install git`".into(),
        ),
    }
}

fn disk(data: &Path) -> Finding {
    match up::check_disk(data) {
        Ok(free) => Finding::Ok(format!("{} GiB free for {}", free >> 30, data.display())),
        Err(error) => Finding::Missing(sentence(&error)),
    }
}

/// A farm that answers has its port.
fn port(listen: SocketAddr, farm: bool) -> Finding {
    match up::take_port(listen, "--listen") {
        Ok(_) => Finding::Ok(format!("{listen} is free")),
        Err(_) if farm => Finding::Ok(format!("{listen} is the running farm's")),
        Err(error) => Finding::Missing(sentence(&error)),
    }
}

/// Whether a farm answers there, in words.
async fn farm(listen: SocketAddr) -> Option<String> {
    let url = format!("http://{listen}");
    let http = local_http_client().ok()?;
    let answer = http.get(format!("{url}/readyz")).timeout(ANSWER).send().await.ok()?;
    let ready = answer.status().is_success();
    let why = answer.text().await.ok()?.trim().replace('\n', "; ");
    Some(if ready { format!("{url} is ready") } else { format!("{url} answers and is not ready: {why}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nix_that_is_too_old_is_missing() {
        assert_eq!(nix_version(Some("nix (Nix) 2.8.0".into())), Finding::Ok("Nix 2.8.0".into()));
        assert_eq!(nix_version(Some("nix (Nix) 2.34.8".into())), Finding::Ok("Nix 2.34.8".into()));
        assert!(matches!(nix_version(Some("nix (Nix) 2.3.16".into())), Finding::Missing(_)));
        assert!(matches!(nix_version(None), Finding::Missing(text) if text.contains("nix-bin")));
    }
}
