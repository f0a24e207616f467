//! The two requests, and who may make them.

use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, header};
use axum::routing::post;
use axum::{Json, Router};
use harmonia_service::problem::Problem;
use harmonia_service::protocol::{CompleteAnswer, CompleteRequest, MOST, SlotsAnswer, SlotsRequest, Token};
use harmonia_service::sentence::sentence;

use crate::{Signer, SignerError};

/// The longest list of results with their references, or of sources with their texts.
const BODY_LIMIT: usize = 64 << 20;

pub(crate) fn routes(signer: Arc<Signer>) -> Router {
    Router::new()
        .route("/api/upload-slots", post(slots))
        .route("/api/build-complete", post(complete))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(signer)
}

async fn slots(
    State(signer): State<Arc<Signer>>,
    headers: HeaderMap,
    body: Result<Json<SlotsRequest>, JsonRejection>,
) -> Result<Json<SlotsAnswer>, Problem> {
    let token = token(&headers)?;
    let Json(request) = body.map_err(unreadable)?;
    within(request.wishes.len())?;
    let slots = signer.slots(&token, request.wishes).await.map_err(problem)?;
    slots.iter().for_each(|slot| signer.counts.slot(slot));
    Ok(Json(SlotsAnswer { slots }))
}

async fn complete(
    State(signer): State<Arc<Signer>>,
    headers: HeaderMap,
    body: Result<Json<CompleteRequest>, JsonRejection>,
) -> Result<Json<CompleteAnswer>, Problem> {
    let token = token(&headers)?;
    let Json(request) = body.map_err(unreadable)?;
    within(request.results.len() + request.sources.len())?;
    // Not cancelled with the connection: what was accepted is published.
    let work = tokio::spawn(async move {
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

/// Without a token of the right shape nothing is asked of anybody. Whether it is a live one, the database says.
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

fn unreadable(rejection: JsonRejection) -> Problem {
    Problem::new(rejection.status(), rejection.body_text())
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
