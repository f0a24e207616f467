//! `harmonia-ci evaluator`.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use harmonia_builder::collect;
use harmonia_builder::persist::persist;
use harmonia_builder::roots::Roots;
use harmonia_builder::store::Store;
use harmonia_builder::upload::{UploadError, http_client};
use harmonia_nix::daemon::Options;
use harmonia_queue::Db;
use harmonia_queue::evaluations;
use harmonia_queue::listen::{Channel, Listener};
use harmonia_queue::replica::{self, Replica};
use harmonia_queue::resolver::Resolver;
use harmonia_service::health::Health;
use harmonia_service::metrics::Metrics;
use harmonia_service::secret::Secret;
use harmonia_service::sentence::sentence;
use harmonia_service::settings::{Settings, SettingsError};
use harmonia_service::{database, serve};
use thiserror::Error;
use tokio::sync::{RwLock, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::config::Config;
use crate::count::Counts;
use crate::nix;
use crate::proxy;
use crate::sandbox::{self, Sandbox};
use crate::substituters::Substituters;
use crate::work::{End, work};

/// Reached from this machine only, unless the settings say more.
const LISTEN: &str = "127.0.0.1:7780";
/// Connections to the database, beside those of each worker: for the registry and the resolver.
const CONNECTIONS: u32 = 2;
/// How often an evaluator looks for work that nobody told it of.
const POLL: Duration = Duration::from_secs(10);
/// How soon something that is away is tried again.
const RETRY: Duration = Duration::from_secs(2);
/// How long the database has to hear that this process ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// Why an evaluator does not run.
#[derive(Debug, Error)]
pub enum EvaluatorError {
    /// It is configured wrongly.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// There is nowhere to work.
    #[error("{} cannot be used: set HARMONIA_CI_STATE_DIR to a directory of this evaluator's own", path.display())]
    State {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Less of a sandbox than the settings ask for.
    #[error("this machine offers less than the full sandbox that HARMONIA_CI_EVAL_SANDBOX asks for: {0}")]
    Sandbox(String),
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

/// What all workers share.
pub struct Evaluator {
    pub(crate) config: Config,
    pub(crate) sandbox: Arc<Sandbox>,
    pub(crate) substituters: Arc<Substituters>,
    pub(crate) db: Db,
    pub(crate) store: Arc<Store>,
    pub(crate) roots: Arc<Roots>,
    pub(crate) resolver: Arc<Resolver>,
    pub(crate) http: reqwest::Client,
    /// Where signers are.
    pub(crate) signers: watch::Sender<Vec<String>>,
    /// Who evaluates reads; who collects garbage, which is between evaluations, writes: what one has found is held, but not what it
    /// is about to find.
    busy: RwLock<()>,
    /// Counts reasons to look at the queue.
    hints: watch::Sender<u64>,
    direct_url: Secret,
    health: Health,
    counts: Counts,
}

/// Runs until `stop` ends; what is being evaluated then is anybody's.
pub async fn run(settings: &Settings, stop: impl Future<Output = ()>) -> Result<(), EvaluatorError> {
    let evaluator = Arc::new(Evaluator::new(settings).await?);
    let address = settings.get("listen").unwrap_or(LISTEN);
    let failed = |source| EvaluatorError::Serve { address: address.to_owned(), source };
    let (listener, bound) = serve::bind(address).await.map_err(failed)?;
    let replica =
        Replica { id: Uuid::now_v7(), role: "evaluator".into(), url: serve::own_url(settings, bound)? };
    tracing::info!(%bound, node = evaluator.config.node, workers = evaluator.config.workers, "evaluator");
    let mut workers = JoinSet::new();
    let ended = tokio::select! {
        served = serve::serve(listener, evaluator.health.routes(), std::future::pending()) => served.map_err(failed),
        () = evaluator.live(&replica, &mut workers) => Ok(()),
        never = database::follow(settings, &evaluator.db) => match never {},
        () = stop => Ok(()),
    };
    // Their children die with them.
    workers.shutdown().await;
    evaluator.leave(&replica).await;
    ended
}

/// The strongest sandbox that this machine offers; said once.
async fn sandbox(config: &Config) -> Result<Sandbox, EvaluatorError> {
    let failed = |source| EvaluatorError::State { path: config.state.clone(), source };
    let proxy = match sandbox::own_proxy() {
        Some(port) => port,
        None => proxy::start(config.networks.clone()).await.map_err(failed)?,
    };
    let sandbox = Sandbox::find(config, proxy).await.map_err(failed)?;
    if config.full_sandbox && !sandbox.is_full() {
        return Err(EvaluatorError::Sandbox(sandbox.words()));
    }
    tracing::info!(sandbox = sandbox.words(), "evaluations are confined");
    Ok(sandbox)
}

impl Evaluator {
    async fn new(settings: &Settings) -> Result<Self, EvaluatorError> {
        let config = Config::read(settings)?;
        let work = nix::directory(&config.state);
        let made = nix::clear(&work).and_then(|()| std::fs::create_dir_all(&work));
        made.map_err(|source| EvaluatorError::State { path: work, source })?;
        let sandbox = Arc::new(sandbox(&config).await?);
        let http = http_client()?;
        let store = Arc::new(Store::new(config.daemon.clone(), config.root.clone(), Options::default()));
        let mut metrics = Metrics::default();
        let counts = Counts::register(&mut metrics);
        let health = Health::new(metrics, &["database", "store"]);
        health.note("sandbox", sandbox.words());
        Ok(Self {
            db: database::connect(settings, CONNECTIONS + 2 * u32::try_from(config.workers).unwrap_or(1))?,
            roots: Roots::new(Arc::clone(&store)),
            store,
            resolver: Arc::default(),
            substituters: Arc::new(Substituters::new(
                http.clone(),
                &config.substituters,
                config.trusted_keys.clone(),
            )),
            http,
            signers: watch::Sender::new(Vec::new()),
            busy: RwLock::default(),
            hints: watch::Sender::new(0),
            direct_url: database::direct(settings)?,
            counts,
            health,
            config,
            sandbox,
        })
    }

    /// Takes back what a former process of this name had, and works.
    async fn live(self: &Arc<Self>, replica: &Replica, workers: &mut JoinSet<()>) {
        for worker in 0..self.config.workers {
            self.release(worker, false).await;
            let evaluator = Arc::clone(self);
            workers.spawn(async move { evaluator.work(worker).await });
        }
        tokio::join!(
            self.beat(replica),
            self.listen(),
            self.follow_signers(),
            self.keep_roots(),
            self.keep_free(),
            self.poll(),
            self.resolver.run(&self.db)
        );
    }

    /// One evaluation after the other.
    async fn work(&self, worker: usize) {
        let name = self.config.claimant(worker);
        let mut hints = self.hints.subscribe();
        loop {
            self.reach_store().await;
            let busy = self.busy.read().await;
            match evaluations::claim(&self.db, &name).await {
                Ok(Some(claimed)) => {
                    let measure = self.counts.begin();
                    let end = work(self, worker, &claimed, &mut hints).await;
                    measure.end(end);
                    if end == End::Later {
                        self.release(worker, true).await;
                        sleep(RETRY).await;
                    }
                    continue;
                }
                Ok(None) => {}
                Err(error) => tracing::debug!(error = sentence(&error), "nothing can be claimed"),
            }
            drop(busy);
            if hints.changed().await.is_err() {
                return;
            }
        }
    }

    async fn release(&self, worker: usize, kindly: bool) {
        let name = self.config.claimant(worker);
        persist(|| evaluations::release(&self.db, &name, kindly)).await;
    }

    /// Nothing is claimed while the store is away.
    async fn reach_store(&self) {
        loop {
            match self.store.connect(&self.store.options()).await {
                Ok(_) => return self.health.set("store", Ok(())),
                Err(error) => self.health.set("store", Err(sentence(&error))),
            }
            sleep(RETRY).await;
        }
    }

    async fn listen(&self) {
        let mut listener = Listener::connect(self.direct_url.clone(), &[Channel::Evaluation], POLL).await;
        loop {
            self.hints.send_modify(|count| *count += 1);
            listener.next().await;
        }
    }

    async fn beat(&self, replica: &Replica) {
        loop {
            let beat = replica.beat(&self.db).await;
            let pause = if beat.is_ok() { replica::BEAT } else { RETRY };
            self.health.set("database", beat.map_err(|error| sentence(&error)));
            sleep(pause).await;
        }
    }

    async fn follow_signers(&self) {
        loop {
            sleep(RETRY).await;
            // Nobody asks where they are while nothing is evaluated.
            if self.signers.receiver_count() > 0
                && let Err(error) = self.find_signers().await
            {
                tracing::debug!(error = sentence(&error), "signers are not known");
            }
        }
    }

    /// Asks the registry where signers are.
    pub(crate) async fn find_signers(&self) -> harmonia_queue::Result<()> {
        let replicas = replica::healthy(&self.db).await?;
        let urls: Vec<String> = replicas
            .into_iter()
            .filter(|replica| replica.role == "signer")
            .map(|replica| replica.url)
            .collect();
        self.signers.send_replace(urls);
        Ok(())
    }

    /// Roots go with the daemon that keeps them.
    async fn keep_roots(&self) {
        loop {
            sleep(RETRY).await;
            let kept = async {
                self.roots.keep().await?;
                self.roots.tidy_now_and_then().await
            };
            if let Err(error) = kept.await {
                tracing::debug!(error = sentence(&error), "roots cannot be kept");
            }
        }
    }

    /// Collects garbage when the store's disk is low. Evaluations that run are waited for, and others wait for it.
    async fn keep_free(&self) {
        loop {
            if self.config.marks.lack(&self.store).is_some() {
                let _alone = self.busy.write().await;
                collect::if_low(&self.store, &self.roots, self.config.marks).await;
            }
            sleep(collect::EVERY).await;
        }
    }

    /// Says at once what leases would show in a minute.
    async fn leave(&self, replica: &Replica) {
        let farewell = async {
            for worker in 0..self.config.workers {
                evaluations::release(&self.db, &self.config.claimant(worker), true).await?;
            }
            replica.leave(&self.db).await
        };
        if !matches!(timeout(FAREWELL, farewell).await, Ok(Ok(()))) {
            tracing::debug!("the database is away: leases end by themselves");
        }
    }
}
