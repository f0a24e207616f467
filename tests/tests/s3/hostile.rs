//! Nodes and evaluators that lie. Each lie is refused with a sentence; nothing is published, nothing is lost.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use harmonia_builder::upload::{Ending, http_client};
use harmonia_nix::Sha256;
use harmonia_queue::builder::{Claim, Session};
use harmonia_queue::ingest::{Ingest, Node, NodeError};
use harmonia_service::protocol::{
    self, BuildResult, Bytes, CompleteRequest, Outcome, Output, Slot, SlotsRequest, Source, StoredFile,
    StoredPart, StoredSource, Token, Upload, Wish,
};
use harmonia_tests::nixes::Expression;
use harmonia_tests::press::{Press, RunningSigner, outputs_of, put, shared_nix, wire};
use harmonia_tests::s3::Server;
use harmonia_tests::{eventually, farm};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const BYTES: &[u8] = b"these are no NAR, but nobody looks";

fn bytes(contents: &[u8]) -> Bytes {
    Bytes { size: contents.len() as u64, sha256: Sha256::of(contents) }
}

fn nar_hash() -> Sha256 {
    Sha256::of("a NAR")
}

/// Two nodes, each with a claim: A is ours, B is not. Their derivations are not real ones.
struct Scene {
    press: Press,
    signer: RunningSigner,
    a: Claim,
    b: Claim,
    other: Session,
}

impl Scene {
    async fn new(server: Server) -> Scene {
        let press = Press::new(server).await;
        let signer = press.start_signer().await;
        press.farm.queue("main", &[("a", &[]), ("b", &[])]).await;
        let other = press.farm.node(&press.pool, "other").await;
        press.farm.settle().await;
        let (a, b) = (press.claim().await, press.farm.claim(&other).await);
        Scene { press, signer, a, b, other }
    }

    fn token(&self) -> String {
        self.press.token().to_text()
    }

    fn nar(&self, claim: &Claim, path: &str) -> Wish {
        Wish::Nar { claim: wire(claim), path: path.to_owned(), nar_hash: nar_hash(), file: bytes(BYTES) }
    }

    fn own_nar(&self) -> Wish {
        self.nar(&self.a, &path_of(&self.a))
    }

    async fn slot_as(&self, token: &str, wish: Wish) -> Slot {
        self.signer.slots(token, vec![wish]).await.remove(0)
    }

    /// The sentence with which a wish is refused.
    async fn refusal_as(&self, token: &str, wish: Wish) -> String {
        match self.slot_as(token, wish).await {
            Slot::Refused { reason } => reason,
            other => panic!("not refused: {other:?}"),
        }
    }

    async fn refusal(&self, wish: Wish) -> String {
        self.refusal_as(&self.token(), wish).await
    }

    async fn address(&self, wish: Wish) -> (String, BTreeMap<String, String>) {
        match self.slot_as(&self.token(), wish).await {
            Slot::Put { url, headers } => (url, headers),
            other => panic!("no slot: {other:?}"),
        }
    }

    async fn store_own_nar(&self) {
        let (url, headers) = self.address(self.own_nar()).await;
        assert!(put(&url, &headers, BYTES.to_vec()).await.is_success());
    }

    async fn complete_as(&self, token: &str, claim: &Claim, outputs: Vec<Output>) -> Outcome {
        let results = vec![BuildResult { claim: wire(claim), outputs, log: false }];
        let request = CompleteRequest { results, ..CompleteRequest::default() };
        self.signer.complete(token, &request).await.results.remove(0)
    }

    async fn complete(&self, outputs: Vec<Output>) -> Outcome {
        self.complete_as(&self.token(), &self.a, outputs).await
    }

    /// Neither in the bucket nor in the queue has anything come of it, and both jobs are still held.
    async fn assert_nothing_happened(&self) {
        assert!(self.press.check().await.is_empty());
        assert_eq!(self.press.farm.value::<i64>("SELECT count(*) + 0 * $1 FROM ci.canonical", 0).await, 0);
        for claim in [&self.a, &self.b] {
            assert_eq!(self.press.farm.state(claim.fence.job).await, "building");
        }
    }
}

/// The output of a derivation that is not a real one.
fn path_of(claim: &Claim) -> String {
    farm::store_path(farm::name(claim), farm::name(claim))
}

/// As an honest builder would say it.
fn output_of(claim: &Claim) -> Output {
    Output {
        name: "out".to_owned(),
        path: path_of(claim),
        nar_hash: nar_hash(),
        nar_size: 100,
        references: Vec::new(),
        ca: None,
        file: StoredFile { bytes: bytes(BYTES), upload: None },
        listing: false,
    }
}

fn assert_says(sentence: &str, words: &str) {
    assert!(sentence.contains(words), "{sentence:?} does not say {words:?}");
}

#[tokio::test]
async fn a_claim_gives_no_slot_for_another_job_s_path() {
    let scene = Scene::new(Server::InProcess).await;
    let reason = scene.refusal(scene.nar(&scene.a, &path_of(&scene.b))).await;
    assert_says(&reason, "is no output of");
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_claim_gives_no_slot_for_a_path_that_is_no_output() {
    let scene = Scene::new(Server::InProcess).await;
    let foreign = farm::store_path("foreign", "foreign");
    for wish in [
        scene.nar(&scene.a, &foreign),
        Wish::Parts { claim: wire(&scene.a), path: foreign.clone(), nar_hash: nar_hash() },
        Wish::Listing { claim: wire(&scene.a), path: foreign.clone(), file: bytes(BYTES) },
    ] {
        assert_says(&scene.refusal(wish).await, "is no output of");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_key_cannot_be_climbed_out_of() {
    let scene = Scene::new(Server::InProcess).await;
    let own = path_of(&scene.a);
    for path in [
        "../../narinfo".to_owned(),
        "/nix/store/../../narinfo".to_owned(),
        format!("{own}/.."),
        format!("{own}/../x"),
        format!("/nix/store/../store/{}", &own["/nix/store/".len()..]),
        format!("{own}%2f.."),
        format!("{own}\n"),
        format!("{own}\0"),
        String::new(),
    ] {
        let reason = scene.refusal(scene.nar(&scene.a, &path)).await;
        assert_says(&reason, "no store path");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn another_session_s_claim_gives_no_slot() {
    let scene = Scene::new(Server::InProcess).await;
    let reason = scene.refusal(scene.nar(&scene.b, &path_of(&scene.b))).await;
    assert_says(&reason, "is not this node's");
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn another_session_s_secret_opens_nothing() {
    let scene = Scene::new(Server::InProcess).await;
    let mixed = Token::Builder { session: scene.press.session.id, secret: scene.other.secret.clone() };
    assert_says(&scene.refusal_as(&mixed.to_text(), scene.own_nar()).await, "is not this node's");
    let ours = Token::Builder { session: scene.other.id, secret: scene.press.session.secret.clone() };
    assert_says(&scene.refusal_as(&ours.to_text(), scene.own_nar()).await, "is not this node's");
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_dead_session_s_secret_opens_nothing() {
    let scene = Scene::new(Server::InProcess).await;
    scene.store_own_nar().await;
    let (dead, job) = (scene.token(), scene.a.fence.job);
    scene.press.session.deregister().await.unwrap();
    assert_says(&scene.refusal_as(&dead, scene.own_nar()).await, "or not any more");
    assert_eq!(scene.complete_as(&dead, &scene.a, vec![output_of(&scene.a)]).await, Outcome::Stale);
    scene.press.farm.settle().await;
    assert_eq!(scene.press.farm.state(job).await, "ready");
    assert!(scene.press.check().await.is_empty());
}

#[tokio::test]
async fn a_stale_attempt_opens_nothing() {
    let scene = Scene::new(Server::InProcess).await;
    scene.store_own_nar().await;
    let mut stale = scene.a.clone();
    stale.fence.attempt -= 1;
    assert_says(&scene.refusal(scene.nar(&stale, &path_of(&scene.a))).await, "is not this node's");
    let log = Wish::Log { claim: wire(&stale), file: bytes(BYTES) };
    assert_says(&scene.refusal(log).await, "is not this node's");
    let outcome = scene.complete_as(&scene.token(), &stale, vec![output_of(&scene.a)]).await;
    assert_eq!(outcome, Outcome::Stale);
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_log_has_its_limit() {
    let scene = Scene::new(Server::InProcess).await;
    let file = |size| Bytes { size, sha256: Sha256::of("a log") };
    let limit = 64 << 20;
    let reason = scene.refusal(Wish::Log { claim: wire(&scene.a), file: file(limit + 1) }).await;
    assert_says(&reason, "a log has at most 67108864 bytes");
    scene.address(Wish::Log { claim: wire(&scene.a), file: file(limit) }).await;
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn everything_else_has_its_limit_too() {
    let scene = Scene::new(Server::InProcess).await;
    let (claim, path) = (wire(&scene.a), path_of(&scene.a));
    let file = Bytes { size: u64::MAX, sha256: Sha256::of("huge") };
    let part = |part| Wish::Part {
        claim,
        path: path.clone(),
        nar_hash: nar_hash(),
        upload: "upload".into(),
        number: 1,
        part,
    };
    for wish in [
        Wish::Nar { claim, path: path.clone(), nar_hash: nar_hash(), file },
        Wish::Listing { claim, path: path.clone(), file },
        part(file),
    ] {
        assert_says(&scene.refusal(wish).await, "has at most");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn parts_are_numbered_from_1_to_10000() {
    let scene = Scene::new(Server::InProcess).await;
    let wish = |number| Wish::Part {
        claim: wire(&scene.a),
        path: path_of(&scene.a),
        nar_hash: nar_hash(),
        upload: "upload".into(),
        number,
        part: bytes(BYTES),
    };
    for number in [i32::MIN, -1, 0, 10_001, i32::MAX] {
        assert_says(&scene.refusal(wish(number)).await, "parts are numbered from 1 to 10000");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_slot_takes_exactly_the_bytes_it_was_given_for() {
    for server in Server::FIT {
        let scene = Scene::new(server).await;
        for wrong in [&b"these are no NAR, and nobody LOOKS"[..], b"too short", &[b'x'; 1000]] {
            let (url, mut headers) = scene.address(scene.own_nar()).await;
            // Its own length: for one that was promised the server would wait.
            headers.remove("content-length");
            assert!(put(&url, &headers, wrong.to_vec()).await.is_client_error(), "{server:?}");
        }
        scene.assert_nothing_happened().await;
    }
}

#[tokio::test]
async fn a_slot_does_not_work_without_what_it_signs() {
    for server in Server::FIT {
        let scene = Scene::new(server).await;
        let (url, headers) = scene.address(scene.own_nar()).await;
        for name in headers.keys().filter(|name| *name != "content-length" && *name != "host") {
            let mut fewer = headers.clone();
            fewer.remove(name);
            assert!(put(&url, &fewer, BYTES.to_vec()).await.is_client_error(), "{server:?}: {name}");
        }
        scene.assert_nothing_happened().await;
    }
}

#[tokio::test]
async fn a_slot_leads_to_no_other_key() {
    for server in Server::FIT {
        let scene = Scene::new(server).await;
        let (url, headers) = scene.address(scene.own_nar()).await;
        let (place, query) = url.split_once('?').unwrap();
        let forged = format!("{}/0c5b8vw40dy178xlpddw65q9gf1h2186.narinfo?{query}", scene.press.s3.url());
        assert!(place.starts_with(&scene.press.s3.url()));
        assert!(put(&forged, &headers, BYTES.to_vec()).await.is_client_error(), "{server:?}");
        scene.assert_nothing_happened().await;
    }
}

#[tokio::test]
async fn a_slot_overwrites_nothing() {
    let scene = Scene::new(Server::Versitygw).await;
    let (url, headers) = scene.address(scene.own_nar()).await;
    assert!(put(&url, &headers, BYTES.to_vec()).await.is_success());
    assert_eq!(put(&url, &headers, BYTES.to_vec()).await.as_u16(), 412);
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn what_was_stored_must_be_what_is_said() {
    let scene = Scene::new(Server::InProcess).await;
    scene.store_own_nar().await;
    let lies: [fn(&mut Output); 3] = [
        |output| output.file.bytes.size += 1,
        |output| output.file.bytes.sha256 = Sha256::of("something else"),
        |output| output.nar_hash = Sha256::of("another NAR"),
    ];
    for lie in lies {
        let mut output = output_of(&scene.a);
        lie(&mut output);
        let Outcome::Again { reason } = scene.complete(vec![output]).await else { panic!("believed") };
        assert_says(&reason, "is not stored, or not as said");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn parts_that_nobody_sent_make_no_object() {
    for server in Server::FIT {
        let scene = Scene::new(server).await;
        let wish = Wish::Parts { claim: wire(&scene.a), path: path_of(&scene.a), nar_hash: nar_hash() };
        let Slot::Parts { upload } = scene.slot_as(&scene.token(), wish).await else { panic!("no upload") };
        for id in [upload, "no such upload".to_owned(), "../../x".to_owned()] {
            let parts = vec![StoredPart { etag: "\"etag\"".into(), sha256: Sha256::of(BYTES) }];
            let mut output = output_of(&scene.a);
            output.file.upload = Some(Upload { id, parts });
            let outcome = scene.complete(vec![output]).await;
            assert!(
                matches!(outcome, Outcome::Again { .. } | Outcome::Later { .. }),
                "{server:?}: {outcome:?}"
            );
        }
        scene.assert_nothing_happened().await;
    }
}

#[tokio::test]
async fn an_output_has_its_own_name_and_path() {
    let scene = Scene::new(Server::InProcess).await;
    scene.store_own_nar().await;
    let lies: [fn(&mut Output); 3] = [
        |output| output.name = "dev".into(),
        |output| output.path = farm::store_path("foreign", "foreign"),
        |output| output.path = "../x".into(),
    ];
    for lie in lies {
        let mut output = output_of(&scene.a);
        lie(&mut output);
        let Outcome::Refused { reason } = scene.complete(vec![output]).await else { panic!("believed") };
        assert_says(&reason, "is not the output");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn another_node_s_result_is_not_completed() {
    let scene = Scene::new(Server::InProcess).await;
    let outcome = scene.complete_as(&scene.token(), &scene.b, vec![output_of(&scene.b)]).await;
    assert_eq!(outcome, Outcome::Stale);
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn an_evaluator_publishes_no_results() {
    let scene = Scene::new(Server::InProcess).await;
    scene.store_own_nar().await;
    let ingest = scene.press.farm.begin("main").await;
    let token = evaluation_token(&ingest).await.to_text();
    assert_says(&scene.refusal_as(&token, scene.own_nar()).await, "is not this node's");
    let outcome = scene.complete_as(&token, &scene.a, vec![output_of(&scene.a)]).await;
    let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
    assert_says(&reason, "results come from a builder");
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_builder_publishes_no_sources() {
    let scene = Scene::new(Server::InProcess).await;
    let (source, contents) = text_source("text");
    let file = bytes(&contents);
    let reason = scene.refusal(Wish::Source { source: source.clone(), file }).await;
    assert_says(&reason, "sources come from an evaluation");
    let outcome = complete_source(&scene.signer, &scene.press.token(), source, file).await;
    let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
    assert_says(&reason, "sources come from an evaluation");
    scene.assert_nothing_happened().await;
}

/// A request with any token and any body.
async fn post(signer: &RunningSigner, what: &str, token: Option<&str>, body: String) -> (u16, String) {
    let request = http_client().unwrap().post(format!("{}/api/{what}", signer.url)).body(body);
    let request = request.header("content-type", "application/json");
    let request = match token {
        Some(token) => request.header("authorization", token),
        None => request,
    };
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

#[tokio::test]
async fn without_a_token_nothing_is_answered() {
    let scene = Scene::new(Server::InProcess).await;
    let body = serde_json::to_string(&SlotsRequest { wishes: vec![scene.own_nar()] }).unwrap();
    let secret = scene.press.session.secret.clone();
    for token in [
        None,
        Some(String::new()),
        Some("Bearer".into()),
        Some("Bearer ".into()),
        Some("Bearer rubbish".into()),
        Some("Bearer builder.x.y".into()),
        Some(format!("Bearer builder.{secret}")),
        Some(format!("Bearer builder.99999999999999999999.{secret}")),
        Some(format!("Bearer signer.{}.{secret}", scene.press.session.id)),
        Some(format!("Basic {}", scene.token())),
        Some(scene.token()),
    ] {
        for what in ["upload-slots", "build-complete"] {
            let (status, text) = post(&scene.signer, what, token.as_deref(), body.clone()).await;
            assert_eq!(status, 401, "{token:?}: {text}");
            assert_says(&text, "a node's token is needed");
        }
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn what_is_not_understood_is_not_taken() {
    let scene = Scene::new(Server::InProcess).await;
    let claim = json!({ "job": scene.a.fence.job, "attempt": scene.a.fence.attempt });
    let file = json!({ "size": 3, "sha256": "sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=" });
    let log = json!({ "log": { "claim": claim, "file": file } });
    let token = format!("Bearer {}", scene.token());
    let bodies = [
        String::new(),
        "rubbish".into(),
        "[]".into(),
        "{}".into(),
        json!({ "wishes": 1 }).to_string(),
        json!({ "wishes": [{ "everything": {} }] }).to_string(),
        json!({ "wishes": [log], "more": 1 }).to_string(),
        json!({ "wishes": [{ "log": { "claim": claim, "file": file, "more": 1 } }] }).to_string(),
        json!({ "wishes": [{ "log": { "claim": claim, "file": { "size": -1, "sha256": "x" } } }] })
            .to_string(),
        format!("{{\"wishes\": [{}", "[".repeat(100_000)),
    ];
    for body in bodies {
        let (status, text) = post(&scene.signer, "upload-slots", Some(&token), body.clone()).await;
        assert!((400..500).contains(&status), "{status} for {body:.80}");
        assert_says(&text, "detail");
    }
    for body in ["rubbish", "{\"results\": 1}", "{\"results\": [], \"more\": 1}"] {
        let (status, _) = post(&scene.signer, "build-complete", Some(&token), body.into()).await;
        assert!((400..500).contains(&status), "{status} for {body}");
    }
    scene.assert_nothing_happened().await;
}

#[tokio::test]
async fn a_request_has_its_limit() {
    let scene = Scene::new(Server::InProcess).await;
    let wishes = vec![scene.own_nar(); 600];
    let body = serde_json::to_string(&SlotsRequest { wishes }).unwrap();
    let token = format!("Bearer {}", scene.token());
    let (status, text) = post(&scene.signer, "upload-slots", Some(&token), body).await;
    assert_eq!(status, 400);
    assert_says(&text, "at most 512 entries");
    let result = BuildResult { claim: wire(&scene.a), outputs: Vec::new(), log: false };
    let request = CompleteRequest { results: vec![result; 600], ..CompleteRequest::default() };
    let body = serde_json::to_string(&request).unwrap();
    let (status, text) = post(&scene.signer, "build-complete", Some(&token), body).await;
    assert_eq!(status, 400);
    assert_says(&text, "at most 512 entries");
    scene.assert_nothing_happened().await;
}

/// A real build that waits to be published.
struct Built {
    press: Press,
    signer: RunningSigner,
    claim: Claim,
    outputs: Vec<Output>,
}

impl Built {
    async fn new(name: &str) -> Built {
        let (press, nix) = (Press::new(Server::InProcess).await, shared_nix());
        let signer = press.start_signer().await;
        let expression = Expression::two_outputs(name);
        nix.build_all(&expression);
        let drv = nix.instantiate(&expression);
        press.evaluate(nix, &signer, &drv).await;
        let uploader = press.uploader(&[&signer.url]);
        press.publish(nix, &uploader, &press.claim().await).await.unwrap();
        press.farm.settle().await;
        let claim = press.claim().await;
        assert_eq!(claim.drv_path, drv);
        let mut outputs = Vec::new();
        for built in outputs_of(nix, &claim) {
            outputs.push(store(&press, &signer, &claim, &built.name, &built.path, built.nar_hash).await);
        }
        Built { press, signer, claim, outputs }
    }

    async fn complete(&self, outputs: Vec<Output>) -> Outcome {
        complete(&self.press, &self.signer, &self.claim, outputs).await
    }

    async fn publish(&self) -> Ending {
        let uploader = self.press.uploader(&[&self.signer.url]);
        self.press.publish(shared_nix(), &uploader, &self.claim).await.unwrap()
    }

    /// The truth is still taken.
    async fn assert_nothing_lost(&self) {
        assert!(!self.press.check().await.contains_key(&self.outputs[0].path));
        assert_eq!(self.publish().await, Ending::Published);
        assert!(self.press.check().await.contains_key(&self.outputs[0].path));
    }
}

/// Stores some bytes as the NAR of an output.
async fn store(
    press: &Press,
    signer: &RunningSigner,
    claim: &Claim,
    name: &str,
    path: &str,
    nar_hash: Sha256,
) -> Output {
    let wish = Wish::Nar { claim: wire(claim), path: path.to_owned(), nar_hash, file: bytes(BYTES) };
    match signer.slots(&press.token().to_text(), vec![wish]).await.remove(0) {
        Slot::Put { url, headers } => assert!(put(&url, &headers, BYTES.to_vec()).await.is_success()),
        other => panic!("{other:?}"),
    }
    let file = StoredFile { bytes: bytes(BYTES), upload: None };
    let (name, path) = (name.to_owned(), path.to_owned());
    Output { name, path, nar_hash, nar_size: 100, references: Vec::new(), ca: None, file, listing: false }
}

async fn complete(press: &Press, signer: &RunningSigner, claim: &Claim, outputs: Vec<Output>) -> Outcome {
    let results = vec![BuildResult { claim: wire(claim), outputs, log: false }];
    let request = CompleteRequest { results, ..CompleteRequest::default() };
    signer.complete(&press.token().to_text(), &request).await.results.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_has_all_its_outputs() {
    let built = Built::new("left-out").await;
    for outputs in [vec![], vec![built.outputs[0].clone()], vec![built.outputs[1].clone()]] {
        let outcome = built.complete(outputs).await;
        let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
        assert_says(&reason, "an output is missing");
    }
    built.assert_nothing_lost().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_is_not_two_things() {
    let built = Built::new("two-things").await;
    let first = &built.outputs[0];
    let hash = Sha256::of("another NAR");
    let other = store(&built.press, &built.signer, &built.claim, &first.name, &first.path, hash).await;
    for outputs in [vec![other.clone()], vec![other.clone(), other]] {
        let outcome = built.complete([built.outputs.clone(), outputs].concat()).await;
        assert!(matches!(outcome, Outcome::Refused { .. }), "{outcome:?}");
    }
    built.assert_nothing_lost().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_are_not_exchanged() {
    let built = Built::new("exchanged").await;
    let mut outputs = built.outputs.clone();
    let first = outputs[0].name.clone();
    outputs[0].name = std::mem::replace(&mut outputs[1].name, first);
    let outcome = built.complete(outputs).await;
    let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
    assert_says(&reason, "is not the output");
    built.assert_nothing_lost().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn references_are_store_paths() {
    let built = Built::new("references").await;
    for reference in ["rubbish", "", "/nix/store/x y", "/nix/store/../etc/passwd", "a\nSig: x"] {
        let mut outputs = built.outputs.clone();
        outputs[0].references = vec![reference.to_owned()];
        let outcome = built.complete(outputs).await;
        let Outcome::Refused { reason } = outcome else { panic!("{reference:?}: {outcome:?}") };
        assert_says(&reason, "no store path");
    }
    built.assert_nothing_lost().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_results_of_one_claim_are_not_mixed() {
    let built = Built::new("two-results").await;
    let mut other = Vec::new();
    for output in &built.outputs {
        let hash = Sha256::of(&output.path);
        other.push(store(&built.press, &built.signer, &built.claim, &output.name, &output.path, hash).await);
    }
    let result =
        |outputs: &[Output]| BuildResult { claim: wire(&built.claim), outputs: outputs.to_vec(), log: false };
    let results = vec![result(&built.outputs), result(&other)];
    let request = CompleteRequest { results, ..CompleteRequest::default() };
    built.signer.complete(&built.press.token().to_text(), &request).await;
    let hashes: Vec<Option<Vec<u8>>> = sqlx::query_scalar(
        "SELECT (SELECT nar_hash FROM ci.canonical c WHERE c.path = o.path) FROM ci.output o WHERE job_id = $1 ORDER BY name",
    )
    .bind(built.claim.fence.job)
    .fetch_all(&built.press.farm.database.admin())
    .await
    .unwrap();
    let of = |outputs: &[Output]| {
        let mut outputs: Vec<&Output> = outputs.iter().collect();
        outputs.sort_by(|a, b| a.name.cmp(&b.name));
        outputs.iter().map(|output| Some(output.nar_hash.0.to_vec())).collect::<Vec<_>>()
    };
    assert!(
        hashes == of(&built.outputs) || hashes == of(&other) || hashes.iter().all(Option::is_none),
        "mixed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_not_replayed_after_its_job_ended() {
    let built = Built::new("replayed").await;
    assert_eq!(built.publish().await, Ending::Published);
    let before = built.press.check().await;
    assert_eq!(built.complete(built.outputs.clone()).await, Outcome::Stale);
    let wish = Wish::Log { claim: wire(&built.claim), file: bytes(BYTES) };
    let slot = built.signer.slots(&built.press.token().to_text(), vec![wish]).await.remove(0);
    assert!(matches!(slot, Slot::Refused { .. }), "{slot:?}");
    let text = |infos: BTreeMap<String, harmonia_nix::narinfo::NarInfo>| format!("{infos:?}");
    assert_eq!(text(built.press.check().await), text(before));
}

async fn evaluation_token(ingest: &Ingest) -> Token {
    Token::Evaluation { id: ingest.evaluation, secret: ingest.token().await.unwrap() }
}

/// A file as `builtins.toFile` names it, and its compressed NAR.
fn text_source(text: &str) -> (Source, Vec<u8>) {
    use base64::Engine;
    let nix = shared_nix();
    let file = nix.root().join("expressions").join(format!("{text}.nix"));
    fs::write(&file, format!("builtins.toFile \"source\" \"{text}\"")).unwrap();
    let path = nix.run("nix-instantiate", &["--eval", "--read-write-mode", file.to_str().unwrap()]);
    let (nar_hash, nar_size) = harmonia_nix::source::nar_of_file(text.as_bytes());
    let source = Source {
        path: path.trim_matches('"').to_owned(),
        nar_hash,
        nar_size,
        references: Vec::new(),
        text: Some(base64::engine::general_purpose::STANDARD.encode(text)),
    };
    let dump = nix.command("nix-store").args(["--dump"]).arg(nix.real(&source.path)).output().unwrap();
    (source, zstd::encode_all(dump.stdout.as_slice(), 3).unwrap())
}

async fn complete_source(signer: &RunningSigner, token: &Token, source: Source, file: Bytes) -> Outcome {
    let request =
        CompleteRequest { sources: vec![StoredSource { source, file }], ..CompleteRequest::default() };
    signer.complete(&token.to_text(), &request).await.sources.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_follows_from_its_content() {
    let press = Press::new(Server::InProcess).await;
    let signer = press.start_signer().await;
    let ingest = press.farm.begin("main").await;
    let token = evaluation_token(&ingest).await;
    let (honest, contents) = text_source("honest");
    let file = bytes(&contents);
    let lies: [fn(&mut Source); 6] = [
        |source| source.path = farm::store_path("bash", "bash-5.2"),
        |source| source.path = source.path.replace("-source", "-bash"),
        |source| source.nar_hash = Sha256::of("another NAR"),
        |source| source.references = vec![farm::store_path("bash", "bash-5.2")],
        |source| source.text = None,
        |source| source.text = Some("bm90IHRoaXM=".into()),
    ];
    for lie in lies {
        let mut source = honest.clone();
        lie(&mut source);
        let wish = Wish::Source { source: source.clone(), file };
        let slot = signer.slots(&token.to_text(), vec![wish]).await.remove(0);
        assert!(matches!(slot, Slot::Refused { .. }), "{slot:?}");
        let outcome = complete_source(&signer, &token, source, file).await;
        assert!(matches!(outcome, Outcome::Refused { .. }), "{outcome:?}");
    }
    assert!(press.check().await.is_empty());
    let slot = signer.slots(&token.to_text(), vec![Wish::Source { source: honest.clone(), file }]).await;
    let [Slot::Put { url, headers }] = slot.as_slice() else { panic!("{slot:?}") };
    assert!(put(url, headers, contents).await.is_success());
    let asked = || vec![Wish::Published { path: honest.path.clone() }];
    assert_eq!(signer.slots(&token.to_text(), asked()).await, [Slot::Absent], "its NAR alone is nothing");
    assert_eq!(complete_source(&signer, &token, honest.clone(), file).await, Outcome::Published);
    assert_eq!(signer.slots(&token.to_text(), asked()).await, [Slot::Present]);
    let slot = signer.slots(&press.token().to_text(), asked()).await.remove(0);
    assert!(matches!(slot, Slot::Refused { .. }), "builders have no sources: {slot:?}");
    assert!(press.check().await.contains_key(&honest.path));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_evaluation_has_no_more_sources() {
    let press = Press::new(Server::InProcess).await;
    let signer = press.start_signer().await;
    let mut ingest = press.farm.begin("main").await;
    ingest.add(vec![farm::derivation("a", &[])]).await.unwrap();
    let token = evaluation_token(&ingest).await;
    let (source, contents) = text_source("late");
    let file = bytes(&contents);
    let slot = signer.slots(&token.to_text(), vec![Wish::Source { source: source.clone(), file }]).await;
    let [Slot::Put { url, headers }] = slot.as_slice() else { panic!("{slot:?}") };
    assert!(put(url, headers, contents).await.is_success());
    ingest.complete(&[]).await.unwrap();
    assert_eq!(complete_source(&signer, &token, source.clone(), file).await, Outcome::Stale);
    let slot = signer.slots(&token.to_text(), vec![Wish::Source { source, file }]).await.remove(0);
    let Slot::Refused { reason } = slot else { panic!("{slot:?}") };
    assert_says(&reason, "an evaluation that is being written");
    assert!(press.check().await.is_empty());
}

/// A derivation's node under the path that its text has.
fn node_of(name: &str, text: Vec<u8>) -> Node {
    match Node::parse(&farm::store_path("forged", &format!("{name}.drv")), text.clone()) {
        Err(NodeError::WrongPath { actual, .. }) => Node::parse(&actual, text).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Reads a derivation of the store and all below it, which is `tools` alone.
fn nodes_of(drv: &str) -> (Node, Node) {
    let nix = shared_nix();
    let read = |path: &str| Node::parse(path, fs::read(nix.real(path)).unwrap()).unwrap();
    let top = read(drv);
    let tools = read(&top.inputs[0]);
    (tools, top)
}

/// Has a hostile evaluator's graph built, and says what the signer says to its result.
async fn result_of(press: &Press, signer: &RunningSigner, nodes: Vec<Node>) -> Outcome {
    let mut ingest = press.farm.begin("main").await;
    let top = nodes.last().unwrap().drv_path.clone();
    ingest.add(nodes).await.unwrap();
    ingest.complete(&[]).await.unwrap();
    press.farm.settle().await;
    loop {
        let claim = press.claim().await;
        if claim.drv_path != top {
            press.farm.succeed(&press.session, &claim).await;
            press.farm.settle().await;
            continue;
        }
        let outputs: Vec<(String, String)> =
            sqlx::query_as("SELECT name, path FROM ci.output WHERE job_id = $1")
                .bind(claim.fence.job)
                .fetch_all(&press.farm.database.admin())
                .await
                .unwrap();
        let mut stored = Vec::new();
        for (name, path) in outputs {
            stored.push(store(press, signer, &claim, &name, &path, nar_hash()).await);
        }
        return complete(press, signer, &claim, stored).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_derivation_does_not_make_another_s_output() {
    let (press, nix) = (Press::new(Server::InProcess).await, shared_nix());
    let signer = press.start_signer().await;
    let (bash, evil) = (Expression::trivial("bash-5.2"), Expression::trivial("evil-5.2"));
    let (bash, evil) =
        ((nix.instantiate(&bash), nix.build(&bash)), (nix.instantiate(&evil), nix.build(&evil)));
    let text = String::from_utf8(fs::read(nix.real(&evil.0)).unwrap()).unwrap();
    let forged = node_of("evil-5.2", text.replace(&evil.1, &bash.1).into_bytes());
    assert_eq!(forged.outputs, [("out".to_owned(), Some(bash.1.clone()))]);
    let (tools, _) = nodes_of(&evil.0);
    let outcome = result_of(&press, &signer, vec![tools, forged]).await;
    let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
    assert_says(&reason, &bash.1);
    assert!(!press.keys("").await.iter().any(|key| key.ends_with(".narinfo")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_derivation_s_path_follows_from_its_text() {
    let (press, nix) = (Press::new(Server::InProcess).await, shared_nix());
    let signer = press.start_signer().await;
    let (honest, other) = (Expression::trivial("named"), Expression::trivial("named").attribute("x", "1"));
    let (honest, other) = (nix.instantiate(&honest), nix.instantiate(&other));
    let (tools, mut forged) = nodes_of(&honest);
    let (_, text) = nodes_of(&other);
    (forged.aterm, forged.outputs) = (text.aterm, text.outputs);
    let outcome = result_of(&press, &signer, vec![tools, forged]).await;
    let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
    assert_says(&reason, &honest);
    assert!(!press.keys("").await.iter().any(|key| key.ends_with(".narinfo")));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_proven_above_a_text_that_is_missing() {
    let (press, nix) = (Press::new(Server::InProcess).await, shared_nix());
    let signer = press.start_signer().await;
    let (mut tools, top) = nodes_of(&nix.instantiate(&Expression::trivial("above")));
    (tools.aterm, tools.cached) = (None, true);
    let missing = tools.drv_path.clone();
    let outcome = result_of(&press, &signer, vec![tools, top]).await;
    let Outcome::Refused { reason } = outcome else { panic!("{outcome:?}") };
    assert_says(&reason, &format!("the text of {missing} is not stored"));
    assert!(!press.keys("").await.iter().any(|key| key.ends_with(".narinfo")));
}

#[test]
fn the_protocol_names_nothing_twice() {
    // A field given twice could mean one thing to whoever checks it and another to whoever uses it.
    let text = r#"{"job": 1, "job": 2, "attempt": 1}"#;
    assert!(serde_json::from_str::<protocol::Claim>(text).is_err());
}

/// Announces a body, and sends none of it. Answers what comes within some time.
async fn announce(signer: &RunningSigner, token: Option<&str>, length: usize) -> (TcpStream, String) {
    let address = signer.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = format!(
        "POST /api/upload-slots HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{token}Content-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 1000];
    let read = timeout(Duration::from_millis(500), stream.read(&mut answer)).await.map_or(0, Result::unwrap);
    (stream, String::from_utf8_lossy(&answer[..read]).into_owned())
}

#[tokio::test]
async fn nothing_is_read_of_somebody_without_a_token() {
    let scene = Scene::new(Server::InProcess).await;
    for token in [None, Some("rubbish")] {
        let (_stream, answer) = announce(&scene.signer, token, 64 << 20).await;
        assert_says(&answer, "401 Unauthorized");
    }
    let (_stream, answer) = announce(&scene.signer, Some(&scene.token()), 1000).await;
    assert_eq!(answer, "", "the body is waited for");
}

#[tokio::test]
async fn what_is_read_at_once_is_bounded() {
    let scene = Scene::new(Server::InProcess).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let (stream, answer) = announce(&scene.signer, Some(&scene.token()), 64 << 20).await;
        assert_eq!(answer, "");
        streams.push(stream);
    }
    let (_stream, answer) = announce(&scene.signer, Some(&scene.token()), 1000).await;
    assert_says(&answer, "503 Service Unavailable");
    // Whoever goes makes room.
    drop(streams);
    eventually("there is room again", || async {
        let request = SlotsRequest { wishes: vec![scene.own_nar()] };
        scene.signer.post("upload-slots", &scene.token(), &request).await.status().is_success()
    })
    .await;
}
