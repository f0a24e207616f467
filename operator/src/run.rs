//! `harmonia-ci operator`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use harmonia_queue::janitor;
use harmonia_queue::leader::{self, Office};
use harmonia_queue::replica::Replica;
use harmonia_service::health::Health;
use harmonia_service::metrics::Metrics;
use harmonia_service::sentence::sentence;
use harmonia_service::serve;
use harmonia_service::settings::Settings;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Client, Config};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cache::Caches;
use crate::context::Context;
use crate::count::Counts;
use crate::database::Database;
use crate::installation::config::Installation;
use crate::ready::{CONDITIONS, RESOURCES, Readiness};
use crate::scope::Scope;
use crate::secrets::Secrets;
use crate::standing::{self, Standing};
use crate::{OperatorError, installation, nodes, pool, project, resources};

/// Reached from this machine only, unless the settings say more.
const LISTEN: &str = "127.0.0.1:7781";
/// Reconciles that run get so long to end, before the lock goes to the next leader: both together stay below ten seconds.
const PATIENCE: Duration = Duration::from_secs(7);
/// How often files with URLs are looked at.
const LOOK: Duration = Duration::from_secs(10);

/// Runs in the cluster around this process, or in that of `KUBECONFIG`, until the first of `stops`.
pub async fn run(settings: &Settings, stops: watch::Receiver<u32>) -> Result<(), OperatorError> {
    let config = Config::infer().await.map_err(|error| OperatorError::Cluster(Box::new(error)))?;
    run_on(settings, config, stops).await
}

/// The same in a cluster that is known.
pub async fn run_on(
    settings: &Settings,
    config: Config,
    mut stops: watch::Receiver<u32>,
) -> Result<(), OperatorError> {
    let address = settings.get("listen").unwrap_or(LISTEN);
    let failed = |source| OperatorError::Serve { address: address.to_owned(), source };
    let installation = read_installation(settings)?;
    let database = Database::connect(settings)?;
    let (client, namespace) = connect(settings, config)?;
    let (listener, bound) = serve::bind(address).await.map_err(failed)?;

    let mut metrics = Metrics::default();
    let counts = Counts::register(&mut metrics);
    let health = Health::new(metrics, &CONDITIONS);
    let scopes = Scope::read(settings.get("watch_namespaces").unwrap_or_default(), &namespace);
    let (caches, watching) = Caches::new(&client, &scopes);
    let (say, standing) = watch::channel(Standing::Follower);
    let (stop, done) = (CancellationToken::new(), CancellationToken::new());
    let reporter = Reporter { controller: "harmonia-ci".into(), instance: Some(machine()) };
    let url =
        settings.get("url").map_or_else(|| format!("http://{}:{}", machine(), bound.port()), str::to_owned);
    let replica = Replica { id: Uuid::now_v7(), role: "operator".into(), url };
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        client,
        namespace,
        scopes,
        caches,
        secrets: Secrets::default(),
        installation: Arc::new(installation),
        ready: Readiness::new(health.clone()),
        counts,
        sees_nodes: watch::Sender::new(None),
        stop: stop.clone(),
        database: database.clone(),
        standing,
    });
    tracing::info!(%bound, url = replica.url, namespace = context.namespace, scopes = ?context.scopes, "operator");

    // What goes on until the lock is given back,
    let mut background = JoinSet::new();
    background.spawn(watching);
    background.spawn(serve_pages(listener, health.clone(), done.clone()));
    background.spawn(follow_url(database.clone()));
    background.spawn(keep_house(database.clone(), replica.clone()));
    let leading = tokio::spawn(lead(context.clone(), replica.clone(), say, done.clone()));
    // and what ends before.
    let working = tokio::spawn(work(context));

    let _ = stops.wait_for(|count| *count > 0).await;
    tracing::info!("stopping");
    stop.cancel();
    if tokio::time::timeout(PATIENCE, working).await.is_err() {
        tracing::warn!("what is being done is broken off");
    }
    done.cancel();
    let _ = tokio::time::timeout(Duration::from_secs(1), leading).await;
    let _ = tokio::time::timeout(Duration::from_secs(1), replica.leave(&database.db)).await;
    background.shutdown().await;
    Ok(())
}

/// All controllers, until they are stopped.
async fn work(context: Arc<Context>) {
    let known = async {
        resources::wait(&context).await;
        context.caches.warm().await;
    };
    if context.stop.run_until_cancelled(known).await.is_none() {
        return;
    }
    context.ready.meet(RESOURCES);
    tokio::join!(
        installation::run(context.clone()),
        nodes::run(context.clone()),
        pool::run(context.clone()),
        project::run(context)
    );
}

async fn lead(
    context: Arc<Context>,
    replica: Replica,
    say: watch::Sender<Standing>,
    done: CancellationToken,
) {
    let database = &context.database;
    let mut heard = context.standings();
    let counting = async {
        while heard.changed().await.is_ok() {
            context.counts.stands(*heard.borrow_and_update());
        }
    };
    tokio::select! {
        () = standing::campaign(database, &replica, &context.ready, &say, &done) => {}
        () = replica.keep_beating(&database.db) => {}
        () = counting => {}
    }
}

/// The janitor's office is another one: this process may hold it without leading.
async fn keep_house(database: Database, replica: Replica) {
    loop {
        let Ok(url) = database.direct_url() else {
            tokio::time::sleep(LOOK).await;
            continue;
        };
        let work = |generation| janitor::run(&database.db, generation);
        let changed = async {
            while database.direct_url().is_ok_and(|now| now == url) {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            () = leader::campaign(&database.db, &url, Office::Janitor, replica.id, work) => {}
            () = changed => {}
        }
    }
}

/// New connections use the URL that the file has by then.
async fn follow_url(database: Database) {
    let mut known = database.url().ok();
    loop {
        tokio::time::sleep(LOOK).await;
        let Ok(url) = database.url() else { continue };
        if known.as_ref() != Some(&url) && database.db.renew(&url).is_ok() {
            tracing::info!("the database's URL has changed");
            known = Some(url);
        }
    }
}

async fn serve_pages(listener: tokio::net::TcpListener, health: Health, done: CancellationToken) {
    let stop = async move { done.cancelled().await };
    if let Err(error) = serve::serve(listener, health.routes(), stop).await {
        tracing::error!(error = sentence(&error), "health is served no more");
    }
}

/// The API server, and the operator's own namespace.
pub(crate) fn connect(settings: &Settings, config: Config) -> Result<(Client, String), OperatorError> {
    // Other libraries in this process may bring a provider of their own.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let namespace = settings.get("namespace").unwrap_or(&config.default_namespace).to_owned();
    Ok((Client::try_from(config).map_err(Box::new)?, namespace))
}

pub(crate) fn read_installation(settings: &Settings) -> Result<Installation, OperatorError> {
    let file = PathBuf::from(settings.require("installation")?);
    let text = std::fs::read_to_string(&file)
        .map_err(|source| OperatorError::Installation { file: file.clone(), source })?;
    serde_saphyr::from_str(&text).map_err(|source| OperatorError::Shape { file, source: Box::new(source) })
}

/// The pod's name, in a cluster.
fn machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
