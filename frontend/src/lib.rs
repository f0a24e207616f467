//! The frontend: the web pages, the API, the webhooks and statuses of forges, and the cache gateway. `/` is for people, `/api` for programs and people. `/cache` is a binary cache for Nix: small
//! objects are answered from the bucket, NARs by a redirect to it, so that none of their bytes passes through this process.

mod admit;
mod answer;
mod api;
mod count;
mod error;
mod escape;
mod find;
mod forge;
mod gauge;
mod key;
mod member;
mod public_keys;
mod redirect;
mod register;
mod remember;
mod shelf;
mod turn;
mod unpack;
mod web;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use harmonia_queue::Db;
use harmonia_service::bucket::Bucket;
use harmonia_service::database;
use harmonia_service::health::Health;
use harmonia_service::metrics::Metrics;
use harmonia_service::secret::Secret;
use harmonia_service::serve;
use harmonia_service::settings::Settings;
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use count::Counts;
pub use error::FrontendError;
pub use forge::ForgeCounts;
pub use gauge::Gauges;

use admit::Admission;
use answer::Gateway;
use api::{Api, Hub};
use find::Finder;
use forge::Forges;
use public_keys::PublicKeys;
use register::Registration;
use shelf::Shelf;
use web::{Live, Shared, Web};

/// Reached from this machine only, unless the settings say more.
const LISTEN: &str = "127.0.0.1:7777";
/// Those who check tokens never wait for those who answer; one more is for the registry, one for the gauges.
const CONNECTIONS: u32 =
    admit::ASKING as u32 + api::ASKING as u32 + web::ASKING as u32 + forge::CONNECTIONS + 2;

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
    direct_url: Secret,
    hub: Arc<Hub>,
    forges: Arc<Forges>,
    live: Arc<Live>,
    gauges: Gauges,
    closing: watch::Sender<bool>,
}

impl Frontend {
    /// Reads the settings and takes the port. The database and the bucket may be away.
    pub async fn start(settings: &Settings) -> Result<Self, FrontendError> {
        let mut metrics = Metrics::default();
        let counts = Counts::register(&mut metrics);
        let gauges = Gauges::register(&mut metrics);
        let forge_counts = ForgeCounts::register(&mut metrics);
        let db = database::connect(settings, CONNECTIONS)?;
        let bucket = Bucket::connect(settings).await?;
        let finder = Finder::new(&bucket, counts.clone());
        let anonymous = settings.parse("anonymous_read")?.unwrap_or(false);
        let admission = Arc::new(Admission::new(db.clone(), anonymous));
        let shelf = Shelf::new(bucket.clone(), shelf::PROGRAMS);
        let (hub, (closing, closed)) = (Arc::new(Hub::new()), watch::channel(false));
        let public_keys = PublicKeys::new(settings, finder.clone())?;
        let gateway = Gateway {
            admission: admission.clone(),
            public_keys: public_keys.clone(),
            finder,
            info: answer::cache_info(settings.parse("cache_priority")?),
            shelf: shelf.clone(),
            bucket: bucket.clone(),
            counts,
        };

        let listen = settings.get("listen").unwrap_or(LISTEN);
        let (listener, address) = serve::bind(listen)
            .await
            .map_err(|source| FrontendError::Bind { address: listen.to_owned(), source })?;
        let url = serve::own_url(settings, address)?;
        let public_url = settings.get("public_url").map_or(url.as_str(), |url| url.trim_end_matches('/'));
        let forges = Arc::new(Forges::new(settings, db.clone(), public_url, forge_counts)?);
        let api = Api::new(admission.clone(), db.clone(), shelf, hub.clone(), closed.clone(), forges.clone());
        let shared = Shared {
            admission,
            db: db.clone(),
            shelf: Shelf::new(bucket.clone(), shelf::PAGES),
            public_keys,
            hub: hub.clone(),
            forges: forges.clone(),
            closing: closed,
            url: public_url.to_owned(),
        };
        let web = Web::new(shared, settings)?;
        let live = web.live();
        let health = Health::new(metrics, &register::CONDITIONS);
        let registration = Registration::new(url, db.clone(), bucket, health.clone());
        let router = api
            .routes()
            .merge(web.routes())
            .merge(forges.routes())
            .merge(gateway.routes())
            .merge(health.routes());
        let direct_url = database::direct(settings)?;
        let settings = settings.clone();
        Ok(Self {
            listener,
            address,
            router,
            registration,
            settings,
            db,
            direct_url,
            hub,
            forges,
            live,
            gauges,
            closing,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` ends.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), FrontendError> {
        tracing::info!(address = %self.address, "the frontend listens");
        let closing = self.closing;
        let stop = async move {
            stop.await;
            // Streams of events would never end by themselves.
            closing.send_replace(true);
        };
        let served = tokio::select! {
            served = serve::serve(self.listener, self.router, stop) => served,
            never = self.registration.keep() => match never {},
            never = database::follow(&self.settings, &self.db) => match never {},
            never = self.hub.listen(&self.direct_url) => match never {},
            never = self.live.run() => match never {},
            never = self.gauges.follow(&self.db) => match never {},
            never = self.forges.speak() => match never {},
        };
        self.registration.leave().await;
        served.map_err(FrontendError::Serve)
    }
}
