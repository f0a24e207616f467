//! Looks at the disk in the moment in which a build complains of it: once the build has ended, what it wrote is gone.

use std::path::PathBuf;

use harmonia_nix::daemon::{Message, Sink};

use crate::store::free_bytes;

/// What the system's tools say when a disk is full.
pub const NO_SPACE: &str = "No space left on device";
/// And what Nix's database does.
pub const NO_ROOM: &str = "database or disk is full";

/// Passes on what a build says.
#[derive(Debug)]
pub struct Witness<'a, S> {
    sink: &'a mut S,
    directory: PathBuf,
    least: u64,
}

impl<'a, S: Sink> Witness<'a, S> {
    /// Of the disk that this directory is on.
    pub fn new(sink: &'a mut S, directory: PathBuf) -> Self {
        Self { sink, directory, least: u64::MAX }
    }

    /// The least bytes that were seen free, now too.
    pub fn least_free(&mut self) -> u64 {
        self.least = self.least.min(free_bytes(&self.directory).unwrap_or(u64::MAX));
        self.least
    }
}

impl<S: Sink> Sink for Witness<'_, S> {
    async fn take(&mut self, message: Message) {
        if let Some(line) = message.log_line()
            && line.windows(NO_SPACE.len()).any(|words| words == NO_SPACE.as_bytes())
        {
            self.least_free();
        }
        self.sink.take(message).await;
    }
}
