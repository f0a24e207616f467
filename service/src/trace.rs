//! Traces of builds, by OTLP over HTTP as JSON: one for every attempt, from claim to signed, of which builder and signer tell their parts.
//!
//! It is written here because OpenTelemetry's crates bring an HTTP client of another version and generated code for what is a POST
//! of a dozen fields. A signer is told of many attempts in one request, so no header can carry a trace's id: it follows from the
//! attempt instead, and both sides know it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::{Client, Response, Url};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use crate::bucket::place;
use crate::sentence::sentence;
use crate::settings::{Settings, SettingsError};

const ENDPOINT: &str = "otlp_endpoint";
/// Spans that wait for the collector. What comes after them is dropped: a trace is not worth a builder's memory.
const WAITING: usize = 4096;
/// Spans in one request.
const BATCH: usize = 512;
/// For how long spans are gathered into one.
const GATHER: Duration = Duration::from_secs(1);
/// How long a collector may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process that ends waits for it.
const FAREWELL: Duration = Duration::from_secs(3);
/// The part of an attempt in which signers have theirs.
pub const PUBLISH: &str = "publish";

/// Where spans are told. The default tells nobody.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<mpsc::Sender<Word>>);

#[derive(Debug)]
enum Word {
    Span(Span),
    Flush(oneshot::Sender<()>),
}

/// The trace of one attempt.
#[derive(Debug)]
pub struct Trace {
    tracer: Tracer,
    id: [u8; 16],
    attributes: [(&'static str, Value); 3],
}

/// A span that ends when it is dropped, however that comes.
#[derive(Debug)]
pub struct Open {
    tracer: Tracer,
    begun: Instant,
    span: Span,
}

#[derive(Debug, Clone)]
struct Span {
    trace: [u8; 16],
    id: [u8; 8],
    parent: Option<[u8; 8]>,
    name: &'static str,
    from: SystemTime,
    took: Duration,
    attributes: Vec<(&'static str, Value)>,
    failure: Option<String>,
}

impl Tracer {
    /// Of a role, as the settings say. Within a runtime.
    pub fn start(settings: &Settings, role: &'static str) -> Result<Self, SettingsError> {
        let Some(endpoint) = settings.get(ENDPOINT) else { return Ok(Self::default()) };
        let invalid = |why: String| SettingsError::Invalid { key: ENDPOINT, value: endpoint.to_owned(), why };
        let url = Url::parse(&format!("{}/v1/traces", endpoint.trim_end_matches('/')))
            .ok()
            .filter(|url| ["http", "https"].contains(&url.scheme()))
            .ok_or_else(|| invalid("is no URL such as http://collector:4318".to_owned()))?;
        // An error says that another provider is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = Client::builder().timeout(PATIENCE).build();
        let http = http.map_err(|error| invalid(format!("cannot be used: {}", sentence(&error))))?;
        let (told, words) = mpsc::channel(WAITING);
        let resource = resource(role, settings.get("node"));
        tokio::spawn(export(words, http, url, resource));
        Ok(Self(Some(told)))
    }

    /// The trace of an attempt.
    pub fn attempt(&self, job: i64, attempt: i64, drv: &str) -> Trace {
        // With the derivation, for several farms may tell one collector.
        let id = half(Sha256::digest(format!("{job} {attempt} {drv}")));
        let attributes = [
            ("harmonia_ci.job", job.into()),
            ("harmonia_ci.attempt", attempt.into()),
            ("harmonia_ci.derivation", drv.into()),
        ];
        Trace { tracer: self.clone(), id, attributes }
    }

    /// Waits until the collector has what was told before, or has had its time.
    pub async fn flush(&self) {
        let Some(told) = &self.0 else { return };
        let (done, flushed) = oneshot::channel();
        let flush = async {
            if told.send(Word::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        };
        let _ = timeout(FAREWELL, flush).await;
    }
}

impl Trace {
    /// The attempt itself.
    pub fn whole(&self) -> Open {
        self.open("attempt", self.known("attempt"), None)
    }

    /// A part of it, of which there is one.
    pub fn part(&self, name: &'static str) -> Open {
        self.open(name, self.known(name), Some(self.known("attempt")))
    }

    /// What another process does in that part, perhaps more than once.
    pub fn within(&self, part: &'static str, name: &'static str) -> Open {
        self.open(name, random(), Some(self.known(part)))
    }

    /// Of a span that both sides know.
    fn known(&self, name: &str) -> [u8; 8] {
        half(Sha256::new().chain_update(self.id).chain_update(name).finalize())
    }

    fn open(&self, name: &'static str, id: [u8; 8], parent: Option<[u8; 8]>) -> Open {
        let attributes = self.attributes.to_vec();
        Open::begin(&self.tracer, self.id, id, parent, name, attributes)
    }
}

impl Open {
    fn begin(
        tracer: &Tracer,
        trace: [u8; 16],
        id: [u8; 8],
        parent: Option<[u8; 8]>,
        name: &'static str,
        attributes: Vec<(&'static str, Value)>,
    ) -> Self {
        let (from, took) = (SystemTime::now(), Duration::ZERO);
        let span = Span { trace, id, parent, name, from, took, attributes, failure: None };
        Self { tracer: tracer.clone(), begun: Instant::now(), span }
    }

    /// A part of this one.
    pub fn part(&self, name: &'static str) -> Open {
        Open::begin(&self.tracer, self.span.trace, random(), Some(self.span.id), name, Vec::new())
    }

    /// Says something more about it.
    pub fn say(&mut self, key: &'static str, value: impl Into<Value>) {
        self.span.attributes.push((key, value.into()));
    }

    /// It came to nothing.
    pub fn fail(&mut self, why: &str) {
        self.span.failure = Some(why.to_owned());
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(told) = &self.tracer.0 else { return };
        self.span.took = self.begun.elapsed();
        if told.try_send(Word::Span(self.span.clone())).is_err() {
            tracing::debug!("a span is dropped: the collector is too slow");
        }
    }
}

/// Tells the collector until nobody has anything to tell any more. It may be away: then what there was to tell is lost.
async fn export(mut words: mpsc::Receiver<Word>, http: Client, url: Url, resource: Value) {
    let mut away = false;
    loop {
        let mut taken = Vec::new();
        if words.recv_many(&mut taken, BATCH).await == 0 {
            return;
        }
        let (mut spans, mut waiting) = (Vec::new(), Vec::new());
        for word in taken {
            match word {
                Word::Span(span) => spans.push(told(&span)),
                Word::Flush(done) => waiting.push(done),
            }
        }
        if !spans.is_empty() {
            let sent = post(&http, &url, &resource, spans).await;
            if let (Err(error), false) = (&sent, away) {
                let collector = place(url.as_str());
                tracing::warn!(
                    error = sentence(error),
                    collector,
                    "traces are lost: the collector does not take them"
                );
            }
            away = sent.is_err();
        }
        if waiting.is_empty() {
            sleep(GATHER).await;
        }
        for done in waiting {
            // Who asked may have gone.
            let _ = done.send(());
        }
    }
}

async fn post(http: &Client, url: &Url, resource: &Value, spans: Vec<Value>) -> Result<(), reqwest::Error> {
    let scope = json!({"scope": {"name": "harmonia-ci"}, "spans": spans});
    let body = json!({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]});
    let answer = http.post(url.clone()).json(&body).send().await.and_then(Response::error_for_status);
    answer.map(drop).map_err(reqwest::Error::without_url)
}

fn resource(role: &str, node: Option<&str>) -> Value {
    let name = format!("harmonia-ci-{role}");
    let mut attributes = vec![
        attribute("service.name", &name.into()),
        attribute("service.version", &env!("CARGO_PKG_VERSION").into()),
    ];
    attributes.extend(node.map(|node| attribute("service.instance.id", &node.into())));
    json!({"attributes": attributes})
}

fn told(span: &Span) -> Value {
    let nanoseconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // 2: an error. Without one, nothing is said about it.
    let status = span.failure.as_ref().map_or(json!({}), |why| json!({"code": 2, "message": why}));
    let attributes: Vec<Value> = span.attributes.iter().map(|(key, value)| attribute(key, value)).collect();
    json!({
        "traceId": hex(&span.trace),
        "spanId": hex(&span.id),
        "parentSpanId": span.parent.map(|parent| hex(&parent)).unwrap_or_default(),
        "name": span.name,
        // 1: within a process.
        "kind": 1,
        // Numbers of 64 bits are texts in the JSON of OTLP.
        "startTimeUnixNano": nanoseconds(span.from).to_string(),
        "endTimeUnixNano": nanoseconds(span.from + span.took).to_string(),
        "attributes": attributes,
        "status": status,
    })
}

fn attribute(key: &str, value: &Value) -> Value {
    let value = match value {
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    };
    json!({"key": key, "value": value})
}

/// The first bytes of a hash.
fn half<const N: usize>(hash: impl AsRef<[u8]>) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.iter_mut().zip(hash.as_ref()).for_each(|(byte, from)| *byte = *from);
    bytes
}

/// The second half of such an id is random.
fn random() -> [u8; 8] {
    half(&Uuid::now_v7().as_bytes()[8..])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn traced() -> (Tracer, mpsc::Receiver<Word>) {
        let (told, words) = mpsc::channel(2);
        (Tracer(Some(told)), words)
    }

    fn next(words: &mut mpsc::Receiver<Word>) -> Value {
        match words.try_recv().unwrap() {
            Word::Span(span) => told(&span),
            Word::Flush(_) => panic!("a span was expected"),
        }
    }

    #[test]
    fn two_processes_agree_on_the_place_of_a_span() {
        let (tracer, mut words) = traced();
        drop(tracer.attempt(1, 2, "/nix/store/x.drv").part(PUBLISH));
        let builder = next(&mut words);
        drop(tracer.attempt(1, 2, "/nix/store/x.drv").within(PUBLISH, "sign"));
        let signer = next(&mut words);
        assert_eq!(builder["traceId"], signer["traceId"]);
        assert_eq!(builder["spanId"], signer["parentSpanId"]);
        assert_eq!(builder["traceId"].as_str().unwrap().len(), 32);
        drop(tracer.attempt(1, 3, "/nix/store/x.drv").whole());
        assert_ne!(next(&mut words)["traceId"], builder["traceId"]);
    }

    #[test]
    fn a_failure_and_attributes_are_told_as_otlp_wants_them() {
        let (tracer, mut words) = traced();
        let mut open = tracer.attempt(7, 9, "x").whole();
        open.say("harmonia_ci.end", "failed");
        open.fail("it broke");
        drop(open);
        let span = next(&mut words);
        assert_eq!(span["status"], json!({"code": 2, "message": "it broke"}));
        let attributes = span["attributes"].as_array().unwrap();
        assert_eq!(attributes[0], json!({"key": "harmonia_ci.job", "value": {"intValue": "7"}}));
        assert_eq!(attributes[3], json!({"key": "harmonia_ci.end", "value": {"stringValue": "failed"}}));
    }

    #[test]
    fn what_nobody_takes_is_dropped() {
        let (tracer, mut words) = traced();
        for _ in 0..5 {
            drop(tracer.attempt(1, 1, "x").whole());
        }
        next(&mut words);
        next(&mut words);
        assert!(words.try_recv().is_err());
    }

    #[tokio::test]
    async fn an_endpoint_that_is_none_is_refused() {
        for wrong in ["collector:4318", "ftp://collector"] {
            let settings = Settings::default().with(ENDPOINT, wrong);
            assert!(Tracer::start(&settings, "builder").unwrap_err().to_string().contains(wrong));
        }
    }
}
