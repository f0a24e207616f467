//! What others have built already: the narinfos of outputs are looked up at the substituters that the settings name, many at once.
//! Only what a trusted key has signed counts, and its hash is what the path is from then on. An answer that does not come means
//! that nothing is known, and the path is built.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};
use harmonia_nix::key::PublicKey;
use harmonia_nix::narinfo::{self, MAX_NARINFO_SIZE};
use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::ingest::KnownPath;
use tokio::time::Instant;

/// Questions on their way at once.
const AT_ONCE: usize = 128;
/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// After so many without an answer in one batch, a substituter is taken for away.
const AWAY: usize = 20;
/// How long it is believed that nobody has a path.
const MISSING: Duration = Duration::from_secs(600);
/// Paths that are remembered, at most: some 20 MB.
const REMEMBERED: usize = 100_000;

/// The substituters, and what they said.
#[derive(Debug)]
pub struct Substituters {
    http: reqwest::Client,
    urls: Vec<String>,
    keys: Vec<PublicKey>,
    /// Until when nobody asks again: what was found is in the queue, for good.
    asked: Mutex<HashMap<String, Option<Instant>>>,
}

impl Substituters {
    /// Asked through this client.
    pub fn new(http: reqwest::Client, urls: Vec<String>, keys: Vec<PublicKey>) -> Self {
        let urls = urls.into_iter().map(|url| url.trim_end_matches('/').to_owned()).collect();
        Self { http, urls, keys, asked: Mutex::default() }
    }

    /// Which of these paths somebody has, and what they are there.
    pub async fn look_up(&self, paths: Vec<String>) -> Vec<KnownPath> {
        let mut found = Vec::new();
        let mut left = self.not_asked_lately(paths);
        for url in &self.urls {
            let silent = AtomicUsize::new(0);
            let asking: Vec<_> = left.iter().map(|path| self.ask(url, path, &silent).boxed()).collect();
            let answers: Vec<Option<KnownPath>> = stream::iter(asking).buffered(AT_ONCE).collect().await;
            let (mut missing, mut answers) = (Vec::new(), answers.into_iter());
            for path in left {
                match answers.next().flatten() {
                    Some(known) => found.push(known),
                    None => missing.push(path),
                }
            }
            left = missing;
        }
        let until = Instant::now() + MISSING;
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() > REMEMBERED {
            asked.clear();
        }
        asked.extend(found.iter().map(|known| (known.path.clone(), None)));
        asked.extend(left.into_iter().map(|path| (path, Some(until))));
        found
    }

    fn not_asked_lately(&self, paths: Vec<String>) -> Vec<String> {
        if self.urls.is_empty() {
            return Vec::new();
        }
        let now = Instant::now();
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let lately =
            |path: &String| asked.get(path).is_some_and(|until| until.is_none_or(|until| until > now));
        paths.into_iter().filter(|path| !lately(path)).collect()
    }

    async fn ask(&self, url: &str, path: &str, silent: &AtomicUsize) -> Option<KnownPath> {
        if silent.load(Ordering::Relaxed) >= AWAY {
            return None;
        }
        let path = store_path::parse(path).ok()?;
        let address = format!("{url}/{}", narinfo::object_name(&path));
        let answer = async {
            let response = self.http.get(address).send().await?;
            if !response.status().is_success() {
                return Ok::<_, reqwest::Error>(None);
            }
            Ok(Some(response.bytes().await?))
        };
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Ok(text)) => {
                silent.store(0, Ordering::Relaxed);
                self.read(&path, &text?)
            }
            _ => {
                silent.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Of this very path, and signed.
    fn read(&self, path: &StorePath, text: &[u8]) -> Option<KnownPath> {
        let info = narinfo::parse(text.get(..text.len().min(MAX_NARINFO_SIZE))?).ok()?;
        if info.store_path() != path || !narinfo::is_signed_by(&info, &self.keys) {
            return None;
        }
        Some(KnownPath {
            path: path.to_string(),
            nar_hash: Some(info.nar_hash().digest_as_bytes().to_vec()).filter(|hash| hash.len() == 32)?,
            nar_size: i64::try_from(info.nar_size()).ok()?,
            references: info.references().iter().map(StorePath::to_string).collect(),
        })
    }
}
