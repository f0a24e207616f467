//! `./dev bench frontend`: what the web pages cost: one frontend as people start it, before a database with a million jobs.

mod front;
mod logs;
mod pages;

use harmonia_queue::ingest::{Attr, Ingest, Node};

use crate::baseline::{Bench, phase};
use crate::farm::{Farm, project};
use crate::graphs::{self, FEATURES, PROJECTS};
use crate::report::{Options, Report};
use front::Front;

const JOBS: usize = 940_000;
/// Builds of the one evaluation that is looked at; a tenth of them are attributes.
const BUILDS: usize = 60_000;
const LAYERS: usize = 30;

/// Measures what is asked for.
pub async fn run(options: &Options, report: &mut Report<'_>) {
    let pages = report.wants(&["page_p99_ms", "page_first_byte_vs_healthz", "page_weight_kb"]);
    let logs = report.wants(&["sse_1000_core_percent", "log_latency_ms"]);
    if !pages && !logs {
        return;
    }
    let bench = Bench::start(&options.settings).await;
    if pages {
        let (farm, evaluation, build) = phase("a million jobs", million(&bench)).await;
        let front = Front::start(&farm).await;
        pages::run(&front, evaluation, build, report).await;
        drop(front);
        bench.drop(farm.database).await;
    }
    if logs {
        logs::run(&bench, report).await;
    }
}

/// Most of them ready, and one evaluation with thirty layers.
async fn million(bench: &Bench) -> (Farm, i64, i64) {
    let farm = Farm::of(bench.server.database().await);
    farm.furnish(PROJECTS, Some(FEATURES)).await;
    graphs::independent(&farm, JOBS).await;
    let mut ingest = Ingest::begin(&farm.evaluator, &project(0), "bench", Some("main"), None, false)
        .await
        .expect("begin an evaluation");
    let nodes = layered();
    let attrs: Vec<Attr> = nodes
        .iter()
        .step_by(10)
        .enumerate()
        .map(|(n, node)| Attr {
            name: format!("checks.x86_64-linux.n{n}"),
            drv_path: Some(node.drv_path.clone()),
            error: None,
        })
        .collect();
    let last = nodes.last().expect("a node").drv_path.clone();
    ingest.add(nodes).await.expect("ingest");
    let build = ingest.job(&last).expect("a job");
    let evaluation = ingest.complete(&attrs).await.expect("complete");
    farm.settle().await;
    farm.tidy().await;
    (farm, evaluation, build)
}

fn layered() -> Vec<Node> {
    let width = BUILDS / LAYERS;
    let mut nodes: Vec<Node> = Vec::with_capacity(BUILDS);
    for n in 0..BUILDS {
        let below = n.checked_sub(width).map(|at| nodes[at].drv_path.clone());
        nodes.push(graphs::job(&format!("layer{}x{}", n / width, n % width), 0, below.into_iter().collect()));
    }
    nodes
}
