//! Garbage is collected while nothing is built and the disk is low, and before a life begins. During builds the daemon
//! does it, by `min-free`.

use std::time::Duration;

use harmonia_nix::daemon::Garbage;

use crate::Builder;
use crate::life::Held;
use crate::store::{StoreError, free_bytes};

const EVERY: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(3600);

/// Looks after the disk for as long as it is run.
pub async fn keep_free(builder: &Builder, held: &Held) {
    loop {
        tokio::time::sleep(EVERY).await;
        if held.is_empty() {
            if_low(builder).await;
        }
    }
}

/// Makes room if there is too little.
pub async fn if_low(builder: &Builder) {
    match free_bytes(&builder.store.directory()) {
        Ok(free) if free < builder.config.min_free => {
            tracing::info!(free, "collecting garbage");
            match collect(builder, builder.config.max_free - free).await {
                Ok(bytes) => tracing::info!(bytes, "collected garbage"),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "garbage cannot be collected");
                }
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "the store's disk cannot be looked at"),
    }
}

async fn collect(builder: &Builder, max_freed: u64) -> Result<u64, StoreError> {
    builder.roots.tidy(0).await?;
    let mut connection = builder.store.connect(&builder.store.options()).await?;
    let freed = connection.collect_garbage(&Garbage::Dead { max_freed }, LIMIT).await?;
    Ok(freed.bytes)
}
