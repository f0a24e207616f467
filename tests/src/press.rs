//! A farm with a bucket and signers: from a real build in a real store to what clients substitute.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use aws_sdk_s3::Client;
use harmonia_builder::upload::{BuiltOutput, Ending, Limits, Log, UploadError, Uploader, http_client};
use harmonia_nix::database::{Database, PathInfo};
use harmonia_nix::key::{PublicKey, SecretKey};
use harmonia_nix::{Sha256, StorePath, narinfo, pack, store_path};
use harmonia_queue::builder::{self, Session};
use harmonia_queue::ingest::{Ingest, Node};
use harmonia_service::layout;
use harmonia_service::protocol::{
    Bytes, Claim, CompleteAnswer, CompleteRequest, Outcome, Slot, SlotsAnswer, SlotsRequest, Source,
    StoredSource, Token, Wish,
};
use harmonia_service::settings::Settings;
use tempfile::TempDir;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::farm::{Farm, PoolHandle};
use crate::nixes::{Nix, Version};
use crate::proxy::{Proxy, Target};
use crate::s3::{S3, Server};

/// The system that Nix builds on here.
pub const SYSTEM: &str = "x86_64-linux";

/// A farm with a project `main`, a pool with one node, and a bucket.
pub struct Press {
    /// The queue.
    pub farm: Farm,
    /// The pool.
    pub pool: PoolHandle,
    /// The life of its node.
    pub session: Session,
    /// The bucket.
    pub s3: S3,
    /// The secret key that signers have.
    pub key: SecretKey,
    files: TempDir,
}

/// A signer in this process; it stops when it is dropped.
pub struct RunningSigner {
    /// Where it is.
    pub url: String,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Press {
    /// With a bucket on this server.
    pub async fn new(server: Server) -> Press {
        Press::with(S3::start(server).await).await
    }

    /// With this bucket.
    pub async fn with(s3: S3) -> Press {
        Press::on(Farm::new().await, s3).await
    }

    /// With this bucket and this farm, which is empty.
    pub async fn on(farm: Farm, s3: S3) -> Press {
        farm.project("main").await;
        let pool = farm.pool("pool", &[SYSTEM], 64).await;
        let session = farm.node(&pool, "node").await;
        farm.settle().await;
        let key = SecretKey::generate("press-1").expect("a key");
        let files = tempfile::tempdir().expect("a directory");
        fs::write(files.path().join("key"), key.to_text().as_bytes()).expect("write the key");
        Press { farm, pool, session, s3, key, files }
    }

    /// Where the signing key is.
    pub fn key_file(&self) -> PathBuf {
        self.files.path().join("key")
    }

    /// What `trusted-public-keys` needs.
    pub fn public_key(&self) -> String {
        self.key.public_text()
    }

    /// The settings of a signer.
    pub async fn signer_settings(&self) -> Settings {
        let login = self.farm.database.make_login("harmonia_signer").await;
        self.bucket_settings()
            .with("database_url", login.direct_url)
            .with("signing_key_files", self.key_file().display().to_string())
    }

    /// The settings of a signer that reaches the bucket and the database by way of these. Its slots lead to the first.
    pub async fn settings_by(&self, bucket: &Proxy, database: &Proxy) -> Settings {
        let login = self.farm.database.make_login("harmonia_signer").await;
        let (address, name) = (database.address(), self.farm.database.name());
        self.signer_settings()
            .await
            .with("s3_endpoint", format!("http://{}", bucket.address()))
            .with("database_url", format!("postgres://{}:{}@{address}/{name}", login.role, login.password))
    }

    /// A proxy before the bucket's server.
    pub fn before_bucket(&self) -> Proxy {
        let address = self.s3.endpoint.trim_start_matches("http://").parse();
        Proxy::http(Target::Tcp(address.expect("an address")))
    }

    /// A proxy before the database.
    pub fn before_database(&self) -> Proxy {
        let server = self.farm.database.server();
        Proxy::postgres(Target::Unix(server.sockets().join(format!(".s.PGSQL.{}", server.port()))))
    }

    /// The settings that name the bucket.
    pub fn bucket_settings(&self) -> Settings {
        Settings::default()
            .with("s3_endpoint", &self.s3.endpoint)
            .with("s3_bucket", &self.s3.bucket)
            .with("s3_region", crate::s3::REGION)
            .with("s3_access_key_id", &self.s3.access_key)
            .with("s3_secret_access_key", &self.s3.secret_key)
    }

    /// A signer that is registered, hence ready.
    pub async fn start_signer(&self) -> RunningSigner {
        RunningSigner::start(&self.farm, self.signer_settings().await).await
    }

    /// The bearer token of the node.
    pub fn token(&self) -> Token {
        Token::Builder { session: self.session.id, secret: self.session.secret.clone() }
    }

    /// The builder's half, speaking to these signers.
    pub fn uploader(&self, signers: &[&str]) -> Uploader {
        self.uploader_as(&self.token(), signers, Limits::default())
    }

    /// The same with another token and other limits.
    pub fn uploader_as(&self, token: &Token, signers: &[&str], limits: Limits) -> Uploader {
        let signers = signers.iter().map(|&url| url.to_owned()).collect();
        let http = http_client().expect("a client");
        Uploader::new(http, watch::channel(signers).1, token, limits)
    }

    /// Writes the graph of a derivation that is in a store, with its sources uploaded and signed.
    pub async fn evaluate(&self, nix: &Nix, signer: &RunningSigner, drv: &str) -> i64 {
        self.evaluate_all(nix, signer, &[drv]).await
    }

    /// The same of several derivations.
    pub async fn evaluate_all(&self, nix: &Nix, signer: &RunningSigner, drvs: &[&str]) -> i64 {
        let mut ingest = self.farm.begin("main").await;
        let token =
            Token::Evaluation { id: ingest.evaluation, secret: ingest.token().await.expect("a token") };
        let closure = lines(&nix.run("nix-store", &[&["--query", "--requisites"], drvs].concat()));
        for source in closure.iter().filter(|path| !path.ends_with(".drv")) {
            let outcome = publish_source(nix, signer, &token, source).await;
            assert_eq!(outcome, Outcome::Published, "{source}");
        }
        self.ingest(nix, &mut ingest, &closure).await;
        let evaluation = ingest.complete(&[]).await.expect("complete the evaluation");
        self.farm.settle().await;
        evaluation
    }

    async fn ingest(&self, nix: &Nix, ingest: &mut Ingest, closure: &[String]) {
        let derivations = closure.iter().filter(|path| path.ends_with(".drv"));
        let nodes = derivations.map(|drv| {
            Node::parse(drv, fs::read(nix.real(drv)).expect("read the derivation")).expect("a derivation")
        });
        ingest.add(nodes.collect()).await.expect("ingest");
    }

    /// Claims everything that waits for nothing, by derivation.
    pub async fn claim_all(&self) -> BTreeMap<String, builder::Claim> {
        let claims = self.session.claim(64).await.expect("claim");
        claims.into_iter().map(|claim| (claim.drv_path.clone(), claim)).collect()
    }

    /// Claims one job.
    pub async fn claim(&self) -> builder::Claim {
        self.farm.claim(&self.session).await
    }

    /// Publishes everything that can be claimed, out of a store that has built it before, with a log.
    pub async fn publish_all(&self, nix: &Nix, uploader: &Uploader) -> Vec<String> {
        let mut published = Vec::new();
        loop {
            let claims = self.session.claim(16).await.expect("claim");
            if claims.is_empty() {
                return published;
            }
            for claim in claims {
                let ending = self.publish(nix, uploader, &claim).await.expect("publish");
                assert_eq!(ending, Ending::Published, "{}", claim.drv_path);
                published.push(claim.drv_path);
            }
            self.farm.settle().await;
        }
    }

    /// Publishes one job out of a store that has built it before.
    pub async fn publish(
        &self,
        nix: &Nix,
        uploader: &Uploader,
        claim: &builder::Claim,
    ) -> Result<Ending, UploadError> {
        self.session.start_upload(&[claim.fence]).await.expect("start the upload");
        let outputs = outputs_of(nix, claim);
        let log = Log::Bytes(format!("the log of {}\n", claim.drv_path).into());
        uploader.publish(wire(claim), &outputs, Some(&log)).await
    }

    /// Every narinfo in the bucket, by store path, each with its NAR fetched and hashed, its signature checked and all it
    /// refers to present. This is what no fault may break.
    pub async fn check(&self) -> BTreeMap<String, narinfo::NarInfo> {
        let mut infos = BTreeMap::new();
        for key in self.keys("").await.iter().filter(|key| key.ends_with(".narinfo")) {
            let info = self.check_narinfo(key).await;
            infos.insert(info.store_path().to_string(), info);
        }
        let known: BTreeSet<&str> = infos.keys().map(String::as_str).collect();
        for info in infos.values() {
            for reference in info.references() {
                assert!(
                    known.contains(reference.to_string().as_str()),
                    "{} lacks {reference}",
                    info.store_path()
                );
            }
        }
        self.farm.assert_sound().await;
        infos
    }

    /// The same of one path alone.
    pub async fn check_path(&self, path: &str) -> narinfo::NarInfo {
        self.farm.assert_sound().await;
        self.check_narinfo(&layout::narinfo(&store_path::parse(path).expect("a store path"))).await
    }

    async fn check_narinfo(&self, key: &str) -> narinfo::NarInfo {
        let client = self.s3.client();
        let info = narinfo::parse(&self.get(&client, key).await).expect("a narinfo");
        let public = PublicKey::parse(&self.public_key()).expect("a public key");
        assert!(narinfo::is_signed_by(&info, &[public]), "{key} is not signed by us");
        let file = self.get(&client, info.url()).await;
        assert_eq!(Some(file.len() as u64), info.file_size(), "{key}");
        let file_hash = info.file_hash().expect("a hash of the file").digest_as_bytes();
        assert_eq!(Sha256::of(&file).0, file_hash, "the file of {key} is another");
        let nar = zstd::decode_all(file.as_slice()).expect("zstd");
        assert_eq!(Sha256::of(&nar).0, info.nar_hash().digest_as_bytes(), "the NAR of {key} is another");
        assert_eq!(nar.len() as u64, info.nar_size(), "{key}");
        info
    }

    /// Keys in the bucket that begin so.
    pub async fn keys(&self, prefix: &str) -> Vec<String> {
        let request = self.s3.client().list_objects_v2().bucket(&self.s3.bucket).prefix(prefix);
        let answer = request.send().await.expect("list the bucket");
        assert_ne!(answer.is_truncated(), Some(true), "more objects than a test should make");
        answer.contents().iter().filter_map(|object| object.key().map(str::to_owned)).collect()
    }

    /// An object's bytes.
    pub async fn object(&self, key: &str) -> Vec<u8> {
        self.get(&self.s3.client(), key).await
    }

    async fn get(&self, client: &Client, key: &str) -> Vec<u8> {
        let answer = client.get_object().bucket(&self.s3.bucket).key(key).send().await;
        let answer = answer.unwrap_or_else(|error| panic!("{key}: {error:?}"));
        answer.body.collect().await.expect("a whole object").to_vec()
    }
}

impl RunningSigner {
    /// Runs a signer until it is registered.
    pub async fn start(farm: &Farm, settings: Settings) -> RunningSigner {
        let port = free_port();
        let url = format!("http://127.0.0.1:{port}");
        let settings = settings.with("listen", format!("127.0.0.1:{port}"));
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            harmonia_signer::run(&settings, stop).await.expect("a signer");
        });
        crate::eventually("the signer registers", || async {
            let replicas = harmonia_queue::replica::healthy(&farm.operator).await.expect("replicas");
            replicas.iter().any(|replica| replica.url == url)
        })
        .await;
        RunningSigner { url, stop: Some(stop), task }
    }

    /// Stops it as SIGTERM would.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        (&mut self.task).await.expect("the signer ends");
    }

    /// Asks for slots, with any token.
    pub async fn slots(&self, token: &str, wishes: Vec<Wish>) -> Vec<Slot> {
        let answer: SlotsAnswer = self.ask("upload-slots", token, &SlotsRequest { wishes }).await;
        answer.slots
    }

    /// Says that results are stored, with any token.
    pub async fn complete(&self, token: &str, request: &CompleteRequest) -> CompleteAnswer {
        self.ask("build-complete", token, request).await
    }

    async fn ask<T: serde::de::DeserializeOwned>(
        &self,
        what: &str,
        token: &str,
        body: &impl serde::Serialize,
    ) -> T {
        let answer = self.post(what, token, body).await;
        let (status, text) = (answer.status(), answer.text().await.expect("a body"));
        assert!(status.is_success(), "{status}: {text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// A request as it is.
    pub async fn post(&self, what: &str, token: &str, body: &impl serde::Serialize) -> reqwest::Response {
        let http = http_client().expect("a client");
        let request = http.post(format!("{}/api/{what}", self.url)).bearer_auth(token).json(body);
        request.send().await.expect("an answer")
    }
}

impl Drop for RunningSigner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One old Nix for all tests of this process that only need something built.
pub fn shared_nix() -> &'static Nix {
    static SHARED: OnceLock<Nix> = OnceLock::new();
    SHARED.get_or_init(|| Nix::start(Version::Old))
}

/// A claim in the words of the protocol.
pub fn wire(claim: &builder::Claim) -> Claim {
    Claim { job: claim.fence.job, attempt: claim.fence.attempt }
}

/// What a claim's derivation has in the store.
pub fn outputs_of(nix: &Nix, claim: &builder::Claim) -> Vec<BuiltOutput> {
    let node = Node::parse(&claim.drv_path, claim.aterm.clone()).expect("a derivation");
    let outputs = node.outputs.into_iter().map(|(name, path)| {
        let path = path.expect("a path known before the build");
        let PathInfo { nar_hash, nar_size, references, .. } = info_of(nix, &path);
        let references = references.iter().map(StorePath::to_string).collect();
        BuiltOutput { name, real_path: nix.real(&path), path, nar_hash, nar_size, references, ca: None }
    });
    outputs.collect()
}

/// What Nix knows of a path. Asked of its database, because a process of Nix takes fifty times as long.
fn info_of(nix: &Nix, path: &str) -> PathInfo {
    let path = store_path::parse(path).expect("a store path");
    let mut database = Database::open(nix.database()).expect("Nix's database");
    let mut infos = database.path_infos(std::slice::from_ref(&path)).expect("an answer of Nix's database");
    infos.remove(&path).unwrap_or_else(|| panic!("{path} is not in the store"))
}

/// A source of a store, as an evaluator publishes it.
pub async fn publish_source(nix: &Nix, signer: &RunningSigner, token: &Token, path: &str) -> Outcome {
    let PathInfo { nar_hash, nar_size, references, .. } = info_of(nix, path);
    let references = references.iter().map(StorePath::to_string).collect();
    let mut body = Vec::new();
    let options = pack::Options { part_size: 1 << 30, ..pack::Options::for_nar(nar_size) };
    let packed = pack::pack(&nix.real(path), &options, |part| {
        body.extend_from_slice(&part.bytes);
        std::ops::ControlFlow::Continue(())
    });
    let packed = packed.expect("pack the source");
    let file = Bytes { size: packed.file.size, sha256: packed.file.sha256 };
    let source = Source { path: path.to_owned(), nar_hash, nar_size, references, text: None };
    let wish = Wish::Source { source: source.clone(), file };
    match signer.slots(&token.to_text(), vec![wish]).await.remove(0) {
        Slot::Put { url, headers } => assert!(put(&url, &headers, body).await.is_success()),
        Slot::Present => {}
        other => panic!("{path}: {other:?}"),
    }
    let request =
        CompleteRequest { sources: vec![StoredSource { source, file }], ..CompleteRequest::default() };
    signer.complete(&token.to_text(), &request).await.sources.remove(0)
}

/// A PUT as the slot says.
pub async fn put(url: &str, headers: &BTreeMap<String, String>, body: Vec<u8>) -> reqwest::StatusCode {
    let mut request = http_client().expect("a client").put(url).body(body);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    request.send().await.expect("an answer").status()
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// A port that nobody listens on. Not one of those that the kernel gives away, which may be somebody's before it is used, and
/// another one each time.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id().wrapping_mul(101));
        let port = 10_000 + (number % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
