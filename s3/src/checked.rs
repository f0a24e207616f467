//! What s3s-fs lacks of S3: SHA-256 checksums of parts and, from them, of the whole; and lists of large buckets.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt};
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use s3s_fs::FileSystem;
use sha2::{Digest, Sha256};

use crate::list::list;

/// s3s-fs with checksums of multipart uploads. Nothing is kept in memory: a part's checksum is computed from its file when
/// the upload is completed, and the whole's is added to what s3s-fs itself keeps of the object.
pub struct Checked {
    files: Arc<FileSystem>,
    root: PathBuf,
}

impl Checked {
    /// A directory whose directories are buckets.
    pub fn new(root: &Path) -> io::Result<Checked> {
        let files = FileSystem::new(root).map_err(|error| io::Error::other(format!("{error:?}")))?;
        Ok(Checked { files: Arc::new(files), root: root.to_owned() })
    }

    /// SHA-256 of the parts' SHA-256, as S3 writes it: with the number of parts.
    async fn whole(&self, upload: &str, completed: &CompletedMultipartUpload) -> S3Result<String> {
        if !upload.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(s3_error!(NoSuchUpload));
        }
        let completed = completed.parts.as_deref().unwrap_or_default();
        let mut hash = Sha256::new();
        for part in completed {
            let number = part.part_number.unwrap_or_default();
            let file = self.root.join(format!(".upload_id-{upload}.part-{number}"));
            let digest = digest(file).await.map_err(|_| s3_error!(InvalidPart))?;
            if part.checksum_sha256.as_ref().is_some_and(|claimed| *claimed != STANDARD.encode(digest)) {
                return Err(s3_error!(InvalidPart, "The part has another checksum."));
            }
            hash.update(digest);
        }
        Ok(format!("{}-{}", STANDARD.encode(hash.finalize()), completed.len()))
    }

    /// Where s3s-fs keeps an object's checksums.
    fn info(&self, bucket: &str, key: &str) -> PathBuf {
        let (bucket, key) = (URL_SAFE_NO_PAD.encode(bucket), URL_SAFE_NO_PAD.encode(key));
        self.root.join(format!(".bucket-{bucket}.object-{key}.internal.json"))
    }
}

async fn digest(file: PathBuf) -> io::Result<[u8; 32]> {
    let read = tokio::task::spawn_blocking(move || {
        let mut hash = Sha256::new();
        io::copy(&mut std::fs::File::open(file)?, &mut hash)?;
        Ok(hash.finalize().into())
    });
    read.await.map_err(io::Error::other)?
}

/// Whole or not at all.
async fn add_checksum(file: PathBuf, checksum: String) -> io::Result<()> {
    let mut info: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&tokio::fs::read(&file).await?)?;
    info.insert("checksum_sha256".to_owned(), checksum.into());
    let new = file.with_extension("new");
    tokio::fs::write(&new, serde_json::to_vec(&info)?).await?;
    tokio::fs::rename(&new, &file).await
}

/// Bucket, key and id of an upload that has begun, from the name of the file in which s3s-fs keeps what the object will be.
fn begun_upload(name: &str) -> Option<(String, String, String)> {
    let decode = |text: &str| String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok();
    let (bucket, rest) = name.strip_prefix(".bucket-")?.split_once(".object-")?;
    let (key, id) = rest.strip_suffix(".metadata.json")?.split_once(".upload-")?;
    Some((decode(bucket)?, decode(key)?, id.to_owned()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Methods that need no more than s3s-fs has, in the form that `async_trait` gives the others.
macro_rules! unchanged {
    ($($method:ident($input:ty) -> $output:ty;)*) => {
        $(fn $method<'a, 'b>(&'a self, request: S3Request<$input>) -> BoxFuture<'b, S3Result<S3Response<$output>>>
        where
            'a: 'b,
            Self: 'b,
        {
            self.files.$method(request)
        })*
    };
}

/// The same for a name that s3s-fs can keep.
macro_rules! shortened {
    ($($method:ident($input:ty) -> $output:ty;)*) => {
        $(fn $method<'a, 'b>(&'a self, mut request: S3Request<$input>) -> BoxFuture<'b, S3Result<S3Response<$output>>>
        where
            'a: 'b,
            Self: 'b,
        {
            request.input.key = short(request.input.key);
            self.files.$method(request)
        })*
    };
}

/// s3s-fs names a file by the key in base64, of which a file's name has room for 160 bytes. Logs are named by their derivation,
/// whose name may have 211. Such a key is cut and told apart by its hash; in lists it stays cut.
fn short(key: String) -> String {
    const LONGEST: usize = 150;
    const KEPT: usize = 80;
    if key.len() <= LONGEST {
        return key;
    }
    let kept: String = key.chars().take(KEPT).collect();
    let digest = Sha256::digest(&key).iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    format!("{kept}~{digest}")
}

#[async_trait]
impl S3 for Checked {
    unchanged! {
        abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput;
        create_bucket(CreateBucketInput) -> CreateBucketOutput;
        create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput;
        delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput;
        get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput;
        head_bucket(HeadBucketInput) -> HeadBucketOutput;
        list_objects(ListObjectsInput) -> ListObjectsOutput;
        list_parts(ListPartsInput) -> ListPartsOutput;
    }

    shortened! {
        delete_object(DeleteObjectInput) -> DeleteObjectOutput;
        get_object(GetObjectInput) -> GetObjectOutput;
        put_object(PutObjectInput) -> PutObjectOutput;
    }

    async fn copy_object(
        &self,
        mut request: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        request.input.key = short(request.input.key);
        if let CopySource::Bucket { key, .. } = &mut request.input.copy_source {
            *key = short(key.to_string()).into();
        }
        self.files.copy_object(request).await
    }

    async fn upload_part(
        &self,
        mut request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let promised = request.input.checksum_sha256.clone();
        let hash = Arc::new(Mutex::new(Sha256::new()));
        if let Some(body) = request.input.body.take() {
            let hash = hash.clone();
            let body = body.inspect(move |chunk| {
                chunk.iter().for_each(|bytes| lock(&hash).update(bytes));
            });
            request.input.body = Some(StreamingBlob::wrap(body.map_err(io::Error::other)));
        }
        let mut response = self.files.upload_part(request).await?;
        let checksum = STANDARD.encode(lock(&hash).clone().finalize());
        if promised.is_some_and(|promised| promised != checksum) {
            return Err(s3_error!(BadDigest));
        }
        response.output.checksum_sha256 = Some(checksum);
        Ok(response)
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = &request.input;
        let info = self.info(&input.bucket, &input.key);
        let completed = input.multipart_upload.as_ref().ok_or_else(|| s3_error!(InvalidPart))?;
        let whole = self.whole(&input.upload_id, completed).await?;
        let files = self.files.clone();
        // Not cancelled with the connection: half way there is neither an upload any more nor an object yet.
        let work = tokio::spawn(async move {
            let response = files.complete_multipart_upload(request).await?;
            add_checksum(info, whole).await.map_err(|error| s3_error!(error, InternalError))?;
            Ok(response)
        });
        work.await.map_err(|error| s3_error!(error, InternalError))?
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        if request.input.delimiter.as_ref().is_some_and(|delimiter| delimiter != "/") {
            return self.files.list_objects_v2(request).await;
        }
        let bucket = self.root.join(&request.input.bucket);
        if !bucket.is_dir() {
            return Err(s3_error!(NoSuchBucket));
        }
        let listed = tokio::task::spawn_blocking(move || list(&bucket, request.input)).await;
        let listed = listed.map_err(io::Error::other).flatten();
        listed.map(S3Response::new).map_err(|error| s3_error!(error, InternalError))
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let ListMultipartUploadsInput { bucket, prefix, .. } = request.input;
        let mut uploads = Vec::new();
        let mut files =
            tokio::fs::read_dir(&self.root).await.map_err(|error| s3_error!(error, InternalError))?;
        while let Ok(Some(entry)) = files.next_entry().await {
            let Some((of, key, id)) = entry.file_name().to_str().and_then(begun_upload) else { continue };
            if of == bucket && key.starts_with(prefix.as_deref().unwrap_or_default()) {
                let begun = entry.metadata().await.and_then(|metadata| metadata.modified()).ok();
                uploads.push(MultipartUpload {
                    key: Some(key),
                    upload_id: Some(id),
                    initiated: begun.map(Timestamp::from),
                    ..MultipartUpload::default()
                });
            }
        }
        let output = ListMultipartUploadsOutput {
            bucket: Some(bucket),
            prefix,
            is_truncated: Some(false),
            uploads: Some(uploads),
            ..ListMultipartUploadsOutput::default()
        };
        Ok(S3Response::new(output))
    }

    async fn head_object(
        &self,
        mut request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        request.input.key = short(request.input.key);
        let mut response = self.files.head_object(request).await?;
        if response.output.checksum_sha256.as_ref().is_some_and(|checksum| checksum.contains('-')) {
            response.output.checksum_type = Some(ChecksumType::from_static(ChecksumType::COMPOSITE));
        }
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_key_becomes_a_short_one_of_its_own() {
        let keys = ["a", "b"].map(|end| format!("log/{}{end}", "x".repeat(240)));
        let names = keys.clone().map(short);
        assert!(names[0] != names[1] && names.iter().all(|name| name.len() <= 150));
        assert_eq!(short("nar/x".to_owned()), "nar/x");
        // What a sweep takes for the log of a derivation ends so.
        assert!(!short(format!("log/{}.drv", "x".repeat(240))).ends_with(".drv"));
    }

    #[test]
    fn an_upload_that_has_begun_is_told_from_an_object() {
        let (bucket, key) = (URL_SAFE_NO_PAD.encode("cache"), URL_SAFE_NO_PAD.encode("nar/x.nar.zst"));
        let object = format!(".bucket-{bucket}.object-{key}.metadata.json");
        assert_eq!(begun_upload(&object), None);
        let upload = format!(".bucket-{bucket}.object-{key}.upload-0a1b.metadata.json");
        assert_eq!(begun_upload(&upload), Some(("cache".into(), "nar/x.nar.zst".into(), "0a1b".into())));
    }
}
