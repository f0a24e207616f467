//! Pages under load.

use std::time::{Duration, Instant};

use futures::future::join_all;

use super::front::Front;
use crate::measure::{latency, median};
use crate::report::Report;

const RATE: u32 = 50;
const WATCHED: Duration = Duration::from_secs(30);
const ROUNDS: usize = 200;

/// All figures of pages.
pub async fn run(front: &Front, evaluation: i64, build: i64, report: &mut Report<'_>) {
    let paths = ["/".to_owned(), format!("/evals/{evaluation}"), format!("/builds/{build}")];
    // A frontend that was just started knows nothing: whoever looks first waits for it.
    for path in &paths {
        front.get(path).await;
    }
    if report.wants(&["page_p99_ms"]) {
        report.put("page_p99_ms", 1000.0 * load(front, &paths).await);
    }
    if report.wants(&["page_first_byte_vs_healthz"]) {
        report.put("page_first_byte_vs_healthz", first_byte(front).await);
    }
    if report.wants(&["page_weight_kb"]) {
        report.put("page_weight_kb", weight(front, &paths).await);
    }
}

/// Requests come when they come, whether those before them are answered or not.
async fn load(front: &Front, paths: &[String]) -> f64 {
    let begun = Instant::now();
    let count = RATE * WATCHED.as_secs() as u32;
    let asked = (0..count).map(|n| async move {
        tokio::time::sleep_until((begun + n * Duration::from_secs(1) / RATE).into()).await;
        front.get(&paths[n as usize % paths.len()]).await.1
    });
    latency(&join_all(asked).await, 0.99)
}

async fn first_byte(front: &Front) -> f64 {
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let (page, bare) = (begins(front, "/").await, begins(front, "/healthz").await);
        ratios.push(page / bare);
    }
    median(ratios)
}

async fn begins(front: &Front, path: &str) -> f64 {
    let begun = Instant::now();
    let mut answer = front.http.get(format!("{}{path}", front.url)).send().await.expect("an answer");
    answer.chunk().await.expect("a byte");
    let time = begun.elapsed().as_secs_f64();
    while answer.chunk().await.expect("all of it").is_some() {}
    time
}

/// What the first look at the heaviest of the pages loads, with all files.
async fn weight(front: &Front, paths: &[String]) -> f64 {
    let plain =
        front.http.get(format!("{}/", front.url)).send().await.expect("a page").text().await.expect("text");
    let mut files = 0;
    for file in plain
        .split('"')
        .filter(|word| word.starts_with("/assets/"))
        .collect::<std::collections::BTreeSet<_>>()
    {
        files += front.get(file).await.0.len();
    }
    let mut heaviest = 0;
    for path in paths {
        heaviest = heaviest.max(front.get(path).await.0.len());
    }
    (files + heaviest) as f64 / 1000.0
}
