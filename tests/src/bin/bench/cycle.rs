//! Whole cycles: claim, start_upload, accept, finish, and a resolver that keeps up.

use std::time::{Duration, Instant};

use futures::future::join_all;

use crate::baseline::{Bench, ROUNDS, phase};
use crate::farm::{Farm, Worker, together};
use crate::graphs::{self, FEATURES, PROJECTS};
use crate::measure::median;
use crate::report::Report;

const WORKERS: usize = 8;
const SLICE: Duration = Duration::from_secs(4);

pub async fn run(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["cycle_1_vs_su", "cycle_8_vs_su"]) {
        return;
    }
    let farm = phase("160,000 jobs in 40 layers", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(PROJECTS, Some(FEATURES)).await;
        graphs::layered(&farm, 4_000, 40).await;
        farm.tidy().await;
        farm
    })
    .await;
    let workers = workers(&farm, WORKERS, 8).await;
    cycle(bench, &farm, &workers, 1, Duration::from_millis(500)).await;
    for batch in [1, 8] {
        let mut ratios = vec![];
        for _ in 0..ROUNDS {
            let su = bench.su(WORKERS).await;
            ratios.push(cycle(bench, &farm, &workers, batch, SLICE).await / su.tps);
        }
        report.put(&format!("cycle_{batch}_vs_su"), median(ratios));
    }
    bench.drop(farm.database).await;
}

/// Workers of synthetic jobs.
pub async fn workers(farm: &Farm, workers: usize, slots: i32) -> Vec<Worker> {
    let workers = join_all((0..workers).map(|n| async move {
        let session = farm.session(&farm.builder(), &format!("worker-{n}"), slots).await;
        Worker { session, signer: farm.signer.clone(), outputs: graphs::synthetic_outputs() }
    }))
    .await;
    farm.settle().await;
    workers
}

/// Cycles for a while; answers jobs a second.
async fn cycle(bench: &Bench, farm: &Farm, workers: &[Worker], batch: i32, limit: Duration) -> f64 {
    let resolving = farm.resolve();
    let (cpu, start) = (bench.cpu(), Instant::now());
    let workers = workers.iter().cloned().map(|worker| (worker, resolving.resolver.clone()));
    let done = together(workers.map(move |(worker, resolver)| async move {
        let mut done = 0;
        while start.elapsed() < limit {
            let claims = worker.session.claim(batch).await.expect("claim");
            if claims.is_empty() {
                // Of thousands, all ready ones are taken: the resolver is behind.
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            worker.complete(&claims).await;
            resolver.nudge();
            done += claims.len();
        }
        done
    }))
    .await;
    let (elapsed, cpu) = (start.elapsed(), bench.cpu() - cpu);
    let done = done.iter().sum::<usize>() as f64;
    drop(resolving);
    farm.settle().await;
    let rate = done / elapsed.as_secs_f64();
    eprintln!("   {done} cycles by {batch}: {rate:.0}/s, {:.3} ms CPU", cpu / done * 1e3);
    rate
}
