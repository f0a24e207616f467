//! Sources, from evaluators: what the cache does not have is packed, sent and signed.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::FutureExt;
use futures::stream::{self, StreamExt, TryStreamExt};
use harmonia_nix::Sha256;
use harmonia_nix::pack::{Options, PackError, SMALL, pack};
use harmonia_service::protocol::{self, Outcome, Slot, Source, StoredSource, Wish};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::put::foreign_slot;
use super::retry::pause;
use super::{SignerError, Stop, UploadError, Uploader};

/// Sources that are asked for or sent at a time: as many as the questions of four requests.
const AT_ONCE: usize = 200;
/// A text goes with the request that proves it, and a request has at most 64 MiB.
const LONGEST_TEXT: u64 = 32 << 20;

/// A store path that no derivation makes, in the local store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalSource {
    /// Its path.
    pub path: String,
    /// Where it is on disk.
    pub real_path: PathBuf,
    /// Hash of its NAR in the store's database.
    pub nar_hash: Sha256,
    /// Bytes of its NAR in the store's database.
    pub nar_size: u64,
    /// Store paths it refers to.
    pub references: Vec<String>,
    /// Its path follows from its contents instead of its NAR.
    pub is_text: bool,
}

impl Uploader {
    /// Has those of the sources published that are not. Answers which the signers refuse, and why.
    pub async fn publish_sources(
        &self,
        sources: &[LocalSource],
    ) -> Result<Vec<(String, String)>, UploadError> {
        let asked: Vec<_> = sources.iter().map(|source| self.refusal(source).boxed()).collect();
        let refused: Vec<Option<_>> = stream::iter(asked).buffer_unordered(AT_ONCE).try_collect().await?;
        Ok(refused.into_iter().flatten().collect())
    }

    async fn refusal(&self, source: &LocalSource) -> Result<Option<(String, String)>, UploadError> {
        let path = source.path.clone();
        match self.publish_source(source).await {
            Ok(()) => Ok(None),
            Err(Stop::Refused(reason)) => Ok(Some((path, reason))),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::Again(reason)) => Err(UploadError::Source { path, rounds: self.limits.rounds, reason }),
        }
    }

    async fn publish_source(&self, source: &LocalSource) -> Result<(), Stop> {
        let wish = Wish::Published { path: source.path.clone() };
        match self.slot(&source.path, wish).await? {
            Slot::Present => return Ok(()),
            Slot::Absent => {}
            _ => return Err(foreign_slot()),
        }
        let mut last = Stop::Again("it was not tried".to_owned());
        for round in 0..self.limits.rounds {
            match self.send_source(source).await {
                Err(Stop::Again(reason)) => {
                    tracing::info!(path = source.path, round, reason, "uploading a source again");
                    last = Stop::Again(reason);
                    sleep(pause(self.limits.pause, round)).await;
                }
                ended => return ended,
            }
        }
        Err(last)
    }

    async fn send_source(&self, local: &LocalSource) -> Result<(), Stop> {
        let passes = if local.nar_size <= SMALL { &self.small_passes } else { &self.passes };
        let turn = Arc::clone(passes).acquire_owned().await.map_err(|_| UploadError::Stopping)?;
        let source = Source {
            path: local.path.clone(),
            nar_hash: local.nar_hash,
            nar_size: local.nar_size,
            references: local.references.clone(),
            text: text_of(local).await?,
        };
        let (file, bytes) = self.pack_source(local).await?;
        let wish = Wish::Source { source: source.clone(), file };
        self.put(&local.path, wish, bytes).await?;
        drop(turn);
        self.complete_source(StoredSource { source, file }).await
    }

    /// All of it in memory: a source goes in one piece, because the slot names the hash of all of it.
    async fn pack_source(&self, local: &LocalSource) -> Result<(protocol::Bytes, Bytes), Stop> {
        let options = Options {
            level: self.limits.level,
            workers: self.limits.workers,
            ..Options::for_nar(local.nar_size)
        };
        let root = local.real_path.clone();
        let pass = spawn_blocking(move || {
            let mut bytes = Vec::new();
            let packed = pack(&root, &options, |part| {
                bytes.extend_from_slice(&part.bytes);
                ControlFlow::Continue(())
            })?;
            Ok::<_, PackError>((packed, bytes))
        });
        let (packed, bytes) = pass.await.map_err(|_| UploadError::Stopping)?.map_err(UploadError::from)?;
        if packed.nar_hash != local.nar_hash {
            let (path, expected) = (local.real_path.clone(), local.nar_hash);
            return Err(UploadError::Corrupt { path, expected, found: packed.nar_hash }.into());
        }
        Ok((protocol::Bytes { size: packed.file.size, sha256: packed.file.sha256 }, bytes.into()))
    }

    async fn complete_source(&self, stored: StoredSource) -> Result<(), Stop> {
        let what = stored.source.path.clone();
        match self.ask(&self.sources, &what, stored).await? {
            Outcome::Published | Outcome::Adopted => Ok(()),
            Outcome::Stale => Err(UploadError::from(SignerError::SessionOver).into()),
            Outcome::Refused { reason } => Err(Stop::Refused(reason)),
            Outcome::Again { reason } | Outcome::Later { reason } => Err(Stop::Again(reason)),
        }
    }
}

/// The contents that prove a text's path.
async fn text_of(local: &LocalSource) -> Result<Option<String>, Stop> {
    if !local.is_text {
        return Ok(None);
    }
    if local.nar_size > LONGEST_TEXT {
        return Err(Stop::Refused(format!(
            "{} has {} bytes, and a file whose path follows from its bytes alone has at most {LONGEST_TEXT}: add it with \
             builtins.path, or fetch it in a derivation",
            local.path, local.nar_size
        )));
    }
    let read = tokio::fs::read(&local.real_path).await;
    let contents =
        read.map_err(|source| UploadError::from(PackError::Read { path: local.real_path.clone(), source }))?;
    Ok(Some(STANDARD.encode(contents)))
}
