//! How long a line takes from a build to whoever watches it: a real build of a farm on one machine.

use std::time::Duration;

use futures::StreamExt;
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::pg::{Options, Server};
use reqwest::header;
use reqwest::redirect::Policy;

use crate::baseline::phase;
use crate::measure::quantile;
use crate::up::expressions;
use crate::up::farm::{Up, running};

/// A line in each tenth of a second.
const LINES: usize = 300;

/// p99, in milliseconds.
pub async fn from_build_to_reader() -> f64 {
    let source = tempfile::tempdir().expect("a directory");
    expressions::talking(source.path(), LINES);
    let (nix, database) =
        (Nix::start(Version::Old), Server::start(Options::default()).empty_database().await);
    let up = Up::with(&nix, &database, 1).await;
    let evaluation = up.eval(source.path()).await;
    let build = running(&database.admin(), evaluation).await;
    let mut ages = phase("a build that talks for half a minute", ages(&up, build)).await;
    up.stop().await;
    eprintln!("   {} lines were heard", ages.len());
    1000.0 * quantile(&mut ages, 0.99)
}

/// How old each line is when it is heard, in seconds.
async fn ages(up: &Up, build: i64) -> Vec<f64> {
    let client = reqwest::Client::builder().redirect(Policy::none()).build().expect("a client");
    let form = format!("token={}", up.token);
    let signed = client.post(format!("{}/sign-in", up.url)).header(header::ORIGIN, &up.url);
    let signed = signed.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded").body(form);
    let answer = signed.send().await.expect("an answer");
    let cookie = answer.headers().get(header::SET_COOKIE).expect("a cookie").to_str().expect("text");
    let cookie = cookie.split(';').next().unwrap_or_default().to_owned();
    let watched = client.get(format!("{}/builds/{build}/log/live", up.url)).header(header::COOKIE, cookie);
    let mut pieces =
        watched.send().await.expect("a stream").error_for_status().expect("a stream").bytes_stream();
    let mut ages = Vec::new();
    while let Ok(Some(Ok(piece))) = tokio::time::timeout(Duration::from_secs(10), pieces.next()).await {
        let (text, now) = (String::from_utf8_lossy(&piece).into_owned(), uptime());
        // What was printed before this reader came says nothing.
        if text.contains("event: whole") {
            continue;
        }
        let stamps = text
            .split("printed at ")
            .skip(1)
            .filter_map(|rest| rest.split(['<', ' ', '\n']).next()?.parse().ok());
        ages.extend(stamps.map(|stamp: f64| now - stamp));
    }
    ages
}

/// What the build reads too: seconds since the machine was started.
fn uptime() -> f64 {
    let text = std::fs::read_to_string("/proc/uptime").expect("the kernel tells");
    text.split(' ').next().and_then(|word| word.parse().ok()).expect("a number")
}
