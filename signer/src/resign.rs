//! Signing again what is published, after a change of keys.

use std::sync::Arc;

use futures::FutureExt;
use harmonia_nix::key::SecretKey;
use harmonia_nix::narinfo;
use harmonia_nix::store_path;
use harmonia_queue::signer::{self, Published};
use harmonia_service::layout;

use crate::publish::record;
use crate::{Signer, SignerError, side_by_side};

/// Rows of one question.
const PAGE: i32 = 1_000;

impl Signer {
    /// Writes every narinfo of a recorded path, and what realises it, with the signatures of today's keys and of no other.
    /// `progress` hears how many are done. Answers how many there were.
    pub async fn resign(&self, progress: impl Fn(usize)) -> Result<usize, SignerError> {
        let keys = self.keys();
        let (mut after, mut count) = (String::new(), 0);
        loop {
            let page = signer::published(&self.db, &after, PAGE).await?;
            let Some(last) = page.last() else { return Ok(count) };
            after.clone_from(&last.output.path);
            count += page.len();
            let paths: Vec<String> = page.iter().map(|published| published.output.path.clone()).collect();
            let written = page.into_iter().map(|published| self.resign_one(published, keys.clone()).boxed());
            side_by_side(written).await.into_iter().collect::<Result<(), _>>()?;
            self.realise_again(&paths).await?;
            progress(count);
        }
    }

    async fn resign_one(&self, published: Published, keys: Arc<[SecretKey]>) -> Result<(), SignerError> {
        let path = store_path::parse(&published.output.path)?;
        let key = layout::narinfo(&path);
        // Accepted but not yet published: whoever publishes it signs it.
        let Some(there) = self.bucket.get(&key, narinfo::MAX_NARINFO_SIZE).await? else { return Ok(()) };
        let deriver = match &published.drv_path {
            Some(drv) => Some(store_path::parse(drv)?),
            // Its job went with the last evaluation that wanted it.
            None => narinfo::parse(&there).ok().and_then(|info| info.deriver().cloned()),
        };
        let text = narinfo::write(&record(&published.output, deriver)?, &keys)?.into_bytes();
        if text != there {
            self.bucket.put(&key, text, layout::NARINFO).await?;
        }
        Ok(())
    }
}
