//! What a page's address must have. Whatever does not fit is a page with a sentence.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::Web;
use super::frame::Trouble;
use crate::api::{Name, Number, Query};

/// The number in the path.
pub struct Numbered(pub i64);

impl FromRequestParts<Arc<Web>> for Numbered {
    type Rejection = Trouble;

    async fn from_request_parts(parts: &mut Parts, web: &Arc<Web>) -> Result<Self, Trouble> {
        Ok(Number::from_request_parts(parts, web).await.map(|Number(number)| Self(number))?)
    }
}

/// The name in the path.
pub struct Named(pub String);

impl FromRequestParts<Arc<Web>> for Named {
    type Rejection = Trouble;

    async fn from_request_parts(parts: &mut Parts, web: &Arc<Web>) -> Result<Self, Trouble> {
        Ok(Name::from_request_parts(parts, web).await.map(|Name(name)| Self(name))?)
    }
}

/// What is behind the `?`.
pub struct Asked<T>(pub T);

impl<T: DeserializeOwned> FromRequestParts<Arc<Web>> for Asked<T> {
    type Rejection = Trouble;

    async fn from_request_parts(parts: &mut Parts, web: &Arc<Web>) -> Result<Self, Trouble> {
        Ok(Query::from_request_parts(parts, web).await.map(|Query(asked)| Self(asked))?)
    }
}
