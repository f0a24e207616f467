//! The derivation with 59,360 dependents: what its success does to everybody else, and what its failure costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harmonia_queue::builder::{Claim, Failure};
use harmonia_queue::{resolver, signer};
use harmonia_tests::graph::Graph;

use crate::baseline::{Bench, phase};
use crate::drain::copy;
use crate::farm::{Farm, Task, Worker, project, together};
use crate::graphs::{self, Nixpkgs};
use crate::measure::{latency, median};
use crate::report::Report;

pub const FIGURES: &[&str] = &["hub_stall_vs_su_mean", "resolver_step_vs_su_mean", "depfail_vs_update"];
/// Each is one big operation on a copy of its own: the median of three counts.
const ROUNDS: usize = 3;
const WORKERS: usize = 8;
/// Work that has nothing to do with the hub.
const OTHERS: usize = 40_000;

pub async fn run(bench: &Bench, report: &mut Report<'_>, nixpkgs: &Nixpkgs, template: &str) {
    if !report.wants(FIGURES) {
        return;
    }
    let template = phase("build all that the hub needs", prepare(bench, nixpkgs, template)).await;
    if report.wants(&FIGURES[..2]) {
        stall(bench, report, nixpkgs, &template).await;
    }
    if report.wants(&FIGURES[2..]) {
        failure(bench, report, nixpkgs, &template).await;
    }
}

/// The path of the hub.
fn hub() -> String {
    let graph = Graph::nixpkgs();
    let dependents = graph.dependents();
    let hub = (0..graph.nodes.len()).max_by_key(|&at| dependents[at].len()).expect("the graph is not empty");
    format!("/nix/store/{}", graph.nodes[hub].drv)
}

/// A copy in which the hub is ready and other work waits beside it.
async fn prepare(bench: &Bench, nixpkgs: &Nixpkgs, template: &str) -> String {
    let farm = copy(bench, template).await;
    farm.furnish(2, None).await;
    let worker = worker(&farm, nixpkgs, "builder", 1024).await;
    let hub = hub();
    let mut held = loop {
        farm.settle().await;
        let (hubs, others): (Vec<Claim>, Vec<Claim>) = worker
            .session
            .claim(1024)
            .await
            .expect("claim")
            .into_iter()
            .partition(|claim| claim.drv_path == hub);
        if !hubs.is_empty() {
            worker.complete(&others).await;
            break hubs;
        }
        assert!(!others.is_empty(), "the hub never became ready");
        worker.complete(&others).await;
    };
    let held = held.remove(0);
    worker.session.give_back(&[held.fence], "later").await.expect("give back");
    worker.session.deregister().await.expect("deregister");
    graphs::simple(&farm, &project(1), OTHERS).await;
    farm.settle().await;
    farm.tidy().await;
    let name = farm.database.name().to_owned();
    bench.release(farm.database).await;
    name
}

async fn worker(farm: &Farm, nixpkgs: &Nixpkgs, name: &str, slots: i32) -> Worker {
    let session = farm.session(&farm.builder(), name, slots).await;
    farm.settle().await;
    Worker { session, signer: farm.signer.clone(), outputs: nixpkgs.outputs() }
}

/// Claims until the hub is among them, and gives the rest back.
async fn claim_hub(farm: &Farm, worker: &Worker) -> Claim {
    let hub = hub();
    let (mut hubs, others): (Vec<Claim>, Vec<Claim>) =
        worker.session.claim(1024).await.expect("claim").into_iter().partition(|claim| claim.drv_path == hub);
    let fences: Vec<_> = others.iter().map(|claim| claim.fence).collect();
    worker.session.give_back(&fences, "not the hub").await.expect("give back");
    farm.settle().await;
    hubs.pop().expect("the hub is ready")
}

/// Others go on claiming and finishing one by one while the hub's dependents are looked at.
async fn stall(bench: &Bench, report: &mut Report<'_>, nixpkgs: &Nixpkgs, template: &str) {
    let (mut stalls, mut steps) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let farm = phase("a copy", copy(bench, template)).await;
        let holder = worker(&farm, nixpkgs, "holder", 1024).await;
        let claim = claim_hub(&farm, &holder).await;
        let mut workers = Vec::new();
        for n in 0..WORKERS {
            workers.push(worker(&farm, nixpkgs, &format!("other-{n}"), 8).await);
        }
        let su = bench.su(WORKERS).await;

        let (measuring, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let stepping = Task(tokio::spawn(step(farm.signer.clone(), over.clone())));
        let others = workers.into_iter().map(|worker| {
            let (measuring, over) = (measuring.clone(), over.clone());
            async move {
                let mut latencies = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    let claims = worker.session.claim(1).await.expect("claim");
                    let claimed = asked.elapsed();
                    let fences: Vec<_> = claims.iter().map(|claim| claim.fence).collect();
                    worker.session.start_upload(&fences).await.expect("start the upload");
                    worker.accept(&claims).await;
                    let asked = Instant::now();
                    signer::finish(&worker.signer, &fences).await.expect("finish");
                    if measuring.load(Ordering::Relaxed) {
                        latencies.extend([claimed, asked.elapsed()]);
                    }
                }
                latencies
            }
        });
        let others = tokio::spawn(together(others.collect::<Vec<_>>().into_iter()));
        tokio::time::sleep(Duration::from_secs(1)).await;
        measuring.store(true, Ordering::Relaxed);
        let start = Instant::now();
        holder.complete(std::slice::from_ref(&claim)).await;
        // The hub's own event is the last word: as long as it is there, dependents are left.
        while pending(&farm, claim.fence.job).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let took = start.elapsed();
        over.store(true, Ordering::Relaxed);
        let latencies = others.await.expect("the others").concat();
        let mut task = stepping;
        let taken = (&mut task.0).await.expect("the resolver");
        let during: Vec<Duration> =
            taken.iter().filter(|(at, _)| *at >= start).map(|(_, took)| *took).collect();
        let (stall, step) = (latency(&latencies, 0.999), latency(&during, 0.999));
        eprintln!(
            "   fan-out {:.2} s, {} calls of others p99.9 {:.1} ms, {} steps p99.9 {:.1} ms",
            took.as_secs_f64(),
            latencies.len(),
            stall * 1e3,
            during.len(),
            step * 1e3
        );
        stalls.push(stall / su.latency);
        steps.push(step / su.latency);
        bench.drop(farm.database).await;
    }
    report.put("hub_stall_vs_su_mean", median(stalls));
    report.put("resolver_step_vs_su_mean", median(steps));
}

/// Resolves until told to stop; answers when each step began and how long it took.
async fn step(db: harmonia_queue::Db, over: Arc<AtomicBool>) -> Vec<(Instant, Duration)> {
    let mut steps = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let start = Instant::now();
        let step = resolver::step(&db, resolver::STEP_ROWS).await.expect("resolve");
        steps.push((start, start.elapsed()));
        if step.events == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    steps
}

async fn pending(farm: &Farm, job: i64) -> bool {
    sqlx::query_scalar("SELECT EXISTS (SELECT FROM ci.event WHERE kind = 'd' AND subject = $1)")
        .bind(job)
        .fetch_one(&farm.database.admin())
        .await
        .expect("look at the events")
}

/// The hub fails for good: until its last dependent has, over one UPDATE of the same rows in a copy.
async fn failure(bench: &Bench, report: &mut Report<'_>, nixpkgs: &Nixpkgs, template: &str) {
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let farm = phase("a copy", copy(bench, template)).await;
        let worker = worker(&farm, nixpkgs, "builder", 1024).await;
        let claim = claim_hub(&farm, &worker).await;
        let start = Instant::now();
        assert!(worker.session.fail(claim.fence, Failure::BuildError, "it is broken").await.expect("fail"));
        resolver::settle(&farm.signer).await.expect("settle");
        let cascade = start.elapsed().as_secs_f64();
        let failed: Vec<i64> =
            sqlx::query_scalar("SELECT id FROM ci.job WHERE state = 'dep_failed' ORDER BY id")
                .fetch_all(&farm.database.admin())
                .await
                .expect("read the dependents");
        bench.drop(farm.database).await;

        let farm = phase("a copy", copy(bench, template)).await;
        let start = Instant::now();
        let update =
            "UPDATE ci.job SET state = 'dep_failed', root = $2, ended_at = ci.clock() WHERE id = ANY ($1)";
        let updated =
            sqlx::query(update).bind(&failed).bind(claim.fence.job).execute(&farm.database.admin()).await;
        let plain = start.elapsed().as_secs_f64();
        assert_eq!(updated.expect("update").rows_affected(), failed.len() as u64);
        bench.drop(farm.database).await;
        eprintln!("   {} dependents: {cascade:.2} s, one UPDATE {plain:.2} s", failed.len());
        ratios.push(cascade / plain);
    }
    report.put("depfail_vs_update", median(ratios));
}
