//! The proxy that does harm, before a real S3 server and a real PostgreSQL.

use std::future::IntoFuture;
use std::sync::mpsc;

use harmonia_tests::eventually;
use harmonia_tests::pg::{Database, Server as Postgres};
use harmonia_tests::proxy::{Fault, Proxy, Target};
use harmonia_tests::s3::{S3, Server};
use reqwest::{Client, Response};
use sqlx::{Connection, PgConnection};

const BODY: &str = "a body of 23 characters";

/// A proxy before a public bucket with an object, a client, and the object's URL by way of the proxy.
async fn before_s3() -> (S3, Proxy, Client, String) {
    let s3 = S3::start_public(Server::InProcess).await;
    let put = s3.client().put_object().bucket(&s3.bucket).key("object").body(BODY.as_bytes().to_vec().into());
    put.send().await.unwrap();
    let address = s3.endpoint.trim_start_matches("http://").parse().unwrap();
    let proxy = Proxy::http(Target::Tcp(address));
    let url = format!("http://{}/{}/object", proxy.address(), s3.bucket);
    let _ = rustls::crypto::ring::default_provider().install_default();
    // One connection, so that each test sees what becomes of it; and no second try by itself.
    let client = Client::builder().pool_max_idle_per_host(1).retry(reqwest::retry::never()).build().unwrap();
    (s3, proxy, client, url)
}

async fn body(response: Response) -> reqwest::Result<String> {
    response.text().await
}

#[tokio::test]
async fn requests_pass_and_are_counted() {
    let (_s3, proxy, client, url) = before_s3().await;
    for _ in 0..3 {
        assert_eq!(body(client.get(&url).send().await.unwrap()).await.unwrap(), BODY);
    }
    assert!(client.head(&url).send().await.unwrap().status().is_success());
    let get = "GET /bucket/object";
    assert_eq!(proxy.requests(), [get, get, get, "HEAD /bucket/object"]);
}

#[tokio::test]
async fn chunked_bodies_pass_both_ways() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::http(Target::Tcp(listener.local_addr().unwrap()));
    let echo = axum::Router::new().fallback(async |body: axum::body::Body| body);
    tokio::spawn(axum::serve(listener, echo).into_future());
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::new();
    for _ in 0..2 {
        let chunks = futures::stream::iter(["one", "two"].map(Ok::<_, std::io::Error>));
        let post =
            client.post(format!("http://{}", proxy.address())).body(reqwest::Body::wrap_stream(chunks));
        let echoed = post.send().await.unwrap();
        assert_eq!(echoed.content_length(), None);
        assert_eq!(body(echoed).await.unwrap(), "onetwo");
    }
}

#[tokio::test]
async fn an_sdk_works_through_it() {
    let (s3, proxy, ..) = before_s3().await;
    let client = s3.client_at(&format!("http://{}", proxy.address()));
    let large = vec![7; 3_000_000];
    client.put_object().bucket(&s3.bucket).key("large").body(large.clone().into()).send().await.unwrap();
    let object = client.get_object().bucket(&s3.bucket).key("large").send().await.unwrap();
    assert_eq!(object.body.collect().await.unwrap().to_vec(), large);
}

#[tokio::test]
async fn the_kth_match_is_answered_by_the_proxy() {
    let (_s3, proxy, client, url) = before_s3().await;
    proxy.on_matching(2, |name| name.starts_with("GET"), Fault::slow_down());
    let mut statuses = Vec::new();
    for request in [client.head(&url), client.get(&url), client.get(&url), client.get(&url)] {
        statuses.push(request.send().await.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 503, 200]);
}

#[tokio::test]
async fn an_answer_is_cut_in_the_middle() {
    let (_s3, proxy, client, url) = before_s3().await;
    let whole = client.get(&url).send().await.unwrap();
    let head = whole.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    let head = "HTTP/1.1 200 OK\r\n\r\n".len() + head.sum::<usize>();
    body(whole).await.unwrap();
    proxy.on(1, Fault::CutResponse(head + 10));
    let mut cut = client.get(&url).send().await.unwrap();
    assert_eq!(cut.chunk().await.unwrap().unwrap(), BODY[..10]);
    cut.chunk().await.expect_err("the rest");
    assert_eq!(body(client.get(&url).send().await.unwrap()).await.unwrap(), BODY);
}

#[tokio::test]
async fn a_request_is_cut_in_the_middle() {
    let (s3, proxy, ..) = before_s3().await;
    let client = s3.client_at(&format!("http://{}", proxy.address()));
    proxy.on(1, Fault::CutRequest(2000));
    let put = client.put_object().bucket(&s3.bucket).key("cut").body(vec![7; 100_000].into());
    let config =
        aws_sdk_s3::config::Builder::new().retry_config(aws_sdk_s3::config::retry::RetryConfig::disabled());
    put.customize().config_override(config).send().await.expect_err("a cut connection");
    assert!(s3.client().head_object().bucket(&s3.bucket).key("cut").send().await.is_err());
}

#[tokio::test]
async fn an_answer_is_swallowed_after_the_server_gave_it() {
    let (s3, proxy, ..) = before_s3().await;
    let client = s3.client_at(&format!("http://{}", proxy.address()));
    let (told, tells) = mpsc::channel();
    proxy.on(1, Fault::Swallow(Box::new(move || told.send(()).unwrap())));
    let put = client.put_object().bucket(&s3.bucket).key("stored").body(BODY.as_bytes().to_vec().into());
    let config =
        aws_sdk_s3::config::Builder::new().retry_config(aws_sdk_s3::config::retry::RetryConfig::disabled());
    put.customize().config_override(config).send().await.expect_err("no answer");
    tells.try_recv().unwrap();
    s3.client().head_object().bucket(&s3.bucket).key("stored").send().await.unwrap();
}

#[tokio::test]
async fn a_request_is_held_with_the_one_that_repeats_it_until_it_is_let_go() {
    let (_s3, proxy, client, url) = before_s3().await;
    let (release, held) = Fault::hold();
    proxy.on(1, held);
    let requests = [(), ()].map(|()| tokio::spawn(client.get(&url).send()));
    eventually("both arrive", || async { proxy.requests().len() == 2 }).await;
    assert!(requests.iter().all(|request| !request.is_finished()));
    drop(release);
    for request in requests {
        assert!(request.await.unwrap().unwrap().status().is_success());
    }
}

#[tokio::test]
async fn what_did_not_happen_is_counted_and_forgotten() {
    let (_s3, proxy, client, url) = before_s3().await;
    proxy.on(1, Fault::slow_down());
    proxy.on(5, Fault::slow_down());
    client.get(&url).send().await.unwrap();
    assert_eq!(proxy.reset(), 1);
    assert!(proxy.requests().is_empty());
}

/// A proxy before a database, and a connection through it.
async fn before_postgres() -> (Database, Proxy, PgConnection) {
    let server = Postgres::shared();
    let database = server.empty_database().await;
    database.execute("CREATE TABLE seen (n int)").await;
    let proxy = Proxy::postgres(Target::Unix(server.sockets().join(format!(".s.PGSQL.{}", server.port()))));
    let url = format!("postgres://postgres@{}/{}", proxy.address(), database.name());
    let connection = PgConnection::connect(&url).await.unwrap();
    proxy.reset();
    (database, proxy, connection)
}

const INSERT: &str = "INSERT INTO seen VALUES ($1)";

async fn insert(connection: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query(INSERT).bind(1).execute(connection).await.map(|_| ())
}

async fn seen(database: &Database) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM seen").fetch_one(&database.admin()).await.unwrap()
}

#[tokio::test]
async fn calls_of_postgres_are_counted() {
    let (database, proxy, mut connection) = before_postgres().await;
    insert(&mut connection).await.unwrap();
    insert(&mut connection).await.unwrap();
    // The first one is prepared, then run; the second one is only run.
    assert_eq!(proxy.requests(), [INSERT, "", ""]);
    assert_eq!(seen(&database).await, 2);
}

#[tokio::test]
async fn a_call_of_postgres_is_cut_before_it_is_made() {
    let (database, proxy, mut connection) = before_postgres().await;
    insert(&mut connection).await.unwrap();
    proxy.on(1, Fault::CutRequest(7));
    insert(&mut connection).await.expect_err("a cut connection");
    assert_eq!(seen(&database).await, 1);
}

#[tokio::test]
async fn an_answer_of_postgres_is_swallowed_after_the_call_was_made() {
    let (database, proxy, mut connection) = before_postgres().await;
    insert(&mut connection).await.unwrap();
    let (told, tells) = mpsc::channel();
    proxy.on(1, Fault::Swallow(Box::new(move || told.send(()).unwrap())));
    insert(&mut connection).await.expect_err("no answer");
    tells.try_recv().unwrap();
    assert_eq!(seen(&database).await, 2);
}

#[tokio::test]
async fn an_answer_of_postgres_is_cut_in_the_middle() {
    let (database, proxy, mut connection) = before_postgres().await;
    insert(&mut connection).await.unwrap();
    proxy.on(1, Fault::CutResponse(3));
    insert(&mut connection).await.expect_err("a cut connection");
    assert_eq!(seen(&database).await, 2);
}
