//! From an accepted record to signed narinfos, and to the job's end.

use std::collections::{BTreeSet, HashMap};

use futures::FutureExt;
use harmonia_nix::Sha256;
use harmonia_nix::key::PublicKey;
use harmonia_nix::narinfo::{self, Record};
use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::signer::{Output, Realised, Unpublished};
use harmonia_queue::{Fence, signer};
use harmonia_service::bucket::Written;
use harmonia_service::layout;
use harmonia_service::sentence::sentence;

use crate::{Signer, SignerError, side_by_side};

/// Why something has to be asked again.
pub(crate) const BUSY: &str = "its builder speaks of it at this moment";
/// A narinfo of a path with thousands of references has some hundred kilobytes.
const NARINFO_LIMIT: usize = narinfo::MAX_NARINFO_SIZE;

impl Signer {
    /// Publishes records and finishes their jobs. Answers what became of each; one that cannot be published stands in
    /// nobody's way.
    pub(crate) async fn publish(&self, records: Vec<Unpublished>) -> Vec<(Fence, Result<(), SignerError>)> {
        let outputs: HashMap<Fence, Vec<Output>> =
            records.iter().map(|job| (job.fence, job.outputs.clone())).collect();
        let written =
            records.into_iter().map(|job| async move { (job.fence, self.write(&job).await) }.boxed());
        let mut outcomes = side_by_side(written).await;
        for (fence, outcome) in &outcomes {
            if let Err(error @ SignerError::Foreign { .. }) = outcome {
                self.give_up(*fence, error, outputs.get(fence).map_or(&[], Vec::as_slice)).await;
            }
        }
        let done: Vec<Fence> =
            outcomes.iter().filter(|(_, written)| written.is_ok()).map(|(fence, _)| *fence).collect();
        if !done.is_empty() {
            let (reason, unfinished) = match signer::finish(&self.db, &done).await {
                Ok(finished) => {
                    let silent = |fence: &Fence| {
                        !finished.jobs.contains(&fence.job) && !finished.busy.contains(&fence.job)
                    };
                    for (fence, outcome) in
                        outcomes.iter_mut().filter(|(fence, done)| done.is_ok() && silent(fence))
                    {
                        *outcome = self.withdraw(outputs.get(fence).map_or(&[], Vec::as_slice)).await;
                    }
                    (BUSY.to_owned(), finished.busy)
                }
                Err(error) => (error.to_string(), done.iter().map(|fence| fence.job).collect()),
            };
            self.resolver.nudge();
            // Their narinfos are there: whoever shows them again, or looks for unfinished records next, finishes them.
            if !unfinished.is_empty() {
                tracing::warn!(reason, jobs = ?unfinished, "published but not finished");
            }
            let is_unfinished = |fence: &Fence| unfinished.contains(&fence.job);
            for (_, outcome) in
                outcomes.iter_mut().filter(|(fence, done)| done.is_ok() && is_unfinished(fence))
            {
                *outcome = Err(harmonia_queue::Error::WrongState(reason.clone()).into());
            }
        }
        outcomes
    }

    /// What a job that is not accepted any more had published: another signer has finished it, or its record was forgotten while
    /// its narinfos were written. Then they go, or another build of the paths could not be published.
    async fn withdraw(&self, outputs: &[Output]) -> Result<(), SignerError> {
        let forgotten = self.not_on_record(outputs).await?;
        for output in &forgotten {
            let key = layout::narinfo(&store_path::parse(&output.path)?);
            let there = self.bucket.get(&key, NARINFO_LIMIT).await?;
            let there = there.and_then(|there| narinfo::parse(&there).ok());
            if there.is_some_and(|there| there.nar_hash().digest_as_bytes() == output.nar_hash.as_slice()) {
                self.bucket.delete(&key).await?;
            }
        }
        match forgotten.first() {
            None => Ok(()),
            Some(output) => Err(SignerError::Forgotten(output.path.clone())),
        }
    }

    /// Those that are not on record, or are something else by now.
    pub(crate) async fn not_on_record<'a>(
        &self,
        outputs: &'a [Output],
    ) -> Result<Vec<&'a Output>, SignerError> {
        let wanted: Vec<(String, Option<i64>)> =
            outputs.iter().map(|output| (output.path.clone(), None)).collect();
        let recorded = signer::recorded(&self.db, &wanted).await?;
        let is_recorded = |output: &Output| {
            recorded.get(&output.path).is_some_and(|known| known.nar_hash.as_ref() == Some(&output.nar_hash))
        };
        Ok(outputs.iter().filter(|output| !is_recorded(output)).collect())
    }

    /// Nobody can publish it before a person has looked: it fails with the sentence that says how. What was published of it goes.
    async fn give_up(&self, fence: Fence, error: &SignerError, outputs: &[Output]) {
        let sentence = format!("{}; then rebuild it", sentence(error));
        let failed = match signer::give_up(&self.db, fence, &sentence).await {
            Ok(given_up) => {
                tracing::error!(
                    job = fence.job,
                    given_up,
                    error = error as &dyn std::error::Error,
                    "a result cannot be published"
                );
                self.resolver.nudge();
                match given_up {
                    true => self.withdraw(outputs).await.err(),
                    false => None,
                }
            }
            // Whoever looks for unfinished results next tries both again.
            Err(error) => Some(error.into()),
        };
        if let Some(error) = failed.filter(|error| !matches!(error, SignerError::Forgotten(_))) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(job = fence.job, error, "could not give up a result");
        }
    }

    /// Everything of one job that clients see. Listing, log and realisations first: the narinfo makes the path visible.
    async fn write(&self, job: &Unpublished) -> Result<(), SignerError> {
        let drv = store_path::parse(&job.drv_path)?;
        let log = layout::log_of_attempt(&drv, job.fence.attempt);
        let copies = job.outputs.iter().filter_map(|output| {
            let path = store_path::parse(&output.path).ok()?;
            Some((
                layout::listing_of_attempt(&path, output.made_by?),
                layout::listing(&path),
                layout::LISTING,
            ))
        });
        let copies = copies.chain([(log, layout::log(&drv), layout::LOG)]);
        let copied =
            copies.map(|(from, to, kind)| async move { self.bucket.copy(&from, &to, kind).await }.boxed());
        side_by_side(copied).await.into_iter().collect::<Result<Vec<bool>, _>>()?;
        if job.realised {
            let realised = |output: &Output| Realised {
                drv_path: job.drv_path.clone(),
                output: output.name.clone(),
                path: output.path.clone(),
            };
            self.realise(&job.outputs.iter().map(realised).collect::<Vec<_>>()).await?;
        }
        // What a substituter has, and nobody brought to us, clients find there.
        let ours = |output: &&Output| !output.file_hash.is_empty();
        for output in referred_first(&job.outputs).into_iter().filter(ours) {
            self.write_narinfo(&record(output, Some(drv.clone()))?).await?;
        }
        Ok(())
    }

    /// Writes a narinfo, unless it is there. One that none of today's keys signed is signed again.
    pub(crate) async fn write_narinfo(&self, record: &Record) -> Result<(), SignerError> {
        let keys = self.keys();
        let text = narinfo::write(record, &keys)?;
        let key = layout::narinfo(&record.path);
        if self.bucket.put_new(&key, text.clone().into_bytes(), layout::NARINFO).await? == Written::New {
            return Ok(());
        }
        let Some(there) = self.bucket.get(&key, NARINFO_LIMIT).await? else {
            // Removed since: whoever did that may be about to forget the record, too.
            return Err(harmonia_queue::Error::WrongState(format!("{key} is being removed")).into());
        };
        let there = narinfo::parse(&there).ok();
        let same = there.as_ref().is_some_and(|there| {
            there.store_path() == &record.path && there.nar_hash().digest_as_bytes() == record.nar_hash.0
        });
        if !same {
            return Err(SignerError::Foreign { path: record.path.to_string() });
        }
        let public: Vec<PublicKey> = keys.iter().map(|key| key.public()).collect();
        if !there.is_some_and(|there| narinfo::is_signed_by(&there, &public)) {
            self.bucket.put(&key, text.into_bytes(), layout::NARINFO).await?;
        }
        Ok(())
    }
}

/// What the queue recorded, as a narinfo says it.
pub(crate) fn record(output: &Output, deriver: Option<StorePath>) -> Result<Record, SignerError> {
    let damaged = || SignerError::Record(output.path.clone());
    let path = store_path::parse(&output.path)?;
    let nar_hash = Sha256::try_from(output.nar_hash.as_slice()).map_err(|_| damaged())?;
    let references: Result<BTreeSet<StorePath>, _> = output
        .references
        .iter()
        .filter(|path| !path.is_empty())
        .map(|path| store_path::parse(path))
        .collect();
    Ok(Record {
        url: layout::nar(&path, &nar_hash),
        path,
        nar_hash,
        nar_size: u64::try_from(output.nar_size).map_err(|_| damaged())?,
        references: references?,
        deriver,
        ca: match &output.content_address {
            Some(text) => Some(text.parse().map_err(|_| damaged())?),
            None => None,
        },
        file_hash: Sha256::try_from(output.file_hash.as_slice()).map_err(|_| damaged())?,
        file_size: u64::try_from(output.file_size).map_err(|_| damaged())?,
    })
}

/// Outputs refer to each other and never in a circle: what is referred to comes first, so that no client ever finds a
/// path without what it needs.
fn referred_first(outputs: &[Output]) -> Vec<&Output> {
    let mut left: Vec<&Output> = outputs.iter().collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        let waits = |output: &Output| {
            left.iter().any(|other| other.path != output.path && output.references.contains(&other.path))
        };
        // In a circle, which cannot be, the first goes first.
        let next = left.iter().position(|output| !waits(output)).unwrap_or(0);
        order.push(left.remove(next));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(path: &str, references: &[&str]) -> Output {
        Output {
            name: path.to_owned(),
            path: path.to_owned(),
            nar_hash: vec![0; 32],
            nar_size: 0,
            references: references.iter().map(|&path| path.to_owned()).collect(),
            file_hash: vec![0; 32],
            file_size: 0,
            content_address: None,
            made_by: None,
        }
    }

    #[test]
    fn what_is_referred_to_comes_first() {
        let outputs = [output("dev", &["out", "lib", "dev"]), output("lib", &[]), output("out", &["lib"])];
        let order: Vec<&str> = referred_first(&outputs).iter().map(|output| output.path.as_str()).collect();
        assert_eq!(order, ["lib", "out", "dev"]);
    }
}
