//! What a builder does when signers and the bucket misbehave. They are played by a double here, and only here, because no real
//! server can be made to expire an address, forget an upload, answer 503 or garble bytes when a test wants it. That real
//! servers are spoken to rightly is shown elsewhere, with real ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{post, put};
use futures::future::join_all;
use harmonia_builder::upload::{
    BuiltOutput, Ending, Limits, Log, SignerError, UploadError, Uploader, http_client,
};
use harmonia_nix::Sha256;
use harmonia_nix::pack::{Options, PackError, pack};
use harmonia_service::protocol::{
    BuildResult, Claim, CompleteAnswer, CompleteRequest, Outcome, Slot, SlotsAnswer, SlotsRequest, Token,
    Wish,
};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

const SECRET: &str = "0123456789abcdef";
/// More than can ever wait.
const OPEN: usize = 1000;
const CLAIM: Claim = Claim { job: 7, attempt: 9 };

/// What the double does next, and what it was told. Where nothing is scripted, all goes well.
#[derive(Default)]
struct Script {
    /// Answers to slot requests as a whole.
    slot_statuses: VecDeque<u16>,
    /// Slots for NARs and parts.
    slots: VecDeque<Slot>,
    /// Answers to PUTs of NARs and parts.
    puts: VecDeque<u16>,
    /// Answers to PUTs of listings and logs.
    spares: VecDeque<u16>,
    outcomes: VecDeque<Outcome>,
    /// Refuses every request with a wish for this path.
    poison: Option<String>,
    slot_requests: Vec<Vec<Wish>>,
    complete_requests: Vec<Vec<BuildResult>>,
    stored: BTreeMap<String, Bytes>,
    put_count: usize,
    uploads: usize,
}

#[derive(Clone)]
struct Double {
    script: Arc<Mutex<Script>>,
    url: String,
    /// A PUT ends when this opens.
    gate: Arc<Semaphore>,
    /// Bytes of NARs and parts before the gate, and the most that ever were there.
    waiting: watch::Sender<(usize, usize)>,
}

impl Double {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let gate = Arc::new(Semaphore::new(OPEN));
        let double = Self { script: Arc::default(), url, gate, waiting: watch::Sender::default() };
        let router = Router::new()
            .route("/api/upload-slots", post(slots))
            .route("/api/build-complete", post(complete))
            .route("/bucket/{*key}", put(store))
            .layer(DefaultBodyLimit::max(64 << 20))
            .with_state(double.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        double
    }

    fn with<T>(&self, change: impl FnOnce(&mut Script) -> T) -> T {
        change(&mut self.script.lock().unwrap())
    }

    fn shut(&self) {
        self.gate.forget_permits(OPEN);
    }

    fn open(&self) {
        self.gate.add_permits(OPEN);
    }

    /// Waits until so many bytes wait.
    async fn holds(&self, bytes: usize) {
        self.waiting.subscribe().wait_for(|(waiting, _)| *waiting >= bytes).await.unwrap();
    }

    fn uploader(&self) -> Uploader {
        self.uploader_of(vec![self.url.clone()], limits())
    }

    fn uploader_of(&self, signers: Vec<String>, limits: Limits) -> Uploader {
        let (_, signers) = watch::channel(signers);
        let token = Token::Builder { session: 1, secret: SECRET.to_owned() };
        Uploader::new(http_client().unwrap(), signers, &token, limits)
    }

    fn slot(&self, key: &str) -> Slot {
        let url = format!("{}/bucket/{key}?X-Amz-Signature={SECRET}", self.url);
        Slot::Put { url, headers: BTreeMap::from([("if-none-match".to_owned(), "*".to_owned())]) }
    }
}

async fn slots(State(double): State<Double>, headers: HeaderMap, body: Bytes) -> Response {
    assert_eq!(headers["authorization"], format!("Bearer builder.1.{SECRET}"));
    let request: SlotsRequest = serde_json::from_slice(&body).unwrap();
    double.with(|script| {
        script.slot_requests.push(request.wishes.clone());
        if let Some(status) = script.slot_statuses.pop_front() {
            return StatusCode::from_u16(status).unwrap().into_response();
        }
        let poisoned = |wish: &Wish| matches!((wish, &script.poison), (Wish::Nar { path, .. }, Some(poison)) if path == poison);
        if request.wishes.iter().any(poisoned) {
            let problem = serde_json::json!({ "detail": "this is no path" });
            return (StatusCode::UNPROCESSABLE_ENTITY, Json(problem)).into_response();
        }
        let slots = request.wishes.iter().map(|wish| match wish {
            Wish::Nar { path, .. } => script.slots.pop_front().unwrap_or_else(|| double.slot(&format!("nar{path}"))),
            Wish::Parts { .. } => {
                script.uploads += 1;
                Slot::Parts { upload: format!("upload-{}", script.uploads) }
            }
            Wish::Part { upload, number, .. } => {
                script.slots.pop_front().unwrap_or_else(|| double.slot(&format!("part/{upload}/{number:05}")))
            }
            Wish::Listing { path, .. } => double.slot(&format!("listing{path}")),
            Wish::Log { .. } => double.slot("log"),
            Wish::Source { .. } | Wish::Published { .. } => panic!("builders have no sources"),
        });
        Json(SlotsAnswer { slots: slots.collect() }).into_response()
    })
}

async fn complete(State(double): State<Double>, body: Bytes) -> Json<CompleteAnswer> {
    let request: CompleteRequest = serde_json::from_slice(&body).unwrap();
    double.with(|script| {
        let results =
            request.results.iter().map(|_| script.outcomes.pop_front().unwrap_or(Outcome::Published));
        let results = results.collect();
        script.complete_requests.push(request.results);
        Json(CompleteAnswer { results, sources: Vec::new() })
    })
}

async fn store(
    State(double): State<Double>,
    uri: Uri,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    assert_eq!(query.unwrap(), format!("X-Amz-Signature={SECRET}"));
    assert_eq!(headers["if-none-match"], "*");
    let key = uri.path().trim_start_matches("/bucket/").to_owned();
    if !key.starts_with("nar") && !key.starts_with("part") {
        return double.with(|script| {
            let status = StatusCode::from_u16(script.spares.pop_front().unwrap_or(200)).unwrap();
            if status.is_success() {
                script.stored.insert(key, body);
            }
            status.into_response()
        });
    }
    double.waiting.send_modify(|(waiting, most)| {
        *waiting += body.len();
        *most = (*most).max(*waiting);
    });
    let _permit = double.gate.acquire().await.unwrap();
    double.waiting.send_modify(|(waiting, _)| *waiting -= body.len());
    double.with(|script| {
        script.put_count += 1;
        let status = StatusCode::from_u16(script.puts.pop_front().unwrap_or(200)).unwrap();
        if status.is_success() {
            script.stored.insert(key, body.clone());
        }
        (status, [("etag", Sha256::of(&body).hex())]).into_response()
    })
}

/// Quick, but for the patience: nothing here may pass because time ran out.
fn limits() -> Limits {
    Limits { pause: Duration::from_millis(1), ..Limits::default() }
}

fn small(dir: &Path, name: &str) -> BuiltOutput {
    fs::write(dir.join(name), format!("contents of {name}")).unwrap();
    output(dir, name)
}

/// Larger than one part when it is compressed.
fn large(dir: &Path, name: &str, size: usize) -> BuiltOutput {
    let mut state = 1_u64;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size);
    fs::write(dir.join(name), bytes).unwrap();
    output(dir, name)
}

fn output(dir: &Path, name: &str) -> BuiltOutput {
    let real_path = dir.join(name);
    // A NAR of one file: eleven words around its bytes.
    let nar_size = 112 + fs::metadata(&real_path).unwrap().len().next_multiple_of(8);
    let nar = pack(&real_path, &Options::for_nar(nar_size), |_| std::ops::ControlFlow::Continue(())).unwrap();
    BuiltOutput {
        name: "out".to_owned(),
        path: format!("/nix/store/00000000000000000000000000000000-{name}"),
        real_path,
        nar_hash: nar.nar_hash,
        nar_size,
        references: Vec::new(),
        ca: None,
    }
}

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn an_output_its_listing_and_the_log_arrive() {
    let (double, dir) = (Double::start().await, dir());
    let output = small(dir.path(), "a+b=c");
    let log = Log::Bytes(Bytes::from_static(b"it compiles"));
    let ending = double.uploader().publish(CLAIM, std::slice::from_ref(&output), Some(&log)).await.unwrap();
    assert_eq!(ending, Ending::Published);
    double.with(|script| {
        let [results] = &script.complete_requests[..] else { panic!("one request") };
        let [result] = &results[..] else { panic!("one result") };
        assert!(result.log && result.outputs[0].listing);
        assert_eq!(result.claim, CLAIM);
        let nar = script.stored.iter().find(|(key, _)| key.starts_with("nar/")).unwrap().1;
        assert_eq!(result.outputs[0].file.bytes.sha256, Sha256::of(nar));
        assert_eq!(script.stored.len(), 3);
    });
}

#[tokio::test]
async fn an_expired_address_is_asked_for_again() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([403]));
    let output = small(dir.path(), "a");
    assert_eq!(double.uploader().publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
    let asked = double.with(|script| script.slot_requests.concat());
    assert_eq!(asked.iter().filter(|wish| matches!(wish, Wish::Nar { .. })).count(), 2);
}

#[tokio::test]
async fn a_server_in_trouble_is_tried_again_with_the_same_address() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([503, 500, 429]));
    let output = small(dir.path(), "a");
    assert_eq!(double.uploader().publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
    double.with(|script| {
        let asked = script.slot_requests.concat();
        assert_eq!(asked.iter().filter(|wish| matches!(wish, Wish::Nar { .. })).count(), 1);
        assert_eq!(script.put_count, 4);
    });
}

#[tokio::test]
async fn a_bucket_that_is_away_is_waited_for_however_often_it_is_tried() {
    let (double, dir) = (Double::start().await, dir());
    let away = 2 * limits().tries as usize;
    double.with(|script| {
        script.puts = VecDeque::from(vec![503; away]);
        script.spares = VecDeque::from(vec![503; away]);
    });
    let output = small(dir.path(), "a");
    let log = Log::Bytes(Bytes::from_static(b"it compiles"));
    let ending = double.uploader().publish(CLAIM, &[output], Some(&log)).await.unwrap();
    assert_eq!(ending, Ending::Published);
    double.with(|script| {
        let result = &script.complete_requests[0][0];
        assert!(result.log && result.outputs[0].listing);
    });
}

#[tokio::test]
async fn a_result_goes_without_what_the_bucket_does_not_take_of_its_log_and_listings() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.spares = VecDeque::from([503; 10_000]));
    let outputs = [small(dir.path(), "a"), large(dir.path(), "large", 10 << 20)];
    let log = Log::Bytes(Bytes::from_static(b"it compiles"));
    let limits = Limits { haste: Duration::from_millis(20), ..limits() };
    let uploader = double.uploader_of(vec![double.url.clone()], limits);
    assert_eq!(uploader.publish(CLAIM, &outputs, Some(&log)).await.unwrap(), Ending::Published);
    double.with(|script| {
        let result = &script.complete_requests[0][0];
        assert!(!result.log && result.outputs.iter().all(|output| !output.listing));
    });
}

#[tokio::test]
async fn tries_of_garbled_bytes_are_bounded_and_the_error_holds_no_secret() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([400; 100]));
    let output = small(dir.path(), "a");
    let error = double.uploader().publish(CLAIM, &[output], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Bucket { .. }), "{error:?}");
    assert_eq!(double.with(|script| script.put_count), limits().tries as usize);
    assert!(!format!("{error} {error:?}").contains(SECRET));
}

#[tokio::test]
async fn what_is_there_already_is_not_sent_or_not_minded() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| {
        script.slots = VecDeque::from([Slot::Present]);
        script.puts = VecDeque::from([412]);
    });
    let outputs = [small(dir.path(), "a"), small(dir.path(), "b")];
    assert_eq!(double.uploader().publish(CLAIM, &outputs, None).await.unwrap(), Ending::Published);
    assert_eq!(double.with(|script| script.put_count), 1);
}

#[tokio::test]
async fn garbled_bytes_are_sent_again() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([400]));
    let output = small(dir.path(), "a");
    assert_eq!(double.uploader().publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
}

#[tokio::test]
async fn a_cut_connection_leads_to_a_new_slot_and_its_error_holds_no_secret() {
    let (double, dir) = (Double::start().await, dir());
    let cutter = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/?X-Amz-Signature={SECRET}", cutter.local_addr().unwrap());
    tokio::spawn(async move { while cutter.accept().await.is_ok() {} });
    let cut = Slot::Put { url, headers: BTreeMap::new() };
    double.with(|script| script.slots = VecDeque::from([cut.clone()]));
    let output = small(dir.path(), "a");
    let ending = double.uploader().publish(CLAIM, std::slice::from_ref(&output), None).await.unwrap();
    assert_eq!(ending, Ending::Published);
    double.with(|script| script.slots = VecDeque::from(vec![cut; 1000]));
    let limits = Limits { refusals: 3, ..limits() };
    let uploader = double.uploader_of(vec![double.url.clone()], limits);
    let error = uploader.publish(CLAIM, &[output], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Bucket { .. }), "{error:?}");
    assert!(!format!("{error} {error:?}").contains(SECRET));
}

#[tokio::test]
async fn a_bucket_that_takes_nothing_from_this_machine_alone_is_not_waited_for() {
    for status in [401, 403, 404] {
        let (double, dir) = (Double::start().await, dir());
        let refusals = limits().refusals as usize;
        double.with(|script| script.puts = VecDeque::from(vec![status; 2 * refusals]));
        let output = small(dir.path(), "a");
        let uploader =
            double.uploader_of(vec![double.url.clone()], Limits { pause: Duration::ZERO, ..limits() });
        let error = uploader.publish(CLAIM, &[output], None).await.unwrap_err();
        assert!(matches!(error, UploadError::Bucket { .. }), "{status}: {error:?}");
        assert_eq!(double.with(|script| script.put_count), refusals + 1, "{status}");
    }
}

#[tokio::test]
async fn a_part_that_is_not_taken_makes_the_upload_begin_again() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([403]));
    let output = large(dir.path(), "large", 10 << 20);
    let uploader = double.uploader_of(vec![double.url.clone()], Limits { refusals: 0, ..limits() });
    assert_eq!(uploader.publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
    assert_eq!(double.with(|script| script.uploads), 2);
}

#[tokio::test]
async fn a_place_that_was_not_found_once_is_asked_for_again() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([404]));
    let output = small(dir.path(), "a");
    let uploader = double.uploader_of(vec![double.url.clone()], Limits { rounds: 1, ..limits() });
    assert_eq!(uploader.publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
}

#[tokio::test]
async fn bytes_that_arrive_garbled_after_the_bucket_was_away_are_sent_again() {
    let (double, dir) = (Double::start().await, dir());
    let mut puts = VecDeque::from(vec![503; limits().tries as usize]);
    puts.push_back(400);
    double.with(|script| script.puts = puts);
    let output = small(dir.path(), "a");
    assert_eq!(double.uploader().publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
}

#[tokio::test]
async fn what_did_not_arrive_is_uploaded_again_a_few_times() {
    let (double, dir) = (Double::start().await, dir());
    let again = Outcome::Again { reason: "the NAR is not there".to_owned() };
    double.with(|script| script.outcomes = VecDeque::from([again.clone()]));
    let output = small(dir.path(), "a");
    let uploader = double.uploader();
    let ending = uploader.publish(CLAIM, std::slice::from_ref(&output), None).await.unwrap();
    assert_eq!(ending, Ending::Published);
    assert_eq!(double.with(|script| script.put_count), 2);
    double.with(|script| script.outcomes = VecDeque::from(vec![again; 100]));
    let error = uploader.publish(CLAIM, &[output], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Incomplete { job: 7, rounds: 4, .. }), "{error:?}");
}

#[tokio::test]
async fn what_is_put_off_is_said_again_without_another_upload() {
    let (double, dir) = (Double::start().await, dir());
    let later = || "a closure is being published".to_owned();
    double.with(|script| {
        script.slots = VecDeque::from([Slot::Later { reason: later() }]);
        script.outcomes = VecDeque::from([Outcome::Later { reason: later() }, Outcome::Adopted]);
    });
    let output = small(dir.path(), "a");
    assert_eq!(double.uploader().publish(CLAIM, &[output], None).await.unwrap(), Ending::Adopted);
    double.with(|script| {
        assert_eq!(script.complete_requests.len(), 2);
        assert_eq!(script.put_count, 1);
    });
}

#[tokio::test]
async fn an_ending_is_told_as_the_signer_told_it() {
    let (double, dir) = (Double::start().await, dir());
    let output = small(dir.path(), "a");
    let uploader = double.uploader();
    let reason = || "no output of this derivation".to_owned();
    let cases = [
        (Outcome::Stale, Ending::Stale),
        (Outcome::Refused { reason: reason() }, Ending::Refused { reason: reason() }),
    ];
    for (outcome, ending) in cases {
        double.with(|script| script.outcomes = VecDeque::from([outcome]));
        assert_eq!(uploader.publish(CLAIM, std::slice::from_ref(&output), None).await.unwrap(), ending);
    }
    double.with(|script| script.slots = VecDeque::from([Slot::Refused { reason: reason() }]));
    let ending = uploader.publish(CLAIM, &[output], None).await.unwrap();
    assert_eq!(ending, Ending::Refused { reason: reason() });
}

#[tokio::test]
async fn a_session_that_is_over_is_not_tried_again() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.slot_statuses = VecDeque::from([401]));
    let output = small(dir.path(), "a");
    let error = double.uploader().publish(CLAIM, &[output], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Signer(SignerError::SessionOver)), "{error:?}");
    assert_eq!(double.with(|script| script.slot_requests.len()), 1);
}

#[tokio::test]
async fn another_signer_answers_for_one_that_is_away() {
    let (double, dir) = (Double::start().await, dir());
    let away = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    double.with(|script| script.slot_statuses = VecDeque::from([503]));
    let output = small(dir.path(), "a");
    let uploader = double.uploader_of(vec![format!("http://{away}"), double.url.clone()], limits());
    assert_eq!(uploader.publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
}

#[tokio::test]
async fn signers_that_stay_away_are_named_as_the_reason() {
    let (double, dir) = (Double::start().await, dir());
    let away = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let output = small(dir.path(), "a");
    let limits = Limits { patience: Duration::from_millis(20), ..limits() };
    let uploader = double.uploader_of(vec![format!("http://{away}")], limits);
    let error = uploader.publish(CLAIM, &[output], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Signer(SignerError::Unreachable { .. })), "{error:?}");
    assert!(!format!("{error:?}").contains(SECRET));
}

#[tokio::test]
async fn a_signer_that_appears_is_asked_at_once() {
    let (double, dir) = (Double::start().await, dir());
    let output = small(dir.path(), "a");
    let ending_one = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (signers, known) = watch::channel(vec![format!("http://{}", ending_one.local_addr().unwrap())]);
    let token = Token::Builder { session: 1, secret: SECRET.to_owned() };
    // Longer than any test may run: only the change of the list can end the pause.
    let limits = Limits { pause: Duration::from_secs(3600), ..Limits::default() };
    let uploader = Uploader::new(http_client().unwrap(), known, &token, limits);
    let outputs = [output];
    let publish = uploader.publish(CLAIM, &outputs, None);
    let appear = async {
        drop(ending_one.accept().await.unwrap());
        signers.send(vec![double.url.clone()]).unwrap();
    };
    let (ending, ()) = tokio::join!(publish, appear);
    assert_eq!(ending.unwrap(), Ending::Published);
}

#[tokio::test]
async fn those_who_publish_together_share_requests() {
    let (double, dir) = (Double::start().await, dir());
    let uploader = double.uploader();
    let outputs: Vec<_> = (0..200).map(|number| [small(dir.path(), &format!("p{number}"))]).collect();
    let endings = join_all(outputs.iter().map(|output| uploader.publish(CLAIM, output, None))).await;
    assert!(endings.into_iter().all(|ending| ending.unwrap() == Ending::Published));
    double.with(|script| {
        let requests = script.slot_requests.len() + script.complete_requests.len();
        assert!(requests < 100, "{requests} requests for 400 slots and 200 results");
        assert!(script.slot_requests.iter().all(|wishes| wishes.len() <= 50));
    });
}

#[tokio::test]
async fn one_bad_wish_does_not_spoil_the_others() {
    let (double, dir) = (Double::start().await, dir());
    let uploader = double.uploader();
    let outputs: Vec<_> = (0..10).map(|number| [small(dir.path(), &format!("p{number}"))]).collect();
    double.with(|script| script.poison = Some(outputs[3][0].path.clone()));
    let endings = join_all(outputs.iter().map(|output| uploader.publish(CLAIM, output, None))).await;
    for (number, ending) in endings.into_iter().enumerate() {
        match ending {
            Ok(ending) => assert!(number != 3 && ending == Ending::Published),
            Err(error) => assert!(
                number == 3 && matches!(error, UploadError::Signer(SignerError::Rejected { .. })),
                "{error:?}"
            ),
        }
    }
}

#[tokio::test]
async fn a_large_output_goes_in_parts_that_make_up_the_file() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([503, 200, 403, 400]));
    let output = large(dir.path(), "large", 30 << 20);
    let ending = double.uploader().publish(CLAIM, std::slice::from_ref(&output), None).await.unwrap();
    assert_eq!(ending, Ending::Published);
    double.with(|script| {
        let file = &script.complete_requests[0][0].outputs[0].file;
        let parts: Vec<_> = script.stored.iter().filter(|(key, _)| key.starts_with("part/")).collect();
        let whole: Vec<u8> = parts.iter().flat_map(|(_, part)| part.iter().copied()).collect();
        assert_eq!((file.bytes.size, file.bytes.sha256), (whole.len() as u64, Sha256::of(&whole)));
        let upload = file.upload.as_ref().unwrap();
        assert_eq!(upload.id, "upload-1");
        assert_eq!(upload.parts.len(), 4);
        for (said, (_, part)) in upload.parts.iter().zip(parts) {
            assert_eq!((said.sha256, &said.etag), (Sha256::of(part), &Sha256::of(part).hex()));
        }
    });
}

#[tokio::test]
async fn an_upload_that_the_bucket_forgot_is_begun_anew() {
    let (double, dir) = (Double::start().await, dir());
    double.with(|script| script.puts = VecDeque::from([200, 404]));
    let output = large(dir.path(), "large", 10 << 20);
    assert_eq!(double.uploader().publish(CLAIM, &[output], None).await.unwrap(), Ending::Published);
    double.with(|script| {
        let file = &script.complete_requests[0][0].outputs[0].file;
        assert_eq!(file.upload.as_ref().unwrap().id, "upload-2");
    });
}

#[tokio::test]
async fn parts_in_flight_stay_within_the_budget_of_all_uploads() {
    let (double, dir) = (Double::start().await, dir());
    let outputs = [large(dir.path(), "one", 30 << 20), large(dir.path(), "other", 30 << 20)];
    let uploader = double.uploader_of(vec![double.url.clone()], Limits { parts: 16 << 20, ..limits() });
    double.shut();
    let open = async {
        double.holds(16 << 20).await;
        double.open();
    };
    let (ending, ()) = tokio::join!(uploader.publish(CLAIM, &outputs, None), open);
    assert_eq!(ending.unwrap(), Ending::Published);
    assert_eq!(double.waiting.borrow().1, 16 << 20);
}

#[tokio::test]
async fn an_upload_that_is_given_up_frees_its_budget() {
    let (double, dir) = (Double::start().await, dir());
    let output = [large(dir.path(), "large", 60 << 20)];
    // Room for one pass: the second begins only when the first one's threads have ended.
    let uploader = double.uploader_of(vec![double.url.clone()], Limits { passes: 1, ..limits() });
    double.shut();
    tokio::select! {
        ending = uploader.publish(CLAIM, &output, None) => panic!("the gate is shut: {ending:?}"),
        () = double.holds(32 << 20) => {}
    }
    double.open();
    assert_eq!(uploader.publish(CLAIM, &output, None).await.unwrap(), Ending::Published);
}

#[tokio::test]
async fn a_path_that_is_not_what_the_database_says_is_not_published() {
    let (double, dir) = (Double::start().await, dir());
    let right = small(dir.path(), "a");
    let wrong = BuiltOutput { nar_hash: Sha256::of("another"), ..right.clone() };
    let error = double.uploader().publish(CLAIM, &[wrong], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Corrupt { .. }), "{error:?}");
    let gone = BuiltOutput { real_path: dir.path().join("gone"), ..right };
    let error = double.uploader().publish(CLAIM, &[gone], None).await.unwrap_err();
    assert!(matches!(error, UploadError::Pack(PackError::Read { .. })), "{error:?}");
    double.with(|script| assert!(script.put_count == 0 && script.complete_requests.is_empty()));
}

#[tokio::test]
async fn the_log_of_a_failed_build_is_stored_alone() {
    let (double, dir) = (Double::start().await, dir());
    fs::write(dir.path().join("log"), "it does not compile").unwrap();
    assert!(double.uploader().store_log(CLAIM, &Log::File(dir.path().join("log"))).await);
    assert!(!double.uploader().store_log(CLAIM, &Log::File(dir.path().join("gone"))).await);
    double.with(|script| assert!(script.stored.contains_key("log") && script.complete_requests.is_empty()));
}
