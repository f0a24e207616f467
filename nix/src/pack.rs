//! From a store path on disk to everything that a cache keeps of it, in one pass: the NAR's hash, its listing, and the
//! compressed NAR in parts with their hashes.
//!
//! Reading and NAR hashing run on one thread, zstd on `workers` more, hashing of compressed bytes and the sink on the
//! caller's; they are joined before [`pack`] returns. A NAR that fits one chunk needs no thread at all.
//!
//! # Memory
//!
//! Bounded whatever the size, at level 3 (window 2 MiB) with w workers and jobs of 2 MiB:
//!
//! | what | bytes | w = 2 |
//! | --- | --- | --- |
//! | chunks between reader and zstd | (4 + 2) × 256 KiB, and a read buffer | 1.8 MiB |
//! | zstd's input: a job for each worker and three of slack | (w + 3) × 2 MiB | 10 MiB |
//! | zstd's output: at most 2w + 3 buffers of a job | (2w + 3) × 2 MiB | 14 MiB |
//! | zstd's tables: hash 2^17 and 2^16 words and block state | w × 1.3 MiB | 2.6 MiB |
//! | a full part, and the one that follows | 2 × 8 MiB | 16 MiB |
//! | zstd for the listing, if it is long | 3.5 MiB | 3.5 MiB |
//!
//! 48 MiB together; zstd's own choice of jobs (8 MiB) would take 72 MiB more. Four parts in flight with the caller add 32
//! MiB. Only the compressed listing grows with the path: some 10 bytes a file.

mod compress;
mod listing;
mod nar;
mod walk;

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread;

use bytes::Bytes;
use thiserror::Error;

pub use compress::{Compressed, compress, compress_file};

use crate::Sha256;
use compress::{Cutter, Stream};
use nar::{CHUNK, Chunks, Nar, Whole};

/// zstd's default level, and Nix's.
pub const LEVEL: i32 = 3;

/// A NAR of at most so many bytes is packed on the caller's thread alone.
pub const SMALL: u64 = CHUNK as u64;

/// Chunks on their way to zstd.
const AHEAD: usize = 4;

/// How a path is packed. The compressed bytes follow from the NAR, [`Options::level`] and zstd's version alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the NAR, as the local store's database has them.
    pub nar_size: u64,
    /// Bytes of each part but the last.
    pub part_size: usize,
    /// zstd's level.
    pub level: i32,
    /// Threads that compress, at least one.
    pub workers: u32,
}

impl Options {
    /// What fits a NAR of this size.
    pub fn for_nar(nar_size: u64) -> Self {
        Self { nar_size, part_size: part_size(nar_size), level: LEVEL, workers: 2 }
    }
}

/// Bytes of a part: 8 MiB, or more where 9000 of them would not hold the NAR uncompressed. S3 takes 10,000; the rest is
/// room for what zstd adds to bytes that it cannot compress.
pub fn part_size(nar_size: u64) -> usize {
    const LEAST: u64 = 8 << 20;
    usize::try_from(nar_size.div_ceil(9000).max(LEAST)).unwrap_or(usize::MAX)
}

/// A piece of the compressed NAR.
#[derive(Debug, Clone)]
pub struct Part {
    /// From 1.
    pub number: i32,
    /// The piece.
    pub bytes: Bytes,
    /// Its hash.
    pub sha256: Sha256,
    /// Whether nothing follows.
    pub last: bool,
}

/// Some bytes, but for the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest {
    /// How many.
    pub size: u64,
    /// Their hash.
    pub sha256: Sha256,
}

/// What became of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Hash of the NAR.
    pub nar_hash: Sha256,
    /// Bytes of the NAR.
    pub nar_size: u64,
    /// What is in it, as Nix writes it beside narinfos.
    pub listing: Compressed,
    /// The compressed NAR, all parts together.
    pub file: Digest,
    /// The parts, in their order.
    pub parts: Vec<Digest>,
}

/// Why a path was not packed.
#[derive(Debug, Error)]
pub enum PackError {
    /// A file is not there, or may not be read.
    #[error("cannot read {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file changed under the reader.
    #[error("{path:?} changed while it was read: something writes to the store")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Something that a NAR cannot hold.
    #[error("{path:?} is neither a file nor a directory nor a symbolic link: a NAR cannot hold it")]
    Special {
        /// The file.
        path: PathBuf,
    },
    /// A tree that a NAR cannot hold.
    #[error("a NAR cannot hold {path:?}")]
    Archive {
        /// Where in the tree.
        path: PathBuf,
        /// Why.
        source: nix_archive::nar::Error,
    },
    /// The path is not what the store's database says.
    #[error(
        "the NAR of {path:?} does not have the {expected} bytes that the store's database says: repair or delete the path"
    )]
    Size {
        /// The path.
        path: PathBuf,
        /// Bytes of the NAR in the database.
        expected: u64,
    },
    /// zstd failed.
    #[error("cannot compress {path:?}")]
    Compress {
        /// The path.
        path: PathBuf,
        /// What zstd said.
        source: io::Error,
    },
    /// The sink wants no more.
    #[error("the upload was given up")]
    Stopped,
}

/// Packs the path at `root`. The parts go to `sink`, in their order; it may block, and everything then waits for it. If it
/// breaks, the pass ends with [`PackError::Stopped`].
pub fn pack(
    root: &Path,
    options: &Options,
    sink: impl FnMut(Part) -> ControlFlow<()>,
) -> Result<Packed, PackError> {
    let mut cutter = Cutter::new(options.part_size, sink);
    let nar = if options.nar_size <= SMALL {
        let mut whole = Whole::default();
        let nar = Nar::read(root, options.nar_size, &mut whole)?;
        cutter.small(&whole.bytes, options.level).map_err(|failure| failure.at(root))?;
        nar
    } else {
        piped(root, options, &mut cutter)?
    };
    let (file, parts) = cutter.finish().map_err(|failure| failure.at(root))?;
    let listing = nar.listing.map_err(|source| PackError::Compress { path: root.to_owned(), source })?;
    Ok(Packed { nar_hash: nar.hash, nar_size: options.nar_size, listing, file, parts })
}

/// Reads and hashes on a thread of its own, compresses here.
fn piped<S>(root: &Path, options: &Options, cutter: &mut Cutter<S>) -> Result<Nar, PackError>
where
    S: FnMut(Part) -> ControlFlow<()>,
{
    let (filled, to_compress) = sync_channel(AHEAD);
    let (emptied, to_fill) = channel();
    thread::scope(|scope| {
        let reader =
            scope.spawn(move || Nar::read(root, options.nar_size, &mut Chunks::new(filled, to_fill)));
        // Ends and drops the channels before the reader is waited for: that is what stops it.
        let compressed = (|to_compress: Receiver<Vec<u8>>| {
            let mut stream = Stream::new(options)?;
            for mut chunk in to_compress {
                stream.write(&chunk, cutter)?;
                chunk.clear();
                // The reader may have ended already.
                let _ = emptied.send(chunk);
            }
            stream.finish(cutter)
        })(to_compress);
        let nar = match reader.join() {
            Ok(nar) => nar,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        match (compressed, nar) {
            (Ok(()), nar) => nar,
            // The reader's own failure is why zstd got less than it was told.
            (Err(_), Err(error)) if !matches!(error, PackError::Stopped) => Err(error),
            (Err(failure), _) => Err(failure.at(root)),
        }
    })
}

#[cfg(test)]
mod tests;
