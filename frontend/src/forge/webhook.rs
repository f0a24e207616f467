//! `POST /webhook/{forge}`: whether a forge itself sent it, whether it is new, and what it says.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures::StreamExt;
use harmonia_nix::Sha256;
use harmonia_queue::forges;
use harmonia_service::problem::Problem;
use harmonia_service::sentence::sentence;
use serde::Serialize;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::act::{Outcome, act};
use super::{Forges, Known};

/// The longest body. GitHub names up to 2,048 commits of a push, at a kilobyte or two each. What is longer is found by
/// comparing heads.
const LONGEST: usize = 4 << 20;
/// Bytes of bodies in memory, of all together. What has not come yet takes none, so that requests that only begin keep nobody out.
const ROOM: usize = 16 * LONGEST;
/// How long a body may take to come: forges themselves give up after 5 to 10 s,
const READ: Duration = Duration::from_secs(10);
/// and how long one waits for its turn.
const WAIT: Duration = Duration::from_secs(4);
/// Webhooks that are dealt with at once: the others wait. Only what is signed has a turn.
pub const AT_ONCE: usize = 8;
/// The longest name of a delivery.
const NAME: usize = 150;

#[derive(Clone)]
struct Desk {
    forges: Arc<Forges>,
    room: Arc<Semaphore>,
    turns: Arc<Semaphore>,
}

#[derive(Serialize)]
struct Answer {
    outcome: &'static str,
    reason: String,
    evaluations: Vec<i64>,
}

/// The one page.
pub fn routes(forges: Arc<Forges>) -> Router {
    let seats = |most| Arc::new(Semaphore::new(most));
    let desk = Desk { forges, room: seats(ROOM), turns: seats(AT_ONCE) };
    Router::new().route("/webhook/{forge}", post(receive)).with_state(desk)
}

async fn receive(
    State(desk): State<Desk>,
    Path(name): Path<String>,
    headers: HeaderMap,
    request: Request,
) -> Response {
    let Some(known) = desk.forges.known.get(&name) else {
        let sentence = "there is no forge of this name: the setting forges names those that there are";
        return Problem::not_found(sentence).into_response();
    };
    let taken = take(&desk, known, &headers, request).await;
    let outcome = match &taken {
        Ok((outcome, _)) => outcome,
        Err(_) => "refused",
    };
    desk.forges.counts.webhook(&known.name, outcome);
    match taken {
        Ok((outcome, Outcome { reason, evaluations, .. })) => {
            let status = if outcome == "accepted" { StatusCode::ACCEPTED } else { StatusCode::OK };
            tracing::info!(forge = known.name, outcome, reason, ?evaluations, "a webhook");
            (status, Json(Answer { outcome, reason, evaluations })).into_response()
        }
        Err(problem) => problem.into_response(),
    }
}

async fn take(
    desk: &Desk,
    known: &Known,
    headers: &HeaderMap,
    request: Request,
) -> Result<(&'static str, Outcome), Problem> {
    let (body, _room) = timeout(READ, read(&desk.room, request)).await.map_err(|_| {
        Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            format!("the body did not come within {} s", READ.as_secs()),
        )
    })??;
    let signed = known.forge.verify(headers, &body).map_err(|error| {
        tracing::error!(forge = known.name, error = sentence(&error), "webhooks cannot be checked");
        Problem::unavailable("the signature cannot be checked: the log of the frontend says why")
    })?;
    if !signed {
        return Err(Problem::unauthorized(
            "the signature does not fit: give the forge the secret that we have",
        ));
    }
    let _turn = timeout(WAIT, desk.turns.acquire()).await.map_err(|_| crowded())?;
    let forges = &desk.forges;
    let keys = keys(known, headers, &body);
    if forges::delivered(&forges.db, &known.name, &keys).await? {
        return Ok(("seen", Outcome::ignored("this delivery was dealt with before")));
    }
    let event = known.forge.parse(headers, &body).map_err(|error| Problem::bad_request(error.to_string()))?;
    let outcome = match event {
        Some(event) => act(&forges.db, known, event).await?,
        None => Outcome::ignored("nothing that would be built"),
    };
    // Not before: what breaks off half-way may be delivered again. So may what came before its project did.
    if !outcome.is_homeless() {
        forges::keep_delivery(&forges.db, &known.name, &keys).await?;
    }
    Ok((if outcome.accepted() { "accepted" } else { "ignored" }, outcome))
}

/// The whole body, and the room that it takes.
async fn read(room: &Semaphore, request: Request) -> Result<(Vec<u8>, Option<SemaphorePermit<'_>>), Problem> {
    let kind = request.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("application/json") {
        let sentence = "choose application/json as the content type of the webhook";
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence));
    }
    let (mut body, mut taken) = (Vec::new(), None::<SemaphorePermit>);
    let mut chunks = request.into_body().into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| Problem::bad_request(format!("the body broke off: {error}")))?;
        if body.len() + chunk.len() > LONGEST {
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is longer than 4 MiB"));
        }
        let more = room.try_acquire_many(chunk.len() as u32).map_err(|_| crowded())?;
        match &mut taken {
            Some(taken) => taken.merge(more),
            None => taken = Some(more),
        }
        body.extend_from_slice(&chunk);
    }
    Ok((body, taken))
}

fn crowded() -> Problem {
    Problem::unavailable("too many webhooks come at once; deliver this again")
}

/// By what a delivery is known. Its name is not signed, so that whoever heard it once could send it under another: its body
/// counts too.
fn keys(known: &Known, headers: &HeaderMap, body: &[u8]) -> Vec<String> {
    let name = known
        .forge
        .delivery(headers)
        .map(|name| format!("id {}", name.chars().take(NAME).collect::<String>()));
    name.into_iter().chain([format!("body {}", Sha256::of(body).hex())]).collect()
}
