//! Narinfos of a private cache, against a page of the same process that does nothing.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures::future::join_all;
use harmonia_nix::store_path;
use harmonia_queue::people::{self, Scope};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;

use super::ROUNDS;
use super::child::Child;
use super::goods::Goods;
use super::stage::{Stage, url_of};
use crate::measure::median;

const CLIENTS: usize = 16;
const SLICE: Duration = Duration::from_secs(3);

/// Narinfos a second over `/healthz` a second.
pub async fn against_healthz(goods: &Goods) -> f64 {
    let stage = Stage::set(goods).await;
    stage.publish().await;
    let login = stage.press.farm.database.make_login("harmonia_frontend").await;
    let settings = stage.press.bucket_settings();
    let settings = settings.with("database_url", login.direct_url).with("listen", "127.0.0.1:0");
    let _frontend = Child::start("frontend", &settings);
    let url = url_of(&stage.press, "frontend").await;
    let address = url.trim_start_matches("http://");

    let token = people::create_token(&stage.press.farm.frontend, "bench", Scope::Read, None).await;
    let basic = BASE64_STANDARD.encode(format!("nix:{}", token.expect("a token")));
    let header = format!("authorization: Basic {basic}\r\n");
    let narinfos: Vec<String> = goods
        .paths
        .keys()
        .map(|path| request(&format!("/cache/{}.narinfo", store_path::hash_part(path)), &header))
        .collect();
    let healthz = [request("/healthz", "")];

    let mut ratios = vec![];
    for round in 0..=ROUNDS {
        let health = rate(address, &healthz).await;
        let narinfo = rate(address, &narinfos).await;
        eprintln!("   {health:.0} /healthz/s, {narinfo:.0} narinfos/s");
        if round > 0 {
            ratios.push(narinfo / health);
        }
    }
    median(ratios)
}

fn request(path: &str, header: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: cache\r\n{header}\r\n")
}

/// Answers a second to requests that are sent in turn, each client over a connection of its own.
async fn rate(address: &str, requests: &[String]) -> f64 {
    let start = Instant::now();
    let clients = (0..CLIENTS).map(|client| async move {
        let stream = TcpStream::connect(address).await.expect("connect");
        stream.set_nodelay(true).expect("no delay");
        let mut stream = BufStream::new(stream);
        let mut answered = 0_usize;
        for request in requests.iter().cycle().skip(client * requests.len() / CLIENTS) {
            if start.elapsed() > SLICE {
                break;
            }
            stream.write_all(request.as_bytes()).await.expect("ask");
            stream.flush().await.expect("ask");
            read(&mut stream).await;
            answered += 1;
        }
        answered
    });
    let answered: usize = join_all(clients).await.into_iter().sum();
    answered as f64 / start.elapsed().as_secs_f64()
}

/// Reads an answer, which must be a good one. A client of one's own: any other costs more than the server.
async fn read(stream: &mut BufStream<TcpStream>) {
    let (mut line, mut length) = (String::new(), 0);
    stream.read_line(&mut line).await.expect("an answer");
    assert!(line.contains(" 200 "), "{line}");
    while line != "\r\n" {
        line.clear();
        stream.read_line(&mut line).await.expect("a header");
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().expect("a length");
        }
    }
    stream.read_exact(&mut vec![0; length]).await.expect("a body");
}
