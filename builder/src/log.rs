//! What a build says: all of it, up to a limit, in a file; its end in memory, for those who follow.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use harmonia_nix::daemon::{Message, Sink};
use harmonia_queue::Fence;
use harmonia_queue::builder::{LogPiece, Session};
use harmonia_service::sentence::sentence;
use thiserror::Error;
use tokio::time::sleep;

use crate::life::Held;

/// Why a log cannot be kept.
#[derive(Debug, Error)]
#[error(
    "the log {} cannot be written: make room on its disk, or set HARMONIA_CI_STATE_DIR to a directory on another",
    path.display()
)]
pub struct LogError {
    /// Its file.
    path: PathBuf,
    /// Why.
    source: io::Error,
}

/// How often followers hear of what was added.
const EVERY: Duration = Duration::from_secs(2);
/// The most that is sent at a time; who prints more is followed with gaps.
const PIECE: usize = 64 << 10;

/// A build's log while it is written. Its file goes with it.
#[derive(Debug)]
pub struct Spool {
    path: PathBuf,
    file: BufWriter<File>,
    limit: u64,
    written: u64,
    truncated: bool,
    /// Lines are being lost, and it was said.
    lossy: bool,
    tail: Arc<Mutex<Tail>>,
}

/// What followers have not been told yet.
#[derive(Debug, Default)]
pub struct Tail {
    offset: u64,
    bytes: Vec<u8>,
}

impl Spool {
    /// An empty log, whose end is followed in `tail`. Its directory is made again if somebody has tidied it away.
    pub fn create(path: PathBuf, limit: u64, tail: Arc<Mutex<Tail>>) -> Result<Self, LogError> {
        let created = match File::create(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => create_beside(&path),
            created => created,
        };
        match created {
            Ok(file) => {
                let file = BufWriter::with_capacity(PIECE, file);
                Ok(Self { path, file, limit, written: 0, truncated: false, lossy: false, tail })
            }
            Err(source) => Err(LogError { path, source }),
        }
    }

    /// Adds a line. Beyond the limit nothing is kept but a mark that there was more; the build goes on.
    pub fn line(&mut self, line: &[u8]) -> Result<(), LogError> {
        if self.truncated {
            return Ok(());
        }
        let added = if self.written + line.len() as u64 + 1 > self.limit {
            self.truncated = true;
            self.add(format!("[... log truncated at {} bytes]\n", self.limit).as_bytes())
        } else {
            self.add(line).and_then(|()| self.add(b"\n"))
        };
        added.map_err(|source| self.failed(source))
    }

    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.written += bytes.len() as u64;
        lock(&self.tail).add(bytes);
        Ok(())
    }

    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        self.written == 0
    }

    /// The file, with everything in it.
    pub fn finish(&mut self) -> Result<&Path, LogError> {
        match self.file.flush() {
            Ok(()) => Ok(&self.path),
            Err(source) => Err(self.failed(source)),
        }
    }

    fn failed(&self, source: io::Error) -> LogError {
        LogError { path: self.path.clone(), source }
    }

    /// The last bytes, for what they say about why a build failed.
    pub fn last(&mut self, most: u64) -> io::Result<String> {
        use std::io::{Read, Seek, SeekFrom};
        self.file.flush()?;
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.written.saturating_sub(most)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

fn create_beside(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    File::create(path)
}

impl Drop for Spool {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, "a log file stays");
        }
    }
}

impl Sink for Spool {
    async fn take(&mut self, message: Message) {
        if let Some(line) = message.log_line()
            && let Err(error) = self.line(line)
            && !std::mem::replace(&mut self.lossy, true)
        {
            tracing::warn!(error = sentence(&error), "lines of a log are lost");
        }
    }
}

impl Tail {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // Trimmed when it is twice too long, so that not every line moves all the others.
        if self.bytes.len() > 2 * PIECE {
            self.trim();
        }
    }

    fn trim(&mut self) {
        let surplus = self.bytes.len().saturating_sub(PIECE);
        self.bytes.drain(..surplus);
        self.offset += surplus as u64;
    }

    fn piece(&mut self, fence: Fence) -> Option<LogPiece> {
        self.trim();
        let offset = i64::try_from(self.offset).ok()?;
        (!self.bytes.is_empty()).then(|| LogPiece { fence, offset, data: self.bytes.clone() })
    }

    /// Followers have these bytes; more may have come since.
    fn told(&mut self, piece: &LogPiece) {
        let end = piece.offset.unsigned_abs() + piece.data.len() as u64;
        let known = usize::try_from(end.saturating_sub(self.offset)).unwrap_or(usize::MAX);
        let known = known.min(self.bytes.len());
        self.bytes.drain(..known);
        self.offset += known as u64;
    }
}

/// Tells followers what was added to all logs, for as long as it is run.
pub async fn follow(session: &Session, held: &Held) {
    loop {
        sleep(EVERY).await;
        let tails = held.tails();
        let pieces: Vec<LogPiece> =
            tails.iter().filter_map(|(fence, tail)| lock(tail).piece(*fence)).collect();
        if pieces.is_empty() {
            continue;
        }
        match session.log_append(&pieces).await {
            Ok(()) => {
                for piece in &pieces {
                    if let Some((_, tail)) = tails.iter().find(|(fence, _)| *fence == piece.fence) {
                        lock(tail).told(piece);
                    }
                }
            }
            Err(error) => tracing::debug!(%error, "followers have to wait for logs"),
        }
    }
}

fn lock(tail: &Mutex<Tail>) -> MutexGuard<'_, Tail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use harmonia_nix::daemon::{Field, ResultKind};

    use super::*;

    const FENCE: Fence = Fence { job: 1, attempt: 2 };

    fn spool(limit: u64) -> (tempfile::TempDir, Spool) {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::create(directory.path().join("log"), limit, Arc::default()).unwrap();
        (directory, spool)
    }

    #[test]
    fn a_log_ends_at_its_limit_with_a_mark() {
        let (_directory, mut spool) = spool(10);
        for line in ["12345", "678", "9"] {
            spool.line(line.as_bytes()).unwrap();
        }
        let file = spool.finish().unwrap();
        assert_eq!(std::fs::read_to_string(file).unwrap(), "12345\n678\n[... log truncated at 10 bytes]\n");
    }

    #[test]
    fn a_directory_that_was_tidied_away_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("logs/log");
        let mut spool = Spool::create(file, 10, Arc::default()).unwrap();
        spool.line(b"one").unwrap();
        assert_eq!(std::fs::read_to_string(spool.finish().unwrap()).unwrap(), "one\n");
    }

    #[test]
    fn a_log_that_cannot_be_written_names_its_file_and_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("logs");
        std::fs::write(&file, "").unwrap();
        let error = Spool::create(file.join("log"), 10, Arc::default()).unwrap_err().to_string();
        let expected = format!("the log {}/log cannot be written: make room on its disk", file.display());
        assert!(error.starts_with(&expected) && error.contains("HARMONIA_CI_STATE_DIR"), "{error}");
    }

    #[tokio::test]
    async fn a_full_disk_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("log");
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let mut spool = Spool::create(file, u64::MAX, Arc::default()).unwrap();
        let line = Message::Result {
            id: 1,
            kind: ResultKind::BuildLogLine,
            fields: vec![Field::Text(vec![b'x'; 2 * PIECE])],
        };
        assert!(spool.line(&[b'x'; 2 * PIECE]).is_err());
        assert!(!spool.lossy);
        spool.take(line).await;
        assert!(spool.lossy);
    }

    #[test]
    fn a_file_goes_with_its_log() {
        let (directory, spool) = spool(10);
        drop(spool);
        assert!(!directory.path().join("log").exists());
    }

    #[test]
    fn followers_hear_every_byte_once() {
        let (_directory, mut spool) = spool(1000);
        spool.line(b"one").unwrap();
        let tail = Arc::clone(&spool.tail);
        let piece = lock(&tail).piece(FENCE).unwrap();
        spool.line(b"two").unwrap();
        lock(&tail).told(&piece);
        assert_eq!((piece.offset, piece.data.as_slice()), (0, &b"one\n"[..]));
        let piece = lock(&tail).piece(FENCE).unwrap();
        assert_eq!((piece.offset, piece.data.as_slice()), (4, &b"two\n"[..]));
        lock(&tail).told(&piece);
        assert!(lock(&tail).piece(FENCE).is_none());
    }

    #[test]
    fn who_prints_too_much_is_followed_with_gaps() {
        let mut tail = Tail::default();
        tail.add(&[b'a'; 3 * PIECE]);
        let piece = tail.piece(FENCE).unwrap();
        assert_eq!((piece.offset, piece.data.len()), (2 * PIECE as i64, PIECE));
    }
}
