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
/// After so many without an answer one after the other, a substituter is taken for away,
const SILENT: usize = 20;
/// for so long: a network that swallows what is sent would cost every batch its patience.
const AWAY: Duration = Duration::from_secs(60);
/// How long it is believed that nobody has a path, or that the queue knows what it is.
const BELIEVED: Duration = Duration::from_secs(600);
/// Paths that are remembered, at most: some 20 MB.
const REMEMBERED: usize = 100_000;

/// The substituters, and what they said.
#[derive(Debug)]
pub struct Substituters {
    http: reqwest::Client,
    all: Vec<Substituter>,
    keys: Vec<PublicKey>,
    /// Until when nobody asks again.
    asked: Mutex<HashMap<String, Instant>>,
}

/// What a substituter says of a path.
enum Answer {
    Has(KnownPath),
    /// It has none, or none that counts.
    HasNot,
    /// Nothing.
    None,
}

#[derive(Debug)]
struct Substituter {
    url: String,
    silent: AtomicUsize,
    away_until: Mutex<Option<Instant>>,
}

impl Substituter {
    fn new(url: &str) -> Self {
        let url = url.trim_end_matches('/').to_owned();
        Self { url, silent: AtomicUsize::default(), away_until: Mutex::default() }
    }

    fn is_away(&self) -> bool {
        let until = *self.away_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| until > Instant::now())
    }

    fn answered(&self) {
        self.silent.store(0, Ordering::Relaxed);
    }

    fn said_nothing(&self) {
        if self.silent.fetch_add(1, Ordering::Relaxed) + 1 >= SILENT {
            self.silent.store(0, Ordering::Relaxed);
            *self.away_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + AWAY);
        }
    }
}

impl Substituters {
    /// Asked through this client.
    pub fn new(http: reqwest::Client, urls: &[String], keys: Vec<PublicKey>) -> Self {
        let all = urls.iter().map(|url| Substituter::new(url)).collect();
        Self { http, all, keys, asked: Mutex::default() }
    }

    /// Which of these paths somebody has, and what they are there. Once the queue knows it too, it is to be [`Self::recorded`].
    pub async fn look_up(&self, paths: Vec<String>) -> Vec<KnownPath> {
        let mut found = Vec::new();
        // With whether everybody has answered so far.
        let mut left: Vec<_> = self.not_asked_lately(paths).into_iter().map(|path| (path, true)).collect();
        for substituter in &self.all {
            let asking: Vec<_> = left.iter().map(|(path, _)| self.ask(substituter, path).boxed()).collect();
            let answers: Vec<Answer> = stream::iter(asking).buffered(AT_ONCE).collect().await;
            let mut missing = Vec::new();
            for ((path, all), answer) in left.into_iter().zip(answers) {
                match answer {
                    Answer::Has(known) => found.push(known),
                    Answer::HasNot => missing.push((path, all)),
                    Answer::None => missing.push((path, false)),
                }
            }
            left = missing;
        }
        self.believe(left.into_iter().filter(|(_, all)| *all).map(|(path, _)| path));
        found
    }

    /// The queue knows what these are.
    pub fn recorded(&self, known: &[KnownPath]) {
        self.believe(known.iter().map(|known| known.path.clone()));
    }

    fn believe(&self, paths: impl Iterator<Item = String>) {
        let until = Instant::now() + BELIEVED;
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() > REMEMBERED {
            asked.clear();
        }
        asked.extend(paths.map(|path| (path, until)));
    }

    fn not_asked_lately(&self, paths: Vec<String>) -> Vec<String> {
        if self.all.is_empty() {
            return Vec::new();
        }
        let now = Instant::now();
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        paths.into_iter().filter(|path| asked.get(path).is_none_or(|until| *until <= now)).collect()
    }

    async fn ask(&self, substituter: &Substituter, path: &str) -> Answer {
        let Ok(path) = store_path::parse(path) else { return Answer::HasNot };
        if substituter.is_away() {
            return Answer::None;
        }
        let address = format!("{}/{}", substituter.url, narinfo::object_name(&path));
        let answer = async {
            let response = self.http.get(address).send().await?;
            let status = response.status();
            let text = if status.is_success() { Some(response.bytes().await?) } else { None };
            Ok::<_, reqwest::Error>((status, text))
        };
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Ok((status, text))) => {
                substituter.answered();
                let known = text.and_then(|text| self.read(&path, &text));
                let nothing = if status.is_server_error() { Answer::None } else { Answer::HasNot };
                known.map_or(nothing, Answer::Has)
            }
            _ => {
                substituter.said_nothing();
                Answer::None
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use harmonia_nix::key::SecretKey;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const PATH: &str = "/nix/store/vbb1lilif8558y8qx1m16hz3yn7zpax5-above";

    /// A substituter that answers everybody the same, and counts them.
    async fn substituter(answer: &'static str) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (url, asked) =
            (format!("http://{}", listener.local_addr().unwrap()), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                let _ = client.read(&mut [0; 4096]).await;
                let text = format!("HTTP/1.1 {answer}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
                let _ = client.write_all(text.as_bytes()).await;
            }
        });
        (url, asked)
    }

    async fn look_up_twice(answers: [&'static str; 2]) -> [usize; 2] {
        let (first, second) = (substituter(answers[0]).await, substituter(answers[1]).await);
        let key = SecretKey::generate("k-1").unwrap().public();
        let http = harmonia_builder::upload::local_http_client().unwrap();
        let substituters = Substituters::new(http, &[first.0, second.0], vec![key]);
        for _ in 0..2 {
            assert!(substituters.look_up(vec![PATH.to_owned()]).await.is_empty());
        }
        [first.1.load(Ordering::Relaxed), second.1.load(Ordering::Relaxed)]
    }

    #[tokio::test]
    async fn what_nobody_has_is_not_asked_for_again_soon() {
        assert_eq!(look_up_twice(["404 Not Found", "403 Forbidden"]).await, [1, 1]);
    }

    #[tokio::test]
    async fn what_somebody_did_not_answer_is_asked_for_again() {
        assert_eq!(look_up_twice(["503 Service Unavailable", "404 Not Found"]).await, [2, 2]);
    }

    #[tokio::test]
    async fn what_the_queue_knows_is_not_asked_for() {
        let (url, asked) = substituter("404 Not Found").await;
        let substituters =
            Substituters::new(harmonia_builder::upload::local_http_client().unwrap(), &[url], vec![]);
        let known =
            KnownPath { path: PATH.to_owned(), nar_hash: vec![0; 32], nar_size: 1, references: vec![] };
        substituters.recorded(&[known]);
        substituters.look_up(vec![PATH.to_owned()]).await;
        assert_eq!(asked.load(Ordering::Relaxed), 0);
    }
}
