//! `harmonia-ci up`

mod account;
mod config;
mod environment;
mod error;
pub mod find;
mod layout;
mod lead;
pub mod nix;
mod ports;
mod postgres;
mod prepare;
mod ready;
mod report;
mod roles;
mod s3;
mod secrets;
mod stop;
mod supervise;
mod terminal;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use clap::Args;
use harmonia_service::sentence::sentence;
use harmonia_service::serve;
use harmonia_service::settings::Settings;
use rustix::fs::Mode;
use tracing_subscriber::EnvFilter;

pub use account::own_name;
pub use error::UpError;
use error::patiently;
pub use layout::{check_disk, default_root};
pub use ports::take as take_port;

use crate::outcome::Failure;
use layout::Layout;
use lead::Leader;
use report::Report;
use supervise::Supervisor;
use terminal::Terminal;

/// Where the frontend listens unless it is told otherwise.
pub const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7777);

/// Run a whole farm on this machine: a private PostgreSQL, an S3 server, and every role
///
/// It needs Nix and PostgreSQL; `harmonia-ci doctor` says what is missing. Nothing outside the data directory is changed, but for
/// a file by which the other commands find the farm. Ctrl-C stops it when running builds have ended; a second one gives them back;
/// a third one kills. Started again, it goes on where it was.
#[derive(Args)]
pub struct Arguments {
    /// Where everything is kept; else ~/.local/share/harmonia-ci, for root /var/lib/harmonia-ci
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,

    /// Where the API and the cache listen; beyond this machine the cache wants a token
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = LISTEN)]
    listen: SocketAddr,

    /// Builds at once; else as many as this machine has processors
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=1000))]
    slots: Option<i32>,

    /// An existing PostgreSQL, as postgres://user:password@host:port/name, by a login that may create roles
    #[arg(long, value_name = "URL", env = "HARMONIA_CI_UP_DATABASE", hide_env_values = true)]
    database: Option<String>,

    /// An existing bucket, as http://key:secret@host:port/bucket?region=REGION
    #[arg(long, value_name = "URL", env = "HARMONIA_CI_UP_S3", hide_env_values = true)]
    s3: Option<String>,

    /// Where its own S3 server listens, to which the cache sends clients for NARs; else beside --listen, on a port that is kept
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "s3")]
    s3_listen: Option<SocketAddr>,

    /// The Nix daemon to build with, by its socket, or as unix://SOCKET?root=DIR
    #[arg(long, value_name = "SOCKET")]
    nix_daemon: Option<String>,

    /// Start everything but the roles, for a restore: the database and the bucket are there, and nobody uses them
    #[arg(long)]
    maintenance: bool,

    /// Show everything that the parts have to say, not only warnings
    #[arg(long, short)]
    verbose: bool,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let mut stops = serve::stops().map_err(Failure::Signals)?;
    // Accounts of PostgreSQL and of evaluations pass through what is made here. What is nobody's business is made for its owner only.
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    let (plan, port) = Plan::make(arguments)?;
    let terminal = Arc::new(Terminal::new(plan.arguments.verbose));
    let supervisor = Supervisor::new(terminal.clone(), environment::shared(plan.places()));
    let leader = OnceLock::new();
    let outcome = tokio::select! {
        failed = plan.live(port, &supervisor, &terminal, &leader) => failed.map(|never| match never {}),
        _ = stops.wait_for(|stops| *stops > 0) => Ok(()),
    };
    terminal.say("stopping");
    let clean = stop::stop(&supervisor, leader.get(), &terminal, stops).await;
    outcome?;
    if clean { Ok(()) } else { Err(Failure::Reported) }
}

/// What was asked for, and a data directory that is ours: nothing has been started.
struct Plan {
    arguments: Arguments,
    layout: Layout,
    settings: Settings,
    public_keys: String,
    slots: i32,
    listen: SocketAddr,
    /// The frontend sends clients there.
    bucket: s3::Wanted,
    /// Where this machine reaches the frontend,
    local_url: String,
    /// and where others do.
    url: String,
    /// The cache answers without a token.
    is_open: bool,
}

impl Plan {
    /// Everything that can be found wrong before something is started.
    fn make(arguments: Arguments) -> Result<(Self, TcpListener), UpError> {
        let root = arguments.data.clone().map_or_else(default_root, Ok)?;
        check_disk(&root)?;
        let layout = patiently(|| Layout::open(&root))?;
        let settings = config::read(&layout)?;
        let (port, listen) = patiently(|| ports::take(arguments.listen, "--listen"))?;
        let option = "--s3-listen";
        let bucket = match (&arguments.s3, arguments.s3_listen) {
            (Some(url), _) => s3::Wanted::Given(url.clone()),
            (None, Some(address)) => s3::Wanted::Own(patiently(|| ports::take(address, option))?.1),
            (None, None) => s3::Wanted::Own(ports::kept(&layout.path("s3-port"), listen.ip(), option)?),
        };
        find::which("nix-store").ok_or(UpError::NoNix)?;
        log_to(&layout)?;
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let plan = Self {
            public_keys: secrets::public_keys(&layout, &settings)?,
            slots: arguments.slots.unwrap_or_else(|| processors.try_into().unwrap_or(2)),
            local_url: format!("http://{}", roles::local(listen)),
            url: public_url(listen),
            is_open: settings.parse("anonymous_read")?.unwrap_or(roles::is_private(listen)),
            listen,
            bucket,
            layout,
            settings,
            arguments,
        };
        Ok((plan, port))
    }

    /// The hosts at which this machine is reached.
    fn places(&self) -> Vec<String> {
        let bucket = match &self.bucket {
            s3::Wanted::Own(listen) => Some(*listen),
            s3::Wanted::Given(_) => None,
        };
        [Some(self.listen), bucket].into_iter().flatten().map(|listen| public_host(listen.ip())).collect()
    }

    /// Starts everything, says so, and watches over it until it is dropped.
    async fn live(
        &self,
        port: TcpListener,
        supervisor: &Supervisor,
        terminal: &Terminal,
        leader: &OnceLock<Leader>,
    ) -> Result<Infallible, UpError> {
        let (layout, listen) = (&self.layout, self.listen);
        let bucket = s3::start(layout, supervisor, &self.bucket)?;
        let (once, daemon) =
            tokio::try_join!(self.database(supervisor, terminal), self.daemon(supervisor, terminal))?;
        drop(port);
        let farm = roles::Farm {
            layout,
            bucket: &bucket,
            daemon: &daemon,
            listen,
            url: &self.url,
            slots: self.slots,
            settings: &self.settings,
        };
        roles::write_signer(&farm)?;
        if self.arguments.maintenance {
            terminal.say(&report::maintenance(layout));
            return std::future::pending().await;
        }
        let roles = roles::start(&farm, supervisor)?;
        let started = Leader::start(layout, &self.url)?;
        leader.get_or_init(|| started);
        ready::ready(layout, supervisor, terminal, &roles).await?;
        if let Err(error) = report::write_local(&self.local_url, &layout.path("token")) {
            terminal.say(&format!("warning: other commands do not find this farm: {}", sentence(&error)));
        }
        terminal.say(&self.report(&daemon, &once));
        std::future::pending().await
    }

    /// A database with all that roles need, and a way into the web pages that works once.
    async fn database(&self, supervisor: &Supervisor, terminal: &Terminal) -> Result<String, UpError> {
        let database = match &self.arguments.database {
            Some(url) => postgres::Database { admin_url: url.clone() },
            None => postgres::start(&self.layout, supervisor, terminal).await?,
        };
        let open = prepare::prepare(&self.layout, &database, self.slots).await?;
        open.iter().for_each(|sentence| terminal.say(&format!("warning: {sentence}")));
        if !self.is_open {
            prepare::builder_netrc(&self.layout, &database, &roles::local(self.listen).ip().to_string())
                .await?;
        }
        prepare::invite(&database).await
    }

    /// A daemon to build with.
    async fn daemon(&self, supervisor: &Supervisor, terminal: &Terminal) -> Result<nix::Daemon, UpError> {
        match nix::find(self.arguments.nix_daemon.as_deref()).await? {
            nix::Found::Usable(daemon) => return Ok(daemon),
            nix::Found::NotTrusted => terminal.say(&report::distrusted()),
            nix::Found::None => {}
        }
        let and = |own: &str, key| nix::list(own, self.settings.get(key).unwrap_or_default());
        let caches = nix::Caches {
            urls: &and(&format!("{}/cache", self.local_url), "substituters"),
            public_keys: &and(&self.public_keys, "trusted_public_keys"),
            slots: self.slots,
            netrc: (!self.is_open).then(|| self.layout.secret("netrc")),
        };
        nix::start(&self.layout, supervisor, terminal, &caches).await
    }

    fn report(&self, daemon: &nix::Daemon, once: &str) -> String {
        let (token, logs) = (self.layout.path("token"), self.layout.path("log"));
        let public_url = self.settings.get("public_url").map(|url| url.trim_end_matches('/'));
        let report = Report {
            url: public_url.unwrap_or(&self.url),
            token: &token,
            logs: &logs,
            public_keys: &self.public_keys,
            daemon,
            once,
            open: self.is_open,
        };
        report.text()
    }
}

/// Where others reach what listens there.
fn public_url(listen: SocketAddr) -> String {
    match listen.ip().is_unspecified() {
        true => format!("http://{}:{}", public_host(listen.ip()), listen.port()),
        false => format!("http://{listen}"),
    }
}

fn public_host(listen: IpAddr) -> String {
    match listen.is_unspecified() {
        true => harmonia_builder::machine_name(),
        false => listen.to_string(),
    }
}

/// What the janitor has to say goes to a file too.
fn log_to(layout: &Layout) -> Result<(), UpError> {
    let path = layout.log("up");
    let log = std::fs::File::options().append(true).create(true).open(&path).map_err(error::file(path))?;
    let filter = EnvFilter::try_from_env("HARMONIA_CI_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(log).init();
    Ok(())
}
