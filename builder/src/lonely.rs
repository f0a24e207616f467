//! Builds that want the node for themselves.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many of them wait, or have it.
#[derive(Debug, Default)]
pub struct Lonely(AtomicUsize);

/// One of them, for as long as it lives.
#[derive(Debug)]
pub struct One<'a>(&'a Lonely);

impl Lonely {
    /// A build wants to be alone.
    pub fn begin(&self) -> One<'_> {
        self.0.fetch_add(1, Ordering::Relaxed);
        One(self)
    }

    /// Whether one does.
    pub fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for One<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
