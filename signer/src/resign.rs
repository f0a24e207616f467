//! Signing again what is published, after a change of keys: by hand, or in the background if somebody asked for it.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use harmonia_nix::key::SecretKey;
use harmonia_nix::narinfo;
use harmonia_nix::store_path;
use harmonia_queue::resign::{self, Resign};
use harmonia_queue::signer::{self, Published};
use harmonia_service::layout;

use crate::publish::record;
use crate::{Signer, SignerError, side_by_side};

/// Rows of one question.
const PAGE: i32 = 1_000;
/// How often a signer looks whether somebody asked.
const LOOK: Duration = Duration::from_secs(10);

impl Signer {
    /// Writes every narinfo of a recorded path, and what realises it, with the signatures of today's keys and of no other.
    /// `progress` hears how many are done. Answers how many there were.
    pub async fn resign(&self, progress: impl Fn(usize)) -> Result<usize, SignerError> {
        let keys = self.keys();
        let (mut after, mut count) = (String::new(), 0);
        while let Some((last, some)) = self.resign_page(&after, PAGE, &keys).await? {
            after = last;
            count += some;
            progress(count);
        }
        Ok(count)
    }

    /// Asks the signers that have today's keys to do the same in the background.
    pub async fn ask_to_resign(&self) -> Result<(), SignerError> {
        Ok(resign::ask(&self.db, &public_halves(&self.keys())).await?)
    }

    /// How far they are.
    pub async fn resigning(&self) -> Result<resign::State, SignerError> {
        Ok(resign::state(&self.db).await?)
    }

    /// Signs everything again whenever somebody asked for it and no other signer does.
    pub(crate) async fn keep_resigning(&self, holder: &str) {
        loop {
            match self.resign_if_asked(holder, PAGE, |_| {}).await {
                Ok(true) => tracing::info!("everything is signed with the keys of today"),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "signing everything again broke off, and goes on where it was"
                    );
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// What was asked for, from where the last one stopped, so many paths at a time. False: nothing was, or somebody else is at it.
    pub async fn resign_if_asked(
        &self,
        holder: &str,
        page: i32,
        progress: impl Fn(&str) + Send + Sync,
    ) -> Result<bool, SignerError> {
        let keys = self.keys();
        let Some(mut resign) = Resign::begin(&self.db, holder, &public_halves(&keys)).await? else {
            return Ok(false);
        };
        while let Some((last, count)) = self.resign_page(&resign.after, page, &keys).await? {
            progress(&last);
            self.counts.resigned(count);
            resign.advance(last, count as i64).await?;
        }
        resign.end().await?;
        Ok(true)
    }

    /// Some paths after this one; answers the last of them, and how many there were. None: there are no more.
    async fn resign_page(
        &self,
        after: &str,
        rows: i32,
        keys: &Arc<[SecretKey]>,
    ) -> Result<Option<(String, usize)>, SignerError> {
        let page = signer::published(&self.db, after, rows).await?;
        let paths: Vec<String> = page.iter().map(|published| published.output.path.clone()).collect();
        let Some(last) = paths.last().cloned() else { return Ok(None) };
        let written = page.into_iter().map(|published| self.resign_one(published, keys.clone()).boxed());
        side_by_side(written).await.into_iter().collect::<Result<(), _>>()?;
        self.realise_again(&paths).await?;
        Ok(Some((last, paths.len())))
    }

    async fn resign_one(&self, published: Published, keys: Arc<[SecretKey]>) -> Result<(), SignerError> {
        let path = store_path::parse(&published.output.path)?;
        let key = layout::narinfo(&path);
        // Accepted but not yet published: whoever publishes it signs it.
        let Some(there) = self.bucket.get(&key, narinfo::MAX_NARINFO_SIZE).await? else { return Ok(()) };
        let info = narinfo::parse(&there).ok();
        // Recorded otherwise since it was read here: whoever publishes that signs it.
        if info.as_ref().is_some_and(|info| info.nar_hash().digest_as_bytes() != published.output.nar_hash) {
            return Ok(());
        }
        let deriver = match &published.drv_path {
            Some(drv) => Some(store_path::parse(drv)?),
            // Its job went with the last evaluation that wanted it.
            None => info.and_then(|info| info.deriver().cloned()),
        };
        let text = narinfo::write(&record(&published.output, deriver)?, &keys)?.into_bytes();
        if text != there {
            self.bucket.put(&key, text, layout::NARINFO).await?;
            // Forgotten while it was signed: then it is not to come back.
            if !self.not_on_record(std::slice::from_ref(&published.output)).await?.is_empty() {
                self.bucket.delete(&key).await?;
            }
        }
        Ok(())
    }
}

fn public_halves(keys: &[SecretKey]) -> Vec<String> {
    keys.iter().map(SecretKey::public_text).collect()
}
