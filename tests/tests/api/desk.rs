//! A farm with a frontend, and somebody who asks it.

use harmonia_frontend::{Frontend, FrontendError};
use harmonia_queue::builder::Session;
use harmonia_queue::ingest::{Attr, Ingest};
use harmonia_queue::people::{Scope, create_token};
use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::farm::{Farm, SYSTEM};
use harmonia_tests::pg::Server as Postgres;
use harmonia_tests::s3::{REGION, S3, Server};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A frontend, what is behind it, and tokens of every scope.
pub struct Desk {
    /// The queue, with the project `main`.
    pub farm: Farm,
    /// The only node, with four slots.
    pub node: Session,
    /// The bucket.
    pub s3: S3,
    /// Where the frontend is.
    pub url: String,
    /// A token that may look.
    pub read: String,
    /// One that may start and stop builds.
    pub operate: String,
    /// One that may do everything.
    pub admin: String,
    client: Client,
    settings: Settings,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<(), FrontendError>>,
}

impl Desk {
    /// On the server that all tests share.
    pub async fn new() -> Desk {
        Desk::with(Farm::new().await, &[]).await
    }

    /// On a server of its own, which can be stopped.
    pub async fn alone() -> Desk {
        let server = Postgres::start(harmonia_tests::pg::Options::default());
        Desk::with(Farm::on(server.database().await).await, &[]).await
    }

    /// With more settings.
    pub async fn with(farm: Farm, more: &[(&str, &str)]) -> Desk {
        farm.project("main").await;
        let pool = farm.pool("pool", &[SYSTEM], 4).await;
        let node = farm.node(&pool, "node").await;
        farm.settle().await;
        let s3 = S3::start(Server::InProcess).await;
        let login = farm.database.make_login("harmonia_frontend").await;
        let settings = Settings::default()
            .with("database_url", login.direct_url)
            .with("listen", "127.0.0.1:0")
            .with("s3_endpoint", &s3.endpoint)
            .with("s3_bucket", &s3.bucket)
            .with("s3_region", REGION)
            .with("s3_access_key_id", &s3.access_key)
            .with("s3_secret_access_key", &s3.secret_key);
        let settings = more.iter().fold(settings, |settings, (name, value)| settings.with(name, *value));
        let frontend = Frontend::start(&settings).await.unwrap();
        let url = format!("http://{}", frontend.address());
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(frontend.serve(async { drop(stopped.await) }));
        let token =
            async |scope: Scope| create_token(&farm.frontend, scope.as_str(), scope, None).await.unwrap();
        let (read, operate, admin) =
            (token(Scope::Read).await, token(Scope::Operate).await, token(Scope::Admin).await);
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().build().unwrap();
        let desk =
            Desk { farm, node, s3, url, read, operate, admin, client, settings, stop: Some(stop), served };
        eventually("the frontend is ready", || async {
            desk.ask(Method::GET, "/readyz", None).send().await.is_ok_and(|answer| answer.status() == 200)
        })
        .await;
        desk
    }

    /// One more frontend of the same farm, until it is aborted.
    pub async fn another(&self) -> JoinHandle<Result<(), FrontendError>> {
        let frontend = Frontend::start(&self.settings).await.unwrap();
        tokio::spawn(frontend.serve(std::future::pending()))
    }

    /// The first frontend is gone without a word, as after SIGKILL.
    pub async fn kill(&mut self) {
        self.served.abort();
        let _ = (&mut self.served).await;
    }

    /// A request, with a token or without.
    pub fn ask(&self, method: Method, path: &str, token: Option<&str>) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", self.url));
        match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    /// A GET with the token that may only look.
    pub fn get(&self, path: &str) -> RequestBuilder {
        self.ask(Method::GET, path, Some(&self.read))
    }

    /// A POST with the token that may start and stop builds.
    pub fn post(&self, path: &str) -> RequestBuilder {
        self.ask(Method::POST, path, Some(&self.operate))
    }

    /// Something that is there.
    pub async fn look<T: DeserializeOwned>(&self, path: &str) -> T {
        json(self.get(path), StatusCode::OK).await
    }

    /// How many things a POST changed.
    pub async fn change(&self, path: &str) -> i64 {
        let changed: Value = json(self.post(path), StatusCode::OK).await;
        changed["changed"].as_i64().unwrap()
    }

    /// Puts a log where builders would, packed as they do.
    pub async fn archive(&self, drv_path: &str, attempt: i64, text: &[u8]) {
        self.put_log(drv_path, attempt, zstd::encode_all(text, 3).unwrap(), "zstd").await;
    }

    /// A log that cannot be read for the time being.
    pub async fn archive_unreadable(&self, drv_path: &str, attempt: i64) {
        self.put_log(drv_path, attempt, b"packed otherwise".to_vec(), "br").await;
    }

    async fn put_log(&self, drv_path: &str, attempt: i64, bytes: Vec<u8>, encoding: &str) {
        let key = format!("log-attempts/{}.{attempt}", drv_path.trim_start_matches("/nix/store/"));
        let put = self.s3.client().put_object().bucket(&self.s3.bucket).key(key);
        put.content_encoding(encoding).body(bytes.into()).send().await.unwrap();
    }

    /// Ends an evaluation that has these attributes.
    pub async fn complete(&self, ingest: Ingest, attrs: &[(String, String)]) -> i64 {
        let attrs: Vec<_> = attrs
            .iter()
            .map(|(name, drv)| Attr { name: name.clone(), drv_path: Some(drv.clone()), error: None })
            .collect();
        ingest.complete(&attrs).await.unwrap()
    }

    /// Stops the frontend as SIGTERM would.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has ended.
    pub async fn stopped(&mut self) {
        (&mut self.served).await.unwrap().unwrap();
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.served.abort();
    }
}

/// The answer, which must have this status.
pub async fn answer(request: RequestBuilder, status: StatusCode) -> Response {
    let response = request.send().await.unwrap();
    let (url, found) = (response.url().clone(), response.status());
    if found != status {
        panic!("{url}: {found} instead of {status}: {}", response.text().await.unwrap());
    }
    response
}

/// The same, as JSON.
pub async fn json<T: DeserializeOwned>(request: RequestBuilder, status: StatusCode) -> T {
    answer(request, status).await.json().await.unwrap()
}

/// The sentence of a problem document, which must have this status.
pub async fn problem(request: RequestBuilder, status: u16) -> String {
    let response = request.send().await.unwrap();
    let (url, found) = (response.url().clone(), response.status());
    let kind = response.headers().get("content-type").cloned();
    let text = response.text().await.unwrap();
    assert_eq!(found, status, "{url}: {text}");
    assert_eq!(kind.unwrap(), "application/problem+json", "{url}");
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["status"], status);
    document["detail"].as_str().unwrap().to_owned()
}
