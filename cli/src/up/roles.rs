//! The roles, as the cluster runs them: this program again, told by variables what to do.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

use harmonia_service::settings::Settings;

use super::error::UpError;
use super::layout::Layout;
use super::nix::Daemon;
use super::ports::free_port;
use super::s3::Bucket;
use super::secrets;
use super::supervise::{Kind, Program, Supervisor};

/// Settings without their prefix, and what they say.
pub type Variables = Vec<(&'static str, String)>;

/// What all roles of a farm are made from.
pub struct Farm<'a> {
    pub layout: &'a Layout,
    pub bucket: &'a Bucket,
    pub daemon: &'a Daemon,
    pub listen: SocketAddr,
    /// Where clients reach the frontend.
    pub url: &'a str,
    pub slots: i32,
    /// What the person has chosen.
    pub settings: &'a Settings,
}

/// Those that are started.
const ROLES: &[&str] = &["signer", "frontend", "evaluator", "builder"];

/// Starts them all; where each tells whether it is ready.
pub fn start(farm: &Farm<'_>, supervisor: &Supervisor) -> Result<Vec<(&'static str, String)>, UpError> {
    let mut ready = Vec::new();
    for name in ROLES {
        let listen = match *name {
            "frontend" => farm.listen,
            _ => free_port(Ipv4Addr::LOCALHOST.into())?,
        };
        let mut variables = farm.variables(name);
        variables.push(("LISTEN", listen.to_string()));
        variables.push(("CONFIG", farm.layout.config().display().to_string()));
        supervisor.start(farm.layout, program(name, Vec::new(), variables)?);
        ready.push((*name, format!("http://{}", local(listen))));
    }
    Ok(ready)
}

/// A signer's whole configuration, for commands that have to do with the bucket.
pub fn write_signer(farm: &Farm<'_>) -> Result<(), UpError> {
    let mut settings = farm.settings.clone();
    let variables = farm.variables("signer").into_iter();
    settings.overlay(variables.map(|(name, value)| (format!("HARMONIA_CI_{name}"), value)));
    secrets::write(&farm.layout.secret("signer.toml"), settings.to_toml().trim_end())
}

impl Farm<'_> {
    /// What a role is told besides its port, and what the person has chosen.
    fn variables(&self, role: &str) -> Variables {
        let mut variables = self.proposals(role);
        variables.retain(|(name, _)| !self.settings.has(&name.to_ascii_lowercase()));
        variables.push(("DATABASE_URL_FILE", self.layout.secret(&url_file(role)).display().to_string()));
        variables
    }

    fn proposals(&self, role: &str) -> Variables {
        match role {
            "signer" => self.with_bucket(vec![(
                "SIGNING_KEY_FILES",
                self.layout.secret("signing-key").display().to_string(),
            )]),
            "frontend" => self.with_bucket(vec![
                ("URL", self.url.to_owned()),
                ("ANONYMOUS_READ", is_private(self.listen).to_string()),
            ]),
            "evaluator" => self.with_store(role, vec![("LOCAL_SOURCES", "true".to_owned())]),
            // How long is long enough, a person says by a second Ctrl-C.
            _ => self.with_store(role, vec![("SLOTS", self.slots.to_string()), ("GRACE", "365d".to_owned())]),
        }
    }

    fn with_bucket(&self, more: Variables) -> Variables {
        self.bucket.variables(self.layout).into_iter().chain(more).collect()
    }

    /// Roles that use the Nix daemon.
    fn with_store(&self, role: &str, more: Variables) -> Variables {
        let always = [
            ("NODE", harmonia_builder::machine_name()),
            ("STATE_DIR", self.layout.path(role).display().to_string()),
            ("NIX_DAEMON", self.daemon.socket.display().to_string()),
            ("NIX_ROOT", self.daemon.root.display().to_string()),
        ];
        always.into_iter().chain(more).collect()
    }
}

/// Where a role's URL of the database is, by the role.
pub fn url_file(role: &str) -> String {
    format!("{role}-database-url")
}

/// This program with a verb. Nothing that the person has set for other farms reaches it.
pub fn program(
    name: &'static str,
    arguments: Vec<OsString>,
    variables: Variables,
) -> Result<Program, UpError> {
    let own = std::env::current_exe();
    let own = own.map_err(|source| UpError::Start { program: name.to_owned(), source })?;
    let command = move || {
        let mut command = Command::new(&own);
        command.arg(name).args(&arguments);
        let foreign = |name: &OsString| {
            name.to_str().is_some_and(|name| name.starts_with("HARMONIA_CI_") && name != "HARMONIA_CI_LOG")
        };
        for (variable, _) in std::env::vars_os().filter(|(variable, _)| foreign(variable)) {
            command.env_remove(variable);
        }
        for (variable, value) in &variables {
            command.env(format!("HARMONIA_CI_{variable}"), value);
        }
        command
    };
    Ok(Program { name, command: Box::new(command), kind: Kind::Role })
}

/// Whoever can reach a loopback address is on this machine.
pub fn is_private(listen: SocketAddr) -> bool {
    listen.ip().is_loopback()
}

/// How this machine reaches what listens there.
pub fn local(listen: SocketAddr) -> SocketAddr {
    match listen.ip().is_unspecified() {
        true => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), listen.port()),
        false => listen,
    }
}
