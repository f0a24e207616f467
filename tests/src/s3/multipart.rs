//! What s3s-fs lacks of S3: SHA-256 checksums of parts and, from them, of the whole.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt};
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use s3s_fs::FileSystem;
use sha2::{Digest, Sha256};

type Part = (MultipartUploadId, PartNumber);
type Object = (BucketName, ObjectKey);

/// s3s-fs with checksums of multipart uploads, which it forgets when it stops.
pub(super) struct Checked {
    files: FileSystem,
    parts: Mutex<HashMap<Part, Vec<u8>>>,
    wholes: Mutex<HashMap<Object, String>>,
}

impl Checked {
    pub(super) fn new(files: FileSystem) -> Checked {
        Checked { files, parts: Mutex::default(), wholes: Mutex::default() }
    }

    /// SHA-256 of the parts' SHA-256, as S3 writes it: with the number of parts.
    fn whole(&self, upload: &str, completed: &CompletedMultipartUpload) -> S3Result<String> {
        let parts = lock(&self.parts);
        let mut hash = Sha256::new();
        let completed = completed.parts.as_deref().unwrap_or_default();
        for part in completed {
            let number = part.part_number.unwrap_or_default();
            let digest = parts.get(&(upload.to_owned(), number)).ok_or_else(|| s3_error!(InvalidPart))?;
            if part.checksum_sha256.as_ref().is_some_and(|claimed| *claimed != STANDARD.encode(digest)) {
                return Err(s3_error!(InvalidPart, "The part has another checksum."));
            }
            hash.update(digest);
        }
        Ok(format!("{}-{}", STANDARD.encode(hash.finalize()), completed.len()))
    }

    fn forget(&self, bucket: &str, key: &str) {
        lock(&self.wholes).remove(&(bucket.to_owned(), key.to_owned()));
    }
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

#[async_trait]
impl S3 for Checked {
    unchanged! {
        abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput;
        create_bucket(CreateBucketInput) -> CreateBucketOutput;
        create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput;
        get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput;
        get_object(GetObjectInput) -> GetObjectOutput;
        head_bucket(HeadBucketInput) -> HeadBucketOutput;
        list_objects(ListObjectsInput) -> ListObjectsOutput;
        list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output;
        list_parts(ListPartsInput) -> ListPartsOutput;
    }

    async fn upload_part(
        &self,
        mut request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let part = (request.input.upload_id.clone(), request.input.part_number);
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
        let digest = lock(&hash).clone().finalize().to_vec();
        let checksum = STANDARD.encode(&digest);
        if promised.is_some_and(|promised| promised != checksum) {
            return Err(s3_error!(BadDigest));
        }
        lock(&self.parts).insert(part, digest);
        response.output.checksum_sha256 = Some(checksum);
        Ok(response)
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = &request.input;
        let object = (input.bucket.clone(), input.key.clone());
        let completed = input.multipart_upload.as_ref().ok_or_else(|| s3_error!(InvalidPart))?;
        let whole = self.whole(&input.upload_id, completed)?;
        let response = self.files.complete_multipart_upload(request).await?;
        lock(&self.wholes).insert(object, whole);
        Ok(response)
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let object = (request.input.bucket.clone(), request.input.key.clone());
        let mut response = self.files.head_object(request).await?;
        if let Some(whole) = lock(&self.wholes).get(&object) {
            response.output.checksum_sha256 = Some(whole.clone());
            response.output.checksum_type = Some(ChecksumType::from_static(ChecksumType::COMPOSITE));
        }
        Ok(response)
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
        let response = self.files.put_object(request).await?;
        self.forget(&bucket, &key);
        Ok(response)
    }

    async fn copy_object(
        &self,
        request: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
        let response = self.files.copy_object(request).await?;
        self.forget(&bucket, &key);
        Ok(response)
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.forget(&request.input.bucket, &request.input.key);
        self.files.delete_object(request).await
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        for object in &request.input.delete.objects {
            self.forget(&request.input.bucket, &object.key);
        }
        self.files.delete_objects(request).await
    }
}
