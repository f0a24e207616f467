//! The bytes of the worker protocol, free of sockets: everything reads from any buffered reader, a slice included,
//! and writes into a [`Request`].
//!
//! Numbers are 8 bytes, little-endian; strings are their length, their bytes and zeros up to the next multiple of 8;
//! lists are their length and their items. Nothing is allocated for a length that was merely announced: memory grows
//! with the bytes that came.

use std::collections::BTreeSet;
use std::io;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use nix_derivation::StorePath;
use thiserror::Error;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

pub mod handshake;
pub mod message;
mod request;

pub use request::{Op, Request};

/// The newest minor version that is spoken here.
pub const NEWEST: u8 = 38;

/// The oldest minor version that is spoken here: that of Nix 2.8.
pub const OLDEST: u8 = 34;

/// The longest store path. Nix allows 211 bytes of name after 11 of directory, 32 of hash and two separators, 256 in
/// all; twice that for another directory.
pub const MAX_PATH: usize = 512;

/// The longest other word of an answer: a version, a signature, a hash, the JSON of a realisation.
pub const MAX_WORD: usize = 64 << 10;

/// How much text of one message or error is kept. Builds decide its length, so the rest is read and left out, where
/// refusing would let a build break its own connection.
pub const MAX_TEXT: usize = 1 << 20;

/// How many fields of a message and traces of an error are kept; the rest is left out likewise. No message of
/// Nix has more than five fields.
pub const MAX_FIELDS: usize = 16;

/// The most paths in one answer. The largest stores hold about a million; at 256 bytes each that is a quarter
/// of a gigabyte, the most that a hostile daemon gets.
pub const MAX_PATHS: u64 = 1 << 20;

/// The most items of any other list: signatures, features, built outputs.
pub const MAX_ITEMS: u64 = 4096;

/// The result of reading from the wire.
pub type Result<T> = std::result::Result<T, Error>;

/// Not the worker protocol.
#[derive(Debug, Error)]
pub enum Error {
    /// The daemon ended the connection before its answer did.
    #[error(
        "the Nix daemon closed the connection in the middle of an operation: see its own log for the reason"
    )]
    Closed,
    /// The connection failed.
    #[error("the connection to the Nix daemon failed")]
    Io(#[source] io::Error),
    /// Somebody else listens on the socket.
    #[error("the other side answered {0:#x} to the greeting of Nix: it is no Nix daemon")]
    NotADaemon(u64),
    /// A daemon of another age.
    #[error(
        "the Nix daemon speaks protocol {major}.{minor}, but 1.{OLDEST} (Nix 2.8) or a later 1.x is needed: use another Nix"
    )]
    Unsupported {
        /// Its major version.
        major: u64,
        /// Its minor version.
        minor: u64,
    },
    /// Longer than anything that makes sense.
    #[error("the Nix daemon announced {length} for {what}, of which at most {limit} are accepted")]
    TooLong {
        /// Of what.
        what: &'static str,
        /// The length that was announced.
        length: u64,
        /// The length that is accepted.
        limit: u64,
    },
    /// A value that has no meaning in this place.
    #[error("the Nix daemon sent {value} as {what}, which the protocol does not have")]
    Unexpected {
        /// In place of what.
        what: &'static str,
        /// The value.
        value: String,
    },
}

impl Error {
    pub(super) fn unexpected(what: &'static str, value: impl ToString) -> Self {
        Self::Unexpected { what, value: value.to_string().chars().take(300).collect() }
    }
}

impl From<io::Error> for Error {
    fn from(source: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match source.kind() {
            UnexpectedEof | BrokenPipe | ConnectionReset => Self::Closed,
            _ => Self::Io(source),
        }
    }
}

/// What is read from: a buffered socket, or a slice.
pub trait Input: AsyncBufRead + Unpin + Send {}

impl<R: AsyncBufRead + Unpin + Send> Input for R {}

/// What follows the end of an operation's messages.
pub trait Answer: Sized {
    /// Reads it as a daemon of that minor version writes it.
    fn read<R: Input>(input: &mut R, minor: u8) -> impl Future<Output = Result<Self>> + Send;
}

/// Reads an answer from the front of `bytes`.
pub fn parse<A: Answer>(bytes: &mut &[u8], minor: u8) -> Result<A> {
    ready(A::read(bytes, minor))
}

/// The outcome of reading from a slice, which never waits.
fn ready<T>(reading: impl Future<Output = Result<T>>) -> Result<T> {
    match pin!(reading).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => Err(Error::Closed),
    }
}

/// Nothing follows.
impl Answer for () {
    async fn read<R: Input>(_: &mut R, _: u8) -> Result<Self> {
        Ok(())
    }
}

/// A word that says nothing but must be read, lest the next answer begin with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acknowledged;

impl Answer for Acknowledged {
    async fn read<R: Input>(input: &mut R, _: u8) -> Result<Self> {
        number(input).await.map(|_| Self)
    }
}

impl Answer for bool {
    async fn read<R: Input>(input: &mut R, _: u8) -> Result<Self> {
        flag(input).await
    }
}

impl Answer for BTreeSet<StorePath> {
    async fn read<R: Input>(input: &mut R, _: u8) -> Result<Self> {
        paths(input).await
    }
}

pub(super) async fn number<R: Input>(input: &mut R) -> Result<u64> {
    Ok(input.read_u64_le().await?)
}

pub(super) async fn flag<R: Input>(input: &mut R) -> Result<bool> {
    Ok(number(input).await? != 0)
}

/// The length of a list.
pub(super) async fn length<R: Input>(input: &mut R, what: &'static str, limit: u64) -> Result<u64> {
    match number(input).await? {
        length if length > limit => Err(Error::TooLong { what, length, limit }),
        length => Ok(length),
    }
}

/// A string that has to be there as a whole.
pub(super) async fn word<R: Input>(input: &mut R, what: &'static str, limit: usize) -> Result<String> {
    let length = length(input, what, limit as u64).await?;
    let bytes = take(input, length, limit).await?;
    String::from_utf8(bytes).map_err(|error| Error::unexpected(what, error.as_bytes().escape_ascii()))
}

/// A string that people read: what exceeds `room` is left out, and `room` shrinks by what was kept.
pub(super) async fn text<R: Input>(input: &mut R, room: &mut usize) -> Result<Vec<u8>> {
    let length = number(input).await?;
    let kept = take(input, length, *room).await?;
    *room -= kept.len();
    Ok(kept)
}

/// The same, as characters.
pub(super) async fn sentence<R: Input>(input: &mut R, room: &mut usize) -> Result<String> {
    let bytes = text(input, room).await?;
    Ok(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}

/// Reads `length` bytes and their padding, keeping the first `keep`.
async fn take<R: Input>(input: &mut R, length: u64, keep: usize) -> Result<Vec<u8>> {
    let mut kept = Vec::new();
    let mut left = length;
    while left > 0 {
        let there = input.fill_buf().await?;
        if there.is_empty() {
            return Err(Error::Closed);
        }
        let read = usize::try_from(left).unwrap_or(usize::MAX).min(there.len());
        kept.extend_from_slice(&there[..read.min(keep - kept.len())]);
        input.consume(read);
        left -= read as u64;
    }
    for _ in 0..padding(length) {
        match input.read_u8().await? {
            0 => {}
            other => return Err(Error::unexpected("padding", other)),
        }
    }
    Ok(kept)
}

/// How many zeros follow that many bytes.
fn padding(length: u64) -> u64 {
    length.wrapping_neg() % 8
}

pub(super) async fn path<R: Input>(input: &mut R) -> Result<StorePath> {
    store_path(&word(input, "a store path", MAX_PATH).await?)
}

fn store_path(path: &str) -> Result<StorePath> {
    path.parse().map_err(|_| Error::unexpected("a store path", path))
}

pub(super) async fn paths<R: Input>(input: &mut R) -> Result<BTreeSet<StorePath>> {
    let mut paths = BTreeSet::new();
    for _ in 0..length(input, "the number of paths", MAX_PATHS).await? {
        paths.insert(path(input).await?);
    }
    Ok(paths)
}

pub(super) async fn words<R: Input, C: Default + Extend<String>>(
    input: &mut R,
    what: &'static str,
) -> Result<C> {
    let mut words = C::default();
    for _ in 0..length(input, what, MAX_ITEMS).await? {
        words.extend([word(input, what, MAX_WORD).await?]);
    }
    Ok(words)
}
