//! The two requests, and who may make them.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use axum::{Json, Router};
use harmonia_service::problem::Problem;
use harmonia_service::protocol::{CompleteAnswer, CompleteRequest, MOST, SlotsAnswer, SlotsRequest, Token};
use harmonia_service::sentence::sentence;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::{Signer, SignerError};

/// The longest list of results with their references, or of sources with their texts.
const BODY_LIMIT: usize = 64 << 20;
/// Of all requests that are read or answered at this moment, in kilobytes: the usual ones have a hundred at most.
const ROOM: usize = 256 << 10;
/// A body takes no longer. Whoever sends it waits for 60 s, for the answer too.
const READING: Duration = Duration::from_secs(40);

/// Behind the two requests.
#[derive(Clone)]
struct Door {
    signer: Arc<Signer>,
    room: Arc<Semaphore>,
}

pub(crate) fn routes(signer: Arc<Signer>) -> Router {
    Router::new()
        .route("/api/upload-slots", post(slots))
        .route("/api/build-complete", post(complete))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(Door { signer, room: Arc::new(Semaphore::new(ROOM)) })
}

/// Who asks. Taken before the body: without a token of the right shape nothing is read, and nothing asked of anybody. Whether it is
/// a live one, the database says.
struct Bearer(Token);

impl FromRequestParts<Door> for Bearer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Door) -> Result<Self, Problem> {
        token(&parts.headers).map(Self)
    }
}

/// What is asked, and its part of the room, which goes with the answer.
struct Asked<T>(T, OwnedSemaphorePermit);

impl<T: DeserializeOwned> FromRequest<Door> for Asked<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, door: &Door) -> Result<Self, Problem> {
        let room = door.room.clone().try_acquire_many_owned(kilobytes(request.headers()));
        let room = room.map_err(|_| {
            Problem::unavailable("too much is asked of this signer at once: ask again, or another one")
        })?;
        match timeout(READING, Json::from_request(request, door)).await {
            Ok(Ok(Json(asked))) => Ok(Self(asked, room)),
            Ok(Err(rejection)) => Err(Problem::new(rejection.status(), rejection.body_text())),
            Err(_) => Err(Problem::new(
                StatusCode::REQUEST_TIMEOUT,
                "the request took too long to arrive: say it again",
            )),
        }
    }
}

/// What a body may have. More than the limit is refused when it is read.
fn kilobytes(headers: &HeaderMap) -> u32 {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let most = length.unwrap_or(BODY_LIMIT).min(BODY_LIMIT).div_ceil(1 << 10);
    u32::try_from(most).unwrap_or(u32::MAX)
}

async fn slots(
    State(Door { signer, .. }): State<Door>,
    Bearer(token): Bearer,
    Asked(request, _room): Asked<SlotsRequest>,
) -> Result<Json<SlotsAnswer>, Problem> {
    within(request.wishes.len())?;
    let slots = signer.slots(&token, request.wishes).await.map_err(problem)?;
    slots.iter().for_each(|slot| signer.counts.slot(slot));
    Ok(Json(SlotsAnswer { slots }))
}

async fn complete(
    State(Door { signer, .. }): State<Door>,
    Bearer(token): Bearer,
    Asked(request, room): Asked<CompleteRequest>,
) -> Result<Json<CompleteAnswer>, Problem> {
    within(request.results.len() + request.sources.len())?;
    // Not cancelled with the connection: what was accepted is published.
    let work = tokio::spawn(async move {
        let _room = room;
        let results = signer.complete(&token, request.results).await?;
        let sources = match request.sources.is_empty() {
            true => Vec::new(),
            false => signer.sources(&token, request.sources).await?,
        };
        results.iter().chain(&sources).for_each(|outcome| signer.counts.result(outcome));
        Ok::<_, SignerError>(CompleteAnswer { results, sources })
    });
    match work.await {
        Ok(answer) => Ok(Json(answer.map_err(problem)?)),
        Err(_) => Err(Problem::unavailable("the request was broken off: say it again")),
    }
}

fn token(headers: &HeaderMap) -> Result<Token, Problem> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    bearer.and_then(|value| value.strip_prefix("Bearer ")).and_then(|text| text.parse().ok()).ok_or_else(
        || {
            Problem::unauthorized(
                "a node's token is needed: `Authorization: Bearer builder.<session>.<secret>`",
            )
        },
    )
}

fn within(count: usize) -> Result<(), Problem> {
    match count <= MOST {
        true => Ok(()),
        false => {
            Err(Problem::bad_request(format!("a request has at most {MOST} entries, this one has {count}")))
        }
    }
}

fn problem(error: SignerError) -> Problem {
    tracing::warn!(error = &error as &dyn std::error::Error, "a request failed");
    Problem::unavailable(sentence(&error))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn weight(length: Option<&str>) -> u32 {
        let length = length.map(|length| (header::CONTENT_LENGTH, length.parse().unwrap()));
        kilobytes(&length.into_iter().collect())
    }

    #[test]
    fn a_body_takes_the_room_that_it_may_need() {
        assert_eq!(weight(Some("0")), 0);
        assert_eq!(weight(Some("1")), 1);
        assert_eq!(weight(Some("1025")), 2);
        let most = (BODY_LIMIT >> 10) as u32;
        for unknown in [None, Some("rubbish"), Some("99999999999999")] {
            assert_eq!(weight(unknown), most, "{unknown:?}");
        }
        assert!(ROOM >= most as usize);
    }
}
