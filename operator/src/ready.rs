//! When this process is ready, and what it waits for until then. What was there once stays: an operator that loses the
//! database goes on, and one that is restarted for it would be worse off.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use harmonia_service::health::Health;

/// The custom resources are known to the API server, and the caches are warm.
pub const RESOURCES: &str = "resources";
/// A leader has put the installation in place, or another replica leads.
pub const INSTALLATION: &str = "installation";
/// All that is waited for.
pub const CONDITIONS: [&str; 2] = [RESOURCES, INSTALLATION];

/// What is ready.
pub struct Readiness {
    health: Health,
    met: Mutex<BTreeSet<&'static str>>,
}

impl Readiness {
    /// Shown by `health`.
    pub fn new(health: Health) -> Self {
        Self { health, met: Mutex::default() }
    }

    /// From now on.
    pub fn meet(&self, condition: &'static str) {
        self.met.lock().unwrap_or_else(PoisonError::into_inner).insert(condition);
        self.health.set(condition, Ok(()));
    }

    /// Not yet, and why.
    pub fn wait(&self, condition: &'static str, reason: String) {
        if !self.met.lock().unwrap_or_else(PoisonError::into_inner).contains(condition) {
            self.health.set(condition, Err(reason));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_once_stays() {
        let health = Health::new(Default::default(), &CONDITIONS);
        let ready = Readiness::new(health.clone());
        ready.wait(INSTALLATION, "the database is away".to_owned());
        assert_eq!(health.reasons()[INSTALLATION], "the database is away");
        CONDITIONS.iter().for_each(|condition| ready.meet(condition));
        ready.wait(INSTALLATION, "the database is away".to_owned());
        assert!(health.reasons().is_empty());
    }
}
