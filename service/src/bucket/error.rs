use std::error::Error as StdError;

use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use thiserror::Error;

/// Words for an object, or an upload, that is not there.
const ABSENT: [&str; 3] = ["NoSuchKey", "NoSuchUpload", "NotFound"];
/// Characters of what a server says that are kept.
const LONGEST: usize = 300;

/// Why the bucket did not do something.
#[derive(Debug, Error)]
pub enum BucketError {
    /// It said no.
    #[error("{operation} {key}: the S3 server answered {}", said(*status, code, message))]
    Refused {
        /// What was asked.
        operation: &'static str,
        /// Of which object.
        key: String,
        /// The HTTP status.
        status: u16,
        /// S3's word for it.
        code: String,
        /// What it says about it.
        message: String,
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
    /// There is no such object, or no such upload. By its word, for there may be no such bucket, or no S3 server: a proxy says 404
    /// too. What is asked with HEAD has an answer without words, for which the SDK puts one.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { status: 404, code, .. } if ABSENT.contains(&code.as_str()))
    }

    /// The bucket is elsewhere, or the signature names another region.
    pub(super) fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Refused { status, code, .. }
            if *status == 301 || matches!(code.as_str(), "AuthorizationHeaderMalformed" | "PermanentRedirect"))
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

fn said(status: u16, code: &str, message: &str) -> String {
    match message {
        "" => format!("{status} {code}").trim_end().to_owned(),
        message => format!("{status} {code} ({message})"),
    }
}

/// The beginning of what the server says, in one line. None of it, if it repeats how a request was signed.
fn shortened(message: &str) -> String {
    if ["Signature=", "Authorization", "Credential="].iter().any(|word| message.contains(word)) {
        return String::new();
    }
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().filter(|sign| !sign.is_control()).take(LONGEST).collect()
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
            let message = shortened(error.message().unwrap_or_default());
            BucketError::Refused { operation, key, status, code, message }
        }
        None => BucketError::Unreachable { operation, key, source: Box::new(error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str, message: &str) -> BucketError {
        let (code, message) = (code.to_owned(), shortened(message));
        BucketError::Refused { operation: "GET", key: "x".to_owned(), status, code, message }
    }

    #[test]
    fn only_what_s3_calls_missing_is_missing() {
        for code in ABSENT {
            assert!(refused(404, code, "").is_missing(), "{code}");
        }
        for code in ["NoSuchBucket", ""] {
            assert!(!refused(404, code, "").is_missing(), "{code}");
        }
        assert!(!refused(403, "NoSuchKey", "").is_missing());
    }

    #[test]
    fn what_the_server_says_is_told_shortly() {
        let error = refused(403, "AccessDenied", "The key\nis   not allowed.");
        assert_eq!(
            error.to_string(),
            "GET x: the S3 server answered 403 AccessDenied (The key is not allowed.)"
        );
        let error = refused(500, "InternalError", &"x".repeat(1000));
        assert!(error.to_string().len() < LONGEST + 80);
    }

    #[test]
    fn how_a_request_was_signed_is_not_told() {
        let error = refused(400, "InvalidRequest", "cannot read X-Amz-Signature=0123");
        assert_eq!(error.to_string(), "GET x: the S3 server answered 400 InvalidRequest");
    }

    #[test]
    fn another_region_is_recognised() {
        assert!(refused(301, "PermanentRedirect", "").is_elsewhere());
        assert!(refused(400, "AuthorizationHeaderMalformed", "").is_elsewhere());
        assert!(!refused(400, "InvalidRequest", "").is_elsewhere());
    }
}
