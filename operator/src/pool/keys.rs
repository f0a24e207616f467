//! The keys that sign the cache, as the frontend says. The operator holds no key itself.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use harmonia_service::sentence::sentence;
use serde::Deserialize;

use crate::context::Context;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How soon a frontend that does not know, or does not answer, is asked again.
const RETRY: Duration = Duration::from_secs(3);
/// How soon a new key is found.
const LOOK: Duration = Duration::from_secs(60);

/// The keys, once they are known. A frontend that is away later on changes nothing.
pub struct Keys {
    client: reqwest::Client,
    known: Mutex<Option<Vec<String>>>,
}

#[derive(Deserialize)]
struct PublicKey {
    name: String,
    key: String,
}

impl Keys {
    pub fn new() -> Self {
        Self { client: reqwest::Client::new(), known: Mutex::default() }
    }

    /// As `nix.conf` has them.
    pub fn known(&self) -> Option<Vec<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks again and again.
    pub async fn follow(&self, context: &Context) {
        let url = format!("{}/api/public-keys", context.installation.frontend.url.trim_end_matches('/'));
        loop {
            match self.ask(&url).await {
                Ok(keys) if keys.is_empty() => {}
                Ok(keys) => {
                    let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                    if known.as_ref() != Some(&keys) {
                        tracing::info!(?keys, "the keys that sign the cache");
                        *known = Some(keys);
                        drop(known);
                        context.caches.touch_all();
                    }
                }
                Err(error) => tracing::debug!(error = sentence(&error), "the frontend does not say its keys"),
            }
            tokio::time::sleep(if self.known().is_some() { LOOK } else { RETRY }).await;
        }
    }

    async fn ask(&self, url: &str) -> Result<Vec<String>, reqwest::Error> {
        let answer = self.client.get(url).timeout(PATIENCE).send().await?.error_for_status()?;
        let keys: Vec<PublicKey> = answer.json().await?;
        Ok(keys.into_iter().map(|PublicKey { name, key }| format!("{name}:{key}")).collect())
    }
}
