//! A signer is killed after each single S3 request and after each call of the database, while it publishes two outputs
//! that differ whenever they are built. Whoever goes on: never mixed, never lost.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use harmonia_builder::upload::{BuiltOutput, Ending, Limits, Log, Uploader, http_client};
use harmonia_queue::builder::{Claim, Session};
use harmonia_service::protocol::Token;
use harmonia_service::settings::{KNOWN, Settings};
use harmonia_signer::Signer;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, free_port, outputs_of, wire};
use harmonia_tests::proxy::{Fault, Proxy};
use harmonia_tests::s3::Server;
use tokio::sync::{oneshot, watch};

/// More than publishing one job takes.
const ROUNDS: usize = 32;

/// The same derivations, built twice.
struct Builds {
    first: Nix,
    second: Nix,
    drvs: Vec<String>,
}

impl Builds {
    fn shared() -> &'static Builds {
        static SHARED: OnceLock<Builds> = OnceLock::new();
        SHARED.get_or_init(|| {
            let (first, second) = std::thread::scope(|scope| {
                let other = scope.spawn(|| build(Version::New));
                (build(Version::Old), other.join().unwrap())
            });
            assert_eq!(first.1, second.1);
            Builds { first: first.0, second: second.0, drvs: first.1 }
        })
    }
}

fn build(version: Version) -> (Nix, Vec<String>) {
    let nix = Nix::start(version);
    let expressions = (0..ROUNDS).map(|round| Expression::unreproducible(&format!("round-{round}")));
    let files: Vec<String> = expressions.map(|one| nix.write(&one).to_str().unwrap().to_owned()).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let drvs: Vec<String> = nix.run("nix-instantiate", &files).lines().map(str::to_owned).collect();
    let words: Vec<&str> = ["--realise"].into_iter().chain(drvs.iter().map(String::as_str)).collect();
    nix.run("nix-store", &words);
    (nix, drvs)
}

/// A signer as a process of its own.
#[derive(Clone)]
struct Process {
    url: String,
    child: Arc<Mutex<Killed>>,
}

/// A process that does not outlive a test that fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    async fn start(press: &Press, settings: Settings) -> Process {
        let port = free_port();
        let settings = settings.with("listen", format!("127.0.0.1:{port}"));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "kills::a_signer_as_a_process", "--ignored", "--quiet"]);
        for (name, ..) in KNOWN {
            if let Some(value) = settings.get(name) {
                command.env(format!("HARMONIA_CI_{}", name.to_uppercase()), value);
            }
        }
        let child = command.env(PROCESS, "1").stdout(Stdio::null()).spawn().unwrap();
        let process =
            Process { url: format!("http://127.0.0.1:{port}"), child: Arc::new(Mutex::new(Killed(child))) };
        harmonia_tests::eventually("the signer registers", || async {
            let replicas = harmonia_queue::replica::healthy(&press.farm.operator).await.unwrap();
            replicas.iter().any(|replica| replica.url == process.url)
        })
        .await;
        process
    }

    fn kill(&self) {
        let child = &mut self.child.lock().unwrap().0;
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

const PROCESS: &str = "HARMONIA_CI_TEST_SIGNER";

#[tokio::test]
#[ignore = "other tests run it as a process of its own"]
async fn a_signer_as_a_process() {
    if std::env::var_os(PROCESS).is_some() {
        harmonia_signer::run(&Settings::load().unwrap(), std::future::pending()).await.unwrap();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Builder {
    /// It asks another signer.
    Stays,
    /// It is killed with the signer.
    Dies,
}

/// A farm whose rounds follow each other.
struct Lane {
    press: Press,
    survivor: RunningSigner,
    bucket: Proxy,
    database: Proxy,
}

/// One publication.
struct Round<'a> {
    lane: &'a Lane,
    session: Session,
    claim: Claim,
    outputs: Vec<BuiltOutput>,
}

impl Lane {
    /// All rounds' jobs wait to be claimed, in their order.
    async fn start() -> Lane {
        let builds = Builds::shared();
        let press = Press::new(Server::Versitygw).await;
        let survivor = press.start_signer().await;
        let drvs: Vec<&str> = builds.drvs.iter().map(String::as_str).collect();
        press.evaluate_all(&builds.first, &survivor, &drvs).await;
        let tools = press.claim().await;
        let uploader = press.uploader(&[&survivor.url]);
        assert_eq!(press.publish(&builds.first, &uploader, &tools).await.unwrap(), Ending::Published);
        press.session.deregister().await.unwrap();
        press.farm.settle().await;
        Lane { bucket: press.before_bucket(), database: press.before_database(), survivor, press }
    }

    async fn begin(&self) -> Round<'_> {
        let farm = &self.press.farm;
        let session = farm.node(&self.press.pool, "first").await;
        farm.settle().await;
        let claim = farm.claim(&session).await;
        let outputs = outputs_of(&Builds::shared().first, &claim);
        Round { lane: self, session, claim, outputs }
    }

    /// Kills after the first request to the bucket, after the second and so on, until nothing is left.
    async fn kill_after_each_s3_request(&self, builder: Builder) {
        for k in 1..ROUNDS {
            // Unfinished uploads are listed when a signer starts.
            let is_killed =
                self.begin().await.run(builder, &self.bucket, k, |name| !name.starts_with("GET")).await;
            if !is_killed {
                // Two NARs, two listings and a log are looked for, put, and looked at or copied; and two narinfos.
                assert!(k > 12, "{:?}", self.bucket.requests());
                self.press.check().await;
                return;
            }
        }
        panic!("publishing took more than {ROUNDS} requests");
    }

    /// Kills after each statement that publishing runs, until one that was not yet killed after does not come.
    async fn kill_after_each_sql_call(&self, builder: Builder) {
        let calls = Calls::default();
        while self.begin().await.run(builder, &self.database, 1, calls.next()).await {}
        self.press.check().await;
        let done = calls.done.lock().unwrap();
        for call in ["check_claims", "texts", "remember_proofs", "accept", "unpublished", "finish"] {
            assert!(done.iter().any(|(text, _)| text.contains(call)), "{done:?}");
        }
    }
}

/// Statements, each with how many times the same had been prepared before: on other connections.
#[derive(Default, Clone)]
struct Calls {
    done: Arc<Mutex<BTreeSet<(String, usize)>>>,
}

impl Calls {
    /// Matches the execution of one more statement. A statement is named when it is prepared, and runs with the next
    /// request, which has no name.
    fn next(&self) -> impl Fn(&str) -> bool + Send + 'static {
        let (done, seen, prepared) = (self.done.clone(), Mutex::new(BTreeMap::new()), AtomicBool::new(false));
        move |name| {
            if name.is_empty() {
                return prepared.swap(false, Ordering::Relaxed);
            }
            if BACKGROUND.iter().all(|word| !name.contains(word)) {
                let mut seen = seen.lock().unwrap();
                let before: &mut usize = seen.entry(name.to_owned()).or_default();
                if !prepared.load(Ordering::Relaxed)
                    && done.lock().unwrap().insert((name.to_owned(), *before))
                {
                    prepared.store(true, Ordering::Relaxed);
                }
                *before += 1;
            }
            false
        }
    }
}

/// Parts of statements that a signer runs all the time, whether it publishes or not.
const BACKGROUND: [&str; 4] = ["missing_reports", "unpublished(make_interval", "beat", "resolve"];

impl Round<'_> {
    /// False: it was published before the k-th request that matches.
    async fn run(
        &self,
        builder: Builder,
        proxy: &Proxy,
        k: usize,
        matches: impl Fn(&str) -> bool + Send + 'static,
    ) -> bool {
        let Lane { press, survivor, bucket, database } = self.lane;
        let dying = Process::start(press, press.settings_by(bucket, database).await).await;
        let (told, killed) = oneshot::channel();
        let victim = dying.clone();
        proxy.reset();
        let kill = Fault::Swallow(Box::new(move || {
            victim.kill();
            let _ = told.send(());
        }));
        proxy.on_matching(k, matches, kill);

        let (signers, known) = watch::channel(vec![dying.url.clone()]);
        let uploader = uploader(&self.session, known);
        self.session.start_upload(&[self.claim.fence]).await.unwrap();
        let log = Log::Bytes("what the build said".into());
        let mut publishing = Box::pin(uploader.publish(wire(&self.claim), &self.outputs, Some(&log)));
        tokio::select! {
            ending = &mut publishing => {
                dying.kill();
                assert_eq!(ending.unwrap(), Ending::Published);
                self.assert_published(&self.outputs).await;
                return false;
            }
            _ = killed => {}
        }
        match builder {
            Builder::Stays => {
                signers.send(vec![survivor.url.clone()]).unwrap();
                let ending = publishing.await.unwrap();
                // Finished by the signer that was killed before it could say so.
                assert!(matches!(ending, Ending::Published | Ending::Stale), "{ending:?}");
                self.assert_published(&self.outputs).await;
            }
            Builder::Dies => {
                drop(publishing);
                self.complete_without_builder().await;
            }
        }
        true
    }

    /// Another signer completes what was accepted; what was not, another node builds again, and it comes out different.
    async fn complete_without_builder(&self) {
        let press = &self.lane.press;
        self.session.deregister().await.unwrap();
        let other = Signer::connect(&press.signer_settings().await).await.unwrap();
        let state = press.farm.state(self.claim.fence.job).await;
        other.complete_abandoned(Duration::ZERO).await.unwrap();
        if matches!(state.as_str(), "accepted" | "succeeded") {
            return self.assert_published(&self.outputs).await;
        }
        press.farm.settle().await;
        let session = press.farm.node(&press.pool, "second").await;
        press.farm.settle().await;
        let claim = press.farm.claim(&session).await;
        assert_eq!(claim.fence.job, self.claim.fence.job);
        let outputs = outputs_of(&Builds::shared().second, &claim);
        let uploader = uploader(&session, watch::channel(vec![self.lane.survivor.url.clone()]).1);
        session.start_upload(&[claim.fence]).await.unwrap();
        let ending = uploader.publish(wire(&claim), &outputs, None).await.unwrap();
        assert_eq!(ending, Ending::Published);
        session.deregister().await.unwrap();
        self.assert_published(&outputs).await;
    }

    /// The job has succeeded with exactly these outputs.
    async fn assert_published(&self, outputs: &[BuiltOutput]) {
        let press = &self.lane.press;
        assert_eq!(press.farm.state(self.claim.fence.job).await, "succeeded");
        for output in outputs {
            let info = press.check_path(&output.path).await;
            assert_eq!(info.nar_hash().digest_as_bytes(), output.nar_hash.0, "{}", output.path);
        }
        self.session.deregister().await.ok();
    }
}

fn uploader(session: &Session, signers: watch::Receiver<Vec<String>>) -> Uploader {
    let token = Token::Builder { session: session.id, secret: session.secret.clone() };
    let limits = Limits { pause: Duration::from_millis(20), ..Limits::default() };
    Uploader::new(http_client().unwrap(), signers, &token, limits)
}

#[tokio::test(flavor = "multi_thread")]
async fn after_each_s3_request_another_completes_without_the_builder() {
    Lane::start().await.kill_after_each_s3_request(Builder::Dies).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_each_s3_request_the_builder_asks_another() {
    Lane::start().await.kill_after_each_s3_request(Builder::Stays).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_each_sql_call_another_completes_without_the_builder() {
    Lane::start().await.kill_after_each_sql_call(Builder::Dies).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_each_sql_call_the_builder_asks_another() {
    Lane::start().await.kill_after_each_sql_call(Builder::Stays).await;
}
