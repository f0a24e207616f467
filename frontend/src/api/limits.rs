//! What a request may take, and what is answered where there is nothing.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use harmonia_service::problem::Problem;

use super::Api;
use crate::web::{PATIENCE, has_nul, lost};

/// The longest body.
pub const BODY: usize = 64 << 10;
/// Requests at once; answers that go on as events do not count once they have begun.
pub const REQUESTS: usize = 256;

/// Keeps every request within these limits.
pub async fn keep(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let Ok(_permit) = api.requests.try_acquire() else {
        return Problem::unavailable("too many requests at once: try again in a moment").into_response();
    };
    if has_nul(request.uri()) {
        return Problem::bad_request("the address has a NUL byte, which no name here has").into_response();
    }
    match tokio::time::timeout(PATIENCE, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Problem::unavailable("the answer took longer than 30 s: try again").into_response(),
    }
}

/// There is no such page.
pub async fn unknown(uri: Uri, headers: HeaderMap) -> Response {
    let words = format!("there is no page {}: /api/openapi.json describes the API", uri.path());
    lost(Problem::not_found(words), &headers).await
}

/// There is such a page, for other methods.
pub async fn wrong_method(method: Method, uri: Uri) -> Problem {
    Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        format!("{} does not know {method}: the header Allow lists what it does", uri.path()),
    )
}
