//! Where to put bytes: only for what a live claim may produce, and never over what is there.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use futures::FutureExt;
use harmonia_nix::Sha256;
use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::Fence;
use harmonia_queue::signer::{self, LiveClaim, Recorded};
use harmonia_service::bucket::{Checksum, Presigned, Stored};
use harmonia_service::layout;
use harmonia_service::protocol::{Bytes, Claim, Slot, Token, Wish};
use harmonia_service::sentence::sentence;

use crate::{Signer, SignerError, side_by_side};

/// Parts of one upload, as S3 numbers them.
const PARTS: std::ops::RangeInclusive<i32> = 1..=10_000;
/// S3 takes no more in one piece.
const WHOLE_LIMIT: u64 = 5 << 30;
/// A listing of a million files.
const LISTING_LIMIT: u64 = 64 << 20;
/// What the queue said about an object may be out of date after this long: then it is not removed.
const FRESH: Duration = Duration::from_secs(2);

pub(crate) type Claims = HashMap<Fence, LiveClaim>;

/// Why there is no slot.
pub(crate) enum No {
    /// Never.
    Refused(String),
    /// Not now.
    Later(String),
}

impl From<SignerError> for No {
    fn from(error: SignerError) -> Self {
        match error {
            SignerError::Path(error) => Self::Refused(error.to_string()),
            error => Self::Later(sentence(&error)),
        }
    }
}

impl From<harmonia_service::bucket::BucketError> for No {
    fn from(error: harmonia_service::bucket::BucketError) -> Self {
        Self::Later(sentence(&error))
    }
}

impl Signer {
    /// A slot for each wish, in their order. The token was read, not yet believed.
    pub(crate) async fn slots(&self, token: &Token, wishes: Vec<Wish>) -> Result<Vec<Slot>, SignerError> {
        let claims = self.claims_of(token, wishes.iter().filter_map(claim_of)).await?;
        let evaluates = match token {
            Token::Evaluation { id, secret } => signer::check_evaluation(&self.db, *id, secret).await?,
            Token::Builder { .. } => false,
        };
        let (claims, kept) = (&claims, &self.kept(evaluates, &wishes).await?);
        let slots = wishes.into_iter().map(|wish| self.slot_or_reason(claims, evaluates, kept, wish).boxed());
        Ok(side_by_side(slots).await)
    }

    /// Of paths that are asked about, those that are on record, which no sweep is about to take any more.
    async fn kept(&self, evaluates: bool, wishes: &[Wish]) -> Result<HashSet<String>, SignerError> {
        let asked = wishes.iter().filter_map(|wish| match wish {
            Wish::Published { path } if evaluates => Some(path.clone()),
            _ => None,
        });
        let asked: Vec<String> = asked.collect();
        match asked.is_empty() {
            true => Ok(HashSet::new()),
            false => Ok(signer::keep_published(&self.db, &asked).await?.into_iter().collect()),
        }
    }

    async fn slot_or_reason(
        &self,
        claims: &Claims,
        evaluates: bool,
        kept: &HashSet<String>,
        wish: Wish,
    ) -> Slot {
        match self.slot(claims, evaluates, kept, wish).await {
            Ok(slot) => slot,
            Err(No::Refused(reason)) => Slot::Refused { reason },
            Err(No::Later(reason)) => Slot::Later { reason },
        }
    }

    /// Those of the claims that are live under this token.
    pub(crate) async fn claims_of(
        &self,
        token: &Token,
        claims: impl Iterator<Item = Claim>,
    ) -> Result<Claims, SignerError> {
        let Token::Builder { session, secret } = token else { return Ok(Claims::new()) };
        let mut fences: Vec<Fence> = claims.map(fence).collect();
        fences.sort_unstable();
        fences.dedup();
        if fences.is_empty() {
            return Ok(Claims::new());
        }
        Ok(signer::check_claims(&self.db, *session, secret, &fences).await?)
    }

    async fn slot(
        &self,
        claims: &Claims,
        evaluates: bool,
        kept: &HashSet<String>,
        wish: Wish,
    ) -> Result<Slot, No> {
        match wish {
            Wish::Nar { claim, path, nar_hash, file } => {
                let path = output_of(claims, claim, &path)?;
                within(file.size, WHOLE_LIMIT, "a compressed NAR in one piece")?;
                self.nar_slot(&path, nar_hash, file, Some(claim.job)).await
            }
            Wish::Parts { claim, path, nar_hash } => {
                let path = output_of(claims, claim, &path)?;
                let key = layout::nar(&path, &nar_hash);
                if let Some(stored) = self.bucket.head(&key).await?
                    && self.keeps(&path, nar_hash, &key, &stored, Some(claim.job)).await?
                {
                    return Ok(Slot::Present);
                }
                Ok(Slot::Parts { upload: self.bucket.begin_parts(&key).await? })
            }
            Wish::Part { claim, path, nar_hash, upload, number, part } => {
                let path = output_of(claims, claim, &path)?;
                within(part.size, WHOLE_LIMIT, "a part")?;
                if !PARTS.contains(&number) {
                    return Err(No::Refused(format!(
                        "there is no part {number}: parts are numbered from 1 to 10000"
                    )));
                }
                let key = layout::nar(&path, &nar_hash);
                let part = self.bucket.presign_part(&key, &upload, number, part.size, part.sha256).await?;
                Ok(put(part))
            }
            Wish::Listing { claim, path, file } => {
                let path = output_of(claims, claim, &path)?;
                within(file.size, LISTING_LIMIT, "a listing")?;
                self.new_slot(&layout::listing_of_attempt(&path, claim.attempt), file).await
            }
            Wish::Log { claim, file } => {
                let live = live(claims, claim)?;
                within(file.size, self.log_limit, "a log")?;
                let drv = store_path::parse(&live.drv_path).map_err(SignerError::from)?;
                self.new_slot(&layout::log_of_attempt(&drv, claim.attempt), file).await
            }
            Wish::Source { source, file } => {
                only_if(evaluates)?;
                let (path, _) = crate::sources::prove(&source).map_err(No::Refused)?;
                within(file.size, WHOLE_LIMIT, "a compressed NAR in one piece")?;
                self.nar_slot(&path, source.nar_hash, file, None).await
            }
            // Its narinfo comes last: where that is, everything is. What is on record stays until then, too.
            Wish::Published { path } => {
                only_if(evaluates)?;
                let parsed = store_path::parse(&path).map_err(SignerError::from)?;
                let there =
                    kept.contains(&path) && self.bucket.head(&layout::narinfo(&parsed)).await?.is_some();
                Ok(if there { Slot::Present } else { Slot::Absent })
            }
        }
    }

    async fn nar_slot(
        &self,
        path: &StorePath,
        nar_hash: Sha256,
        file: Bytes,
        job: Option<i64>,
    ) -> Result<Slot, No> {
        let key = layout::nar(path, &nar_hash);
        if let Some(stored) = self.bucket.head(&key).await?
            && (is(&stored, file) || self.keeps(path, nar_hash, &key, &stored, job).await?)
        {
            return Ok(Slot::Present);
        }
        self.new_slot(&key, file).await
    }

    async fn new_slot(&self, key: &str, file: Bytes) -> Result<Slot, No> {
        Ok(put(self.bucket.presign_put(key, file.size, file.sha256).await?))
    }

    /// Something else than what is offered is there. What a narinfo names stays; what another claim may be about to
    /// name is waited for; a leftover is removed.
    async fn keeps(
        &self,
        path: &StorePath,
        nar_hash: Sha256,
        key: &str,
        stored: &Stored,
        job: Option<i64>,
    ) -> Result<bool, No> {
        let asked = Instant::now();
        let path = path.to_string();
        let mut recorded =
            signer::recorded(&self.db, &[(path.clone(), job)]).await.map_err(SignerError::from)?;
        let recorded = recorded.remove(&path).unwrap_or_default();
        if names(&recorded, nar_hash) {
            return if is_recorded(stored, &recorded) {
                Ok(true)
            } else {
                Err(No::Refused(format!(
                    "{key} is not what was recorded: forget {path}, so that it is built again"
                )))
            };
        }
        if recorded.contested {
            return Err(No::Later(format!("another build of {path} is being uploaded")));
        }
        if asked.elapsed() > FRESH {
            return Err(No::Later(format!(
                "the database took too long to say whether {key} may be replaced"
            )));
        }
        self.bucket.delete(key).await?;
        Ok(false)
    }

    /// Hash and size of somebody else's bytes of the same NAR, which are there instead of those that were sent. They will
    /// do if they are on record.
    pub(crate) async fn recorded_file(
        &self,
        path: &str,
        nar_hash: Sha256,
        job: Option<i64>,
        stored: &Stored,
    ) -> Result<Option<(Vec<u8>, u64)>, SignerError> {
        let mut recorded = signer::recorded(&self.db, &[(path.to_owned(), job)]).await?;
        let known =
            recorded.remove(path).filter(|known| names(known, nar_hash) && is_recorded(stored, known));
        Ok(known.and_then(|known| known.file).map(|(hash, _)| (hash, stored.size)))
    }
}

pub(crate) fn fence(claim: Claim) -> Fence {
    Fence { job: claim.job, attempt: claim.attempt }
}

fn claim_of(wish: &Wish) -> Option<Claim> {
    match wish {
        Wish::Nar { claim, .. }
        | Wish::Parts { claim, .. }
        | Wish::Part { claim, .. }
        | Wish::Listing { claim, .. }
        | Wish::Log { claim, .. } => Some(*claim),
        Wish::Source { .. } | Wish::Published { .. } => None,
    }
}

fn only_if(evaluates: bool) -> Result<(), No> {
    match evaluates {
        true => Ok(()),
        false => Err(No::Refused("sources come from an evaluation that is being written".into())),
    }
}

fn live(claims: &Claims, claim: Claim) -> Result<&LiveClaim, No> {
    claims.get(&fence(claim)).ok_or_else(|| {
        No::Refused(format!(
            "attempt {} at job {} is not this node's, or not any more",
            claim.attempt, claim.job
        ))
    })
}

/// An output that the claim may produce. One without a path before the build must at least have its name.
fn output_of(claims: &Claims, claim: Claim, path: &str) -> Result<StorePath, No> {
    let live = live(claims, claim)?;
    let parsed = store_path::parse(path).map_err(SignerError::from)?;
    let drv = store_path::parse(&live.drv_path).map_err(SignerError::from)?;
    let may = live.outputs.iter().any(|(name, known)| match known {
        Some(known) => known == path,
        None => parsed.name() == output_name(&drv, name),
    });
    match may {
        true => Ok(parsed),
        false => Err(No::Refused(format!("{path} is no output of {}", live.drv_path))),
    }
}

/// The name of an output's path: the derivation's, and the output's unless it is `out`.
fn output_name(drv: &StorePath, output: &str) -> String {
    let name = drv.name().strip_suffix(".drv").unwrap_or(drv.name());
    if output == "out" { name.to_owned() } else { format!("{name}-{output}") }
}

fn within(size: u64, most: u64, what: &str) -> Result<(), No> {
    match size <= most {
        true => Ok(()),
        false => Err(No::Refused(format!("{what} has at most {most} bytes, this one has {size}"))),
    }
}

fn put(request: Presigned) -> Slot {
    Slot::Put { url: request.url, headers: request.headers }
}

/// Whether the object is exactly these bytes, as the server saw them.
pub(crate) fn is(stored: &Stored, file: Bytes) -> bool {
    stored.size == file.size && stored.checksum == Checksum::Whole(file.sha256)
}

/// Whether a narinfo names, or is about to name, this NAR of the path.
fn names(recorded: &Recorded, nar_hash: Sha256) -> bool {
    recorded.file.is_some() && recorded.nar_hash.as_deref() == Some(&nar_hash.0[..])
}

/// Whether the object is what was recorded. The hash of an object that came in parts was checked before it was recorded,
/// part by part; its size is what is left to compare.
fn is_recorded(stored: &Stored, recorded: &Recorded) -> bool {
    let Some((hash, size)) = &recorded.file else { return false };
    u64::try_from(*size).is_ok_and(|size| size == stored.size)
        && match stored.checksum {
            Checksum::Whole(sha256) => sha256.0[..] == hash[..],
            Checksum::OfParts(..) => true,
            Checksum::Unknown => false,
        }
}
