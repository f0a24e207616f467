//! Claims alone: how many, how long, how much CPU, and what the size of the queue has to do with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use harmonia_queue::Fence;
use harmonia_queue::builder::Session;

use crate::baseline::{Bench, ROUNDS, phase};
use crate::farm::{Farm, together};
use crate::graphs::{self, FEATURES, PROJECTS};
use crate::measure::{latency, median};
use crate::report::Report;

pub const CLAIMERS: usize = 8;
/// Each claimer speaks for so many sessions, so that a slice ends before their slots do.
pub const SESSIONS: usize = 64;
const SLOTS: i32 = 64;
const SLICE: Duration = Duration::from_secs(3);

/// All figures that need a million open jobs.
pub async fn among_a_million(bench: &Bench, report: &mut Report<'_>) {
    let singles = report.wants(&["claim_1_vs_su", "claim_cpu_vs_su", "claim_p99_vs_su_mean"]);
    let batches = report.wants(&["claim_batch8_vs_su"]);
    let size = report.wants(&["claim_10k_vs_1m"]);
    if !singles && !batches && !size {
        return;
    }
    let million = phase("a million ready jobs", ready(bench, 1_000_000)).await;
    if singles {
        single(bench, report, &million).await;
    }
    if batches {
        batched(bench, report, &million).await;
    }
    if size {
        let few = phase("10,000 ready jobs", ready(bench, 10_000)).await;
        let ratio = compare(bench, &few, &million).await;
        report.put("claim_10k_vs_1m", ratio);
        bench.drop(few.database).await;
    }
    bench.drop(million.database).await;
}

async fn single(bench: &Bench, report: &mut Report<'_>, farm: &Farm) {
    let claimers = Claimers::register(farm, SESSIONS).await;
    let _resolving = farm.resolve();
    claimers.warm_up(bench, farm).await;
    let (mut rate, mut cpu, mut p99) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        let su = bench.su(CLAIMERS).await;
        let slice = claimers.slice(bench, 1).await;
        rate.push(slice.rate() / su.tps);
        cpu.push(slice.cpu_per_job() / su.cpu);
        p99.push(latency(&slice.latencies, 0.99) / su.latency);
        slice.undo(farm).await;
    }
    report.put("claim_1_vs_su", median(rate));
    report.put("claim_cpu_vs_su", median(cpu));
    report.put("claim_p99_vs_su_mean", median(p99));
}

async fn batched(bench: &Bench, report: &mut Report<'_>, farm: &Farm) {
    let claimers = Claimers::register(farm, SESSIONS).await;
    let _resolving = farm.resolve();
    claimers.warm_up(bench, farm).await;
    let mut rate = vec![];
    for _ in 0..ROUNDS {
        let su = bench.su(CLAIMERS).await;
        let slice = claimers.slice(bench, 8).await;
        rate.push(slice.rate() / su.tps);
        slice.undo(farm).await;
    }
    report.put("claim_batch8_vs_su", median(rate));
}

/// CPU of a claim behind many older jobs that wait.
pub async fn behind_blocked(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["claim_behind_100k_blocked"]) {
        return;
    }
    let without = phase("10,000 ready jobs", ready(bench, 10_000)).await;
    let with = phase("10,000 ready jobs behind 100,000 blocked ones", async {
        let farm = furnished(bench).await;
        graphs::blocked(&farm, 100_000).await;
        graphs::independent(&farm, 10_000).await;
        farm.tidy().await;
        farm
    })
    .await;
    let ratio = compare(bench, &without, &with).await;
    report.put("claim_behind_100k_blocked", ratio);
    bench.drop(without.database).await;
    bench.drop(with.database).await;
}

/// CPU of a claim in one farm over that in another.
async fn compare(bench: &Bench, one: &Farm, other: &Farm) -> f64 {
    // 4,096 claims a slice leave most of 10,000 where they are.
    let claimers = [Claimers::register(one, 8).await, Claimers::register(other, 8).await];
    for (claimers, farm) in claimers.iter().zip([one, other]) {
        farm.settle().await;
        claimers.warm_up(bench, farm).await;
    }
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let mut cost = vec![];
        for (claimers, farm) in claimers.iter().zip([one, other]) {
            let _resolving = farm.resolve();
            let slice = claimers.slice(bench, 1).await;
            cost.push(slice.cpu_per_job());
            slice.undo(farm).await;
        }
        ratios.push(cost[1] / cost[0]);
    }
    median(ratios)
}

pub async fn furnished(bench: &Bench) -> Farm {
    let farm = Farm::of(bench.server.database().await);
    farm.furnish(PROJECTS, Some(FEATURES)).await;
    farm
}

/// A farm with so many ready jobs.
async fn ready(bench: &Bench, jobs: usize) -> Farm {
    let farm = furnished(bench).await;
    graphs::independent(&farm, jobs).await;
    farm.tidy().await;
    farm
}

/// Those who claim, each with a connection of its own and with sessions enough.
pub struct Claimers {
    sessions: Vec<Arc<[Session]>>,
}

/// What was claimed in some time.
pub struct Slice {
    elapsed: Duration,
    cpu: f64,
    pub latencies: Vec<Duration>,
    held: Vec<(Session, Vec<Fence>)>,
}

impl Claimers {
    pub async fn register(farm: &Farm, sessions: usize) -> Self {
        let claimers = join_all((0..CLAIMERS).map(|claimer| async move {
            let db = farm.builder();
            let mut registered = Vec::with_capacity(sessions);
            for n in 0..sessions {
                registered.push(farm.session(&db, &format!("node-{claimer}-{n}"), SLOTS).await);
            }
            registered.into()
        }));
        let claimers = Self { sessions: claimers.await };
        farm.settle().await;
        claimers
    }

    /// Connections and their plans are made before anything is measured.
    pub async fn warm_up(&self, bench: &Bench, farm: &Farm) {
        self.claim(bench, 1, Duration::from_millis(500)).await.undo(farm).await;
    }

    /// Claims by `batch` until the time is over or a claimer has no slot left.
    pub async fn slice(&self, bench: &Bench, batch: i32) -> Slice {
        let slice = self.claim(bench, batch, SLICE).await;
        eprintln!(
            "   {} claimed by {batch}: {:.0}/s, {:.3} ms CPU, p50 {:.2} ms, p99 {:.2} ms",
            slice.jobs(),
            slice.rate(),
            slice.cpu_per_job() * 1e3,
            latency(&slice.latencies, 0.5) * 1e3,
            latency(&slice.latencies, 0.99) * 1e3,
        );
        slice
    }

    async fn claim(&self, bench: &Bench, batch: i32, limit: Duration) -> Slice {
        let over = Arc::new(AtomicBool::new(false));
        let (cpu, start) = (bench.cpu(), Instant::now());
        let claimers = self.sessions.iter().cloned().map(|sessions| (sessions, over.clone()));
        let claimed = together(claimers.map(move |(sessions, over)| async move {
            let (mut latencies, mut held) = (Vec::new(), Vec::new());
            for session in sessions.iter() {
                let mut fences = Vec::new();
                for _ in 0..session.slots / batch {
                    let asked = Instant::now();
                    let claims = session.claim(batch).await.expect("claim");
                    latencies.push(asked.elapsed());
                    assert_eq!(claims.len(), batch as usize, "the queue ran dry");
                    fences.extend(claims.iter().map(|claim| claim.fence));
                    if over.load(Ordering::Relaxed) || start.elapsed() > limit {
                        held.push((session.clone(), fences));
                        return (latencies, held);
                    }
                }
                held.push((session.clone(), fences));
            }
            over.store(true, Ordering::Relaxed);
            (latencies, held)
        }))
        .await;
        let (elapsed, cpu) = (start.elapsed(), bench.cpu() - cpu);
        let (latencies, held): (Vec<_>, Vec<_>) = claimed.into_iter().unzip();
        Slice { elapsed, cpu, latencies: latencies.concat(), held: held.into_iter().flatten().collect() }
    }
}

impl Slice {
    fn jobs(&self) -> usize {
        self.held.iter().map(|(_, fences)| fences.len()).sum()
    }

    pub fn rate(&self) -> f64 {
        self.jobs() as f64 / self.elapsed.as_secs_f64()
    }

    pub fn cpu_per_job(&self) -> f64 {
        self.cpu / self.jobs() as f64
    }

    /// Gives everything back and leaves the queue as it was.
    pub async fn undo(self, farm: &Farm) {
        let mut jobs = Vec::new();
        for (session, fences) in self.held {
            session.give_back(&fences, "the slice is over").await.expect("give back");
            jobs.extend(fences.iter().map(|fence| fence.job));
        }
        // Ten interruptions would be the end of a job.
        sqlx::query("UPDATE ci.job SET interruptions = 0 WHERE id = ANY ($1)")
            .bind(jobs)
            .execute(&farm.database.admin())
            .await
            .expect("forget the interruptions");
        harmonia_queue::resolver::settle(&farm.signer).await.expect("settle");
        farm.database
            .execute("VACUUM ci.ready, ci.offer, ci.running, ci.blocked, ci.event, ci.job, ci.session")
            .await;
    }
}
