//! Small objects of the bucket: narinfos above all, which every client asks for first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::HeaderValue;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use harmonia_nix::Sha256;
use harmonia_service::bucket::Bucket;
use harmonia_service::problem::Problem;
use nix_narinfo::MAX_NARINFO_SIZE;
use tokio::sync::Semaphore;

use crate::count::Counts;
use crate::remember::Memory;
use harmonia_service::sentence::sentence;

/// A forgotten or newly signed path shows within this time.
const LIFETIME: Duration = Duration::from_secs(30);
/// All that is remembered: some 30,000 narinfos.
const MOST: usize = 64 << 20;
/// What an object weighs beside its bytes: its key, its tag, two places in a map.
const OVERHEAD: usize = 300;
/// The bucket is asked for so many objects at once, each over a connection of its own.
const AT_ONCE: usize = 256;
/// An answer that comes later is of no use: Nix asks again, or elsewhere.
const PATIENCE: Duration = Duration::from_secs(20);

/// An object's bytes.
#[derive(Debug)]
pub struct Object {
    /// All of them.
    pub bytes: Bytes,
    /// Says whether they changed.
    pub etag: HeaderValue,
}

impl Object {
    fn new(bytes: Vec<u8>) -> Self {
        // The digits of nix32 are always fit for a header.
        let etag = HeaderValue::try_from(format!("\"{}\"", Sha256::of(&bytes).nix32()));
        Self { etag: etag.unwrap_or(HeaderValue::from_static("\"\"")), bytes: bytes.into() }
    }
}

/// The bucket did not answer, or not with what it should; it was logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Away;

impl From<Away> for Problem {
    fn from(_: Away) -> Self {
        Problem::unavailable("the storage behind the cache does not answer: try again in a moment")
    }
}

type Found = Result<Option<Arc<Object>>, Away>;
type Flight = BoxFuture<'static, Found>;
type Fetch = dyn Fn(String) -> BoxFuture<'static, Result<Option<Vec<u8>>, Away>> + Send + Sync;

/// Finds small objects: in memory, or in the bucket, which is asked once however many ask for the same at once. Only what
/// is there is remembered, for what is missing may be signed in the next moment.
#[derive(Clone)]
pub struct Finder {
    fetch: Arc<Fetch>,
    state: Arc<Mutex<State>>,
    counts: Counts,
}

struct State {
    kept: Memory<String, Arc<Object>>,
    flights: HashMap<String, (u64, WeakShared<Flight>)>,
    last: u64,
}

enum Seen {
    Kept(Arc<Object>),
    /// On its way, and whether it left for this very request.
    Flying(Shared<Flight>, bool),
}

impl Finder {
    /// Of a bucket's objects.
    pub fn new(bucket: &Bucket, counts: Counts) -> Self {
        let (bucket, gate) = (bucket.clone(), Arc::new(Semaphore::new(AT_ONCE)));
        let fetch = move |key: String| {
            let (bucket, gate) = (bucket.clone(), gate.clone());
            async move { fetch(&bucket, &gate, &key).await }.boxed()
        };
        Self::by(Arc::new(fetch), counts)
    }

    fn by(fetch: Arc<Fetch>, counts: Counts) -> Self {
        let kept = Memory::new(Instant::now(), LIFETIME, MOST);
        let state = State { kept, flights: HashMap::new(), last: 0 };
        Self { fetch, state: Arc::new(Mutex::new(state)), counts }
    }

    /// An object, if it is there.
    pub async fn find(&self, key: &str) -> Found {
        let seen = self.look(key);
        self.counts.remembered(matches!(seen, Seen::Kept(_)));
        let (flight, own) = match seen {
            Seen::Kept(object) => return Ok(Some(object)),
            Seen::Flying(flight, own) => (flight, own),
        };
        let found = flight.await;
        if own || found != Ok(None) {
            return found;
        }
        // That flight left before this request came, and the object may have been signed in between. The next one leaves
        // after it came, whoever sends it.
        match self.look(key) {
            Seen::Kept(object) => Ok(Some(object)),
            Seen::Flying(flight, _) => flight.await,
        }
    }

    fn look(&self, key: &str) -> Seen {
        let mut state = lock(&self.state);
        if let Some(object) = state.kept.get(Instant::now(), key) {
            return Seen::Kept(object);
        }
        if let Some(flight) = state.flights.get(key).and_then(|(_, flight)| flight.upgrade()) {
            return Seen::Flying(flight, false);
        }
        state.last += 1;
        let landing =
            Landing { state: self.state.clone(), key: key.to_owned(), number: state.last, object: None };
        let fetched = (self.fetch)(key.to_owned());
        let flight = async move {
            let found = fetched.await?.map(|bytes| Arc::new(Object::new(bytes)));
            landing.land(found.clone());
            Ok(found)
        };
        let flight = flight.boxed().shared();
        if let Some(weak) = flight.downgrade() {
            let number = state.last;
            state.flights.insert(key.to_owned(), (number, weak));
        }
        Seen::Flying(flight, true)
    }
}

/// The end of a flight, also when all who waited for it went away.
struct Landing {
    state: Arc<Mutex<State>>,
    key: String,
    number: u64,
    object: Option<Arc<Object>>,
}

impl Landing {
    fn land(mut self, object: Option<Arc<Object>>) {
        self.object = object;
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        if state.flights.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            state.flights.remove(&self.key);
        }
        if let Some(object) = self.object.take() {
            let weight = object.bytes.len() + OVERHEAD;
            state.kept.insert(Instant::now(), std::mem::take(&mut self.key), object, weight);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn fetch(bucket: &Bucket, gate: &Semaphore, key: &str) -> Result<Option<Vec<u8>>, Away> {
    let asked = async {
        let _turn = gate.acquire().await;
        bucket.get(key, MAX_NARINFO_SIZE).await
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) => {
            tracing::warn!(key, error = sentence(&error), "the bucket did not give an object");
            Err(Away)
        }
        Err(_) => {
            tracing::warn!(key, "the bucket did not give an object in time");
            Err(Away)
        }
    }
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use tokio::sync::mpsc;

    use super::*;

    type Answer = Result<Option<Vec<u8>>, Away>;

    /// A bucket that answers what it is told, one request after the other.
    fn finder() -> (Finder, mpsc::UnboundedSender<Answer>, Arc<AtomicUsize>) {
        let (answers, next) = mpsc::unbounded_channel::<Answer>();
        let next = Arc::new(tokio::sync::Mutex::new(next));
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let fetch = move |_| {
            let (next, count) = (next.clone(), count.clone());
            async move {
                count.fetch_add(1, Ordering::SeqCst);
                next.lock().await.recv().await.unwrap()
            }
            .boxed()
        };
        (Finder::by(Arc::new(fetch), Counts::default()), answers, asked)
    }

    fn bytes(found: Found) -> Option<Vec<u8>> {
        found.unwrap().map(|object| object.bytes.to_vec())
    }

    #[tokio::test]
    async fn what_was_found_is_not_asked_again() {
        let (finder, answers, asked) = finder();
        answers.send(Ok(Some(b"one".to_vec()))).unwrap();
        assert_eq!(bytes(finder.find("a").await), Some(b"one".to_vec()));
        assert_eq!(bytes(finder.find("a").await), Some(b"one".to_vec()));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn what_was_missing_is_found_as_soon_as_it_is_there() {
        let (finder, answers, _) = finder();
        answers.send(Ok(None)).unwrap();
        assert_eq!(bytes(finder.find("a").await), None);
        answers.send(Ok(Some(b"one".to_vec()))).unwrap();
        assert_eq!(bytes(finder.find("a").await), Some(b"one".to_vec()));
    }

    #[tokio::test]
    async fn trouble_is_not_remembered() {
        let (finder, answers, _) = finder();
        answers.send(Err(Away)).unwrap();
        assert_eq!(finder.find("a").await, Err(Away));
        answers.send(Ok(Some(b"one".to_vec()))).unwrap();
        assert_eq!(bytes(finder.find("a").await), Some(b"one".to_vec()));
    }

    #[tokio::test]
    async fn many_at_once_ask_once() {
        let (finder, answers, asked) = finder();
        let requests = join_all((0..100).map(|_| finder.find("a")));
        answers.send(Ok(Some(b"one".to_vec()))).unwrap();
        let found = requests.await;
        assert!(found.into_iter().all(|found| bytes(found) == Some(b"one".to_vec())));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn who_came_after_the_bucket_was_asked_is_not_told_that_it_is_missing() {
        let (finder, answers, asked) = finder();
        let mut first = Box::pin(finder.find("a"));
        assert!(futures::poll!(&mut first).is_pending());
        let later = join_all((0..100).map(|_| finder.find("a")));
        answers.send(Ok(None)).unwrap();
        answers.send(Ok(Some(b"one".to_vec()))).unwrap();
        let (first, later) = tokio::join!(first, later);
        assert_eq!(bytes(first), None);
        assert!(later.into_iter().all(|found| bytes(found) == Some(b"one".to_vec())));
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn who_goes_away_takes_nobody_along_and_leaves_nothing() {
        let (finder, answers, asked) = finder();
        let mut first = Box::pin(finder.find("a"));
        let mut second = Box::pin(finder.find("a"));
        assert!(futures::poll!(&mut first).is_pending());
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        answers.send(Ok(Some(b"one".to_vec()))).unwrap();
        assert_eq!(bytes(second.await), Some(b"one".to_vec()));
        assert_eq!(asked.load(Ordering::SeqCst), 1);

        let mut alone = Box::pin(finder.find("b"));
        assert!(futures::poll!(&mut alone).is_pending());
        drop(alone);
        assert!(lock(&finder.state).flights.is_empty());
    }
}
