//! The NAR of a path as a stream of chunks, hashed on its way.

use std::cell::Cell;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender};

use nix_archive::nar::Encoder;
use sha2::Digest;

use super::compress::Compressed;
use super::listing::Listing;
use super::{PackError, walk};
use crate::Sha256;

/// Bytes that are hashed at once and travel together: large enough that a thread is seldom woken, small enough to be
/// still in the core's cache when they are hashed and copied.
pub(super) const CHUNK: usize = 256 << 10;

/// What one reading of a path told.
pub(super) struct Nar {
    pub hash: Sha256,
    pub listing: io::Result<Compressed>,
}

/// Where chunks go.
pub(super) trait Lane {
    /// Takes a chunk and gives back an empty one.
    fn pass(&mut self, chunk: Vec<u8>) -> io::Result<Vec<u8>>;
}

/// Keeps what fits into one chunk.
#[derive(Default)]
pub(super) struct Whole {
    pub bytes: Vec<u8>,
}

impl Lane for Whole {
    fn pass(&mut self, chunk: Vec<u8>) -> io::Result<Vec<u8>> {
        self.bytes = chunk;
        Ok(Vec::new())
    }
}

/// Sends chunks to another thread, which gives them back when they are empty.
pub(super) struct Chunks {
    filled: SyncSender<Vec<u8>>,
    emptied: Receiver<Vec<u8>>,
}

impl Chunks {
    pub fn new(filled: SyncSender<Vec<u8>>, emptied: Receiver<Vec<u8>>) -> Self {
        Self { filled, emptied }
    }
}

impl Lane for Chunks {
    fn pass(&mut self, chunk: Vec<u8>) -> io::Result<Vec<u8>> {
        self.filled.send(chunk).map_err(|_| ErrorKind::BrokenPipe)?;
        Ok(self.emptied.try_recv().unwrap_or_else(|_| Vec::with_capacity(CHUNK)))
    }
}

impl Nar {
    /// Reads `root`. Fails if its NAR has not exactly `size` bytes.
    pub fn read(root: &Path, size: u64, lane: &mut impl Lane) -> Result<Self, PackError> {
        let written = Cell::new(0);
        let mut listing = Listing::default();
        let mut writer =
            Writer { lane, size, written: &written, hasher: sha2::Sha256::new(), chunk: Vec::new() };
        let read = Encoder::new(&mut writer)
            .map_err(|source| PackError::Archive { path: root.to_owned(), source })
            .and_then(|encoder| walk::walk(root, encoder, &written, &mut listing));
        let passed = read.and_then(|()| {
            writer
                .flush()
                .map_err(|source| PackError::Archive { path: root.to_owned(), source: source.into() })
        });
        let fitted = || PackError::Size { path: root.to_owned(), expected: size };
        passed.map_err(|error| match error {
            PackError::Archive { source: nix_archive::nar::Error::Io(source), path } => match source.kind() {
                ErrorKind::BrokenPipe => PackError::Stopped,
                ErrorKind::FileTooLarge => fitted(),
                _ => PackError::Read { path, source },
            },
            error => error,
        })?;
        if written.get() != size {
            return Err(fitted());
        }
        Ok(Self { hash: Sha256(writer.hasher.finalize().into()), listing: listing.finish() })
    }
}

/// Cuts, counts and hashes.
struct Writer<'a, L> {
    lane: &'a mut L,
    size: u64,
    written: &'a Cell<u64>,
    hasher: sha2::Sha256,
    chunk: Vec<u8>,
}

impl<L: Lane> Write for Writer<'_, L> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK - self.chunk.len());
        let written = self.written.get() + taken as u64;
        if written > self.size {
            return Err(ErrorKind::FileTooLarge.into());
        }
        self.written.set(written);
        self.chunk.extend_from_slice(&bytes[..taken]);
        if self.chunk.len() == CHUNK {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        self.hasher.update(&self.chunk);
        self.chunk = self.lane.pass(std::mem::take(&mut self.chunk))?;
        Ok(())
    }
}
