//! An output, or a log, from the disk into the bucket.

use std::future::ready;
use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use harmonia_nix::pack::{
    Compressed, Digest, Options, PackError, Packed, Part, SMALL, compress, compress_file, pack,
};
use harmonia_service::protocol::{self, Claim, Output, Slot, StoredFile, StoredPart, Upload, Wish};
use harmonia_service::sentence::sentence;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::{JoinHandle, spawn_blocking};

use super::put::{Sent, foreign_slot};
use super::{BuiltOutput, Log, Stop, UploadError, Uploader};

/// A part, and its share of the budget until it is sent.
type Held = (Part, OwnedSemaphorePermit);

impl Uploader {
    /// Packs an output and stores its NAR and its listing.
    pub(super) async fn store_output(&self, claim: Claim, output: &BuiltOutput) -> Result<Output, Stop> {
        let (mut parts, pass) = self.start_pass(output).await?;
        let Some((first, share)) = parts.recv().await else {
            // A pass without a part has failed.
            finished(pass, output).await?;
            return Err(UploadError::Stopping.into());
        };
        if first.last {
            let packed = finished(pass, output).await?;
            let file = bytes(packed.file);
            let wish = Wish::Nar { claim, path: output.path.clone(), nar_hash: output.nar_hash, file };
            let nar = async {
                let sent = self.put(&output.path, wish, first.bytes).await;
                drop(share);
                sent
            };
            let (_, listing) = self.beside(nar, self.store_listing(claim, output, &packed.listing)).await?;
            Ok(stored(output, &packed, None, listing))
        } else {
            let upload = self.send_parts(claim, output, (first, share), parts).await?;
            let packed = finished(pass, output).await?;
            let listing = self.store_listing(claim, output, &packed.listing);
            let (upload, listing) = self.beside(ready(Ok(upload)), listing).await?;
            Ok(stored(output, &packed, upload, listing))
        }
    }

    /// Begins to pack. A part waits for its share of the budget before it is handed over; the pass waits
    /// with it.
    async fn start_pass(
        &self,
        output: &BuiltOutput,
    ) -> Result<(mpsc::Receiver<Held>, JoinHandle<Result<Packed, PackError>>), Stop> {
        let passes = if output.nar_size <= SMALL { &self.small_passes } else { &self.passes };
        let turn = Arc::clone(passes).acquire_owned().await.map_err(|_| UploadError::Stopping)?;
        let options = Options {
            level: self.limits.level,
            workers: self.limits.workers,
            ..Options::for_nar(output.nar_size)
        };
        let (budget, most) = (Arc::clone(&self.parts), self.limits.parts);
        let (sender, parts) = mpsc::channel(1);
        let (root, runtime) = (output.real_path.clone(), Handle::current());
        let pass = spawn_blocking(move || {
            let packed = pack(&root, &options, |part| {
                // A part larger than the budget takes all of it.
                let share = u32::try_from(part.bytes.len()).unwrap_or(u32::MAX).min(most);
                let share = runtime.block_on(Arc::clone(&budget).acquire_many_owned(share));
                match share.map(|share| sender.blocking_send((part, share))) {
                    Ok(Ok(())) => ControlFlow::Continue(()),
                    _ => ControlFlow::Break(()),
                }
            });
            drop(turn);
            packed
        });
        Ok((parts, pass))
    }

    /// Sends all parts, some at a time. None: somebody else's NAR is there, and these were only counted.
    async fn send_parts(
        &self,
        claim: Claim,
        output: &BuiltOutput,
        first: Held,
        mut rest: mpsc::Receiver<Held>,
    ) -> Result<Option<Upload>, Stop> {
        let wish = Wish::Parts { claim, path: output.path.clone(), nar_hash: output.nar_hash };
        let id = match self.slot(&output.path, wish).await? {
            Slot::Parts { upload } => upload,
            Slot::Present => {
                drop(first);
                while rest.recv().await.is_some() {}
                return Ok(None);
            }
            _ => return Err(foreign_slot()),
        };
        let rest = stream::unfold(rest, |mut rest| async { Some((rest.recv().await?, rest)) });
        let sent = stream::once(async { first }).chain(rest).map(|(part, share)| {
            let wish = Wish::Part {
                claim,
                path: output.path.clone(),
                nar_hash: output.nar_hash,
                upload: id.clone(),
                number: part.number,
                part: protocol::Bytes { size: part.bytes.len() as u64, sha256: part.sha256 },
            };
            async move {
                let what = format!("part {} of {}", part.number, output.path);
                let sent = self.put(&what, wish, part.bytes).await?;
                drop(share);
                match sent {
                    Sent::Stored(Some(etag)) => Ok((part.number, StoredPart { etag, sha256: part.sha256 })),
                    Sent::Stored(None) => {
                        Err(UploadError::Bucket { what, reason: "it gave no ETag".to_owned() }.into())
                    }
                    Sent::Present => Err(foreign_slot()),
                }
            }
        });
        let mut sent: Vec<_> = sent.buffer_unordered(self.limits.puts.max(1)).try_collect().await?;
        sent.sort_unstable_by_key(|(number, _)| *number);
        let parts = sent.into_iter().map(|(_, part)| part).collect();
        Ok(Some(Upload { id, parts }))
    }

    async fn store_listing(&self, claim: Claim, output: &BuiltOutput, listing: &Compressed) -> bool {
        let wish = Wish::Listing { claim, path: output.path.clone(), file: whole(listing) };
        self.put_spare(&format!("the listing of {}", output.path), wish, listing.bytes.clone()).await
    }

    /// Stores the log of an attempt. False: it cannot be read, or is not wanted, or not taken.
    pub async fn store_log(&self, claim: Claim, log: &Log) -> bool {
        let (log, level) = (log.clone(), self.limits.level);
        let compressed = spawn_blocking(move || match log {
            Log::Bytes(bytes) => compress(&bytes, level)
                .map_err(|source| PackError::Compress { path: "the log".into(), source }),
            Log::File(path) => compress_file(&path, level),
        });
        let compressed = match compressed.await {
            Ok(Ok(compressed)) => compressed,
            Ok(Err(error)) => {
                tracing::warn!(job = claim.job, error = sentence(&error), "a log is lost");
                return false;
            }
            Err(_) => return false,
        };
        let wish = Wish::Log { claim, file: whole(&compressed) };
        self.put_spare(&format!("the log of job {}", claim.job), wish, compressed.bytes).await
    }

    /// Stores what is no reason to lose a result. False: the signer wants none of it, or the bucket takes none of it.
    async fn put_spare(&self, what: &str, wish: Wish, bytes: Bytes) -> bool {
        let reason = match self.put(what, wish, bytes).await {
            Ok(_) => return true,
            Err(Stop::Again(reason) | Stop::Refused(reason)) => reason,
            Err(Stop::Failed(error)) => sentence(&error),
        };
        tracing::warn!(what, reason, "not stored");
        false
    }
}

/// Waits for the end of a pass and compares with what the database says.
async fn finished(
    pass: JoinHandle<Result<Packed, PackError>>,
    output: &BuiltOutput,
) -> Result<Packed, UploadError> {
    let packed = pass.await.map_err(|_| UploadError::Stopping)??;
    if packed.nar_hash == output.nar_hash {
        Ok(packed)
    } else {
        let (path, expected) = (output.real_path.clone(), output.nar_hash);
        Err(UploadError::Corrupt { path, expected, found: packed.nar_hash })
    }
}

fn stored(output: &BuiltOutput, packed: &Packed, upload: Option<Upload>, listing: bool) -> Output {
    Output {
        name: output.name.clone(),
        path: output.path.clone(),
        nar_hash: output.nar_hash,
        nar_size: output.nar_size,
        references: output.references.clone(),
        ca: output.ca.clone(),
        file: StoredFile { bytes: bytes(packed.file), upload },
        listing,
    }
}

fn bytes(digest: Digest) -> protocol::Bytes {
    protocol::Bytes { size: digest.size, sha256: digest.sha256 }
}

fn whole(compressed: &Compressed) -> protocol::Bytes {
    protocol::Bytes { size: compressed.bytes.len() as u64, sha256: compressed.sha256 }
}
