//! The whole nixpkgs graph with builds of no length: throughput, deadlocks, WAL; and what one hub's end does to others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::sync::Notify;

use crate::baseline::{Bench, ROUNDS, phase};
use crate::farm::{Ears, Farm, Worker, project, together};
use crate::graphs::Nixpkgs;
use crate::measure::{median, quantile};
use crate::report::Report;

const WORKERS: usize = 8;
const SLOTS: i32 = 8;
/// How often an idle builder looks without being told.
const POLL: Duration = Duration::from_secs(5);

/// One drain.
struct Drain {
    seconds: f64,
    deadlocks: i64,
    wal: f64,
}

pub const FIGURES: &[&str] =
    &["drain_nixpkgs_vs_su", "drain_worst_vs_median", "drain_deadlocks", "drain_wal_kb_per_job"];

pub async fn run(bench: &Bench, report: &mut Report<'_>, nixpkgs: &Nixpkgs, template: &str) {
    if !report.wants(FIGURES) {
        return;
    }
    let jobs = nixpkgs.nodes.len() as f64;
    let (mut ratios, mut drains) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let farm = phase("a copy of nixpkgs", bench.copy(template)).await;
        let su = bench.su(WORKERS).await;
        let drain = phase("drain", drain(&farm, nixpkgs)).await;
        ratios.push(jobs / drain.seconds / su.tps);
        drains.push(drain);
        bench.drop(farm.database).await;
    }
    let mut seconds: Vec<f64> = drains.iter().map(|drain| drain.seconds).collect();
    report.put("drain_nixpkgs_vs_su", median(ratios));
    report.put("drain_worst_vs_median", quantile(&mut seconds, 1.0) / quantile(&mut seconds, 0.5));
    report.put("drain_deadlocks", drains.iter().map(|drain| drain.deadlocks).sum::<i64>() as f64);
    report.put("drain_wal_kb_per_job", median(drains.iter().map(|drain| drain.wal / jobs / 1000.0)));
}

/// A database with the ingested graph, to be copied; one x86_64-linux pool, one project, no other setting.
pub async fn template(bench: &Bench, nixpkgs: &Nixpkgs) -> String {
    let farm = Farm::of(bench.server.database().await);
    farm.furnish(1, None).await;
    farm.evaluate(&project(0), nixpkgs.nodes.clone()).await;
    farm.settle().await;
    bench.template(farm).await
}

async fn drain(farm: &Farm, nixpkgs: &Nixpkgs) -> Drain {
    let workers = workers(farm, nixpkgs).await;
    let left = Arc::new(Left { jobs: AtomicUsize::new(nixpkgs.nodes.len()), none: Notify::new() });
    let resolving = farm.resolve();
    let (wal, start) = (wal_position(farm).await, Instant::now());
    together(workers.into_iter().map(|(worker, ears)| {
        let (resolver, left) = (resolving.resolver.clone(), left.clone());
        async move {
            loop {
                let claims = worker.session.claim(SLOTS).await.expect("claim");
                if !claims.is_empty() {
                    worker.complete(&claims).await;
                    resolver.nudge();
                    left.take(claims.len());
                    continue;
                }
                // A wake-up may have come and gone before this was asked for; the flag is looked at after that.
                let over = left.none.notified();
                if left.jobs.load(Ordering::Relaxed) == 0 {
                    return;
                }
                tokio::select! {
                    () = ears.wait() => {}
                    () = over => return,
                }
            }
        }
    }))
    .await;
    let seconds = start.elapsed().as_secs_f64();
    drop(resolving);
    let end = wal_position(farm).await;
    Drain { seconds, deadlocks: deadlocks(farm).await, wal: wal_between(farm, &wal, &end).await }
}

struct Left {
    jobs: AtomicUsize,
    none: Notify,
}

impl Left {
    fn take(&self, jobs: usize) {
        if self.jobs.fetch_sub(jobs, Ordering::Relaxed) == jobs {
            self.none.notify_waiters();
        }
    }
}

/// Builders of nixpkgs, each with a connection to listen on.
pub async fn workers(farm: &Farm, nixpkgs: &Nixpkgs) -> Vec<(Worker, Ears)> {
    let workers = join_all((0..WORKERS).map(|n| async move {
        let session = farm.session(&farm.builder(), &format!("worker-{n}"), SLOTS).await;
        let worker = Worker { session, signer: farm.signer.clone(), outputs: nixpkgs.outputs() };
        (worker, Ears::open(&farm.builder_url(), POLL).await)
    }))
    .await;
    farm.settle().await;
    workers
}

async fn deadlocks(farm: &Farm) -> i64 {
    sqlx::query_scalar("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        .fetch_one(&farm.database.admin())
        .await
        .expect("read the statistics")
}

async fn wal_position(farm: &Farm) -> String {
    sqlx::query_scalar("SELECT pg_current_wal_insert_lsn()::text")
        .fetch_one(&farm.database.admin())
        .await
        .expect("read the position")
}

/// Bytes of WAL records between two positions, without full-page images.
async fn wal_between(farm: &Farm, start: &str, end: &str) -> f64 {
    farm.database.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect").await;
    sqlx::query_scalar(
        "SELECT sum(record_size)::float8 FROM pg_get_wal_stats($1::text::pg_lsn, $2::text::pg_lsn)",
    )
    .bind(start)
    .bind(end)
    .fetch_one(&farm.database.admin())
    .await
    .expect("read the WAL")
}
