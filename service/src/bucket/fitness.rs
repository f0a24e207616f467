//! Not every server that speaks S3 keeps what publishing relies on. Found out by trying, at start.

use std::fmt;

use harmonia_nix::Sha256;
use uuid::Uuid;

use super::{Bucket, BucketError, Checksum, Kind, Written};
use crate::sentence::sentence;

const PROBE: Kind = Kind { content_type: "text/plain", encoding: None };

/// Nothing is here. A key that may list the bucket hears that, any other is refused, and would be for every path that is missing.
const ABSENT: &str = "probe/absent";

/// A bucket, to whoever chose it.
impl fmt::Display for Bucket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the bucket {} at {}", self.name, self.server)
    }
}

impl Bucket {
    /// None: fit. Otherwise a sentence that says what is missing.
    pub async fn unfit(&self) -> Option<String> {
        let key = format!("probe/{}", Uuid::now_v7());
        let verdict = self.try_writes(&key).await;
        let removed = self.delete(&key).await;
        match verdict.and_then(|verdict| removed.map(|()| verdict)) {
            Ok(verdict) => verdict.map(|why| format!("{self} cannot be used: {why}")),
            Err(error) => Some(self.explained(&error)),
        }
    }

    /// The same for those that only read. With requests whose answers tell an object that is missing from a bucket that is: of HEAD
    /// none does, and of GET not every server's.
    pub async fn unreadable(&self) -> Option<String> {
        let looked = async {
            self.list(ABSENT, true, None).await?;
            self.get(ABSENT, 0).await
        };
        let error = looked.await.err()?;
        Some(format!("{}; the key must be allowed to read and to list the bucket", self.explained(&error)))
    }

    fn explained(&self, error: &BucketError) -> String {
        let advice = if error.is_elsewhere() { "; set s3_region to the region that it is in" } else { "" };
        format!("{self}: {}{advice}", sentence(error))
    }

    async fn try_writes(&self, key: &str) -> Result<Option<String>, BucketError> {
        // Before anything is there, so that a server which stores it all the same is found out by what follows.
        let wrong =
            self.client.put_object().bucket(&self.name).key(key).body("probe".to_owned().into_bytes().into());
        let wrong = wrong.checksum_sha256(Sha256::of("something else").base64()).send().await;
        match wrong.map_err(super::fault("PUT", key)) {
            Ok(_) => {
                return Ok(Some(
                    "it stores an object although its SHA-256 differs from the one given".into(),
                ));
            }
            Err(BucketError::Refused { status: 400..=499, code, .. }) if code != "AccessDenied" => {}
            Err(error) => return Err(error),
        }
        self.delete(key).await?;
        self.put_new(key, b"probe".to_vec(), PROBE).await?;
        if self.put_new(key, b"probe again".to_vec(), PROBE).await? == Written::New {
            return Ok(Some("it ignores `If-None-Match: *` and overwrites what is there".into()));
        }
        match self.head(key).await? {
            Some(stored) if stored.checksum == Checksum::Whole(Sha256::of("probe")) => Ok(None),
            Some(_) => Ok(Some("it does not say the SHA-256 of what it stores".into())),
            None => Ok(Some("what was stored cannot be found".into())),
        }
    }
}
