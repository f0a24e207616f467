//! The frontend: for now, the cache gateway. `/cache` is a binary cache for Nix: small objects are answered from the
//! bucket, NARs by a redirect to it, so that none of their bytes passes through this process.

mod admit;
mod answer;
mod count;
mod error;
mod find;
mod key;
mod public_keys;
mod redirect;
mod register;
mod remember;
mod unpack;

use std::future::Future;
use std::net::SocketAddr;

use axum::Router;
use harmonia_queue::Db;
use harmonia_service::bucket::Bucket;
use harmonia_service::database;
use harmonia_service::health::Health;
use harmonia_service::serve;
use harmonia_service::settings::Settings;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

pub use error::FrontendError;

use admit::Admission;
use answer::Gateway;
use count::Counts;
use find::Finder;
use public_keys::PublicKeys;
use register::Registration;

/// Reached from this machine only, unless the settings say more.
const LISTEN: &str = "127.0.0.1:7777";
/// Token checks are short and remembered; one connection more is for the registry.
const CONNECTIONS: u32 = admit::ASKING as u32 + 1;

/// Serves until `stop` ends.
pub async fn run(
    settings: &Settings,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), FrontendError> {
    Frontend::start(settings).await?.serve(stop).await
}

/// A frontend that has its port and does not answer yet.
pub struct Frontend {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    registration: Registration,
    settings: Settings,
    db: Db,
}

impl Frontend {
    /// Reads the settings and takes the port. The database and the bucket may be away.
    pub async fn start(settings: &Settings) -> Result<Self, FrontendError> {
        let mut metrics = Registry::with_prefix("harmonia_ci");
        let counts = Counts::register(&mut metrics);
        let db = database::connect(settings, CONNECTIONS)?;
        let bucket = Bucket::connect(settings).await?;
        let finder = Finder::new(&bucket, counts.clone());
        let admission = Admission::new(db.clone(), settings.parse("anonymous_read")?.unwrap_or(false));
        let gateway = Gateway {
            admission,
            public_keys: PublicKeys::new(settings, finder.clone())?,
            finder,
            info: answer::cache_info(settings.parse("cache_priority")?),
            bucket: bucket.clone(),
            unpacking: unpack::permits(),
            counts,
        };

        let listen = settings.get("listen").unwrap_or(LISTEN);
        let (listener, address) = serve::bind(listen)
            .await
            .map_err(|source| FrontendError::Bind { address: listen.to_owned(), source })?;
        let url = serve::own_url(settings, address)?;
        let health = Health::new(metrics, &register::CONDITIONS);
        let registration = Registration::new(url, db.clone(), bucket, health.clone());
        let router = gateway.routes().merge(health.routes());
        Ok(Self { listener, address, router, registration, settings: settings.clone(), db })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` ends.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), FrontendError> {
        tracing::info!(address = %self.address, "the frontend listens");
        let served = tokio::select! {
            served = serve::serve(self.listener, self.router, stop) => served,
            never = self.registration.keep() => match never {},
            never = database::follow(&self.settings, &self.db) => match never {},
        };
        self.registration.leave().await;
        served.map_err(FrontendError::Serve)
    }
}
