//! `./dev bench up`: a farm on one machine, as a person starts it, against what it is made of: `initdb`, `nix-instantiate`,
//! `nix-build`, by the same programs in stores of the same kind, in the same run.

pub mod evaluate;
pub mod expressions;
pub mod farm;
mod idle;
mod ready;

use crate::measure::median;
use crate::report::Report;

/// How often a ratio is taken; the median of them counts.
const ROUNDS: usize = 3;

/// Measures what is asked for.
pub async fn run(report: &mut Report<'_>) {
    let mut kept = Vec::new();
    if report.wants(&["up_ready_vs_initdb"]) {
        let mut ratios = Vec::new();
        for _ in 0..ROUNDS {
            ratios.push(ready::against_initdb().await);
        }
        report.put("up_ready_vs_initdb", median(ratios));
    }
    if report.wants(&["eval_vs_nix", "eval_noop_vs_nix"]) {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            rounds.push(evaluate::against_instantiate(&mut kept).await);
        }
        report.put("eval_vs_nix", median(rounds.iter().map(|(first, _)| *first)));
        report.put("eval_noop_vs_nix", median(rounds.iter().map(|(_, again)| *again)));
    }
    if report.wants(&["eval_first_build_ms"]) {
        report.put("eval_first_build_ms", evaluate::first_build_ms().await);
    }
    if report.wants(&["farm_vs_nix"]) {
        let mut ratios = Vec::new();
        for _ in 0..ROUNDS {
            ratios.push(evaluate::demo_against_nix_build(&mut kept).await);
        }
        report.put("farm_vs_nix", median(ratios));
    }
    if report.wants(&["idle_rss_mb", "idle_cpu_percent"]) {
        let (megabytes, percent) = idle::of_all_processes().await;
        report.put("idle_rss_mb", megabytes);
        report.put("idle_cpu_percent", percent);
    }
}
