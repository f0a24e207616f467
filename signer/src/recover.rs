//! What any signer takes up: records that another one accepted and did not finish, paths that builders miss, uploads in
//! parts that nobody ended.

use std::time::{Duration, SystemTime};

use harmonia_nix::store_path;
use harmonia_queue::signer;
use harmonia_service::layout;

use crate::{Signer, SignerError};

/// A signer that lives is done long before.
const ABANDONED: Duration = Duration::from_secs(15);
/// How often it looks.
const LOOK: Duration = Duration::from_secs(5);
/// Uploads in parts are given up after a day.
const STALE_PARTS: Duration = Duration::from_secs(86_400);
/// And looked for now and then, in rounds.
const SWEEP_EVERY: u32 = 720;

impl Signer {
    /// Looks for as long as it lives.
    pub(crate) async fn recover(&self) {
        let mut tick = tokio::time::interval(LOOK);
        let mut round = 0_u32;
        loop {
            tick.tick().await;
            if let Err(error) = self.complete_abandoned(ABANDONED).await {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "could not complete what others accepted"
                );
            }
            if let Err(error) = self.settle_missing().await {
                tracing::warn!(error = &error as &dyn std::error::Error, "could not look for missing paths");
            }
            if round.is_multiple_of(SWEEP_EVERY)
                && let Err(error) = self.abort_stale_parts().await
            {
                tracing::warn!(error = &error as &dyn std::error::Error, "could not end stale uploads");
            }
            round = round.wrapping_add(1);
        }
    }

    /// Publishes what was accepted so long ago and not finished. Answers how many jobs.
    pub async fn complete_abandoned(&self, older_than: Duration) -> Result<usize, SignerError> {
        let records = signer::unpublished(&self.db, older_than).await?;
        if records.is_empty() {
            return Ok(0);
        }
        let mut count = 0;
        for (fence, outcome) in self.publish(records).await {
            match outcome {
                Ok(()) => count += 1,
                Err(error) => tracing::error!(
                    job = fence.job,
                    error = &error as &dyn std::error::Error,
                    "an accepted result cannot be published"
                ),
            }
        }
        self.counts.recovered(count);
        tracing::info!(count, "completed what others had accepted");
        Ok(count)
    }

    /// Confirms or denies what builders report missing.
    async fn settle_missing(&self) -> Result<(), SignerError> {
        let mut reports = signer::missing_reports(&self.db).await?;
        reports.dedup_by(|a, b| a.0 == b.0);
        for (path, _) in reports {
            // One that cannot be looked at stands in nobody's way.
            if let Err(error) = self.settle_one(&path).await {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(path, error, "a path that a builder misses cannot be looked at now");
            }
        }
        Ok(())
    }

    async fn settle_one(&self, path: &str) -> Result<(), SignerError> {
        let gone = self.is_gone(path).await?;
        if gone {
            // What was made with it is forgotten with it: were its narinfos left, no other build of it could be published.
            let going = signer::to_forget(&self.db, &[path.to_owned()], None).await?;
            match self.take_back(&going).await {
                // What it was realised as cannot be named any more. Its builders wait all the same.
                Err(error @ SignerError::Unproven { .. }) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(path, error, "a realisation may be left");
                }
                taken => taken?,
            }
        }
        let reopened = signer::settle_missing(&self.db, path, gone).await?;
        tracing::info!(path, gone, reopened, "a builder could not find a path");
        self.resolver.nudge();
        Ok(())
    }

    /// Whether a client would not get it: no narinfo, or one whose NAR is not there. A narinfo without its NAR is removed,
    /// or the path could not be published again.
    async fn is_gone(&self, path: &str) -> Result<bool, SignerError> {
        let Ok(parsed) = store_path::parse(path) else { return Ok(true) };
        let key = layout::narinfo(&parsed);
        let limit = harmonia_nix::narinfo::MAX_NARINFO_SIZE;
        let Some(text) = self.bucket.get(&key, limit).await? else { return Ok(true) };
        let there = match harmonia_nix::narinfo::parse(&text) {
            Ok(narinfo) => self.bucket.head(narinfo.url()).await?.is_some(),
            Err(_) => false,
        };
        if !there {
            self.bucket.delete(&key).await?;
        }
        Ok(!there)
    }

    async fn abort_stale_parts(&self) -> Result<(), SignerError> {
        let before = SystemTime::now().checked_sub(STALE_PARTS).unwrap_or(SystemTime::UNIX_EPOCH);
        for (key, upload) in self.bucket.stale_parts(before).await? {
            tracing::info!(key, "ending an upload that was begun a day ago");
            if let Err(error) = self.bucket.abort_parts(&key, &upload).await {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(key, error, "an upload that was begun a day ago cannot be ended now");
            }
        }
        Ok(())
    }
}
