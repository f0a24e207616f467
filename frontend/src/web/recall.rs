//! What is dear to find out and looked at by many: remembered until something changes. While it is found out anew, whoever asks
//! gets what was known before, and is told that it is old.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harmonia_service::problem::Problem;

/// What takes less is found out while the reader waits.
const CHEAP: Duration = Duration::from_millis(20);
/// What was known longer ago is not shown any more.
const OLD: Duration = Duration::from_secs(30);
/// At most this part of the time is spent on finding the same out again.
const PART: u32 = 5;

/// Answers by key.
pub struct Recall<K, V> {
    known: Arc<Mutex<HashMap<K, Known<V>>>>,
    most: usize,
}

struct Known<V> {
    value: Arc<V>,
    version: u64,
    at: Instant,
    cost: Duration,
    asking: bool,
}

/// An answer.
pub struct Told<V> {
    /// What is known.
    pub value: Arc<V>,
    /// Something has changed since: ask again in a moment.
    pub stale: bool,
}

enum Next<V> {
    Tell(Told<V>),
    Refresh(Told<V>),
    Ask,
}

impl<K: Eq + Hash + Clone + Send + 'static, V: Send + Sync + 'static> Recall<K, V> {
    /// Of so many keys, at most.
    pub fn new(most: usize) -> Self {
        Self { known: Arc::default(), most }
    }

    /// What is known at this version of everything, or was a moment ago.
    pub async fn get<F>(&self, key: K, version: u64, ask: impl FnOnce() -> F) -> Result<Told<V>, Problem>
    where
        F: Future<Output = Result<V, Problem>> + Send + 'static,
    {
        match self.next(&key, version, Instant::now()) {
            Next::Tell(told) => Ok(told),
            Next::Ask => {
                let begun = Instant::now();
                let value = Arc::new(ask().await?);
                self.learn(key, value.clone(), version, begun);
                Ok(Told { value, stale: false })
            }
            Next::Refresh(told) => {
                let (asked, known, most) = (ask(), self.known.clone(), self.most);
                tokio::spawn(async move {
                    let begun = Instant::now();
                    let recall = Self { known, most };
                    match asked.await {
                        Ok(value) => recall.learn(key, Arc::new(value), version, begun),
                        Err(_) => recall.give_up(&key),
                    }
                });
                Ok(told)
            }
        }
    }

    /// Only what is known and, if it has ended, will hardly change.
    pub fn peek(&self, key: &K, version: u64, settled: impl Fn(&V) -> bool) -> Option<Arc<V>> {
        let known = self.lock();
        let known = known.get(key)?;
        let good = known.version == version || settled(&known.value) && known.at.elapsed() < OLD / 3;
        good.then(|| known.value.clone())
    }

    /// Remembers what was asked for then.
    pub fn learn(&self, key: K, value: Arc<V>, version: u64, begun: Instant) {
        let mut known = self.lock();
        if known.len() >= self.most && !known.contains_key(&key) {
            // The oldest goes. There are few.
            let oldest = known.iter().min_by_key(|(_, known)| known.at).map(|(key, _)| key.clone());
            oldest.map(|key| known.remove(&key));
        }
        known.insert(key, Known { value, version, at: Instant::now(), cost: begun.elapsed(), asking: false });
    }

    /// Somebody here has just changed something: nothing old is shown.
    pub fn forget(&self) {
        self.lock().clear();
    }

    fn give_up(&self, key: &K) {
        self.lock().remove(key);
    }

    fn next(&self, key: &K, version: u64, now: Instant) -> Next<V> {
        let mut known = self.lock();
        let Some(known) = known.get_mut(key) else { return Next::Ask };
        let told = |stale| Told { value: known.value.clone(), stale };
        let age = now.saturating_duration_since(known.at);
        if known.version == version {
            Next::Tell(told(false))
        } else if age > OLD || (known.cost < CHEAP && !known.asking) {
            Next::Ask
        } else if known.asking || age < known.cost * PART {
            Next::Tell(told(true))
        } else {
            let told = told(true);
            known.asking = true;
            Next::Refresh(told)
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Known<V>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn recall(version: u64, cost: Duration) -> Recall<u8, u8> {
        let recall = Recall::new(2);
        let at = Instant::now();
        let known = Known { value: Arc::new(7), version, at, cost, asking: false };
        recall.lock().insert(1, known);
        recall
    }

    fn word(next: &Next<u8>) -> &'static str {
        match next {
            Next::Ask => "ask",
            Next::Refresh(_) => "refresh",
            Next::Tell(told) if told.stale => "old",
            Next::Tell(_) => "new",
        }
    }

    #[test]
    fn what_nothing_changed_is_told_again() {
        let recall = recall(3, Duration::from_secs(1));
        assert_eq!(word(&recall.next(&1, 3, Instant::now() + OLD * 2)), "new");
        assert_eq!(word(&recall.next(&2, 3, Instant::now())), "ask");
    }

    #[test]
    fn what_is_cheap_is_asked_for_at_once() {
        assert_eq!(word(&recall(3, Duration::ZERO).next(&1, 4, Instant::now())), "ask");
    }

    #[test]
    fn what_is_dear_is_asked_for_by_one_and_told_to_the_others_meanwhile() {
        let recall = recall(3, Duration::from_secs(1));
        let now = Instant::now();
        assert_eq!(word(&recall.next(&1, 4, now)), "old");
        assert_eq!(word(&recall.next(&1, 4, now + Duration::from_secs(6))), "refresh");
        assert_eq!(word(&recall.next(&1, 4, now + Duration::from_secs(7))), "old");
        assert_eq!(word(&recall.next(&1, 4, now + OLD * 2)), "ask");
    }

    #[test]
    fn the_oldest_makes_room() {
        let recall = recall(3, Duration::ZERO);
        let now = Instant::now();
        recall.learn(2, Arc::new(2), 3, now);
        recall.learn(3, Arc::new(3), 3, now);
        assert!(recall.peek(&1, 3, |_| false).is_none());
        assert_eq!(*recall.peek(&3, 3, |_| false).unwrap(), 3);
    }
}
