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
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, select, try_join_all};
use harmonia_nix::Sha256;
use harmonia_service::protocol::{BuildResult, Claim, Outcome, StoredSource, Token, Wish};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};

pub use error::{SignerError, UploadError};
pub use http::{http_client, local_http_client};
pub use sources::LocalSource;

use ask::{Answer, Question, Signers};
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
    /// PUTs of one object or part whose bytes arrive garbled, and of any before somebody is told.
    pub tries: u32,
    /// Places in a row for one object or part of which the bucket takes none, although a signer that reaches it gave them: then
    /// the trouble is this machine's own. With the pauses below, eleven minutes.
    pub refusals: u32,
    /// Uploads of one job, if what arrived is missing or wrong.
    pub rounds: u32,
    /// How long signers and the bucket may be away, or say "later".
    pub patience: Duration,
    /// How much longer than a result the bucket may take for what the result can do without.
    pub haste: Duration,
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
            refusals: 90,
            rounds: 4,
            patience: Duration::from_secs(600),
            haste: Duration::from_secs(120),
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
                Some(log) => self.store_log(claim, log).await,
                None => false,
            }
        };
        let (outputs, log) = self.beside(stored, logged).await?;
        self.complete(BuildResult { claim, outputs, log }).await
    }

    /// Does what a result needs, and beside it what it can do without, which is not waited for much longer.
    async fn beside<T>(
        &self,
        needed: impl Future<Output = Result<T, Stop>>,
        spare: impl Future<Output = bool>,
    ) -> Result<(T, bool), Stop> {
        match select(pin!(needed), pin!(spare)).await {
            Either::Left((needed, spare)) => {
                let needed = needed?;
                let stored = timeout(self.limits.haste, spare).await;
                let late = |_| tracing::warn!("a log or a listing is not stored in time");
                Ok((needed, stored.map_err(late).unwrap_or(false)))
            }
            Either::Right((stored, needed)) => Ok((needed.await?, stored)),
        }
    }

    /// Says that everything is there.
    async fn complete(&self, result: BuildResult) -> Result<Ending, Stop> {
        let what = format!("the result of job {}", result.claim.job);
        match self.ask(&self.results, &what, result).await? {
            Outcome::Published => Ok(Ending::Published),
            Outcome::Adopted => Ok(Ending::Adopted),
            Outcome::Stale => Ok(Ending::Stale),
            Outcome::Refused { reason } => Ok(Ending::Refused { reason }),
            Outcome::Again { reason } | Outcome::Later { reason } => Err(Stop::Again(reason)),
        }
    }

    /// Asks until the answer is another one than "later".
    async fn ask<Q: Question>(
        &self,
        signers: &Batcher<Q>,
        what: &str,
        question: Q,
    ) -> Result<Q::Answer, UploadError> {
        let until = Instant::now() + self.limits.patience;
        let mut attempt = 0;
        loop {
            let answer = signers.ask(question.clone()).await.ok_or(UploadError::Stopping)??;
            let Some(reason) = answer.later() else { return Ok(answer) };
            if Instant::now() >= until {
                let (what, reason) = (what.to_owned(), reason.to_owned());
                return Err(SignerError::PutOff { what, reason }.into());
            }
            tracing::debug!(what, attempt, reason, "put off");
            sleep(pause(self.limits.pause, attempt)).await;
            attempt += 1;
        }
    }
}
