//! `./dev bench frontend`: what the web pages cost: one frontend as people start it, before a database with a million jobs.

mod front;
mod lines;
mod logs;
mod million;
mod pages;

use crate::baseline::{Bench, phase};
use crate::report::{Options, Report};
use front::Front;

/// Measures what is asked for.
pub async fn run(options: &Options, report: &mut Report<'_>) {
    let pages = report.wants(&["page_p99_ms", "page_first_byte_vs_healthz", "page_weight_kb"]);
    let watchers = report.wants(&["sse_1000_core_percent"]);
    if pages || watchers {
        let bench = Bench::start(&options.settings).await;
        if pages {
            let (farm, evaluation, build) = phase("a million jobs", million::load(&bench)).await;
            let front = Front::start(&farm).await;
            pages::run(&front, evaluation, build, report).await;
            drop(front);
            bench.drop(farm.database).await;
        }
        if watchers {
            let percent = logs::watched_by_a_thousand(&bench).await;
            report.put("sse_1000_core_percent", percent);
        }
    }
    if report.wants(&["log_latency_ms"]) {
        report.put("log_latency_ms", lines::from_build_to_reader().await);
    }
}
