use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harmonia_nix::Sha256;
use harmonia_nix::pack::PackError;
use thiserror::Error;

/// Why something was not published. No sentence holds an address or a token.
#[derive(Debug, Error)]
pub enum UploadError {
    /// The path could not be read or packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The path is not what it was when it was registered.
    #[error(
        "{path:?} has the NAR hash {found}, but the store's database says {expected}: repair or delete the path"
    )]
    Corrupt {
        /// Where it is on disk.
        path: PathBuf,
        /// Hash of the NAR in the database.
        expected: Sha256,
        /// Hash of the NAR on disk.
        found: Sha256,
    },
    /// The signers did not help.
    #[error(transparent)]
    Signer(#[from] SignerError),
    /// The bucket did not take something, however often it was offered.
    #[error("the bucket did not take {what}: {reason}")]
    Bucket {
        /// What was sent.
        what: String,
        /// What it said last.
        reason: String,
    },
    /// What was sent was always found missing or wrong.
    #[error("job {job} was uploaded {rounds} times and is still not complete: {reason}")]
    Incomplete {
        /// The job.
        job: i64,
        /// How often.
        rounds: u32,
        /// What the signer said last.
        reason: String,
    },
    /// The same of a source.
    #[error("{path} was uploaded {rounds} times and is still not published: {reason}")]
    Source {
        /// Its path.
        path: String,
        /// How often.
        rounds: u32,
        /// What the signer said last.
        reason: String,
    },
    /// The process is coming to its end.
    #[error("the upload was given up: this process is stopping")]
    Stopping,
    /// No client for HTTP.
    #[error("no HTTP client can be made: are there CA certificates?")]
    Client(#[source] reqwest::Error),
}

impl UploadError {
    /// The file that is not what the store's database says it is, if that is why.
    pub fn damaged(&self) -> Option<&Path> {
        match self {
            Self::Corrupt { path, .. } | Self::Pack(PackError::Size { path, .. }) => Some(path),
            Self::Pack(PackError::Read { path, source }) if source.kind() == ErrorKind::NotFound => {
                Some(path)
            }
            _ => None,
        }
    }
}

/// Why signers did not answer a question. Clonable: one request answers many.
#[derive(Debug, Clone, Error)]
pub enum SignerError {
    /// The token is not known any more: register again.
    #[error("the signer does not know this session any more: register again")]
    SessionOver,
    /// None of them answered for too long.
    #[error("no signer could be reached: {reason}")]
    Unreachable {
        /// What the last one did.
        reason: String,
        /// Why.
        source: Option<Arc<reqwest::Error>>,
    },
    /// They answered that the question is wrong.
    #[error("the signer refused a request: {reason}")]
    Rejected {
        /// A sentence.
        reason: String,
    },
    /// They say "not now" for too long.
    #[error("the signer puts off {what}: {reason}")]
    PutOff {
        /// What was asked.
        what: String,
        /// What it said last.
        reason: String,
    },
}
