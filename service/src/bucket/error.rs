use std::error::Error as StdError;

use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use thiserror::Error;

/// Why the bucket did not do something.
#[derive(Debug, Error)]
pub enum BucketError {
    /// It said no.
    #[error("{operation} {key}: the S3 server answered {status} {code}")]
    Refused {
        /// What was asked.
        operation: &'static str,
        /// Of which object.
        key: String,
        /// The HTTP status.
        status: u16,
        /// S3's word for it.
        code: String,
    },
    /// It could not be asked, or did not answer.
    #[error("{operation} {key}: the S3 server cannot be reached")]
    Unreachable {
        /// What was asked.
        operation: &'static str,
        /// Of which object.
        key: String,
        /// Why.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The answer ended too soon.
    #[error("GET {key}: the answer broke off")]
    Cut {
        /// Of which object.
        key: String,
        /// Why.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// Larger than anything of its kind.
    #[error("{key} has more than {most} bytes")]
    TooLarge {
        /// The object.
        key: String,
        /// The most it may have.
        most: usize,
    },
    /// An upload in parts was begun and not named.
    #[error("the S3 server began an upload of {key} and did not name it")]
    Nameless {
        /// Of which object.
        key: String,
    },
    /// A request could not be signed.
    #[error("a request for {key} cannot be signed")]
    Presign {
        /// Of which object.
        key: String,
        /// Why.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
}

impl BucketError {
    /// There is no such object, or no such upload.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }

    /// Something is there already, or is being written there.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { status: 409 | 412, .. })
    }

    /// The same may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Refused { status, .. } => matches!(status, 408 | 429 | 500..),
            Self::Unreachable { .. } | Self::Cut { .. } => true,
            _ => false,
        }
    }
}

/// An error of the SDK, without the request: it may hold a signature.
pub(super) fn fault<E>(
    operation: &'static str,
    key: &str,
) -> impl FnOnce(SdkError<E, HttpResponse>) -> BucketError
where
    E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
{
    let key = key.to_owned();
    move |error| match error.raw_response().map(|response| response.status().as_u16()) {
        Some(status) => {
            let code = error.code().unwrap_or_default().to_owned();
            BucketError::Refused { operation, key, status, code }
        }
        None => BucketError::Unreachable { operation, key, source: Box::new(error) },
    }
}
