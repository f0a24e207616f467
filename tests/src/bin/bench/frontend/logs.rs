//! Logs that many watch while they are written.

use std::time::{Duration, Instant};

use futures::StreamExt;
use harmonia_queue::Fence;
use harmonia_queue::builder::{LogPiece, Session};
use tokio::sync::mpsc;

use super::front::Front;
use crate::baseline::{Bench, phase};
use crate::farm::{Farm, Task};
use crate::graphs::{self, FEATURES, PROJECTS};
use crate::measure::{cpu_of_process, latency};

const LOGS: i32 = 100;
const WATCHERS: usize = 1000;
const EVERY: Duration = Duration::from_secs(1);
const WATCHED: Duration = Duration::from_secs(20);
/// The first lines come while watchers still arrive.
const SETTLED: Duration = Duration::from_secs(5);

/// A thousand watch a hundred logs, each of which gets a line a second: how much of a core the frontend takes. The line says
/// when it was written, so that it is seen whether all of them hear it.
pub async fn watched_by_a_thousand(bench: &Bench) -> f64 {
    let farm = phase("running jobs", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(PROJECTS, Some(FEATURES)).await;
        graphs::independent(&farm, 2_000).await;
        farm
    })
    .await;
    let db = farm.builder();
    let session = farm.session(&db, "builder", LOGS).await;
    farm.settle().await;
    let held: Vec<Fence> =
        session.claim(LOGS).await.expect("claim").iter().map(|claim| claim.fence).collect();
    let front = Front::start(&farm).await;
    let begun = Instant::now();
    let (heard, mut times) = mpsc::unbounded_channel();
    let mut watchers = Vec::new();
    for n in 0..WATCHERS {
        let address = format!("{}/builds/{}/log/live", front.url, held[n % held.len()].job);
        watchers.push(Task(tokio::spawn(watch(front.http.clone(), address, begun, heard.clone()))));
    }
    drop(heard);
    tokio::time::sleep(SETTLED).await;
    while times.try_recv().is_ok() {}
    let (cpu, from) = (cpu_of_process(front.id()), Instant::now());
    let mut offset = 0;
    while from.elapsed() < WATCHED {
        offset += write(&session, &held, offset, begun).await;
        tokio::time::sleep(EVERY).await;
    }
    let percent = 100.0 * (cpu_of_process(front.id()) - cpu) / from.elapsed().as_secs_f64();
    let mut all = Vec::new();
    while let Ok(time) = times.try_recv() {
        all.push(time);
    }
    eprintln!(
        "   {} lines were heard, p99 {:.0} ms after the database",
        all.len(),
        1000.0 * latency(&all, 0.99)
    );
    drop(watchers);
    drop(front);
    bench.drop(farm.database).await;
    percent
}

/// A line of 64 bytes for each of them.
async fn write(session: &Session, held: &[Fence], offset: i64, begun: Instant) -> i64 {
    let line = format!("{:<63}\n", format!("written {}", begun.elapsed().as_millis())).into_bytes();
    let length = line.len() as i64;
    let pieces: Vec<LogPiece> =
        held.iter().map(|fence| LogPiece { fence: *fence, offset, data: line.clone() }).collect();
    session.log_append(&pieces).await.expect("append");
    length
}

/// How long ago each line that is heard was written.
async fn watch(
    http: reqwest::Client,
    address: String,
    begun: Instant,
    heard: mpsc::UnboundedSender<Duration>,
) {
    let answer = http.get(address).send().await.expect("a stream").error_for_status().expect("a stream");
    let mut pieces = answer.bytes_stream();
    while let Some(Ok(piece)) = pieces.next().await {
        let text = String::from_utf8_lossy(&piece);
        // What was there before this watcher came says nothing.
        if text.contains("event: whole") {
            continue;
        }
        for word in text.split("written ").skip(1) {
            let digits: String = word.chars().take_while(char::is_ascii_digit).collect();
            let written = Duration::from_millis(digits.parse().unwrap_or(0));
            let _ = heard.send(begun.elapsed().saturating_sub(written));
        }
    }
}
