//! A build's trace, from claim to signed.
//!
//! The collector is this test: what it has to say is whether the JSON is OTLP's, and a real one would take minutes to compile for
//! not saying more.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use harmonia_service::settings::Settings;
use harmonia_tests::nixes::{Expression, Version};
use harmonia_tests::press::{Press, RunningSigner};
use harmonia_tests::s3::{S3, Server};
use serde::Deserialize;

use crate::stage::Scene;

/// What is sent, as the specification of OTLP names it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Sent {
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ResourceSpans {
    resource: Resource,
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resource {
    attributes: Vec<Attribute>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScopeSpans {
    #[serde(rename = "scope")]
    _scope: BTreeMap<String, String>,
    spans: Vec<Span>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Span {
    trace_id: String,
    span_id: String,
    parent_span_id: String,
    name: String,
    #[serde(rename = "kind")]
    _kind: u8,
    start_time_unix_nano: String,
    end_time_unix_nano: String,
    attributes: Vec<Attribute>,
    status: Status,
    /// The service that told it.
    #[serde(skip)]
    service: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Attribute {
    key: String,
    value: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Status {
    code: u8,
    message: String,
}

impl Span {
    fn time(&self) -> (u128, u128) {
        (self.start_time_unix_nano.parse().unwrap(), self.end_time_unix_nano.parse().unwrap())
    }

    fn says(&self, key: &str) -> Option<String> {
        let attribute = self.attributes.iter().find(|attribute| attribute.key == key)?;
        attribute.value.values().next().cloned()
    }
}

type Spans = Arc<Mutex<Vec<Span>>>;

async fn take(State(spans): State<Spans>, Json(sent): Json<Sent>) -> StatusCode {
    for ResourceSpans { resource, scope_spans } in sent.resource_spans {
        let service = resource.attributes.iter().find(|attribute| attribute.key == "service.name").unwrap();
        for mut span in scope_spans.into_iter().flat_map(|scope| scope.spans) {
            span.service = service.value["stringValue"].clone();
            spans.lock().unwrap().push(span);
        }
    }
    StatusCode::OK
}

/// A collector; its address, and what it was told.
async fn collector() -> (String, Spans) {
    let spans = Spans::default();
    let router = Router::new().route("/v1/traces", post(take)).with_state(Arc::clone(&spans));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, spans)
}

/// Builds it with builder and signer telling a collector, and ends both; what the collector was told.
async fn traced(expression: &Expression, state: &str) -> Vec<Span> {
    let (url, spans) = collector().await;
    let tell = |settings: Settings| settings.with("otlp_endpoint", &url);
    let press = Press::with(S3::start_public(Server::InProcess).await).await;
    let signer = RunningSigner::start(&press.farm, tell(press.signer_settings().await)).await;
    let scene = Scene::on(press);
    let drv = scene.queue_one(&signer, expression).await;
    let builder = scene.builder(Version::New, "one", tell).await;
    assert_eq!(scene.end(&drv).await.state, state);
    builder.stop().await;
    signer.stop().await;
    // What it is built from was built too.
    let mut spans = spans.lock().unwrap().clone();
    let of_it =
        |span: &&Span| span.name == "attempt" && span.says("harmonia_ci.derivation") == Some(drv.clone());
    let trace = spans.iter().find(of_it).unwrap().trace_id.clone();
    spans.retain(|span| span.trace_id == trace);
    spans
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_is_one_trace_of_what_builder_and_signer_did() {
    let spans = traced(&Expression::new("traced", "echo >$out"), "succeeded").await;
    let mut names: Vec<(&str, &str)> =
        spans.iter().map(|span| (span.service.as_str(), span.name.as_str())).collect();
    names.sort_unstable();
    let builder = ["attempt", "build", "inputs", "publish"].map(|name| ("harmonia-ci-builder", name));
    let signer = ["accept", "check", "prove", "sign", "write"].map(|name| ("harmonia-ci-signer", name));
    assert_eq!(names, [&builder[..], &signer].concat());

    let find = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    for (child, parent) in [
        ("inputs", "attempt"),
        ("build", "attempt"),
        ("publish", "attempt"),
        ("sign", "publish"),
        ("write", "sign"),
    ] {
        let (child, parent) = (find(child), find(parent));
        assert_eq!((&child.trace_id, &child.parent_span_id), (&parent.trace_id, &parent.span_id));
        let ((begun, ended), (from, to)) = (child.time(), parent.time());
        assert!(from <= begun && ended <= to, "{child:?} is not within {parent:?}");
    }
    let whole = find("attempt");
    assert_eq!(whole.parent_span_id, "");
    assert_eq!((whole.trace_id.len(), whole.span_id.len()), (32, 16));
    assert_eq!(whole.says("harmonia_ci.end").unwrap(), "settled");
    assert_eq!(find("sign").says("harmonia_ci.outcome").unwrap(), "published");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trace_of_a_failure_says_why() {
    let spans = traced(&Expression::failing("failing"), "failed").await;
    let whole = spans.iter().find(|span| span.name == "attempt").unwrap();
    assert_eq!(whole.status.code, 2);
    assert!(whole.status.message.contains("failing"), "{whole:?}");
}
