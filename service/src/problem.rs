//! Errors as RFC 9457 problem documents.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::sentence::sentence;

/// What went wrong, for a program and for a person.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Problem {
    #[serde(skip)]
    code: StatusCode,
    /// The status of the answer
    status: u16,
    /// What that status is called
    title: &'static str,
    /// What is wrong, and what to do about it
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

    /// What that status is called.
    pub fn title(&self) -> &'static str {
        self.title
    }

    /// What is wrong, and what to do about it.
    pub fn detail(&self) -> &str {
        &self.detail
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

    /// It does not fit what is there.
    pub fn conflict(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, detail)
    }

    /// Something behind this process is away.
    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }
}

/// What the queue refuses has a sentence for the person who asked. What went wrong inside is logged, and told as that.
impl From<harmonia_queue::Error> for Problem {
    fn from(error: harmonia_queue::Error) -> Self {
        use harmonia_queue::Error::{Graph, Invalid, NameTaken, NotFound, Unreachable, WrongState};
        match error {
            NotFound(words) => Self::not_found(words),
            WrongState(words) | NameTaken(words) => Self::conflict(words),
            Invalid(words) => Self::bad_request(words),
            Graph(words) => Self::new(StatusCode::UNPROCESSABLE_ENTITY, words),
            error if matches!(error, Unreachable(_)) || error.is_transient() => {
                tracing::warn!(error = sentence(&error), "the database did not answer");
                Self::unavailable("the database does not answer: try again in a moment")
            }
            error => {
                tracing::error!(error = sentence(&error), "the database refused what it should not");
                Self::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "the database refused a call; the log of the frontend says why",
                )
            }
        }
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
