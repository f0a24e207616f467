//! `harmonia-ci builder`.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use harmonia_nix::daemon::{Connection, Options};
use harmonia_queue::builder::{Node, Session};
use harmonia_queue::listen::{Channel, Listener, Wake};
use harmonia_queue::{Db, Error};
use harmonia_service::health::Health;
use harmonia_service::metrics::Metrics;
use harmonia_service::secret::Secret;
use harmonia_service::sentence::sentence;
use harmonia_service::settings::{Settings, SettingsError};
use harmonia_service::trace::Tracer;
use harmonia_service::{database, serve};
use thiserror::Error;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::canary::{self, CanaryError};
use crate::config::Config;
use crate::count::Counts;
use crate::job;
use crate::life::{Halt, Life};
use crate::lonely::Lonely;
use crate::misses::Misses;
use crate::persist::persist;
use crate::roots::Roots;
use crate::store::{Store, StoreError, free_bytes};
use crate::upload::{UploadError, http_client};
use crate::{collect, log};

/// Reached from this machine only, unless the settings say more.
const LISTEN: &str = "127.0.0.1:7779";
/// Connections to the database, beside the listener's: hundreds of builders share one server, and every call is short.
const CONNECTIONS: u32 = 1;
/// A lease lasts for four of these.
const BEAT: Duration = Duration::from_secs(30);
/// How soon a question that was not answered is asked again, and how often a builder that stops asks how long it has.
const SOON: Duration = Duration::from_secs(1);
/// How often a builder looks for work that nobody told it of.
const POLL: Duration = Duration::from_secs(10);
/// How old what `/metrics` shows of now may be.
const COUNT: Duration = Duration::from_secs(5);
/// How soon a daemon that does not answer is tried again: one that starts beside its builder answers within a moment,
const KNOCK: Duration = Duration::from_millis(50);
/// and one that does not within this time is told about.
const STARTING: Duration = Duration::from_secs(10);
/// How long after a canary that died the next one follows.
const CANARY: Duration = Duration::from_secs(10);
/// Pauses of a builder that has just been told to stop are over by then.
const FAREWELL: Duration = Duration::from_secs(5);

/// Why a builder does not run.
#[derive(Debug, Error)]
pub enum BuilderError {
    /// It is configured wrongly.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Its state cannot be kept.
    #[error("{} cannot be used: set HARMONIA_CI_STATE_DIR to a directory of this builder's own", path.display())]
    State {
        /// The directory or file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process has it.
    #[error(
        "another builder uses {}: give this one a HARMONIA_CI_STATE_DIR and a HARMONIA_CI_NODE of its own",
        path.display()
    )]
    Taken {
        /// The directory.
        path: PathBuf,
    },
    /// The queue does not want this node.
    #[error("the queue refuses this builder")]
    Queue(#[from] Error),
    /// The HTTP client cannot be made.
    #[error("HTTPS cannot be used")]
    Http(#[from] UploadError),
    /// The port is taken, for one.
    #[error("cannot serve on {address}")]
    Serve {
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
}

/// All that is the same from one life to the next.
pub struct Builder {
    pub(crate) config: Config,
    pub(crate) store: Arc<Store>,
    pub(crate) roots: Arc<Roots>,
    /// Builds share it; one that has to be alone takes it for itself.
    pub(crate) alone: tokio::sync::RwLock<()>,
    /// Those that have to be, or wait for it.
    pub(crate) lonely: Lonely,
    /// Inputs that jobs did not find.
    pub(crate) misses: Misses,
    pub(crate) counts: Counts,
    pub(crate) tracer: Tracer,
    db: Db,
    direct_url: Secret,
    secret: String,
    http: reqwest::Client,
    health: Health,
    /// Nobody else uses the state while it is open.
    _lock: File,
}

/// How a life ended.
enum Over {
    /// The process is to end.
    Stopped,
    /// The session is over, or has to be: begin another.
    Anew,
}

/// Runs until `stops`, the number of times it was told to stop, is more than none and what it holds has ended; at once
/// if it is more than one.
pub async fn run(settings: &Settings, stops: watch::Receiver<u32>) -> Result<(), BuilderError> {
    let builder = Arc::new(Builder::new(settings)?);
    let address = settings.get("listen").unwrap_or(LISTEN);
    let failed = |source| BuilderError::Serve { address: address.to_owned(), source };
    let (listener, bound) = serve::bind(address).await.map_err(failed)?;
    tracing::info!(%bound, node = builder.config.node, slots = builder.config.slots, "builder");
    let ended = tokio::select! {
        served = serve::serve(listener, builder.health.routes(), std::future::pending()) => served.map_err(failed),
        lived = builder.lives(stops) => lived,
        never = database::follow(settings, &builder.db) => match never {},
    };
    builder.tracer.flush().await;
    ended
}

impl Builder {
    fn new(settings: &Settings) -> Result<Self, BuilderError> {
        let config = Config::read(settings)?;
        let lock = lock_state(&config.state)?;
        let secret = prepare_state(&config.state)?;
        let options = Options::default()
            // What another builder published a second ago must not look missing.
            .with("narinfo-cache-negative-ttl", "0")
            // And what was published anew since must not look as it did before.
            .with("narinfo-cache-positive-ttl", "0")
            .with("sandbox-fallback", "false")
            // Logs are kept in the bucket; here they would pile up, and a daemon takes long to compress them.
            .with("keep-build-log", "false")
            // With these a daemon also looks every few seconds whether its client is still there.
            .with("min-free", &config.marks.min_free.to_string())
            .with("max-free", &config.marks.max_free.to_string());
        let mut metrics = Metrics::default();
        let store = Arc::new(Store::new(config.daemon.clone(), config.root.clone(), options));
        Ok(Self {
            roots: Roots::new(Arc::clone(&store)),
            store,
            alone: tokio::sync::RwLock::default(),
            lonely: Lonely::default(),
            misses: Misses::default(),
            counts: Counts::register(&mut metrics),
            tracer: Tracer::start(settings, "builder")?,
            db: database::connect(settings, CONNECTIONS)?,
            direct_url: database::direct(settings)?,
            secret,
            http: http_client()?,
            health: Health::new(metrics, &["store", "registered"]),
            config,
            _lock: lock,
        })
    }

    /// Where the logs of running builds are.
    pub(crate) fn logs(&self) -> PathBuf {
        self.config.state.join("logs")
    }

    /// What a connection that builds is told.
    pub(crate) fn build_options(&self) -> Options {
        let limits = self.config.limits;
        Options {
            max_build_jobs: 1,
            build_cores: limits.cores,
            timeout: limits.timeout,
            max_silent: limits.silent,
            // Its inputs are there; its outputs are to be built.
            use_substitutes: false,
            ..self.store.options()
        }
    }

    /// A connection to the daemon, which may be starting.
    pub(crate) async fn connect(
        &self,
        options: &Options,
        patience: Duration,
    ) -> Result<Connection, StoreError> {
        let until = Instant::now() + patience;
        loop {
            match self.store.connect(options).await {
                Err(StoreError::Daemon(error)) if error.is_lost() && Instant::now() < until => {
                    sleep(KNOCK).await
                }
                connected => return connected,
            }
        }
    }

    async fn lives(self: &Arc<Self>, stops: watch::Receiver<u32>) -> Result<(), BuilderError> {
        let mut stopped = stops.clone();
        loop {
            let session = tokio::select! {
                begun = self.begin() => begun?,
                _ = stopped.wait_for(|stops| *stops > 0) => return Ok(()),
            };
            tracing::info!(session = session.id, slots = session.slots, "registered");
            self.health.set("registered", Ok(()));
            let life = Arc::new(Life::new(session, self.http.clone(), self.config.margin));
            match self.live(&life, stops.clone()).await {
                Over::Stopped => return Ok(()),
                Over::Anew => tracing::info!(session = life.session.id, "this session is over"),
            }
        }
    }

    /// A session, once this node has built something.
    async fn begin(&self) -> Result<Session, BuilderError> {
        loop {
            // On a full disk the canary dies, and so would all that follows.
            collect::if_low(&self.store, &self.roots, self.config.marks).await;
            let Err(error) = self.try_out().await else { break };
            self.not_yet("store", &error);
            tracing::warn!(error = sentence(&error), "the canary died");
            sleep(CANARY).await;
        }
        self.health.set("store", Ok(()));
        let node = Node {
            systems: self.config.systems.clone(),
            features: self.config.features.clone(),
            kube_node: self.config.kube_node.as_deref(),
            version: Some(env!("CARGO_PKG_VERSION")),
            ..Node::new(&self.config.node, &self.secret, self.config.slots)
        };
        loop {
            match Session::register(&self.db, &node).await {
                Ok(session) => return Ok(session),
                Err(error) if error.may_pass() || matches!(error, Error::NameTaken(_)) => {
                    self.not_yet("registered", &error);
                    sleep(SOON).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether anything can be built here.
    async fn try_out(&self) -> Result<(), CanaryError> {
        let mut connection = self.connect(&self.build_options(), STARTING).await?;
        canary::sing(&mut connection).await
    }

    /// Says why it is not ready. Once it was, it stays so: unready pods are the first to be evicted.
    fn not_yet(&self, condition: &'static str, error: &dyn std::error::Error) {
        if self.health.reasons().contains_key(condition) {
            self.health.set(condition, Err(sentence(error)));
        }
    }

    async fn live(self: &Arc<Self>, life: &Arc<Life>, stops: watch::Receiver<u32>) -> Over {
        let mut jobs = JoinSet::new();
        let over = tokio::select! {
            over = self.work(life, &mut jobs) => over,
            () = beat(life) => Over::Anew,
            () = self.heed(life, stops) => Over::Stopped,
            () = log::follow(&life.session, &life.held) => Over::Anew,
            () = collect::keep_free(self, &life.held) => Over::Anew,
            () = self.keep_roots() => Over::Anew,
            () = self.count(life) => Over::Anew,
        };
        // What is left belongs to nobody any more.
        life.held.halt_all(&Halt::Abandoned);
        jobs.shutdown().await;
        over
    }

    /// Claims whenever there is room, until there is nothing more to claim in this life and nothing left to do.
    async fn work(self: &Arc<Self>, life: &Arc<Life>, jobs: &mut JoinSet<()>) -> Over {
        let channels = [Channel::Ready, Channel::Stop];
        let mut listener = Listener::beside(&self.db, self.direct_url.clone(), &channels, POLL).await;
        let mut worth_asking = true;
        loop {
            if life.is_ending() && life.held.is_empty() {
                return self.end(life).await;
            }
            let free = self.free_slots(life);
            if worth_asking && free > 0 {
                match life.session.claim(free).await {
                    Ok(claims) => {
                        // As many as were asked for: there may be more.
                        worth_asking = claims.len() == usize::try_from(free).unwrap_or_default();
                        for claim in claims {
                            jobs.spawn(job::run(Arc::clone(self), Arc::clone(life), claim));
                        }
                        continue;
                    }
                    Err(Error::SessionOver(_)) => return Over::Anew,
                    Err(error) => {
                        tracing::debug!(error = sentence(&error), "nothing can be claimed");
                        worth_asking = false;
                    }
                }
            }
            tokio::select! {
                wake = listener.next() => {
                    worth_asking = true;
                    if matches!(wake, Wake::Hint(Channel::Stop, _)) {
                        life.beat_now.notify_one();
                    }
                }
                Some(_) = jobs.join_next() => worth_asking = true,
                () = life.held.changed.notified() => worth_asking = true,
                () = sleep(SOON), if life.is_draining() => {}
            }
            life.keep_deadline();
        }
    }

    fn free_slots(&self, life: &Life) -> i32 {
        let slots = usize::try_from(life.session.slots).unwrap_or_default();
        let (waiting, bytes) = life.held.backlog();
        if life.is_draining() || self.lonely.any() || waiting > 2 * slots || bytes > self.config.backlog {
            return 0;
        }
        i32::try_from(slots.saturating_sub(life.held.building())).unwrap_or_default()
    }

    async fn end(&self, life: &Life) -> Over {
        let farewell = timeout(FAREWELL, persist(|| life.session.deregister())).await;
        if farewell.is_err() {
            tracing::debug!("the database is away: the session ends by itself");
        }
        match life.stopping_in() {
            Some(_) => Over::Stopped,
            None => Over::Anew,
        }
    }

    /// The first time it is told to stop, everything may end that can; the second time nothing may. Ends when the database
    /// has not heard of all of it in time: then leases end by themselves.
    async fn heed(&self, life: &Life, mut stops: watch::Receiver<u32>) {
        let told = async |stops: &mut watch::Receiver<u32>, times: u32| {
            if stops.wait_for(|stops| *stops >= times).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        told(&mut stops, 1).await;
        tracing::info!(held = life.held.fences().len(), "told to stop: claiming nothing more");
        life.stop(self.config.grace);
        if timeout(self.config.grace, told(&mut stops, 2)).await.is_ok() {
            tracing::info!("told to stop at once: giving everything back");
            life.held.halt_all(&Halt::GivenBack("the builder was told to stop at once".to_owned()));
            sleep(FAREWELL).await;
        }
        tracing::warn!(held = life.held.fences().len(), "out of time: leases end by themselves");
    }

    /// Keeps what `/metrics` shows of now up to date.
    async fn count(&self, life: &Life) {
        loop {
            self.counts.look(life, free_bytes(&self.store.directory()).ok());
            sleep(COUNT).await;
        }
    }

    /// Roots go with the daemon that keeps them.
    async fn keep_roots(&self) {
        loop {
            sleep(SOON).await;
            let kept = async {
                self.roots.keep().await?;
                self.roots.tidy_now_and_then().await
            };
            if let Err(error) = kept.await {
                tracing::debug!(error = sentence(&error), "roots cannot be kept");
            }
        }
    }
}

/// Says that it lives, until the queue says that it does not.
async fn beat(life: &Life) {
    loop {
        let stopping = life.stopping_in();
        let pause = match life.session.heartbeat(&life.held.fences(), stopping).await {
            Ok(pulse) => {
                // After an outage of the database a builder may be heard again before the signers are.
                let nowhere_to_send = pulse.signers.is_empty() && life.held.backlog().0 > 0;
                life.hear(pulse);
                if stopping.is_some() || nowhere_to_send { SOON } else { BEAT }
            }
            Err(Error::SessionOver(reason)) => {
                tracing::warn!(reason, "the queue has given this builder up");
                return;
            }
            Err(error) => {
                tracing::debug!(error = sentence(&error), "not heard");
                SOON
            }
        };
        // Whoever finds no signer asks whether there is another, but not all the time.
        let unanswered = async {
            sleep(SOON).await;
            life.uploader.unanswered().await;
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = life.beat_now.notified() => {}
            () = unanswered => {}
        }
    }
}

/// Makes the directory, for this process alone: of two with one secret each would end the other's session for ever.
fn lock_state(state: &Path) -> Result<File, BuilderError> {
    let file = state.join("lock");
    let open = || {
        std::fs::create_dir_all(state)?;
        OpenOptions::new().write(true).create(true).truncate(false).open(&file)
    };
    let failed = |source| BuilderError::State { path: file.clone(), source };
    let lock = open().map_err(failed)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(BuilderError::Taken { path: state.to_owned() }),
        Err(TryLockError::Error(error)) if has_no_locks(&error) => {
            let file = file.display();
            tracing::warn!(%file, %error, "this file system has no locks: let no other builder use the same directory");
            Ok(lock)
        }
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Whether a file system does not know locks, as some network file systems do not.
fn has_no_locks(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP))
}

/// Makes the directories, forgets logs of builds that a former process ran, and answers the node's secret.
fn prepare_state(state: &Path) -> Result<String, BuilderError> {
    let logs = state.join("logs");
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| BuilderError::State { path, source }
    };
    match std::fs::remove_dir_all(&logs) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&logs)(error)),
        _ => {}
    }
    std::fs::create_dir_all(&logs).map_err(failed(&logs))?;
    let file = state.join("secret");
    match std::fs::read_to_string(&file) {
        Ok(secret) if secret.trim().len() >= 16 => Ok(secret.trim().to_owned()),
        Ok(_) => write_secret(&file).map_err(failed(&file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => write_secret(&file).map_err(failed(&file)),
        Err(error) => Err(failed(&file)(error)),
    }
}

/// Whole or not at all: a builder that is killed here makes another one.
fn write_secret(file: &Path) -> io::Result<String> {
    use std::io::Write;
    let secret = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
    let new = file.with_extension("new");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut open = options.open(&new)?;
    open.write_all(secret.as_bytes())?;
    open.sync_all()?;
    std::fs::rename(&new, file)?;
    Ok(secret)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn of_two_builders_with_one_state_the_second_ends() {
        let state = tempfile::tempdir().unwrap();
        let first = lock_state(state.path()).unwrap();
        assert!(matches!(lock_state(state.path()), Err(BuilderError::Taken { .. })));
        drop(first);
        lock_state(state.path()).unwrap();
    }

    #[test]
    fn a_file_system_without_locks_is_told_from_one_that_fails() {
        for errno in [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOTSUP] {
            assert!(has_no_locks(&errno.into()), "{errno}");
        }
        for errno in [Errno::IO, Errno::NOSPC, Errno::AGAIN] {
            assert!(!has_no_locks(&errno.into()), "{errno}");
        }
    }
}
