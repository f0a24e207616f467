//! What each request is answered with.
//!
//! `Range` is left aside, as HTTP allows: only NARs are worth parts, and those the bucket answers.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use harmonia_service::bucket::Bucket;
use harmonia_service::problem::Problem;

use crate::admit::Admission;
use crate::count::Counts;
use crate::find::Finder;
use crate::key::{Key, Kind};
use crate::public_keys::{PublicKey, PublicKeys};
use crate::redirect::redirect;
use crate::shelf::{Shelf, trouble};

/// Before cache.nixos.org, which has 40.
const PRIORITY: u32 = 30;

/// What answers are made of.
pub struct Gateway {
    /// Who may read.
    pub admission: Arc<Admission>,
    /// Small objects.
    pub finder: Finder,
    /// Logs and listings.
    pub shelf: Shelf,
    /// All others.
    pub bucket: Bucket,
    /// `nix-cache-info`.
    pub info: Bytes,
    /// The keys that sign.
    pub public_keys: PublicKeys,
    /// What is counted.
    pub counts: Counts,
}

/// What Nix wants to know of a cache.
pub fn cache_info(priority: Option<u32>) -> Bytes {
    let priority = priority.unwrap_or(PRIORITY);
    format!("StoreDir: /nix/store\nWantMassQuery: 1\nPriority: {priority}\n").into()
}

/// There is no such thing. Nobody on the way may remember that: it may be signed in the next moment.
pub fn missing() -> Response {
    (StatusCode::NOT_FOUND, [(header::CACHE_CONTROL, "no-store")], "not in this cache\n").into_response()
}

impl Gateway {
    /// The pages.
    pub fn routes(self) -> Router {
        Router::new()
            .route("/cache/{*key}", get(cache))
            .route("/api/public-keys", get(public_keys))
            .with_state(Arc::new(self))
    }

    async fn answer(&self, key: &Key, method: &Method, headers: &HeaderMap) -> Result<Response, Problem> {
        match key.kind {
            Kind::Info => {
                Ok(([(header::CONTENT_TYPE, "text/x-nix-cache-info")], self.info.clone()).into_response())
            }
            Kind::NarInfo => self.small(&key.object, "text/x-nix-narinfo", headers).await,
            Kind::Realisation => self.small(&key.object, "application/json", headers).await,
            Kind::Nar => redirect(&self.bucket, method, &key.object).await.map_err(trouble(&key.object)),
            Kind::Log => self.large(&key.object, "text/plain; charset=utf-8", headers).await,
            Kind::Listing => self.large(&key.object, "application/json", headers).await,
        }
    }

    async fn small(
        &self,
        object: &str,
        content_type: &'static str,
        headers: &HeaderMap,
    ) -> Result<Response, Problem> {
        let Some(found) = self.finder.find(object).await? else { return Ok(missing()) };
        let etag = (header::ETAG, found.etag.clone());
        if is_known(headers, &found.etag) {
            return Ok((StatusCode::NOT_MODIFIED, [etag]).into_response());
        }
        let content_type = (header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        Ok(([content_type, etag], found.bytes.clone()).into_response())
    }

    async fn large(
        &self,
        object: &str,
        content_type: &'static str,
        headers: &HeaderMap,
    ) -> Result<Response, Problem> {
        Ok(self.shelf.answer(object, content_type, headers).await?.unwrap_or_else(missing))
    }
}

async fn cache(
    State(gateway): State<Arc<Gateway>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let path = uri.path_and_query().and_then(|path| path.as_str().strip_prefix("/cache/"));
    let key = path.and_then(Key::parse);
    let answer = match gateway.admission.admit(&headers).await {
        Err(problem) => Err(problem),
        Ok(()) => match &key {
            Some(key) => gateway.answer(key, &method, &headers).await,
            None => Ok(missing()),
        },
    };
    let response = answer.unwrap_or_else(IntoResponse::into_response);
    gateway.counts.answered(key.map(|key| key.kind), response.status());
    response
}

/// The keys that sign the cache, or the lines that a `nix.conf` takes for who asks for text
#[utoipa::path(get, path = "/api/public-keys", tag = "cache", security(()), responses(
    (status = 200, description = "The keys", content((Vec<PublicKey> = "application/json"), (String = "text/plain"))),
    (status = 503, description = "They are not known yet", body = Problem, content_type = "application/problem+json"),
))]
pub async fn public_keys(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    gateway.public_keys.answer(&headers).await
}

/// Whether the client has these bytes already.
fn is_known(headers: &HeaderMap, etag: &HeaderValue) -> bool {
    let values = headers.get_all(header::IF_NONE_MATCH).into_iter().filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag).as_bytes() == etag.as_bytes())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_known_tag_is_found_in_any_form() {
        let knows = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::IF_NONE_MATCH, value.parse().unwrap());
            is_known(&headers, &HeaderValue::from_static("\"abc\""))
        };
        assert!(knows("\"abc\"") && knows("W/\"abc\"") && knows("\"x\", \"abc\"") && knows("*"));
        assert!(!knows("abc") && !knows("\"x\"") && !knows(""));
        assert!(!is_known(&HeaderMap::new(), &HeaderValue::from_static("\"abc\"")));
    }
}
