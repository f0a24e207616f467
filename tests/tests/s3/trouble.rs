//! S3 servers, connections and databases that fail while something is published: it is published all the same, and
//! nobody's secret is in a log.
//!
//! Everything of a test runs on its own thread, so that all it logs can be gathered.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use harmonia_builder::upload::{Ending, Limits, http_client};
use harmonia_nix::store_path;
use harmonia_queue::builder::Claim;
use harmonia_service::bucket::Bucket;
use harmonia_service::layout;
use harmonia_service::protocol::{BuildResult, CompleteRequest};
use harmonia_tests::farm::Farm;
use harmonia_tests::nixes::Expression;
use harmonia_tests::pg;
use harmonia_tests::press::{Press, RunningSigner, free_port, outputs_of, shared_nix, wire};
use harmonia_tests::proxy::{Fault, Proxy};
use harmonia_tests::s3::{S3, Server};
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::EnvFilter;

/// Jobs that a test may publish.
const JOBS: usize = 8;

/// What the thread logs: all that our code says, and of others' what they say by default.
struct Log {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: DefaultGuard,
}

#[derive(Clone)]
struct Writer(Arc<Mutex<Vec<u8>>>);

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn gather() -> Log {
        let text = Arc::new(Mutex::new(Vec::new()));
        let writer = Writer(text.clone());
        let ours = ["builder", "nix", "queue", "service", "signer"];
        let ours: String = ours.iter().map(|name| format!(",harmonia_{name}=trace")).collect();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(format!("info{ours}")))
            .with_ansi(false)
            .with_writer(move || writer.clone());
        Log { text, _guard: tracing::subscriber::set_default(subscriber.finish()) }
    }

    fn text(&self) -> String {
        String::from_utf8(self.text.lock().unwrap().clone()).unwrap()
    }
}

/// A farm whose signer, and whose builder on its way to the bucket, go through proxies.
struct Stage {
    press: Press,
    signer: RunningSigner,
    bucket: Proxy,
    database: Proxy,
    claims: Vec<Claim>,
    log: Log,
    secrets: Vec<String>,
}

impl Stage {
    async fn new(server: Server) -> Stage {
        Stage::with(Press::new(server).await, drvs()).await
    }

    async fn with(press: Press, drvs: &[String]) -> Stage {
        let log = Log::gather();
        let (bucket, database) = (press.before_bucket(), press.before_database());
        let settings = press.settings_by(&bucket, &database).await;
        let url = settings.get("database_url").unwrap();
        let password = url.split([':', '@']).nth(2).unwrap().to_owned();
        let key = press.key.to_text();
        let secrets = vec![
            password,
            press.session.secret.clone(),
            press.s3.secret_key.clone(),
            key.split_once(':').unwrap().1.to_owned(),
            "X-Amz-Signature".to_owned(),
            "X-Amz-Credential".to_owned(),
        ];
        let signer = RunningSigner::start(&press.farm, settings).await;
        let drvs: Vec<&str> = drvs.iter().map(String::as_str).collect();
        press.evaluate_all(shared_nix(), &signer, &drvs).await;
        let tools = press.claim().await;
        press.publish(shared_nix(), &press.uploader(&[&signer.url]), &tools).await.unwrap();
        press.farm.settle().await;
        let claims = press.claim_all().await.into_values().collect();
        Stage { press, signer, bucket, database, claims, log, secrets }
    }

    async fn publish(&self, claim: &Claim) -> Ending {
        let limits = Limits { pause: Duration::from_millis(10), ..Limits::default() };
        let uploader = self.press.uploader_as(&self.press.token(), &[&self.signer.url], limits);
        self.press.publish(shared_nix(), &uploader, claim).await.unwrap()
    }

    /// Each of the troubles befalls one publication, in the requests that match. Each must have happened.
    async fn survives(&mut self, matches: fn(&str) -> bool, troubles: Vec<Vec<Fault>>) {
        for trouble in troubles {
            let (claim, what) = (self.claims.pop().unwrap(), format!("{trouble:?}"));
            self.bucket.reset();
            for fault in trouble {
                self.bucket.on_matching(1, matches, fault);
            }
            assert_eq!(self.publish(&claim).await, Ending::Published, "{what}");
            assert_eq!(self.bucket.reset(), 0, "{what} did not happen");
            self.press.farm.assert_sound().await;
        }
        self.end().await;
    }

    /// Nothing is wrong, and no secret was told.
    async fn end(&self) {
        self.press.check().await;
        let text = self.log.text();
        assert!(text.contains("harmonia_signer"), "nothing was gathered");
        for secret in &self.secrets {
            assert!(!text.contains(secret.as_str()), "a secret is in the log:\n{text}");
        }
    }
}

/// Two outputs each, built once.
fn drvs() -> &'static [String] {
    static DRVS: OnceLock<Vec<String>> = OnceLock::new();
    DRVS.get_or_init(|| {
        build((0..JOBS).map(|number| Expression::two_outputs(&format!("trouble-{number}"))).collect())
    })
}

/// One output each that does not fit into one part. Its bytes do not matter, but that no compression makes them less.
fn large() -> &'static [String] {
    static DRVS: OnceLock<Vec<String>> = OnceLock::new();
    DRVS.get_or_init(|| {
        let one = |number| Expression::new(&format!("large-{number}"), "head -c 9000000 /dev/urandom >$out");
        build((0..4).map(one).collect())
    })
}

fn build(expressions: Vec<Expression>) -> Vec<String> {
    let nix = shared_nix();
    let files: Vec<String> =
        expressions.iter().map(|one| nix.write(one).to_str().unwrap().to_owned()).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let drvs: Vec<String> = nix.run("nix-instantiate", &files).lines().map(str::to_owned).collect();
    let words: Vec<&str> = ["--realise"].into_iter().chain(drvs.iter().map(String::as_str)).collect();
    nix.run("nix-store", &words);
    drvs
}

fn answer(status: u16, code: &str) -> Fault {
    Fault::Answer(status, format!("<Error><Code>{code}</Code><Message>No.</Message></Error>"))
}

/// What an S3 server and the way to it may do. Four refusals in a row are more than the SDK tries.
fn troubles() -> Vec<Vec<Fault>> {
    let internal = || answer(500, "InternalError");
    vec![
        vec![internal(), Fault::slow_down(), internal(), Fault::slow_down()],
        vec![answer(403, "AccessDenied")],
        vec![answer(412, "PreconditionFailed")],
        vec![answer(400, "XAmzContentChecksumMismatch")],
        vec![Fault::CutRequest(100), Fault::CutResponse(0)],
        vec![Fault::CutResponse(20), Fault::Swallow(Box::new(|| ()))],
    ]
}

#[tokio::test]
async fn a_nar_that_is_put() {
    let mut stage = Stage::new(Server::InProcess).await;
    stage.survives(|name| name.starts_with("PUT /bucket/nar/"), troubles()).await;
}

#[tokio::test]
async fn a_listing_that_is_put() {
    let mut stage = Stage::new(Server::InProcess).await;
    stage.survives(|name| name.starts_with("PUT /bucket/listings/"), troubles()).await;
}

#[tokio::test]
async fn a_log_that_is_put() {
    let mut stage = Stage::new(Server::InProcess).await;
    stage.survives(|name| name.starts_with("PUT /bucket/log-attempts/"), troubles()).await;
}

#[tokio::test]
async fn an_object_that_is_looked_at() {
    let mut stage = Stage::new(Server::Versitygw).await;
    stage.survives(|name| name.starts_with("HEAD"), troubles()).await;
}

#[tokio::test]
async fn a_listing_that_is_copied() {
    let mut stage = Stage::new(Server::Versitygw).await;
    let is_copy = |name: &str| name.ends_with(".ls") && !name.contains("listings/");
    stage.survives(is_copy, troubles()).await;
}

#[tokio::test]
async fn a_log_that_is_copied() {
    let mut stage = Stage::new(Server::InProcess).await;
    stage.survives(|name| name.starts_with("PUT /bucket/log/"), troubles()).await;
}

#[tokio::test]
async fn a_narinfo_that_is_put() {
    let mut stage = Stage::new(Server::Versitygw).await;
    stage.survives(|name| name.ends_with(".narinfo"), troubles()).await;
}

/// The same for what is sent in parts, which takes longer.
fn large_troubles(cut: usize) -> Vec<Vec<Fault>> {
    vec![
        vec![Fault::slow_down(), answer(500, "InternalError")],
        vec![answer(403, "AccessDenied"), answer(400, "XAmzContentChecksumMismatch")],
        vec![Fault::CutRequest(cut), Fault::CutResponse(20)],
        vec![Fault::CutResponse(0), Fault::Swallow(Box::new(|| ()))],
    ]
}

#[tokio::test]
async fn a_part_that_is_put() {
    let mut stage = Stage::with(Press::new(Server::Versitygw).await, large()).await;
    stage.survives(|name| name.starts_with("PUT /bucket/nar/"), large_troubles(1_000_000)).await;
}

#[tokio::test]
async fn parts_that_are_begun() {
    let mut stage = Stage::with(Press::new(Server::Versitygw).await, large()).await;
    stage.survives(|name| name.starts_with("POST /bucket/nar/"), large_troubles(100)).await;
}

#[tokio::test]
async fn parts_that_are_completed() {
    let mut stage = Stage::with(Press::new(Server::Versitygw).await, large()).await;
    for trouble in [
        vec![Fault::slow_down(), answer(500, "InternalError")],
        vec![answer(412, "PreconditionFailed")],
        vec![answer(404, "NoSuchUpload")],
        vec![Fault::CutResponse(0), Fault::Swallow(Box::new(|| ()))],
    ] {
        let (claim, what) = (stage.claims.pop().unwrap(), format!("{trouble:?}"));
        stage.bucket.reset();
        for fault in trouble {
            // The first one begins the upload.
            stage.bucket.on_matching(2, |name| name.starts_with("POST /bucket/nar/"), fault);
        }
        assert_eq!(stage.publish(&claim).await, Ending::Published, "{what}");
        assert_eq!(stage.bucket.reset(), 0, "{what} did not happen");
    }
    stage.end().await;
}

/// A server that copies the parts is asked once, and waited for.
#[tokio::test]
async fn parts_that_are_completed_slowly() {
    let stage = Stage::with(Press::new(Server::Versitygw).await, &large()[..1]).await;
    stage.bucket.reset();
    let (release, hold) = Fault::hold();
    stage.bucket.on_matching(2, |name| name.starts_with("POST /bucket/nar/"), hold);
    let slow = async {
        // Longer than any other request may take.
        tokio::time::sleep(Duration::from_secs(12)).await;
        release.send(()).unwrap();
    };
    let (ending, ()) = tokio::join!(stage.publish(&stage.claims[0]), slow);
    assert_eq!(ending, Ending::Published);
    let posts = stage.bucket.requests().iter().filter(|name| name.starts_with("POST /bucket/nar/")).count();
    assert_eq!(posts, 2, "begun and completed");
    stage.end().await;
}

/// One that misses what it misses, and a proxy that knows no bucket.
#[tokio::test]
async fn what_is_not_missing_in_the_words_of_s3_is_an_error() {
    let press = Press::new(Server::InProcess).await;
    let proxy = press.before_bucket();
    let settings = press.bucket_settings().with("s3_endpoint", format!("http://{}", proxy.address()));
    let bucket = Bucket::connect(&settings).await.unwrap();
    assert_eq!(bucket.get("absent", 1).await.unwrap(), None);
    assert!(bucket.head("absent").await.unwrap().is_none());
    for text in
        ["<html>nothing here</html>", "<Error><Code>NoSuchBucket</Code><Message>No.</Message></Error>"]
    {
        proxy.on(1, Fault::Answer(404, text.to_owned()));
        let error = bucket.get("absent", 1).await.unwrap_err().to_string();
        assert!(error.contains("404"), "{error}");
    }
    // As AWS says it.
    proxy.on(1, answer(400, "AuthorizationHeaderMalformed"));
    let sentence = bucket.unreadable().await.unwrap();
    assert!(sentence.contains(&format!("the bucket bucket at http://{}:", proxy.address())), "{sentence}");
    assert!(sentence.contains("AuthorizationHeaderMalformed (No.); set s3_region"), "{sentence}");
    assert_eq!(bucket.unreadable().await, None);
}

#[tokio::test]
async fn a_bucket_whose_name_is_misspelt_is_named() {
    for server in Server::FIT {
        let press = Press::new(server).await;
        let bucket = Bucket::connect(&press.bucket_settings().with("s3_bucket", "bukcet")).await.unwrap();
        let mut sentences = vec![bucket.unreadable().await];
        // The other one makes a bucket of any name that is written to.
        if server == Server::Versitygw {
            sentences.push(bucket.unfit().await);
        }
        for sentence in sentences {
            let sentence = sentence.unwrap_or_else(|| panic!("{server:?} takes it"));
            let place = format!("the bucket bukcet at {}: ", press.s3.endpoint);
            assert!(sentence.starts_with(&place) && sentence.contains("NoSuchBucket"), "{sentence}");
        }
    }
}

#[tokio::test]
async fn the_way_to_the_database_while_a_result_is_published() {
    let mut stage = Stage::new(Server::InProcess).await;
    for k in 1..=JOBS {
        let claim = stage.claims.pop().unwrap();
        stage.database.reset();
        let fault = if k % 2 == 0 { Fault::CutRequest(10) } else { Fault::CutResponse(5) };
        stage.database.on(k, fault);
        let ending = stage.publish(&claim).await;
        // Finished, and the answer to that was cut: the claim is not live any more.
        assert!(matches!(ending, Ending::Published | Ending::Stale), "{k}: {ending:?}");
        assert_eq!(stage.press.farm.state(claim.fence.job).await, "succeeded", "{k}");
    }
    stage.end().await;
}

/// A database of its own stops when the narinfos are written, and comes back.
#[tokio::test]
async fn the_database_that_stops_before_a_job_is_finished() {
    let server = pg::Server::start(pg::Options::default());
    let farm = Farm::on(server.database().await).await;
    let press = Press::on(farm, S3::start(Server::InProcess).await).await;
    let stage = Stage::with(press, &drvs()[..1]).await;
    let claim = &stage.claims[0];
    let (written, mut writes) = tokio::sync::mpsc::unbounded_channel();
    let (stopped, stops) = mpsc::channel::<()>();
    let wait = Fault::Swallow(Box::new(move || {
        written.send(()).unwrap();
        stops.recv().unwrap();
    }));
    stage.bucket.on_matching(1, |name| name.ends_with(".narinfo"), wait);
    let outage = async {
        writes.recv().await.unwrap();
        server.stop_immediate().await;
        stopped.send(()).unwrap();
        let result = BuildResult { claim: wire(claim), outputs: Vec::new(), log: false };
        let request = CompleteRequest { results: vec![result], ..CompleteRequest::default() };
        let answer = stage.signer.post("build-complete", &stage.press.token().to_text(), &request).await;
        assert_eq!(answer.status().as_u16(), 503);
        server.start_again().await;
    };
    let (ending, ()) = tokio::join!(stage.publish(claim), outage);
    assert_eq!(ending, Ending::Published);
    stage.end().await;
}

#[tokio::test]
async fn parts_become_one_object() {
    for server in Server::FIT {
        let stage = Stage::with(Press::new(server).await, &large()[..1]).await;
        assert_eq!(stage.publish(&stage.claims[0]).await, Ending::Published);
        let parts =
            stage.bucket.requests().iter().filter(|name| name.starts_with("POST /bucket/nar/")).count();
        assert_eq!(parts, 2, "{server:?}: begun and completed");
        stage.end().await;
    }
}

#[tokio::test]
async fn a_leftover_is_replaced() {
    let mut stage = Stage::new(Server::Versitygw).await;
    let client = stage.press.s3.client();
    // Of another size; of the size of what follows; and with a checksum of its own.
    let claims: Vec<Claim> = stage.claims.drain(..3).collect();
    for (turn, claim) in claims.iter().enumerate() {
        for output in outputs_of(shared_nix(), claim) {
            let key = layout::nar(&store_path::parse(&output.path).unwrap(), &output.nar_hash);
            let packed = pack(&output.real_path, output.nar_size);
            let left = vec![b'x'; if turn == 0 { 17 } else { packed }];
            let put = client.put_object().bucket(&stage.press.s3.bucket).key(key);
            let put = match turn {
                2 => put.checksum_sha256(harmonia_nix::Sha256::of(&left).base64()),
                _ => put,
            };
            put.body(left.into()).send().await.unwrap();
        }
        assert_eq!(stage.publish(claim).await, Ending::Published, "{turn}");
    }
    stage.end().await;
}

/// Bytes of the compressed NAR.
fn pack(path: &std::path::Path, nar_size: u64) -> usize {
    let options = harmonia_nix::pack::Options::for_nar(nar_size);
    let packed = harmonia_nix::pack::pack(path, &options, |_| std::ops::ControlFlow::Continue(()));
    usize::try_from(packed.unwrap().file.size).unwrap()
}

#[tokio::test]
async fn a_leftover_of_what_comes_in_parts_is_replaced() {
    let stage = Stage::with(Press::new(Server::Versitygw).await, &large()[..1]).await;
    let output = outputs_of(shared_nix(), &stage.claims[0]).remove(0);
    let key = layout::nar(&store_path::parse(&output.path).unwrap(), &output.nar_hash);
    let put = stage.press.s3.client().put_object().bucket(&stage.press.s3.bucket).key(key);
    put.body(b"left over".to_vec().into()).send().await.unwrap();
    assert_eq!(stage.publish(&stage.claims[0]).await, Ending::Published);
    stage.end().await;
}

#[tokio::test]
async fn a_bucket_that_is_unfit_is_named_and_not_used() {
    let press = Press::new(Server::Unfit).await;
    let listen = format!("127.0.0.1:{}", free_port());
    let settings = press.signer_settings().await.with("listen", &listen);
    let signer = tokio::spawn(async move { harmonia_signer::run(&settings, std::future::pending()).await });
    let http = http_client().unwrap();
    let ready = async || {
        let answer = http.get(format!("http://{listen}/readyz")).send().await.ok()?;
        Some((answer.status().as_u16(), answer.text().await.ok()?))
    };
    harmonia_tests::eventually("the bucket is named", || async {
        ready().await.is_some_and(|(_, text)| {
            text.contains("the bucket bucket at ") && text.contains(" cannot be used: ")
        })
    })
    .await;
    let (status, text) = ready().await.unwrap();
    assert_eq!(status, 503, "{text}");
    assert!(text.contains("SHA-256") || text.contains("If-None-Match"), "{text}");
    assert!(harmonia_queue::replica::healthy(&press.farm.operator).await.unwrap().is_empty());
    signer.abort();
}
