//! The bucket: the few S3 calls that signers and frontends make.

mod connect;
mod error;
mod fitness;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use aws_sdk_s3::Client;
use aws_sdk_s3::presigning::{PresignedRequest, PresigningConfig};
use aws_sdk_s3::primitives::{ByteStream, DateTime};
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart, MetadataDirective,
};
use axum::body::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use harmonia_nix::Sha256;

pub(crate) use connect::place;
pub use error::BucketError;
use error::fault;

/// Uploads may begin this long after the slot was given.
pub const SLOT_LIFETIME: Duration = Duration::from_secs(15 * 60);

/// A bucket.
#[derive(Clone, Debug)]
pub struct Bucket {
    client: Client,
    /// As others reach it who are sent there by a frontend.
    outside: Client,
    name: String,
    /// Where it is, in a word without secrets.
    server: String,
}

/// What is stored under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Bytes.
    pub size: u64,
    /// What the server computed when it took them.
    pub checksum: Checksum,
}

/// A checksum as S3 keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checksum {
    /// Of all bytes.
    Whole(Sha256),
    /// Of the checksums of the parts, and how many there are.
    OfParts(Sha256, usize),
    /// None is kept.
    Unknown,
}

impl Checksum {
    /// What S3 keeps of an object that was sent in parts.
    pub fn of_parts(parts: &[Sha256]) -> Self {
        Self::OfParts(Sha256::of(parts.iter().map(|part| part.0).collect::<Vec<_>>().concat()), parts.len())
    }

    fn read(text: Option<&str>) -> Self {
        let parse = |base64: &str| format!("sha256-{base64}").parse::<Sha256>().ok();
        match text.map(|text| text.split_once('-').unwrap_or((text, ""))) {
            Some((whole, "")) => parse(whole).map_or(Self::Unknown, Self::Whole),
            Some((digest, count)) => match (parse(digest), count.parse()) {
                (Some(digest), Ok(count)) => Self::OfParts(digest, count),
                _ => Self::Unknown,
            },
            None => Self::Unknown,
        }
    }
}

/// What became of a conditional write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is there now.
    New,
    /// Something was there before, and is still.
    Exists,
}

/// A request that somebody else may send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presigned {
    /// The address, a secret for as long as it lasts.
    pub url: String,
    /// Headers that the signature covers.
    pub headers: BTreeMap<String, String>,
}

/// How an object presents itself to whoever fetches it.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// `Content-Type`.
    pub content_type: &'static str,
    /// `Content-Encoding`.
    pub encoding: Option<&'static str>,
}

/// An object as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// When it was written.
    pub written: SystemTime,
}

/// An object that is being read.
pub struct Opened {
    /// `Content-Encoding`.
    pub encoding: Option<String>,
    /// Its bytes.
    pub pieces: BoxStream<'static, Result<Bytes, BucketError>>,
}

impl Bucket {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is stored under a key, if anything.
    pub async fn head(&self, key: &str) -> Result<Option<Stored>, BucketError> {
        let request =
            self.client.head_object().bucket(&self.name).key(key).checksum_mode(ChecksumMode::Enabled);
        match request.send().await.map_err(fault("HEAD", key)) {
            Ok(answer) => Ok(Some(Stored {
                size: answer.content_length().and_then(|size| size.try_into().ok()).unwrap_or(0),
                checksum: Checksum::read(answer.checksum_sha256()),
            })),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A small object's bytes. One larger than `most` is an error.
    pub async fn get(&self, key: &str, most: usize) -> Result<Option<Vec<u8>>, BucketError> {
        let request = self.client.get_object().bucket(&self.name).key(key);
        let mut answer = match request.send().await.map_err(fault("GET", key)) {
            Ok(answer) => answer,
            Err(error) if error.is_missing() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        loop {
            match answer.body.try_next().await {
                Ok(Some(chunk)) if bytes.len() + chunk.len() <= most => bytes.extend_from_slice(&chunk),
                Ok(Some(_)) => return Err(BucketError::TooLarge { key: key.to_owned(), most }),
                Ok(None) => return Ok(Some(bytes)),
                Err(source) => {
                    return Err(BucketError::Cut { key: key.to_owned(), source: Box::new(source) });
                }
            }
        }
    }

    /// An object piece by piece.
    pub async fn open(&self, key: &str) -> Result<Option<Opened>, BucketError> {
        let request = self.client.get_object().bucket(&self.name).key(key);
        let answer = match request.send().await.map_err(fault("GET", key)) {
            Ok(answer) => answer,
            Err(error) if error.is_missing() => return Ok(None),
            Err(error) => return Err(error),
        };
        let pieces = stream::try_unfold((answer.body, key.to_owned()), |(mut body, key)| async move {
            match body.try_next().await {
                Ok(piece) => Ok(piece.map(|piece| (piece, (body, key)))),
                Err(source) => Err(BucketError::Cut { key, source: Box::new(source) }),
            }
        });
        Ok(Some(Opened { encoding: answer.content_encoding, pieces: pieces.boxed() }))
    }

    /// Writes what is not there yet.
    pub async fn put_new(&self, key: &str, bytes: Vec<u8>, kind: Kind) -> Result<Written, BucketError> {
        let request = self.put_request(key, bytes, kind).if_none_match("*");
        written(request.send().await.map_err(fault("PUT", key)))
    }

    /// Writes, whatever is there.
    pub async fn put(&self, key: &str, bytes: Vec<u8>, kind: Kind) -> Result<(), BucketError> {
        self.put_request(key, bytes, kind).send().await.map_err(fault("PUT", key))?;
        Ok(())
    }

    fn put_request(
        &self,
        key: &str,
        bytes: Vec<u8>,
        kind: Kind,
    ) -> aws_sdk_s3::operation::put_object::builders::PutObjectFluentBuilder {
        let checksum = Sha256::of(&bytes).base64();
        let request = self.client.put_object().bucket(&self.name).key(key).body(ByteStream::from(bytes));
        request
            .checksum_sha256(checksum)
            .content_type(kind.content_type)
            .set_content_encoding(kind.encoding.map(str::to_owned))
    }

    /// Copies on the server's side. False: there is nothing to copy.
    pub async fn copy(&self, from: &str, to: &str, kind: Kind) -> Result<bool, BucketError> {
        let request = self
            .client
            .copy_object()
            .bucket(&self.name)
            .key(to)
            .copy_source(format!("{}/{}", self.name, percent_encoded(from)))
            .metadata_directive(MetadataDirective::Replace)
            .content_type(kind.content_type)
            .set_content_encoding(kind.encoding.map(str::to_owned));
        match request.send().await.map_err(fault("COPY", from)) {
            Ok(_) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes; what is not there is removed already.
    pub async fn delete(&self, key: &str) -> Result<(), BucketError> {
        match self
            .client
            .delete_object()
            .bucket(&self.name)
            .key(key)
            .send()
            .await
            .map_err(fault("DELETE", key))
        {
            Ok(_) => Ok(()),
            Err(error) if error.is_missing() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Objects whose keys begin so, a page of up to a thousand, and where the next one begins. `flat`: none with a `/` behind
    /// the prefix.
    pub async fn list(
        &self,
        prefix: &str,
        flat: bool,
        from: Option<String>,
    ) -> Result<(Vec<Listed>, Option<String>), BucketError> {
        let request = self.client.list_objects_v2().bucket(&self.name).prefix(prefix);
        let request = request.set_delimiter(flat.then(|| "/".to_owned())).set_continuation_token(from);
        let answer = request.send().await.map_err(fault("LIST", prefix))?;
        let listed = answer.contents.unwrap_or_default().into_iter().filter_map(|object| {
            Some(Listed {
                key: object.key?,
                size: object.size.and_then(|size| size.try_into().ok()).unwrap_or(0),
                written: object.last_modified.and_then(|moment| SystemTime::try_from(moment).ok())?,
            })
        });
        Ok((listed.collect(), answer.next_continuation_token))
    }

    /// A PUT of exactly these bytes to a key where nothing is.
    pub async fn presign_put(&self, key: &str, size: u64, sha256: Sha256) -> Result<Presigned, BucketError> {
        let request = self
            .client
            .put_object()
            .bucket(&self.name)
            .key(key)
            .content_length(length(size))
            .checksum_sha256(sha256.base64())
            .if_none_match("*");
        request
            .presigned(expiring(SLOT_LIFETIME, key)?)
            .await
            .map(presigned)
            .map_err(fault("presign PUT", key))
    }

    /// A GET, for `lifetime`.
    pub async fn presign_get(&self, key: &str, lifetime: Duration) -> Result<String, BucketError> {
        let request = self.outside.get_object().bucket(&self.name).key(key);
        let request = request.presigned(expiring(lifetime, key)?).await.map_err(fault("presign GET", key))?;
        Ok(request.uri().to_owned())
    }

    /// Begins an upload in parts; answers its name.
    pub async fn begin_parts(&self, key: &str) -> Result<String, BucketError> {
        let request = self
            .client
            .create_multipart_upload()
            .bucket(&self.name)
            .key(key)
            .checksum_algorithm(ChecksumAlgorithm::Sha256)
            .checksum_type(ChecksumType::Composite);
        let answer = request.send().await.map_err(fault("begin parts of", key))?;
        answer.upload_id.ok_or_else(|| BucketError::Nameless { key: key.to_owned() })
    }

    /// A PUT of exactly this part.
    pub async fn presign_part(
        &self,
        key: &str,
        upload: &str,
        number: i32,
        size: u64,
        sha256: Sha256,
    ) -> Result<Presigned, BucketError> {
        let request = self
            .client
            .upload_part()
            .bucket(&self.name)
            .key(key)
            .upload_id(upload)
            .part_number(number)
            .content_length(length(size))
            .checksum_sha256(sha256.base64());
        request
            .presigned(expiring(SLOT_LIFETIME, key)?)
            .await
            .map(presigned)
            .map_err(fault("presign a part of", key))
    }

    /// Makes one object of the parts, where nothing is. An upload that is not known any more is an error that
    /// [`BucketError::is_missing`]: it may have been completed before.
    pub async fn complete_parts(
        &self,
        key: &str,
        upload: &str,
        parts: &[(String, Sha256)],
    ) -> Result<Written, BucketError> {
        let parts = (1..).zip(parts).map(|(number, (etag, sha256))| {
            CompletedPart::builder().part_number(number).e_tag(etag).checksum_sha256(sha256.base64()).build()
        });
        let parts = CompletedMultipartUpload::builder().set_parts(Some(parts.collect())).build();
        let request = self
            .client
            .complete_multipart_upload()
            .bucket(&self.name)
            .key(key)
            .upload_id(upload)
            .if_none_match("*");
        let request = request.multipart_upload(parts).customize().config_override(connect::patient());
        written(request.send().await.map_err(fault("complete", key)))
    }

    /// Drops an upload in parts.
    pub async fn abort_parts(&self, key: &str, upload: &str) -> Result<(), BucketError> {
        let request = self.client.abort_multipart_upload().bucket(&self.name).key(key).upload_id(upload);
        match request.send().await.map_err(fault("abort", key)) {
            Ok(_) => Ok(()),
            Err(error) if error.is_missing() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Uploads in parts that were begun before a moment and never ended, up to a page of them.
    pub async fn stale_parts(&self, before: SystemTime) -> Result<Vec<(String, String)>, BucketError> {
        let request = self.client.list_multipart_uploads().bucket(&self.name).prefix("nar/");
        let answer = request.send().await.map_err(fault("list uploads of", "nar/"))?;
        let before = DateTime::from(before);
        let stale = answer.uploads.unwrap_or_default().into_iter();
        let stale = stale.filter(|upload| upload.initiated.is_some_and(|begun| begun < before));
        Ok(stale.filter_map(|upload| Some((upload.key?, upload.upload_id?))).collect())
    }
}

fn written<T>(answer: Result<T, BucketError>) -> Result<Written, BucketError> {
    match answer {
        Ok(_) => Ok(Written::New),
        Err(error) if error.is_conflict() => Ok(Written::Exists),
        Err(error) => Err(error),
    }
}

fn presigned(request: PresignedRequest) -> Presigned {
    let headers = request.headers().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    Presigned { url: request.uri().to_owned(), headers }
}

fn expiring(lifetime: Duration, key: &str) -> Result<PresigningConfig, BucketError> {
    PresigningConfig::expires_in(lifetime)
        .map_err(|source| BucketError::Presign { key: key.to_owned(), source: Box::new(source) })
}

fn length(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// All but what needs no escape in a path: names of store paths may have `+`, `?` and `=`.
fn percent_encoded(key: &str) -> String {
    key.bytes().fold(String::new(), |mut text, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(byte))
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_told_apart() {
        let part = Sha256::of("part");
        assert_eq!(Checksum::read(Some(&part.base64())), Checksum::Whole(part));
        let both = Checksum::of_parts(&[part, part]);
        let Checksum::OfParts(digest, 2) = both else { unreachable!("two parts") };
        assert_eq!(Checksum::read(Some(&format!("{}-2", digest.base64()))), both);
        assert_eq!(Checksum::read(Some("rubbish-x")), Checksum::Unknown);
        assert_eq!(Checksum::read(None), Checksum::Unknown);
    }

    #[test]
    fn names_of_store_paths_are_escaped() {
        assert_eq!(percent_encoded("listings/a+b?c=d_e.ls"), "listings/a%2Bb%3Fc%3Dd_e.ls");
    }
}
