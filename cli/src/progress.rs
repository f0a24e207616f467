//! How far a long work is: one line that changes on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines in a log come no more often.
const PAUSE: Duration = Duration::from_secs(10);

/// Shows how far it is.
pub struct Progress {
    terminal: bool,
    last: Mutex<Instant>,
}

impl Default for Progress {
    fn default() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), last: Mutex::new(Instant::now()) }
    }
}

impl Progress {
    /// It is so far.
    pub fn show(&self, words: &str) {
        if self.terminal {
            eprint!("\r{words}\x1b[K");
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= PAUSE {
            *last = Instant::now();
            eprintln!("{words}");
        }
    }

    /// It is done.
    pub fn end(&self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
