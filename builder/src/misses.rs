//! How often a job missed an input on this node. What the cache has lost is built again, and found the next time; what is
//! missed again and again is there, and this node's Nix does not find it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use harmonia_nix::StorePath;

/// How often the queue is asked to look for the same input of a job.
pub const MISSES: u32 = 3;
/// Jobs that are remembered. Those that went on elsewhere are never heard of again.
const JOBS: usize = 10_000;

/// What was missed, by job.
#[derive(Debug, Default)]
pub struct Misses(Mutex<HashMap<i64, HashMap<StorePath, u32>>>);

impl Misses {
    /// A job misses an input. Answers how often it has by now.
    pub fn count(&self, job: i64, path: &StorePath) -> u32 {
        let mut jobs = self.jobs();
        if jobs.len() >= JOBS && !jobs.contains_key(&job) {
            jobs.clear();
        }
        let times = jobs.entry(job).or_default().entry(path.clone()).or_default();
        *times += 1;
        *times
    }

    /// A job has its inputs.
    pub fn forget(&self, job: i64) {
        self.jobs().remove(&job);
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<i64, HashMap<StorePath, u32>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use harmonia_nix::store_path;

    use super::*;

    #[test]
    fn each_input_of_each_job_is_counted_until_the_job_has_them() {
        let path = |name: &str| store_path::parse(&format!("/nix/store/{}-{name}", "0".repeat(32))).unwrap();
        let misses = Misses::default();
        let counted: Vec<u32> = (0..3).map(|_| misses.count(1, &path("a"))).collect();
        assert_eq!(counted, [1, 2, 3]);
        assert_eq!((misses.count(1, &path("b")), misses.count(2, &path("a"))), (1, 1));
        misses.forget(1);
        assert_eq!((misses.count(1, &path("a")), misses.count(2, &path("a"))), (1, 2));
    }

    #[test]
    fn jobs_that_went_elsewhere_do_not_pile_up() {
        let path = store_path::parse(&format!("/nix/store/{}-a", "0".repeat(32))).unwrap();
        let misses = Misses::default();
        for job in 0..30_000 {
            misses.count(job, &path);
        }
        assert!(misses.jobs().len() <= JOBS);
    }
}
