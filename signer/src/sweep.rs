//! Removing from the bucket what nobody needs.
//!
//! From records to objects: paths that no kept evaluation needs are marked, and forgotten when their grace is over; then
//! their narinfos go, then all else. From objects to records: what lies in the bucket and belongs to nothing, such as the
//! NAR of an attempt that was lost ([`leftovers`]).

mod keeping;
mod leftovers;
mod tally;

use std::time::{Duration, Instant};

use futures::FutureExt;
use harmonia_nix::{Sha256, store_path};
use harmonia_queue::sweep::{self, Condemned, Sweep};
use harmonia_service::layout;

pub use keeping::Keeping;
pub use tally::{Swept, Tally};

use crate::{Signer, SignerError, side_by_side};

/// Records of one step of the plan: some tenths of a second.
const PAGE: i32 = 20_000;
/// Texts that are read in one step.
const TEXTS: i32 = 500;
/// Marks that are confirmed in one step, during which no evaluation can be written.
const CONFIRMED: i32 = 2_000;
/// Paths that are forgotten, and removed, in one step.
const CONDEMNED: i32 = 500;
/// How often a signer looks whether the next sweep is due.
const LOOK: Duration = Duration::from_secs(60);
/// After each step, so many times as long as it took nothing is asked of the database: claims have the rest.
const REST: u32 = 9;
/// But no longer: a sweeper that is silent for two minutes is taken for dead.
const LONGEST_REST: Duration = Duration::from_secs(30);
/// Objects of one step are removed within this, so that two of them fit into those two minutes: later, another may sweep, and
/// what it removed may be published again.
const REMOVAL: Duration = Duration::from_secs(50);

impl Signer {
    /// Sweeps whenever it is due and no other signer does.
    pub(crate) async fn keep_sweeping(&self, holder: &str, keeping: &Keeping) {
        let Some(every) = keeping.every else { return };
        loop {
            tokio::time::sleep(LOOK).await;
            match self.sweep(holder, keeping, Some(every), |_| {}).await {
                Ok(Some(swept)) => tracing::info!(%swept, "swept the bucket"),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "a sweep of the bucket broke off"
                    )
                }
            }
        }
    }

    /// One whole sweep; `every`: only if the last one is so long ago. None: not due, or somebody else sweeps.
    pub async fn sweep(
        &self,
        holder: &str,
        keeping: &Keeping,
        every: Option<Duration>,
        progress: impl Fn(&Swept) + Send + Sync,
    ) -> Result<Option<Swept>, SignerError> {
        let Some(sweep) = Sweep::begin(&self.db, holder, every).await? else { return Ok(None) };
        let mut swept = Swept::default();
        while self.remove_condemned(sweep.unburied(CONDEMNED).await?, &sweep, &mut swept).await? {}
        self.read_sources(&sweep).await?;
        self.plan(&sweep, keeping).await?;
        loop {
            let condemned = paced(sweep.condemn(keeping.grace, CONDEMNED)).await?;
            // No evaluation may have named sources since that were not read.
            if !self.remove_condemned(condemned, &sweep, &mut swept).await?
                && !self.read_sources(&sweep).await?
            {
                break;
            }
            progress(&swept);
        }
        self.sweep_leftovers(keeping, Some(&sweep), &mut swept, &progress).await?;
        swept.waiting = sweep::marked(&self.db).await?.into();
        sweep.end().await?;
        self.counts.swept(&swept);
        Ok(Some(swept))
    }

    /// What a sweep would remove now, and what it would leave for later. Nothing is marked or removed, but texts are read for
    /// their sources, as a sweep does first. None: somebody sweeps.
    pub async fn would_sweep(&self, holder: &str, keeping: &Keeping) -> Result<Option<Swept>, SignerError> {
        let Some(reading) = Sweep::begin(&self.db, holder, None).await? else { return Ok(None) };
        self.read_sources(&reading).await?;
        reading.release().await?;
        let [ripe, waiting] = sweep::would_sweep(&self.db, keeping.grace).await?;
        let mut swept = Swept { paths: ripe.into(), waiting: waiting.into(), ..Swept::default() };
        self.sweep_leftovers(keeping, None, &mut swept, &|_| {}).await?;
        Ok(Some(swept))
    }

    /// Answers whether there was anything to read.
    async fn read_sources(&self, sweep: &Sweep<'_>) -> Result<bool, SignerError> {
        let mut any = false;
        while paced(sweep.read_sources(TEXTS)).await? {
            any = true;
        }
        Ok(any)
    }

    /// Marks what no kept evaluation needs.
    async fn plan(&self, sweep: &Sweep<'_>, keeping: &Keeping) -> Result<(), SignerError> {
        sweep::pass(|after| async move { paced(sweep.mark_candidates(&after, PAGE, keeping.grace)).await })
            .await?;
        sweep::pass(|after| async move { paced(sweep.spare_references(&after, PAGE)).await }).await?;
        Ok(sweep::pass(|after| async move { paced(sweep.confirm(&after, CONFIRMED)).await }).await?)
    }

    /// Removes the objects of paths that the queue has forgotten, narinfos first. False: there are none.
    async fn remove_condemned(
        &self,
        condemned: Vec<Condemned>,
        sweep: &Sweep<'_>,
        swept: &mut Swept,
    ) -> Result<bool, SignerError> {
        if condemned.is_empty() {
            return Ok(false);
        }
        let ours: Vec<&Condemned> = condemned.iter().filter(|path| path.file_size.is_some()).collect();
        let keys = ours.iter().map(|path| keys_of(path)).collect::<Result<Vec<_>, _>>()?;
        self.delete_all(keys.iter().map(|(narinfo, _)| narinfo.clone())).await?;
        self.delete_all(keys.iter().flat_map(|(_, rest)| rest.clone())).await?;
        let paths: Vec<String> = ours.iter().map(|condemned| condemned.path.clone()).collect();
        sweep.bury(&paths).await?;
        for path in ours {
            swept.paths.add(path.file_size.and_then(|size| size.try_into().ok()).unwrap_or(0));
        }
        Ok(true)
    }

    async fn delete_all(&self, keys: impl Iterator<Item = String>) -> Result<(), SignerError> {
        let deleted = keys.map(|key| async move { self.bucket.delete(&key).await }.boxed());
        let deleted = tokio::time::timeout(REMOVAL, side_by_side(deleted)).await;
        Ok(deleted.map_err(|_| SignerError::Slow(REMOVAL))?.into_iter().collect::<Result<_, _>>()?)
    }
}

/// The narinfo of a path, and all else that is there for its sake.
fn keys_of(condemned: &Condemned) -> Result<(String, Vec<String>), SignerError> {
    let path = store_path::parse(&condemned.path)?;
    let damaged = |_| SignerError::Record(condemned.path.clone());
    let nar_hash = Sha256::try_from(condemned.nar_hash.as_slice()).map_err(damaged)?;
    let mut rest = vec![layout::nar(&path, &nar_hash), layout::listing(&path)];
    rest.extend(condemned.attempt.map(|attempt| layout::listing_of_attempt(&path, attempt)));
    Ok((layout::narinfo(&path), rest))
}

/// A step, and its rest.
pub async fn paced<T>(step: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let answer = step.await;
    tokio::time::sleep((begun.elapsed() * REST).min(LONGEST_REST)).await;
    answer
}
