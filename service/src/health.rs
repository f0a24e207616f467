//! `/healthz`, `/readyz` with reasons, `/metrics`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;

use crate::metrics::Metrics;

/// What Prometheus asks for. Others, such as promtool, read only the format before it.
const OPEN_METRICS: &str = "application/openmetrics-text";

/// How a process is: shared by whatever knows something about it.
#[derive(Clone)]
pub struct Health(Arc<Inner>);

struct Inner {
    /// Why it is not ready, by what stands in the way.
    reasons: Mutex<BTreeMap<&'static str, String>>,
    /// What people who look should know besides.
    notes: Mutex<BTreeMap<&'static str, String>>,
    metrics: Metrics,
}

impl Health {
    /// A process that is not ready until each of `conditions` was met once.
    pub fn new(metrics: Metrics, conditions: &[&'static str]) -> Self {
        let waiting = conditions.iter().map(|name| (*name, "not known yet".to_owned())).collect();
        Self(Arc::new(Inner { reasons: Mutex::new(waiting), notes: Mutex::default(), metrics }))
    }

    /// A condition is met, or not and why.
    pub fn set(&self, condition: &'static str, state: Result<(), String>) {
        let mut reasons = self.0.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        match state {
            Ok(()) => drop(reasons.remove(condition)),
            Err(reason) => {
                if reasons.get(condition) != Some(&reason) {
                    tracing::warn!(condition, reason, "not ready");
                }
                reasons.insert(condition, reason);
            }
        }
    }

    /// Why it is not ready; empty if it is.
    pub fn reasons(&self) -> BTreeMap<&'static str, String> {
        self.0.reasons.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says something that holds whether it is ready or not, at `/readyz` of one that is.
    pub fn note(&self, about: &'static str, text: String) {
        self.0.notes.lock().unwrap_or_else(PoisonError::into_inner).insert(about, text);
    }

    /// The three pages.
    pub fn routes<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self.clone())
    }
}

async fn ready(State(health): State<Health>) -> Response {
    let lines = |named: &BTreeMap<&str, String>| -> String {
        named.iter().map(|(name, text)| format!("{name}: {text}\n")).collect()
    };
    let reasons = health.reasons();
    if !reasons.is_empty() {
        return (StatusCode::SERVICE_UNAVAILABLE, lines(&reasons)).into_response();
    }
    let notes = health.0.notes.lock().unwrap_or_else(PoisonError::into_inner);
    format!("ok\n{}", lines(&notes)).into_response()
}

async fn metrics(State(health): State<Health>, headers: HeaderMap) -> Response {
    let mut text = String::new();
    if encode(&mut text, health.0.metrics.registry()).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let accepted =
        headers.get(header::ACCEPT).and_then(|accepted| accepted.to_str().ok()).unwrap_or_default();
    if accepted.contains(OPEN_METRICS) {
        let kind = format!("{OPEN_METRICS}; version=1.0.0; charset=utf-8");
        return ([(header::CONTENT_TYPE, kind)], text).into_response();
    }
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], health.0.metrics.in_older_words(&text)).into_response()
}
