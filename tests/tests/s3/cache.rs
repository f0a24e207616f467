//! The cache gateway, before a real S3 server and a real PostgreSQL.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use harmonia_frontend::Frontend;
use harmonia_queue::people::{self, Scope};
use harmonia_queue::{Db, replica};
use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::pg::{Database, Options, Server as Postgres};
use harmonia_tests::proxy::{Fault, Proxy, Target};
use harmonia_tests::s3::{REGION, S3, Server};
use reqwest::{Client, RequestBuilder, Response, StatusCode, redirect};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const HASH: &str = "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz";
const NARINFO: &str = "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz.narinfo";
const LISTING: &str = "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz.ls";
const NAR: &str =
    "nar/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-1b0ri5lsf45dknj8bfxi1syz35kgyy6d8v1r7qmr8nxahbzp0y4a.nar.zst";
const TEXT: &str = "StorePath: /nix/store/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a\n";
const KEY: &str = "cache-1:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=";

/// A frontend, and all that is behind it.
struct Cache {
    s3: S3,
    /// Between the frontend and the bucket.
    proxy: Proxy,
    /// Between the frontend and the database.
    database: Proxy,
    postgres: Arc<Postgres>,
    /// It goes with this.
    _own: Database,
    db: Db,
    url: String,
    client: Client,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<(), harmonia_frontend::FrontendError>>,
}

impl Cache {
    async fn private() -> Self {
        Self::on(Postgres::shared(), Server::InProcess, &[]).await
    }

    async fn public() -> Self {
        Self::on(Postgres::shared(), Server::InProcess, &[("anonymous_read", "true")]).await
    }

    async fn on(postgres: Arc<Postgres>, server: Server, more: &[(&str, &str)]) -> Self {
        let s3 = S3::start(server).await;
        let proxy = Proxy::http(Target::Tcp(s3.endpoint.trim_start_matches("http://").parse().unwrap()));
        let socket = postgres.sockets().join(format!(".s.PGSQL.{}", postgres.port()));
        let database = Proxy::postgres(Target::Unix(socket));
        let own = postgres.database().await;
        let login = own.make_login("harmonia_frontend").await;
        let (role, password, address) = (&login.role, &login.password, database.address());
        let settings = Settings::default()
            .with(
                "database_url",
                format!("postgres://{role}:{password}@{address}/{}?sslmode=disable", own.name()),
            )
            .with("listen", "127.0.0.1:0")
            .with("s3_endpoint", format!("http://{}", proxy.address()))
            .with("s3_bucket", &s3.bucket)
            .with("s3_region", REGION)
            .with("s3_access_key_id", &s3.access_key)
            .with("s3_secret_access_key", &s3.secret_key);
        let settings = more.iter().fold(settings, |settings, (name, value)| settings.with(name, *value));
        let frontend = Frontend::start(&settings).await.unwrap();
        let url = format!("http://{}", frontend.address());
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(frontend.serve(async {
            let _ = stopped.await;
        }));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().redirect(redirect::Policy::none()).build().unwrap();
        let (db, stop) = (login.db(), Some(stop));
        let cache = Self { s3, proxy, database, postgres, _own: own, db, url, client, stop, served };
        cache.ready().await;
        cache.proxy.reset();
        cache
    }

    async fn ready(&self) {
        while self.page("/readyz").await.status() != StatusCode::OK {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn put(&self, key: &str, bytes: &[u8], encoding: Option<&str>) {
        let put = self.s3.client().put_object().bucket(&self.s3.bucket).key(key).body(bytes.to_vec().into());
        put.set_content_encoding(encoding.map(str::to_owned)).send().await.unwrap();
    }

    fn get(&self, key: &str) -> RequestBuilder {
        self.client.get(format!("{}/cache/{key}", self.url))
    }

    async fn page(&self, path: &str) -> Response {
        self.client.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    async fn token(&self) -> String {
        people::create_token(&self.db, "token", Scope::Read, None).await.unwrap()
    }
}

async fn status(request: RequestBuilder) -> StatusCode {
    request.send().await.unwrap().status()
}

async fn text(request: RequestBuilder) -> String {
    request.send().await.unwrap().text().await.unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

#[tokio::test]
async fn nix_is_told_what_cache_it_is() {
    let settings = [("anonymous_read", "true"), ("cache_priority", "10")];
    let cache = Cache::on(Postgres::shared(), Server::InProcess, &settings).await;
    let info = text(cache.get("nix-cache-info")).await;
    assert_eq!(info, "StoreDir: /nix/store\nWantMassQuery: 1\nPriority: 10\n");
}

#[tokio::test]
async fn a_narinfo_is_answered_and_asked_of_the_bucket_once() {
    let cache = Cache::public().await;
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    let answers = join_all((0..20).map(|_| cache.get(NARINFO).send())).await;
    for answer in answers {
        let answer = answer.unwrap();
        assert_eq!(header(&answer, "content-type"), "text/x-nix-narinfo");
        assert_eq!(answer.text().await.unwrap(), TEXT);
    }
    assert_eq!(cache.proxy.requests(), [format!("GET /bucket/{NARINFO}")]);
}

#[tokio::test]
async fn an_unchanged_narinfo_is_not_sent_again() {
    let cache = Cache::public().await;
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    let answer = cache.get(NARINFO).send().await.unwrap();
    let again = cache.get(NARINFO).header("if-none-match", header(&answer, "etag")).send().await.unwrap();
    assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
    assert_eq!(header(&again, "etag"), header(&answer, "etag"));
    assert_eq!(again.text().await.unwrap(), "");
}

#[tokio::test]
async fn what_was_missing_is_found_as_soon_as_it_is_signed() {
    let cache = Cache::public().await;
    let miss = cache.get(NARINFO).send().await.unwrap();
    assert_eq!(miss.status(), StatusCode::NOT_FOUND);
    assert_eq!(header(&miss, "cache-control"), "no-store");
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    assert_eq!(text(cache.get(NARINFO)).await, TEXT);
}

#[tokio::test]
async fn a_head_says_what_a_get_would() {
    let cache = Cache::public().await;
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    let head = |key: &str| cache.client.head(format!("{}/cache/{key}", cache.url));
    let answer = head(NARINFO).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(header(&answer, "content-length"), TEXT.len().to_string());
    assert_eq!(status(head(NAR)).await, StatusCode::NOT_FOUND);
    cache.put(NAR, b"a NAR", None).await;
    let answer = head(NAR).send().await.unwrap();
    assert_eq!((answer.status(), header(&answer, "content-length")), (StatusCode::OK, "5"));
}

#[tokio::test]
async fn a_nar_comes_from_the_bucket_in_parts_too_and_without_credentials() {
    for server in Server::FIT {
        let cache = Cache::on(Postgres::shared(), server, &[]).await;
        cache.put(NAR, b"a NAR", None).await;
        let answer = cache.get(NAR).basic_auth("nix", Some(cache.token().await)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::FOUND);
        assert_eq!(header(&answer, "cache-control"), "no-store");
        let target = header(&answer, "location");
        assert_eq!(text(cache.client.get(target)).await, "a NAR");
        assert_eq!(text(cache.client.get(target).header("range", "bytes=2-")).await, "NAR");
        let plain = target.split_once('?').unwrap().0;
        assert_eq!(status(cache.client.get(plain)).await, StatusCode::FORBIDDEN);
    }
}

#[tokio::test]
async fn without_a_token_nothing_is_said() {
    let cache = Cache::private().await;
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    for key in ["nix-cache-info", NARINFO, NAR, "no-such-key"] {
        let answer = cache.get(key).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED, "{key}");
        assert!(header(&answer, "www-authenticate").starts_with("Basic"), "{key}");
        assert_eq!(header(&answer, "content-type"), "application/problem+json");
    }
    assert_eq!(status(cache.get(NARINFO).bearer_auth("wrong")).await, StatusCode::UNAUTHORIZED);
    assert_eq!(cache.proxy.requests(), [""; 0]);
}

#[tokio::test]
async fn a_token_of_any_scope_reads_by_password_or_bearer() {
    let cache = Cache::private().await;
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    for scope in [Scope::Read, Scope::Operate, Scope::Admin] {
        let token = people::create_token(&cache.db, scope.as_str(), scope, None).await.unwrap();
        assert_eq!(text(cache.get(NARINFO).basic_auth("any", Some(&token))).await, TEXT);
        assert_eq!(text(cache.get(NARINFO).bearer_auth(&token)).await, TEXT);
    }
}

#[tokio::test]
async fn a_revoked_token_stops_working() {
    let cache = Cache::private().await;
    let token = cache.token().await;
    let ask = || status(cache.get("nix-cache-info").bearer_auth(&token));
    assert_eq!(ask().await, StatusCode::OK);
    people::revoke_token(&cache.db, "token").await.unwrap();
    eventually("it is refused", || async { ask().await == StatusCode::UNAUTHORIZED }).await;
}

#[tokio::test]
async fn tokens_good_or_wrong_cost_the_database_little() {
    let cache = Cache::private().await;
    let good = cache.token().await;
    cache.database.reset();
    let begun = Instant::now();
    for token in [good.as_str(), "wrong"].repeat(10) {
        join_all((0..20).map(|_| status(cache.get("nix-cache-info").bearer_auth(token)))).await;
    }
    // In each half of five seconds, two tokens are asked for by at most four at once, with at most five words each.
    let most = 2 * 4 * 5 * (1 + begun.elapsed().as_secs() as usize / 2);
    let asked = cache.database.requests();
    assert!(asked.len() < most, "{asked:?}");
}

#[tokio::test]
async fn an_expired_token_is_refused() {
    let cache = Cache::private().await;
    let expired = people::create_token(&cache.db, "token", Scope::Read, Some(Duration::ZERO)).await.unwrap();
    assert_eq!(status(cache.get("nix-cache-info").bearer_auth(expired)).await, StatusCode::UNAUTHORIZED);
    let tokens = people::list_tokens(&cache.db).await.unwrap();
    assert!(tokens.len() == 1 && tokens[0].name == "token" && tokens[0].expired, "{tokens:?}");
}

#[tokio::test]
async fn while_the_database_is_away_nobody_unknown_comes_in() {
    let cache = Cache::on(Postgres::start(Options::default()), Server::InProcess, &[]).await;
    let unknown = cache.token().await;
    cache.postgres.stop_immediate().await;
    let answer = cache.get("nix-cache-info").bearer_auth(&unknown).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_ne!(header(&answer, "retry-after"), "");
    cache.postgres.start_again().await;
    while status(cache.get("nix-cache-info").bearer_auth(&unknown)).await != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn what_is_not_in_the_layout_never_reaches_the_bucket() {
    let cache = Cache::public().await;
    let long = "x".repeat(5000);
    for key in ["..%2Fsecret", "public-keys", "nar/x", "log/x.drv", "%00", "listings/x.ls", &long] {
        assert_eq!(status(cache.get(key)).await, StatusCode::NOT_FOUND, "{key}");
    }
    assert_eq!(cache.proxy.requests(), [""; 0]);
}

#[tokio::test]
async fn a_log_is_unpacked_for_who_cannot() {
    let cache = Cache::public().await;
    let plain: String = (0..200_000).map(|line| format!("line {line}\n")).collect();
    let packed = zstd::encode_all(plain.as_bytes(), 3).unwrap();
    let name = format!("{HASH}-a+b?c=d_e.drv");
    cache.put(&format!("log/{name}"), &packed, Some("zstd")).await;
    for key in ["log/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a%2Bb%3Fc%3Dd_e.drv", &format!("log/{name}")] {
        let answer = cache.get(key).send().await.unwrap();
        assert_eq!(header(&answer, "content-encoding"), "");
        assert_eq!(header(&answer, "content-type"), "text/plain; charset=utf-8");
        assert!(answer.text().await.unwrap() == plain, "{key}");
    }
    let answer =
        cache.get(&format!("log/{name}")).header("accept-encoding", "br, zstd").send().await.unwrap();
    assert_eq!(header(&answer, "content-encoding"), "zstd");
    assert!(answer.bytes().await.unwrap() == packed);
}

#[tokio::test]
async fn listings_and_realisations_of_both_layouts_are_answered() {
    let cache = Cache::public().await;
    let packed = zstd::encode_all(&b"{}"[..], 3).unwrap();
    cache.put(LISTING, &packed, Some("zstd")).await;
    let old = format!("realisations/sha256:{}!out.doi", "0f".repeat(32));
    let new = format!("build-trace-v2/{HASH}-a.drv/out.doi");
    cache.put(&old, b"{}", None).await;
    cache.put(&new, b"{}", None).await;
    for key in [LISTING, &old, &new] {
        let answer = cache.get(key).send().await.unwrap();
        assert_eq!(header(&answer, "content-type"), "application/json", "{key}");
        assert_eq!(answer.text().await.unwrap(), "{}", "{key}");
    }
}

#[tokio::test]
async fn trouble_with_the_bucket_is_said_without_its_secrets() {
    let cache = Cache::public().await;
    let denied = || vec![Fault::Answer(403, "<Error><Code>AccessDenied</Code></Error>".into())];
    // As often as it is tried.
    let slow = || vec![Fault::slow_down(), Fault::slow_down(), Fault::slow_down()];
    for (key, faults) in [(NARINFO, denied()), (NARINFO, slow()), (LISTING, denied()), (LISTING, slow())] {
        (1..).zip(faults).for_each(|(k, fault)| cache.proxy.on(k, fault));
        let answer = cache.get(key).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{key}");
        assert_ne!(header(&answer, "retry-after"), "");
        let sentence = answer.text().await.unwrap();
        assert!(!sentence.contains("http") && !sentence.contains("Signature"), "{sentence}");
    }
}

#[tokio::test]
async fn the_public_keys_are_those_that_signers_wrote_down() {
    let cache = Cache::private().await;
    let answer = cache.page("/api/public-keys").await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    cache.put("public-keys", format!("{KEY}\n").as_bytes(), None).await;
    let keys: serde_json::Value = cache.page("/api/public-keys").await.json().await.unwrap();
    let (name, key) = KEY.split_once(':').unwrap();
    assert_eq!(keys, serde_json::json!([{ "name": name, "key": key }]));
    let lines = cache.client.get(format!("{}/api/public-keys", cache.url)).header("accept", "text/plain");
    assert_eq!(text(lines).await, format!("{KEY}\n"));
}

#[tokio::test]
async fn requests_are_counted() {
    let cache = Cache::public().await;
    cache.put(NARINFO, TEXT.as_bytes(), None).await;
    for _ in 0..3 {
        text(cache.get(NARINFO)).await;
    }
    let metrics = cache.page("/metrics").await.text().await.unwrap();
    for line in [
        "harmonia_ci_cache_requests_total{kind=\"narinfo\",status=\"2xx\"} 3",
        "harmonia_ci_cache_memory_total{result=\"hit\"} 2",
        "harmonia_ci_cache_memory_total{result=\"miss\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn a_frontend_is_registered_until_it_stops() {
    let mut cache = Cache::public().await;
    let replicas = replica::healthy(&cache.db).await.unwrap();
    assert_eq!(replicas.len(), 1);
    assert_eq!((replicas[0].role.as_str(), &replicas[0].url), ("frontend", &cache.url));
    cache.stop.take().unwrap().send(()).unwrap();
    cache.served.await.unwrap().unwrap();
    assert_eq!(replica::healthy(&cache.db).await.unwrap(), []);
}
