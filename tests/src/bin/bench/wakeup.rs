//! Wake-ups: what they cost the writers, and how soon an idle builder has a job that became ready.

use std::sync::Arc;
use std::time::{Duration, Instant};

use harmonia_queue::builder::Claim;
use harmonia_queue::resolver;
use rand::RngExt;
use tokio::sync::mpsc;

use crate::baseline::{Bench, ROUNDS, phase};
use crate::cycle::workers;
use crate::farm::{Ears, Farm, Resolving, Task, Worker, project, together};
use crate::graphs::{self, FEATURES, PROJECTS};
use crate::measure::{median, quantile};
use crate::report::Report;

const WRITERS: usize = 32;
const IDLE: usize = 64;
const SLICE: Duration = Duration::from_secs(4);
/// How often an idle builder looks without being told.
const POLL: Duration = Duration::from_secs(5);
/// Jobs made ready one at a time.
const CHAIN: usize = 200;

/// 32 writers go through whole cycles while as many builders listen; the resolver tells them, or does not.
pub async fn cost(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["wakeup_write_tps"]) {
        return;
    }
    let farm = phase("80,000 jobs in 20 layers", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(PROJECTS, Some(FEATURES)).await;
        graphs::layered(&farm, 4_000, 20).await;
        farm.tidy().await;
        farm
    })
    .await;
    let mut ears = Vec::new();
    for _ in 0..WRITERS {
        ears.push(Ears::open(&farm.builder_url(), POLL).await);
    }
    let writers = workers(&farm, WRITERS, 8).await;
    write(&farm, &writers, true, Duration::from_secs(1)).await;
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let without = write(&farm, &writers, false, SLICE).await;
        let with = write(&farm, &writers, true, SLICE).await;
        eprintln!("   {with:.0}/s with, {without:.0}/s without wake-ups");
        ratios.push(with / without);
    }
    report.put("wakeup_write_tps", median(ratios));
    bench.drop(farm.database).await;
}

/// Finished jobs a second.
async fn write(farm: &Farm, writers: &[Worker], told: bool, limit: Duration) -> f64 {
    let resolving = if told { farm.resolve() } else { silently(farm) };
    let start = Instant::now();
    let done = together(writers.iter().cloned().map(|writer| {
        let resolver = resolving.resolver.clone();
        async move {
            let mut done = 0;
            while start.elapsed() < limit {
                let claims = writer.session.claim(1).await.expect("claim");
                if claims.is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                }
                writer.complete(&claims).await;
                resolver.nudge();
                done += 1;
            }
            done
        }
    }))
    .await;
    let rate = done.iter().sum::<i32>() as f64 / start.elapsed().as_secs_f64();
    drop(resolving);
    farm.settle().await;
    rate
}

/// A resolver that tells nobody.
fn silently(farm: &Farm) -> Resolving {
    let db = farm.signer.clone();
    Resolving::new(Arc::default(), async move {
        loop {
            if resolver::step(&db, resolver::STEP_ROWS).await.expect("resolve").events == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    })
}

/// 64 idle builders; each end of a job makes the next one ready. The clock runs from the end of the call that finished
/// the one to the end of the call that claimed the other: the resolver's step is in it.
pub async fn latency(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["wakeup_p99_ms"]) {
        return;
    }
    let farm = Farm::of(bench.server.database().await);
    farm.furnish(PROJECTS, Some(FEATURES)).await;
    graphs::chain(&farm, &project(0), CHAIN).await;
    farm.settle().await;
    farm.tidy().await;
    let builders = phase("64 idle builders", async {
        let mut builders = Vec::new();
        for worker in workers(&farm, IDLE, 1).await {
            builders.push((Arc::new(worker), Ears::open(&farm.builder_url(), POLL).await));
        }
        builders
    })
    .await;
    let resolving = farm.resolve();
    let (claimed, mut claims) = mpsc::unbounded_channel::<(Instant, Arc<Worker>, Claim)>();
    let mut tasks = Vec::new();
    for (worker, ears) in builders {
        let claimed = claimed.clone();
        tasks.push(Task(tokio::spawn(async move {
            loop {
                if let Some(claim) = worker.session.claim(1).await.expect("claim").pop() {
                    let _ = claimed.send((Instant::now(), worker.clone(), claim));
                }
                ears.wait().await;
            }
        })));
    }
    let mut waits = Vec::new();
    let mut made_ready: Option<Instant> = None;
    for _ in 0..CHAIN {
        let (at, worker, claim) = claims.recv().await.expect("builders claim");
        if let Some(ready) = made_ready {
            waits.push((at - ready).as_secs_f64() * 1e3);
        }
        // Not in step with the resolver's own pace.
        tokio::time::sleep(Duration::from_millis(rand::rng().random_range(20..120))).await;
        worker.complete(&[claim]).await;
        resolving.resolver.nudge();
        made_ready = Some(Instant::now());
    }
    eprintln!("   p50 {:.1} ms", quantile(&mut waits, 0.5));
    report.put("wakeup_p99_ms", quantile(&mut waits, 0.99));
    drop(tasks);
    bench.drop(farm.database).await;
}
