//! `./dev bench build`: what a builder adds to Nix, against `nix-store --realise` of the same derivations in a store of the same
//! kind, in the same run. The signer and the builder are processes of their own.

mod graphs;
mod idle;
mod lookup;
mod race;

use crate::baseline::phase;
use crate::measure::{median, quantile};
use crate::report::Report;
use graphs::Work;
use race::{Ours, build, realise};

/// How often a ratio is taken; the median of them counts.
const ROUNDS: usize = 3;
const JOBS: usize = 200;
const LINKS: usize = 40;

/// Measures what is asked for.
pub async fn run(report: &mut Report<'_>) {
    if report.wants(&["input_check_vs_lookup"]) {
        report.put("input_check_vs_lookup", phase("3,000 paths", lookup::against_point_lookups()).await);
    }
    let trivial = ["build_trivial_vs_nix", "build_overhead_cpu_ms", "builder_rss_mb"];
    if report.wants(&trivial) {
        let work = Work::independent("trivial", JOBS, "echo $n >$out");
        let rounds = race(&work, 2, ROUNDS).await;
        report.put(trivial[0], median(rounds.iter().map(|(ours, nix)| ours.wall() / nix)));
        let overhead = rounds.iter().map(|(ours, _)| 1000.0 * ours.cpu / JOBS as f64);
        report.put(trivial[1], median(overhead));
        report.put(trivial[2], median(rounds.iter().map(|(ours, _)| ours.peak_mb)));
    }
    if report.wants(&["chain_link_ms"]) {
        let rounds = race(&Work::chain("link", LINKS), 2, ROUNDS).await;
        let extra = rounds.iter().map(|(ours, nix)| 1000.0 * (link(ours) - nix / LINKS as f64));
        report.put("chain_link_ms", median(extra));
    }
    if report.wants(&["build_1s_vs_nix"]) {
        let rounds = race(&Work::independent("second", JOBS, "sleep 1; echo $n >$out"), 8, 1).await;
        report.put("build_1s_vs_nix", median(rounds.iter().map(|(ours, nix)| ours.wall() / nix)));
    }
    if report.wants(&["builder_idle_core_percent"]) {
        report.put("builder_idle_core_percent", phase("an idle builder", idle::core_percent()).await);
    }
}

/// The same work by us and by Nix alone, which takes so many seconds.
async fn race(work: &Work, slots: u32, rounds: usize) -> Vec<(Ours, f64)> {
    let mut results = Vec::new();
    for _ in 0..rounds {
        let nix = phase(&format!("{} by Nix alone", work.name), async { realise(work, slots) }).await;
        let ours = phase(&format!("{} by a builder", work.name), build(work, slots)).await;
        eprintln!("   nix {nix:.2} s; ours {:.2} s, {:.2} s CPU", ours.wall(), ours.cpu);
        results.push((ours, nix));
    }
    results
}

/// The time from the end of one link of a chain to the end of the next, half of them.
fn link(ours: &Ours) -> f64 {
    let mut links: Vec<f64> = ours.ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
    quantile(&mut links, 0.5)
}
