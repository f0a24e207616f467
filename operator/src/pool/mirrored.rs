//! What the database was told, by whom and when: pods change every few seconds, and a pool does not.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::secrets::{self, Contents};

/// The database is told again what it should know already after this long, less than a resync: somebody may have restored a
/// backup, and a builder may have changed its own password.
const AGAIN: Duration = Duration::from_secs(200);

/// A word about a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    uid: String,
    generation: i64,
    leader: i64,
    credentials: String,
}

impl Word {
    /// A leader's, about a resource of that uid and generation, whose Secret holds this.
    pub fn new(uid: &str, generation: i64, leader: i64, contents: &Contents) -> Self {
        let contents = contents.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        Self { uid: uid.to_owned(), generation, leader, credentials: secrets::hash(contents) }
    }
}

/// The last words, by the pools' names.
#[derive(Default)]
pub struct Mirrored(Mutex<HashMap<String, (Word, Instant)>>);

impl Mirrored {
    /// Whether this was said a moment ago.
    pub fn stands(&self, name: &str, word: &Word) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(name).is_some_and(|(last, at)| last == word && at.elapsed() < AGAIN)
    }

    /// It is said.
    pub fn put(&self, name: String, word: Word) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name, (word, Instant::now()));
    }

    /// The pool is gone.
    pub fn forget(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_is_said_again() {
        let contents = Contents::from([("netrc".to_owned(), "a".to_owned())]);
        let word = Word::new("uid", 1, 1, &contents);
        let mirrored = Mirrored::default();
        assert!(!mirrored.stands("ci/x86", &word));
        mirrored.put("ci/x86".to_owned(), word.clone());
        assert!(mirrored.stands("ci/x86", &word));
        for other in [
            Word::new("other", 1, 1, &contents),
            Word::new("uid", 2, 1, &contents),
            Word::new("uid", 1, 2, &contents),
            Word::new("uid", 1, 1, &Contents::new()),
        ] {
            assert!(!mirrored.stands("ci/x86", &other), "{other:?}");
        }
        mirrored.forget("ci/x86");
        assert!(!mirrored.stands("ci/x86", &word));
    }
}
