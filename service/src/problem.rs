//! Errors as RFC 9457 problem documents.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// What went wrong, for a program and for a person.
#[derive(Debug, Clone, Serialize)]
pub struct Problem {
    #[serde(skip)]
    code: StatusCode,
    status: u16,
    title: &'static str,
    detail: String,
}

impl Problem {
    /// A status and a sentence.
    pub fn new(code: StatusCode, detail: impl Into<String>) -> Self {
        let title = code.canonical_reason().unwrap_or("Error");
        Self { code, status: code.as_u16(), title, detail: detail.into() }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.code
    }

    /// Nobody known, or not allowed: which of them is not said.
    pub fn unauthorized(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, detail)
    }

    /// The request makes no sense.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// There is no such thing.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    /// Something behind this process is away.
    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let code = self.code;
        let mut response = (code, Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if code == StatusCode::UNAUTHORIZED {
            headers.insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static("Basic realm=\"harmonia-ci\", Bearer"),
            );
        }
        if code == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
