//! `harmonia-ci signer`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use harmonia_queue::replica::Replica;
use harmonia_service::bucket::Written;
use harmonia_service::database;
use harmonia_service::health::Health;
use harmonia_service::layout;
use harmonia_service::metrics::Metrics;
use harmonia_service::sentence::sentence;
use harmonia_service::serve;
use harmonia_service::settings::Settings;
use uuid::Uuid;

use crate::{Keeping, Signer, SignerError, api};

/// Reached from this machine only, unless the settings say more.
const LISTEN: &str = "127.0.0.1:7778";
/// How soon a bucket, or a database, that could not be used is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// The end of a process waits no longer for the registry.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often keys are looked at when nothing is signed.
const KEYS: Duration = Duration::from_secs(10);

/// Runs until `stop` ends and what was asked before is answered.
pub async fn run(
    settings: &Settings,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), SignerError> {
    let address = settings.get("listen").unwrap_or(LISTEN);
    let failed = |source| SignerError::Serve { address: address.to_owned(), source };
    let keeping = Keeping::of(settings)?;
    let signer = Signer::connect(settings).await?;
    let (listener, bound) = serve::bind(address).await.map_err(failed)?;
    let url = serve::own_url(settings, bound)?;
    let mut metrics = Metrics::default();
    signer.counts.register(&mut metrics);
    let health = Health::new(metrics, &["bucket", "database"]);
    let replica = Replica { id: Uuid::now_v7(), role: "signer".into(), url };
    tracing::info!(%bound, url = replica.url, "signer");

    let router = api::routes(signer.clone()).merge(health.routes());
    let background = tokio::spawn(work(settings.clone(), signer.clone(), keeping, health, replica.clone()));
    let served = serve::serve(listener, router, stop).await.map_err(failed);
    background.abort();
    if !matches!(tokio::time::timeout(FAREWELL, replica.leave(&signer.db)).await, Ok(Ok(()))) {
        tracing::warn!(replica = %replica.id, "could not sign off; the registry forgets it by itself");
    }
    signer.tracer.flush().await;
    served
}

/// Registers only once the bucket is fit: builders ask whoever is registered.
async fn work(settings: Settings, signer: Arc<Signer>, keeping: Keeping, health: Health, replica: Replica) {
    until_fit(&signer, &health).await;
    tokio::join!(
        beat(&signer, &health, &replica),
        signer.resolver.run(&signer.db),
        signer.recover(),
        signer.keep_sweeping(&replica.url, &keeping),
        signer.keep_resigning(&replica.url),
        keep_keys_published(&signer),
        database::follow(&settings, &signer.db),
    );
}

async fn until_fit(signer: &Signer, health: &Health) {
    loop {
        let verdict = match signer.bucket.unfit().await {
            None => signer.furnish().await.map_err(|error| sentence(&error)),
            Some(sentence) => Err(sentence),
        };
        let fit = verdict.is_ok();
        health.set("bucket", verdict);
        if fit {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn beat(signer: &Signer, health: &Health, replica: &Replica) {
    loop {
        let beat = replica.beat(&signer.db).await;
        let pause = if beat.is_ok() { harmonia_queue::replica::BEAT } else { RETRY };
        health.set("database", beat.map_err(|error| sentence(&error)));
        tokio::time::sleep(pause).await;
    }
}

async fn keep_keys_published(signer: &Signer) {
    let mut published = signer.public_keys();
    loop {
        tokio::time::sleep(KEYS).await;
        let now = signer.public_keys();
        if now != published {
            match signer.publish_keys(&now).await {
                Ok(()) => published = now,
                Err(error) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "could not publish the public keys"
                ),
            }
        }
    }
}

impl Signer {
    /// What every cache has: its description and its public keys.
    async fn furnish(&self) -> Result<(), SignerError> {
        let info = "StoreDir: /nix/store\nWantMassQuery: 1\nPriority: 30\n";
        match self.bucket.put_new(layout::CACHE_INFO, info.into(), layout::TEXT).await? {
            Written::New => tracing::info!(bucket = self.bucket.name(), "a new cache"),
            Written::Exists => {}
        }
        self.publish_keys(&self.public_keys()).await
    }

    fn public_keys(&self) -> String {
        self.keys().iter().map(|key| format!("{}\n", key.public_text())).collect()
    }

    async fn publish_keys(&self, keys: &str) -> Result<(), SignerError> {
        Ok(self.bucket.put(layout::PUBLIC_KEYS, keys.into(), layout::TEXT).await?)
    }
}
