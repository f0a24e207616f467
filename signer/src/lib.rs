//! The signer: how a result is published.
//!
//! Nothing is kept here. A builder asks where to put bytes ([`slots`]); when they are there, the bucket is asked what it
//! has, the derivation is proven, the queue takes the record of all outputs, and narinfos are written from that record
//! ([`complete`], [`publish`]). A crash anywhere leaves an accepted record, which any signer completes ([`recover`]).

mod api;
mod complete;
mod count;
mod forget;
mod pages;
mod prove;
mod publish;
mod realise;
mod recover;
mod resign;
mod resync;
mod run;
mod slots;
mod sources;
mod sweep;
mod traced;

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use harmonia_nix::key::{KeyError, Keys, SecretKey};
use harmonia_nix::narinfo::NarInfoError;
use harmonia_nix::store_path::PathError;
use harmonia_queue::Db;
use harmonia_queue::resolver::Resolver;
use harmonia_service::bucket::{Bucket, BucketError};
use harmonia_service::database;
use harmonia_service::settings::{Settings, SettingsError};
use harmonia_service::trace::Tracer;
use thiserror::Error;

pub use count::Counts;
pub use resync::Resynced;
pub use run::run;
pub use sweep::{Keeping, Swept, Tally, paced};

/// S3 calls at once for one request: enough to hide a round trip of 20 ms at a thousand calls a second.
const AT_ONCE: usize = 32;
/// Connections to the database. Every request takes one for some milliseconds.
const CONNECTIONS: u32 = 8;
/// A compressed log, unless it is configured.
const LOG_LIMIT: u64 = 64 << 20;

/// Does some work side by side, and answers in its order.
async fn side_by_side<'a, T: Send + 'a>(work: impl Iterator<Item = BoxFuture<'a, T>>) -> Vec<T> {
    let work: Vec<BoxFuture<'a, T>> = work.collect();
    stream::iter(work).buffered(AT_ONCE).collect().await
}

/// Why something is not signed.
#[derive(Debug, Error)]
pub enum SignerError {
    /// It is configured wrongly.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The keys cannot be used.
    #[error("the signing keys cannot be used")]
    Keys(#[from] KeyError),
    /// The queue said no, or cannot be asked.
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
    /// The bucket said no, or cannot be asked.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// Not a store path.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A narinfo cannot be written.
    #[error(transparent)]
    NarInfo(#[from] NarInfoError),
    /// What the queue has cannot be what it says.
    #[error("the record of {0} is damaged: forget the path, so that it is built again")]
    Record(String),
    /// Somebody took it back.
    #[error("{0} was forgotten while it was published")]
    Forgotten(String),
    /// The bucket knows better.
    #[error(
        "the bucket has a narinfo for {path} with another NAR hash than was recorded: \
         `harmonia-ci cache forget {path}` removes it"
    )]
    Foreign {
        /// The path.
        path: String,
    },
    /// The bucket knows better.
    #[error(
        "the bucket says of an output of {drv} that it is another path than was recorded: \
         `harmonia-ci cache forget` of its outputs removes that"
    )]
    OtherRealisation {
        /// The derivation.
        drv: String,
    },
    /// It was accepted, and is not proven now.
    #[error("{drv} cannot be proven any more: {reason}")]
    Unproven {
        /// The derivation.
        drv: String,
        /// Why.
        reason: String,
    },
    /// The bucket takes its time.
    #[error("the bucket did not remove objects within {0:?}: the next sweep goes on")]
    Slow(std::time::Duration),
    /// No two lists of it can be compared.
    #[error(
        "the bucket does not list its objects in the order of their keys, as S3 does: it cannot be compared with the database"
    )]
    Unordered,
    /// The port is taken, for one.
    #[error("cannot serve on {address}")]
    Serve {
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// All that signing needs.
#[derive(Debug)]
pub struct Signer {
    db: Db,
    bucket: Bucket,
    keys: Mutex<Keys>,
    resolver: Resolver,
    counts: Counts,
    tracer: Tracer,
    log_limit: u64,
}

impl Signer {
    /// A signer as configured. Nothing is asked of the database yet.
    pub async fn connect(settings: &Settings) -> Result<Arc<Self>, SignerError> {
        let files = settings.require("signing_key_files")?;
        let keys = Keys::load(files.split(',').map(|file| file.trim().into()))?;
        Ok(Arc::new(Self {
            db: database::connect(settings, CONNECTIONS)?,
            bucket: Bucket::connect(settings).await?,
            keys: Mutex::new(keys),
            resolver: Resolver::default(),
            counts: Counts::default(),
            tracer: Tracer::start(settings, "signer")?,
            log_limit: settings.parse("log_limit")?.unwrap_or(LOG_LIMIT),
        }))
    }

    /// What to sign with now. A key that cannot be read any more leaves the ones that were read before.
    fn keys(&self) -> Arc<[SecretKey]> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        match keys.reload_if_changed() {
            Ok(true) => tracing::info!("signing keys were read again"),
            Ok(false) => {}
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "signing keys stay as they were")
            }
        }
        keys.current()
    }
}
