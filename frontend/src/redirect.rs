//! NARs: whoever may read is sent to the bucket.

use std::time::Duration;

use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use harmonia_service::bucket::{Bucket, BucketError};

use crate::answer::missing;

/// Nix follows at once, S3 looks at the end of the time only when a download begins, and a broken download begins again
/// here: seconds would do. The rest is for clocks that differ and for slow proxies. It is also how long a leaked
/// address is of use.
const LIFETIME: Duration = Duration::from_secs(5 * 60);

/// A redirect. The address is signed for GET alone, so HEAD, by which Nix looks whether there is something, is answered.
pub async fn redirect(bucket: &Bucket, method: &Method, object: &str) -> Result<Response, BucketError> {
    if method == Method::HEAD {
        let Some(stored) = bucket.head(object).await? else { return Ok(missing()) };
        let headers = [
            (header::CONTENT_TYPE, HeaderValue::from_static("application/x-nix-nar")),
            (header::CONTENT_LENGTH, stored.size.into()),
            (header::ACCEPT_RANGES, HeaderValue::from_static("bytes")),
        ];
        return Ok(headers.into_response());
    }
    let url = bucket.presign_get(object, LIFETIME).await?;
    // Nobody on the way may keep an address that ends.
    let headers = [(header::LOCATION, url), (header::CACHE_CONTROL, "no-store".to_owned())];
    Ok((StatusCode::FOUND, headers).into_response())
}
