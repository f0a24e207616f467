//! Garbage is collected while nothing needs the store and its disk is low. During builds the daemon does it, by `min-free`.

use std::time::Duration;

use harmonia_nix::daemon::Garbage;
use harmonia_service::quantity::Size;
use harmonia_service::settings::{Settings, SettingsError};

use crate::Builder;
use crate::life::Held;
use crate::roots::Roots;
use crate::store::{Store, StoreError, free_bytes};

/// How often the disk is looked at.
pub const EVERY: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(3600);

/// When to begin and when to end, in free bytes of the store's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// Below this, garbage is collected.
    pub min_free: u64,
    /// Until so much is free.
    pub max_free: u64,
}

impl Marks {
    /// As the settings say.
    pub fn read(settings: &Settings) -> Result<Self, SettingsError> {
        let size = |key, default| {
            Ok::<_, SettingsError>(settings.parse::<Size>(key)?.map_or(default, |size| size.0))
        };
        let min_free = size("min_free", 2 << 30)?;
        Ok(Self { min_free, max_free: size("max_free", min_free.saturating_mul(4))?.max(min_free) })
    }

    /// How much is to be freed; None: there is enough.
    pub fn lack(self, store: &Store) -> Option<u64> {
        match free_bytes(&store.directory()) {
            Ok(free) if free < self.min_free => Some(self.max_free - free),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(%error, "the store's disk cannot be looked at");
                None
            }
        }
    }
}

/// Looks after the disk for as long as it is run.
pub async fn keep_free(builder: &Builder, held: &Held) {
    loop {
        tokio::time::sleep(EVERY).await;
        if held.is_empty() {
            if_low(&builder.store, &builder.roots, builder.config.marks).await;
        }
    }
}

/// Makes room if there is too little.
pub async fn if_low(store: &Store, roots: &Roots, marks: Marks) {
    let Some(bytes) = marks.lack(store) else { return };
    tracing::info!(bytes, "collecting garbage");
    match collect(store, roots, bytes).await {
        Ok(bytes) => tracing::info!(bytes, "collected garbage"),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "garbage cannot be collected");
        }
    }
}

async fn collect(store: &Store, roots: &Roots, max_freed: u64) -> Result<u64, StoreError> {
    roots.tidy(0).await?;
    let mut connection = store.connect(&store.options()).await?;
    let freed = connection.collect_garbage(&Garbage::Dead { max_freed }, LIMIT).await?;
    Ok(freed.bytes)
}
