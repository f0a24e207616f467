//! The builder's half of publishing: packs outputs, asks signers where to put them, puts them there and says so.

mod ask;
mod batch;
mod error;
mod http;
mod put;
mod retry;
mod sources;
mod store;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{try_join, try_join_all};
use harmonia_nix::Sha256;
use harmonia_service::protocol::{BuildResult, Claim, Outcome, StoredSource, Token, Wish};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

pub use error::{SignerError, UploadError};
pub use http::http_client;
pub use sources::LocalSource;

use ask::Signers;
use batch::Batcher;
use retry::pause;

/// An output in the local store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltOutput {
    /// Its name, `out` mostly.
    pub name: String,
    /// Its store path.
    pub path: String,
    /// Where it is on disk; another place than `path` if the store has a root of its own.
    pub real_path: PathBuf,
    /// Hash of its NAR in the store's database.
    pub nar_hash: Sha256,
    /// Bytes of its NAR in the store's database.
    pub nar_size: u64,
    /// Store paths it refers to.
    pub references: Vec<String>,
    /// Its content address, if it has one, as Nix writes it.
    pub ca: Option<String>,
}

/// What a build said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Log {
    /// In memory.
    Bytes(Bytes),
    /// On disk.
    File(PathBuf),
}

/// How a job's publication ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// Signed and published.
    Published,
    /// Another attempt's bytes are what the paths are; those are published.
    Adopted,
    /// The claim is not live any more: drop the result.
    Stale,
    /// Never, and why.
    Refused {
        /// A sentence.
        reason: String,
    },
}

/// What an [`Uploader`] may take, and how long it goes on trying.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Large outputs that are packed at a time, in some 48 MiB each.
    pub passes: usize,
    /// Small outputs that are packed at a time, in some 1 MiB each. They never wait for large ones.
    pub small_passes: usize,
    /// Bytes of compressed parts that are on their way to the bucket. Each pass holds up to two more.
    pub parts: u32,
    /// Parts of one NAR that are sent at a time.
    pub puts: usize,
    /// zstd's level.
    pub level: i32,
    /// Threads that compress one NAR.
    pub workers: u32,
    /// PUTs of one object or part.
    pub tries: u32,
    /// Uploads of one job, if what arrived is missing or wrong.
    pub rounds: u32,
    /// How long signers may be away, or say "later".
    pub patience: Duration,
    /// The first pause before something is tried again; each further one is twice as long, up to fifty
    /// times the first.
    pub pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            passes: 2,
            small_passes: 8,
            parts: 32 << 20,
            puts: 4,
            level: harmonia_nix::pack::LEVEL,
            workers: 2,
            tries: 8,
            rounds: 4,
            patience: Duration::from_secs(600),
            pause: Duration::from_millis(200),
        }
    }
}

/// Publishes what was built. One for the whole life of a session: those who publish at the same time share requests,
/// connections and a budget of memory.
#[derive(Clone)]
pub struct Uploader {
    http: reqwest::Client,
    signers: Arc<Signers>,
    slots: Arc<Batcher<Wish>>,
    results: Arc<Batcher<BuildResult>>,
    sources: Arc<Batcher<StoredSource>>,
    limits: Limits,
    passes: Arc<Semaphore>,
    small_passes: Arc<Semaphore>,
    parts: Arc<Semaphore>,
}

/// Why a round of uploads did not come to its end.
enum Stop {
    /// What was sent is gone or wrong: from the beginning.
    Again(String),
    /// Never.
    Refused(String),
    Failed(UploadError),
}

impl From<UploadError> for Stop {
    fn from(error: UploadError) -> Self {
        Self::Failed(error)
    }
}

impl Uploader {
    /// Speaks with `token` to the signers whose addresses (`http://host:port`) are in `signers` at the time. Needs a runtime.
    pub fn new(
        http: reqwest::Client,
        signers: watch::Receiver<Vec<String>>,
        token: &Token,
        limits: Limits,
    ) -> Self {
        let signers = Arc::new(Signers::new(http.clone(), signers, token, limits.clone()));
        Self {
            http,
            slots: Arc::new(Batcher::new(Arc::clone(&signers))),
            results: Arc::new(Batcher::new(Arc::clone(&signers))),
            sources: Arc::new(Batcher::new(Arc::clone(&signers))),
            signers,
            passes: Arc::new(Semaphore::new(limits.passes.max(1))),
            small_passes: Arc::new(Semaphore::new(limits.small_passes.max(1))),
            parts: Arc::new(Semaphore::new(limits.parts as usize)),
            limits,
        }
    }

    /// Ends when none of the signers that it knows has answered: there may be others by now.
    pub async fn unanswered(&self) {
        self.signers.unanswered.notified().await;
    }

    /// Uploads all outputs of a build and its log, and has them published.
    pub async fn publish(
        &self,
        claim: Claim,
        outputs: &[BuiltOutput],
        log: Option<&Log>,
    ) -> Result<Ending, UploadError> {
        let mut last = String::new();
        for round in 0..self.limits.rounds {
            match self.publish_once(claim, outputs, log).await {
                Ok(ending) => return Ok(ending),
                Err(Stop::Refused(reason)) => return Ok(Ending::Refused { reason }),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Again(reason)) => {
                    tracing::info!(
                        job = claim.job,
                        attempt = claim.attempt,
                        round,
                        reason,
                        "uploading again"
                    );
                    last = reason;
                    sleep(pause(self.limits.pause, round)).await;
                }
            }
        }
        Err(UploadError::Incomplete { job: claim.job, rounds: self.limits.rounds, reason: last })
    }

    async fn publish_once(
        &self,
        claim: Claim,
        outputs: &[BuiltOutput],
        log: Option<&Log>,
    ) -> Result<Ending, Stop> {
        let stored = try_join_all(outputs.iter().map(|output| self.store_output(claim, output)));
        let logged = async {
            match log {
                Some(log) => self.put_log(claim, log).await,
                None => Ok(false),
            }
        };
        let (outputs, log) = try_join(stored, logged).await?;
        self.complete(BuildResult { claim, outputs, log }).await
    }

    /// Says that everything is there.
    async fn complete(&self, result: BuildResult) -> Result<Ending, Stop> {
        let until = Instant::now() + self.limits.patience;
        let mut attempt = 0;
        loop {
            let outcome = self.results.ask(result.clone()).await.ok_or(UploadError::Stopping)?;
            match outcome.map_err(UploadError::from)? {
                Outcome::Published => return Ok(Ending::Published),
                Outcome::Adopted => return Ok(Ending::Adopted),
                Outcome::Stale => return Ok(Ending::Stale),
                Outcome::Refused { reason } => return Ok(Ending::Refused { reason }),
                Outcome::Again { reason } => return Err(Stop::Again(reason)),
                Outcome::Later { reason } if Instant::now() >= until => {
                    let what = format!("the result of job {}", result.claim.job);
                    return Err(UploadError::from(SignerError::PutOff { what, reason }).into());
                }
                Outcome::Later { reason } => {
                    tracing::debug!(job = result.claim.job, attempt, reason, "not published yet");
                    sleep(pause(self.limits.pause, attempt)).await;
                    attempt += 1;
                }
            }
        }
    }

    /// Uploads the log of an attempt that has nothing to publish. False: the signer wants none of it.
    pub async fn store_log(&self, claim: Claim, log: &Log) -> Result<bool, UploadError> {
        match self.put_log(claim, log).await {
            Ok(stored) => Ok(stored),
            Err(Stop::Refused(_)) => Ok(false),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::Again(reason)) => Err(UploadError::Incomplete { job: claim.job, rounds: 1, reason }),
        }
    }
}
