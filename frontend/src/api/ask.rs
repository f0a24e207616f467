//! What a handler asks for in its signature: who may call it, and what a request must carry. Whatever does not fit is a
//! problem document with a sentence.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Api;
use crate::forge::Member;
use crate::member::{Target, is_allowed};

/// Whoever may look.
pub struct Reader;
/// Whoever may start and stop builds.
pub struct Operator;
/// Whoever may do everything.
pub struct Admin;

impl FromRequestParts<Arc<Api>> for Reader {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, Problem> {
        api.admission.require(&parts.headers, Scope::Read).await.map(|()| Self)
    }
}

impl FromRequestParts<Arc<Api>> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, Problem> {
        api.admission.require(&parts.headers, Scope::Operate).await.map(|()| Self)
    }
}

impl FromRequestParts<Arc<Api>> for Admin {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, Problem> {
        api.admission.require(&parts.headers, Scope::Admin).await.map(|()| Self)
    }
}

/// Whoever may start and stop builds, or perhaps some: then the forge that knows them has the word.
pub struct Acting(Option<Member>);

impl FromRequestParts<Arc<Api>> for Acting {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, Problem> {
        match api.admission.require(&parts.headers, Scope::Operate).await {
            Ok(()) => Ok(Self(None)),
            Err(problem) if problem.status() == StatusCode::FORBIDDEN => {
                let member = api.admission.member(&parts.headers).await?;
                member.map(|member| Self(Some(member))).ok_or(problem)
            }
            Err(problem) => Err(problem),
        }
    }
}

impl Acting {
    /// Whether they may start or stop this.
    pub async fn on(&self, api: &Api, target: Target) -> Result<(), Problem> {
        let Self(Some(member)) = self else { return Ok(()) };
        let places = target.places(&*api.db().await).await?;
        if is_allowed(&api.forges, member, target, &places, false).await? {
            return Ok(());
        }
        let sentence =
            "your forge says that you may not push to the repository of every project that this is about";
        Err(Problem::new(StatusCode::FORBIDDEN, sentence))
    }
}

/// What is asked for behind the `?`.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        axum::extract::Query::try_from_uri(&parts.uri)
            .map(|query| Self(query.0))
            .map_err(|error| Problem::bad_request(error.body_text()))
    }
}

/// The number in the path.
pub struct Number(pub i64);

impl<S: Send + Sync> FromRequestParts<S> for Number {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Name(word) = Name::from_request_parts(parts, state).await?;
        let number = word.parse().ok().filter(|number| *number > 0);
        number.map(Self).ok_or_else(|| Problem::bad_request(format!("`{word}` is no number of anything")))
    }
}

/// The name in the path.
pub struct Name(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.map(|Path(name)| Self(name)).map_err(|error| Problem::bad_request(error.body_text()))
    }
}

/// The body, as JSON. None is `null`, which few things can be.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        if !is_json(request.headers()) {
            let sentence = "send the body as JSON, with `Content-Type: application/json`";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence));
        }
        let bytes = Bytes::from_request(request, state).await.map_err(|error| {
            let sentence = match error.status() {
                StatusCode::PAYLOAD_TOO_LARGE => "the body is longer than 64 KiB".to_owned(),
                _ => error.body_text(),
            };
            Problem::new(error.status(), sentence)
        })?;
        read(&bytes).map(Self)
    }
}

/// What is not said to be something else.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return true };
    let kind = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let value = match bytes {
        [] => Value::Null,
        bytes => serde_json::from_slice(bytes)
            .map_err(|error| Problem::bad_request(format!("the body is no JSON: {error}")))?,
    };
    if has_nul(&value) {
        return Err(Problem::bad_request("the body has a NUL character, which no text here has"));
    }
    // A list would be taken for the fields in their order.
    if !value.is_object() && !value.is_null() {
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "the body must be an object"));
    }
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let sentence = match (bytes, path.as_str()) {
            ([], _) => "the body is missing: send JSON".to_owned(),
            (_, ".") => format!("the body does not fit: {}", error.inner()),
            (_, path) => format!("`{path}` does not fit: {}", error.inner()),
        };
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, sentence)
    })
}

/// PostgreSQL keeps no NUL in a text.
fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(fields) => fields.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use harmonia_service::api::{Drain, NewEvaluation, ProjectChange};

    use super::*;

    fn status<T: DeserializeOwned>(bytes: &[u8]) -> u16 {
        read::<T>(bytes).map(|_| 200).unwrap_or_else(|problem| problem.status().as_u16())
    }

    #[test]
    fn nothing_is_taken_only_where_nothing_can_be() {
        assert!(read::<Option<Drain>>(b"").unwrap().is_none());
        assert!(read::<Option<Drain>>(b"{}").unwrap().is_some());
        assert_eq!(status::<NewEvaluation>(b""), 422);
        assert_eq!(status::<ProjectChange>(b"null"), 422);
    }

    #[test]
    fn what_is_no_json_and_what_does_not_fit_are_told_apart() {
        assert_eq!(status::<NewEvaluation>(b"{"), 400);
        assert_eq!(status::<NewEvaluation>(br#"["main", "/src"]"#), 422);
        assert_eq!(status::<NewEvaluation>(br#"{"project": "a"}"#), 422);
        assert_eq!(status::<NewEvaluation>(br#"{"project": "a", "source": "b", "x": 1}"#), 422);
    }

    #[test]
    fn a_field_that_does_not_fit_is_named() {
        let problem =
            read::<NewEvaluation>(br#"{"project": "a", "source": "b", "attrs": ["c", 1]}"#).unwrap_err();
        let words = serde_json::to_value(problem).unwrap()["detail"].to_string();
        assert!(words.contains("`attrs[1]`"), "{words}");
    }

    #[test]
    fn no_nul_passes_wherever_it_is() {
        for bytes in [&br#"{"name": "a\u0000"}"#[..], br#"{"pools": ["\u0000"]}"#, br#"{"\u0000": 1}"#] {
            assert_eq!(status::<ProjectChange>(bytes), 400);
        }
        assert_eq!(status::<ProjectChange>(br#"{"name": "a\\u0000"}"#), 200);
    }

    #[test]
    fn null_takes_a_limit_away() {
        let change: ProjectChange = read(br#"{"max_concurrent": null}"#).unwrap();
        assert_eq!((change.max_concurrent, change.pools), (Some(None), None));
    }
}
