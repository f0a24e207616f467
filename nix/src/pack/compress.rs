//! zstd, and the cutting of what comes out of it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::Path;

use bytes::Bytes;
use sha2::Digest as _;
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation, OutBuffer};

use super::{Digest, Options, PackError, Part};
use crate::Sha256;

/// Bytes that one worker compresses at a time. Its history begins with the last eighth of a window (256 KiB) of the job before:
/// smaller jobs compress worse, larger ones take more memory.
const JOB: u32 = 2 << 20;

/// Bytes in zstd's form, and their hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compressed {
    /// The compressed bytes.
    pub bytes: Bytes,
    /// Their hash.
    pub sha256: Sha256,
}

impl Compressed {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { sha256: Sha256::of(&bytes), bytes: bytes.into() }
    }
}

/// Compresses bytes, on this thread.
pub fn compress(bytes: &[u8], level: i32) -> io::Result<Compressed> {
    zstd::bulk::compress(bytes, level).map(Compressed::new)
}

/// Compresses a file into memory, on this thread: for logs, whose size is limited.
pub fn compress_file(path: &Path, level: i32) -> Result<Compressed, PackError> {
    let read = |source| PackError::Read { path: path.to_owned(), source };
    let failed = |source| PackError::Compress { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(read)?;
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), level).map_err(failed)?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return encoder.finish().map(Compressed::new).map_err(failed),
            Ok(size) => encoder.write_all(&buffer[..size]).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(read(source)),
        }
    }
}

/// Why compression ended early.
pub(super) enum Failure {
    Stopped,
    Zstd(io::Error),
}

impl Failure {
    pub fn at(self, root: &Path) -> PackError {
        match self {
            Self::Stopped => PackError::Stopped,
            Self::Zstd(source) => PackError::Compress { path: root.to_owned(), source },
        }
    }
}

impl From<io::Error> for Failure {
    fn from(source: io::Error) -> Self {
        Self::Zstd(source)
    }
}

/// zstd with workers.
pub(super) struct Stream {
    encoder: Encoder<'static>,
}

impl Stream {
    pub fn new(options: &Options) -> Result<Self, Failure> {
        let mut encoder = Encoder::new(options.level)?;
        encoder.set_parameter(CParameter::NbWorkers(options.workers.max(1)))?;
        encoder.set_parameter(CParameter::JobSize(JOB))?;
        encoder.set_pledged_src_size(Some(options.nar_size))?;
        Ok(Self { encoder })
    }

    pub fn write<S>(&mut self, bytes: &[u8], cutter: &mut Cutter<S>) -> Result<(), Failure>
    where
        S: FnMut(Part) -> ControlFlow<()>,
    {
        let mut input = InBuffer::around(bytes);
        while input.pos() < bytes.len() {
            cutter.fill(|output| self.encoder.run(&mut input, output))?;
        }
        Ok(())
    }

    /// Ends the frame. zstd refuses if it got less than the pledged size.
    pub fn finish<S>(mut self, cutter: &mut Cutter<S>) -> Result<(), Failure>
    where
        S: FnMut(Part) -> ControlFlow<()>,
    {
        while cutter.fill(|output| self.encoder.finish(output, true))? > 0 {}
        Ok(())
    }
}

/// Cuts compressed bytes into parts and hashes them.
pub(super) struct Cutter<S> {
    part_size: usize,
    sink: S,
    /// The part that is being filled, and its hash so far.
    part: Vec<u8>,
    hasher: sha2::Sha256,
    /// The hash of all parts so far. Of the first part alone it is that part's: small files are hashed once.
    all: Option<sha2::Sha256>,
    size: u64,
    /// A full part, until it is known whether it is the last.
    full: Option<Part>,
    parts: Vec<Digest>,
}

impl<S: FnMut(Part) -> ControlFlow<()>> Cutter<S> {
    pub fn new(part_size: usize, sink: S) -> Self {
        Self {
            part_size: part_size.max(1),
            sink,
            part: Vec::new(),
            hasher: sha2::Sha256::new(),
            all: None,
            size: 0,
            full: None,
            parts: Vec::new(),
        }
    }

    /// Compresses a whole NAR, on this thread.
    pub fn small(&mut self, nar: &[u8], level: i32) -> Result<(), Failure> {
        let file = zstd::bulk::compress(nar, level)?;
        for piece in file.chunks(self.part_size) {
            self.cut_if_full();
            self.part.extend_from_slice(piece);
            self.added(0)?;
        }
        Ok(())
    }

    /// Lets zstd write into the part at hand.
    fn fill(
        &mut self,
        run: impl FnOnce(&mut OutBuffer<'_, Vec<u8>>) -> io::Result<usize>,
    ) -> Result<usize, Failure> {
        self.cut_if_full();
        if self.part.capacity() == 0 {
            self.part = Vec::with_capacity(self.part_size);
        }
        let before = self.part.len();
        let left = run(&mut OutBuffer::around_pos(&mut self.part, before))?;
        self.added(before)?;
        Ok(left)
    }

    /// Everything in the part from `before` on is new.
    fn added(&mut self, before: usize) -> Result<(), Failure> {
        let new = &self.part[before..];
        if new.is_empty() {
            return Ok(());
        }
        self.size += new.len() as u64;
        self.hasher.update(new);
        if let Some(all) = &mut self.all {
            all.update(new);
        }
        self.hand_over(false)
    }

    fn cut_if_full(&mut self) {
        if self.part.len() >= self.part_size {
            self.cut();
        }
    }

    fn cut(&mut self) {
        let hasher = std::mem::take(&mut self.hasher);
        if self.all.is_none() {
            self.all = Some(hasher.clone());
        }
        let bytes = Bytes::from(std::mem::take(&mut self.part));
        let sha256 = Sha256(hasher.finalize().into());
        self.parts.push(Digest { size: bytes.len() as u64, sha256 });
        self.full = Some(Part { number: self.parts.len() as i32, bytes, sha256, last: false });
    }

    fn hand_over(&mut self, last: bool) -> Result<(), Failure> {
        let taken = self.full.take().map(|part| (self.sink)(Part { last, ..part }));
        if taken.is_some_and(|taken| taken.is_break()) { Err(Failure::Stopped) } else { Ok(()) }
    }

    /// Hands over the last part.
    pub fn finish(mut self) -> Result<(Digest, Vec<Digest>), Failure> {
        if !self.part.is_empty() {
            self.cut();
        }
        self.hand_over(true)?;
        let sha256 = Sha256(self.all.unwrap_or_default().finalize().into());
        Ok((Digest { size: self.size, sha256 }, self.parts))
    }
}
