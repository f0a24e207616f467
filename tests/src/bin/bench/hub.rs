//! A derivation with as many dependents as the busiest of nixpkgs: what its success does to everybody else, and what its
//! failure costs.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harmonia_queue::builder::{Claim, Failure};
use harmonia_queue::{resolver, signer};
use harmonia_tests::graph::Graph;

use crate::baseline::{Bench, phase};
use crate::cycle::workers;
use crate::farm::{Farm, Task, project, together};
use crate::graphs::{self, FEATURES, Nixpkgs, PROJECTS};
use crate::measure::{latency, median};
use crate::report::Report;

/// Each is one big operation on a copy of its own: the median of three counts.
const ROUNDS: usize = 3;
const WORKERS: usize = 8;
/// As bash has in nixpkgs. There most of them watch something deeper when it ends; here all of them watch the hub.
const DEPENDENTS: usize = 59_360;
/// Work that has nothing to do with the hub.
const OTHERS: usize = 40_000;

/// Others go on claiming and finishing one by one while the hub's dependents are looked at.
pub async fn stall(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["hub_stall_vs_su_mean", "resolver_step_vs_su_mean"]) {
        return;
    }
    let template = phase("a hub with 59,360 dependents, and other work", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(PROJECTS, Some(FEATURES)).await;
        graphs::hub(&farm, &project(0), DEPENDENTS).await;
        graphs::independent(&farm, OTHERS).await;
        bench.template(farm).await
    })
    .await;
    let (mut stalls, mut steps) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let farm = phase("a copy", bench.copy(&template)).await;
        let mut workers = workers(&farm, WORKERS + 1, 8).await;
        let holder = workers.pop().expect("one holds the hub");
        let claim = hub(&holder.session.claim(1).await.expect("claim"));
        let su = bench.su(WORKERS).await;

        let (measuring, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let stepping = Task(tokio::spawn(step(farm.signer.alone(), over.clone())));
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

/// The hub is first in line: the longest chain is above it, in the oldest evaluation.
fn hub(claims: &[Claim]) -> Claim {
    let hub = claims.iter().find(|claim| claim.drv_path.ends_with("-hub.drv"));
    hub.expect("the hub is first in line").clone()
}

/// The busiest derivation of nixpkgs fails for good: until its last dependent has, over one UPDATE of the same rows in a
/// copy.
pub async fn failure(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["depfail_vs_update"]) {
        return;
    }
    let (template, path) = phase("nixpkgs, built up to its busiest derivation", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(1, None).await;
        let (mut nixpkgs, graph) = (Nixpkgs::read(false), Graph::nixpkgs());
        let dependents = graph.dependents();
        let busiest = (0..graph.nodes.len()).max_by_key(|&at| dependents[at].len()).expect("nodes");
        let path = nixpkgs.nodes[busiest].drv_path.clone();
        let below: HashSet<String> = graph
            .closure(&[busiest])
            .nodes
            .into_iter()
            .map(|node| format!("/nix/store/{}", node.drv))
            .collect();
        for node in &mut nixpkgs.nodes {
            node.cached = node.drv_path != path && below.contains(&node.drv_path);
        }
        farm.evaluate(&project(0), nixpkgs.nodes).await;
        farm.settle().await;
        (bench.template(farm).await, path)
    })
    .await;
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let farm = phase("a copy", bench.copy(&template)).await;
        let session = farm.session(&farm.builder(), "builder", 1024).await;
        farm.settle().await;
        let claims = session.claim(1024).await.expect("claim");
        let claim = claims.iter().find(|claim| claim.drv_path == path).expect("it is ready");
        let start = Instant::now();
        assert!(session.fail(claim.fence, Failure::BuildError, "it is broken").await.expect("fail"));
        resolver::settle(&farm.signer).await.expect("settle");
        let cascade = start.elapsed().as_secs_f64();
        let failed: Vec<i64> =
            sqlx::query_scalar("SELECT id FROM ci.job WHERE state = 'dep_failed' ORDER BY id")
                .fetch_all(&farm.database.admin())
                .await
                .expect("read the dependents");
        bench.drop(farm.database).await;

        let farm = phase("a copy", bench.copy(&template)).await;
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
