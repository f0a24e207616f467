//! Not every server that speaks S3 keeps what publishing relies on. Found out by trying, at start.

use harmonia_nix::Sha256;
use uuid::Uuid;

use super::{Bucket, BucketError, Checksum, Kind, Written};

const PROBE: Kind = Kind { content_type: "text/plain", encoding: None };

impl Bucket {
    /// None: fit. Otherwise a sentence that says what is missing.
    pub async fn unfit(&self) -> Result<Option<String>, BucketError> {
        let key = format!("probe/{}", Uuid::now_v7());
        let verdict = self.try_writes(&key).await;
        let removed = self.delete(&key).await;
        let verdict = verdict?;
        removed?;
        Ok(verdict.map(|why| format!("the bucket {} cannot be used: {why}", self.name)))
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
