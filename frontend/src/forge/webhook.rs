//! `POST /webhook/{forge}`: whether a forge itself sent it, whether it is new, and what it says.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use harmonia_queue::forges;
use harmonia_service::problem::Problem;
use harmonia_service::sentence::sentence;
use serde::Serialize;
use tokio::sync::Semaphore;

use super::act::{Outcome, act};
use super::{Forges, Known};

/// The longest body. GitHub names up to 2,048 commits of a push, at a kilobyte or two each. What is longer is found by
/// comparing heads.
const LONGEST: usize = 4 << 20;
/// Webhooks at once: the others wait. So much memory they may take, times the longest.
pub const AT_ONCE: usize = 8;
/// The longest name of a delivery.
const NAME: usize = 150;

#[derive(Clone)]
struct Desk {
    forges: Arc<Forges>,
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
    let desk = Desk { forges, turns: Arc::new(Semaphore::new(AT_ONCE)) };
    let limit = DefaultBodyLimit::max(LONGEST);
    Router::new().route("/webhook/{forge}", post(receive)).layer(limit).with_state(desk)
}

async fn receive(
    State(desk): State<Desk>,
    Path(name): Path<String>,
    headers: HeaderMap,
    request: axum::extract::Request,
) -> Response {
    let Some(known) = desk.forges.known.get(&name) else {
        let sentence = "there is no forge of this name: the setting forges names those that there are";
        return Problem::not_found(sentence).into_response();
    };
    let _turn = desk.turns.acquire().await;
    let taken = take(&desk.forges, known, &headers, request).await;
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
    forges: &Forges,
    known: &Known,
    headers: &HeaderMap,
    request: axum::extract::Request,
) -> Result<(&'static str, Outcome), Problem> {
    let body = body(request).await?;
    let signed = known.forge.verify(headers, &body).map_err(|error| {
        tracing::error!(forge = known.name, error = sentence(&error), "webhooks cannot be checked");
        Problem::unavailable("the signature cannot be checked: the log of the frontend says why")
    })?;
    if !signed {
        return Err(Problem::unauthorized(
            "the signature does not fit: give the forge the secret that we have",
        ));
    }
    let keys = keys(known, headers, &body);
    if forges::delivered(&forges.db, &known.name, &keys).await? {
        return Ok(("seen", Outcome::ignored("this delivery was dealt with before")));
    }
    let event = known.forge.parse(headers, &body).map_err(|error| Problem::bad_request(error.to_string()))?;
    let outcome = act(&forges.db, known, event).await?;
    // Not before: what breaks off half-way may be delivered again.
    forges::keep_delivery(&forges.db, &known.name, &keys).await?;
    Ok((if outcome.accepted() { "accepted" } else { "ignored" }, outcome))
}

async fn body(request: axum::extract::Request) -> Result<Bytes, Problem> {
    use axum::extract::FromRequest;
    let kind = request.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("application/json") {
        let sentence = "choose application/json as the content type of the webhook";
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence));
    }
    Bytes::from_request(request, &()).await.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Problem::new(error.status(), "the body is longer than 4 MiB"),
        status => Problem::new(status, error.body_text()),
    })
}

/// By what a delivery is known. Its name is not signed, so that whoever heard it once could send it under another: its body
/// counts too.
fn keys(known: &Known, headers: &HeaderMap, body: &[u8]) -> Vec<String> {
    let name = known
        .forge
        .delivery(headers)
        .map(|name| format!("id {}", name.chars().take(NAME).collect::<String>()));
    name.into_iter().chain([format!("body {}", hex(body))]).collect()
}

fn hex(body: &[u8]) -> String {
    ring::digest::digest(&ring::digest::SHA256, body)
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
