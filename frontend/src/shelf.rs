//! Logs and listings of the bucket, for those who read them.

use std::io;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use harmonia_service::bucket::{Bucket, BucketError, Opened};
use harmonia_service::layout;
use harmonia_service::problem::Problem;
use harmonia_service::sentence::sentence;
use tokio::sync::Semaphore;

use crate::find::Away;
use crate::unpack::{PATIENCE, accepts_zstd, unpacked};

/// Plain bytes, as they are unpacked.
pub type Plain = BoxStream<'static, io::Result<Bytes>>;

/// Unpacking takes 8 MB at the very worst: so many programs read logs at once,
pub const PROGRAMS: usize = 32;
/// and so many pages, which take what they show of a log as fast as the bucket gives it.
pub const PAGES: usize = 16;

/// Large objects, and the right to unpack them.
#[derive(Clone)]
pub struct Shelf {
    bucket: Bucket,
    permits: Arc<Semaphore>,
}

impl Shelf {
    /// Of this bucket, for so many readers at once.
    pub fn new(bucket: Bucket, readers: usize) -> Self {
        Self { bucket, permits: Arc::new(Semaphore::new(readers)) }
    }

    /// An object, packed for whoever can read that. None: there is no such thing.
    pub async fn answer(
        &self,
        object: &str,
        content_type: &'static str,
        headers: &HeaderMap,
    ) -> Result<Option<Response>, Problem> {
        let Some(opened) = self.bucket.open(object).await.map_err(trouble(object))? else { return Ok(None) };
        let packed = is_packed(object, &opened)?;
        let as_it_is = !packed || accepts_zstd(headers);
        let body = if as_it_is {
            Body::from_stream(opened.pieces)
        } else {
            Body::from_stream(self.unpack(object, opened)?)
        };
        let mut response = body.into_response();
        let answered = response.headers_mut();
        answered.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if packed {
            answered.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
            if as_it_is {
                answered.insert(header::CONTENT_ENCODING, HeaderValue::from_static("zstd"));
            }
        }
        Ok(Some(response))
    }

    /// An object's plain bytes.
    pub async fn plain(&self, object: &str) -> Result<Option<Plain>, Problem> {
        let Some(opened) = self.bucket.open(object).await.map_err(trouble(object))? else { return Ok(None) };
        if is_packed(object, &opened)? {
            return self.unpack(object, opened).map(Some);
        }
        Ok(Some(opened.pieces.map_err(io::Error::other).boxed()))
    }

    fn unpack(&self, object: &str, opened: Opened) -> Result<Plain, Problem> {
        let permit = self
            .permits
            .clone()
            .try_acquire_owned()
            .map_err(|_| Problem::unavailable("too many logs are read at once: try again in a moment"))?;
        let plain = unpacked(opened.pieces, permit, PATIENCE).map_err(|error| {
            tracing::warn!(object, error = sentence(&error), "an object cannot be unpacked");
            Problem::from(Away)
        })?;
        Ok(plain.boxed())
    }
}

fn is_packed(object: &str, opened: &Opened) -> Result<bool, Problem> {
    match opened.encoding.as_deref() {
        None | Some("" | "identity") => Ok(layout::is_of_attempt(object)),
        Some("zstd") => Ok(true),
        Some(other) => {
            tracing::warn!(object, encoding = other, "the bucket has an object that is packed otherwise");
            Err(Away.into())
        }
    }
}

/// The sentence names neither the bucket nor the server; the log does.
pub fn trouble(object: &str) -> impl FnOnce(BucketError) -> Problem {
    move |error| {
        tracing::warn!(object, error = sentence(&error), "the bucket did not give an object");
        Away.into()
    }
}
