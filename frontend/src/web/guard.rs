//! What every page is sent with, and what a request may take.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use harmonia_service::problem::Problem;

use super::Web;
use super::frame::Trouble;

/// The longest that an answer may take to begin.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Nothing but our own files, no script or style within a page, in nobody's frame. Forms go to ourselves.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
/// Pages up to this size are packed while the reader waits; longer ones are sent as they are.
const MOST: usize = 8 << 20;

const HEADERS: &[(&str, &str)] = &[
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
];

/// Keeps every request within limits, and every answer safe.
pub async fn keep(State(web): State<Arc<Web>>, request: Request, next: Next) -> Response {
    let packs = accepts_gzip(request.headers());
    let response = answer(&web, request, next).await;
    dress(response, packs).await
}

async fn answer(web: &Web, request: Request, next: Next) -> Response {
    let Ok(_permit) = web.requests.try_acquire() else {
        let busy = Problem::unavailable("too many requests at once: try again in a moment");
        return Trouble::from(busy).into_response();
    };
    if has_nul(request.uri()) {
        let problem = Problem::bad_request("the address has a NUL byte, which no name here has");
        return Trouble::from(problem).into_response();
    }
    match tokio::time::timeout(PATIENCE, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            Trouble::from(Problem::unavailable("the page took longer than 30 s: try again")).into_response()
        }
    }
}

/// PostgreSQL keeps no NUL in a text. An address can only have it escaped.
pub fn has_nul(uri: &Uri) -> bool {
    uri.path().contains("%00") || uri.query().is_some_and(|query| query.contains("%00"))
}

/// For people who follow a link to nowhere; programs are told in their own way.
pub async fn lost(problem: Problem, headers: &HeaderMap) -> Response {
    let html = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|v| v.contains("text/html"));
    if html { dress(Trouble::from(problem).into_response(), false).await } else { problem.into_response() }
}

async fn dress(mut response: Response, packs: bool) -> Response {
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(*name, HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let html =
        headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
    let short = response.body().size_hint().upper().is_some_and(|bytes| bytes <= MOST as u64);
    if !html || !packs || !short {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(plain) = axum::body::to_bytes(body, MOST).await else {
        return Problem::unavailable("the page is too long").into_response();
    };
    let Some(packed) = packed(&plain, Compression::fast()) else {
        return Response::from_parts(parts, Body::from(plain));
    };
    parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    parts.headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(packed))
}

/// As gzip.
pub fn packed(plain: &[u8], level: Compression) -> Option<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(plain.len() / 4), level);
    encoder.write_all(plain).ok()?;
    encoder.finish().ok()
}

/// Whether the client unpacks by itself.
pub fn accepts_gzip(headers: &HeaderMap) -> bool {
    crate::unpack::accepts(headers, "gzip")
}

#[cfg(test)]
mod tests {
    use axum::response::Html;

    use super::*;

    #[tokio::test]
    async fn a_page_that_is_too_long_to_be_packed_is_sent_as_it_is() {
        for (length, packed) in [(1000, true), (MOST, true), (MOST + 1, false)] {
            let answer = dress(Html("x".repeat(length)).into_response(), true).await;
            assert_eq!(answer.status(), 200);
            assert_eq!(answer.headers().contains_key("content-encoding"), packed, "{length}");
            assert!(answer.headers().contains_key("content-security-policy"));
        }
    }
}
