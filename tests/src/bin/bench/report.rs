//! The figures, their targets, and how they are shown.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;

/// Which way a figure is better.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Better {
    Higher,
    Lower,
}
use Better::{Higher, Lower};

/// Name, unit, target, direction: names never change meaning.
const FIGURES: &[(&str, &str, f64, Better)] = &[
    ("claim_1_vs_su", "x", 0.8, Higher),
    ("claim_cpu_vs_su", "x", 1.5, Lower),
    ("claim_p99_vs_su_mean", "x", 4.0, Lower),
    ("claim_10k_vs_1m", "x", 1.3, Lower),
    ("claim_behind_100k_blocked", "x", 1.3, Lower),
    ("claim_vs_literal_cpu", "x", 2000.0, Higher),
    ("claim_batch8_vs_su", "x", 3.0, Higher),
    ("cycle_1_vs_su", "x", 0.25, Higher),
    ("cycle_8_vs_su", "x", 1.0, Higher),
    ("drain_nixpkgs_vs_su", "x", 1.0, Higher),
    ("drain_worst_vs_median", "x", 1.5, Lower),
    ("drain_deadlocks", "", 0.0, Lower),
    ("drain_wal_kb_per_job", "kB", 2.5, Lower),
    ("hub_stall_vs_su_mean", "x", 40.0, Lower),
    ("resolver_step_vs_su_mean", "x", 40.0, Lower),
    ("enqueue_vs_copy", "x", 2.0, Lower),
    ("enqueue_known_vs_copy", "x", 0.3, Lower),
    ("depfail_vs_update", "x", 5.0, Lower),
    ("wakeup_write_tps", "x", 0.95, Higher),
    ("wakeup_p99_ms", "ms", 50.0, Lower),
    ("logtail_500_core_percent", "%", 10.0, Lower),
    ("logtail_vs_su", "x", 4.0, Higher),
    ("idle_500_sessions_core_percent", "%", 5.0, Lower),
    ("makespan_vs_bound", "x", 1.15, Lower),
    ("makespan_vs_fifo", "x", 0.9, Lower),
    ("makespan_vs_bound_16", "x", 1.15, Lower),
    ("makespan_vs_bound_64", "x", 1.15, Lower),
    ("makespan_vs_bound_256", "x", 1.15, Lower),
    ("makespan_vs_fifo_16", "x", 0.9, Lower),
    ("makespan_vs_fifo_64", "x", 0.9, Lower),
    ("makespan_vs_fifo_256", "x", 0.9, Lower),
    ("fairness_p95", "", 0.05, Lower),
    ("fairness_worst", "", 0.12, Lower),
    ("upload_vs_nix_copy", "x", 2.0, Higher),
    ("upload_cpu_vs_nix_copy", "x", 1.0, Lower),
    ("upload_small_vs_nix_copy", "x", 4.0, Higher),
    ("upload_rss_mb", "MB", 150.0, Lower),
    ("nar_pass_vs_limit", "x", 0.7, Higher),
    ("signer_slots_vs_head", "x", 0.8, Higher),
    ("cache_narinfo_vs_healthz", "x", 0.3, Higher),
    ("build_1s_vs_nix", "x", 1.05, Lower),
    ("build_overhead_cpu_ms", "ms", 25.0, Lower),
    ("build_trivial_vs_nix", "x", 2.0, Lower),
    ("chain_link_ms", "ms", 150.0, Lower),
    ("input_check_vs_lookup", "x", 2.0, Lower),
    ("builder_idle_core_percent", "%", 0.5, Lower),
    ("builder_rss_mb", "MB", 60.0, Lower),
    ("eval_first_build_fraction", "", 0.2, Lower),
    ("eval_parallel_vs_nix", "x", 1.6, Higher),
    ("eval_rss_vs_nix", "MB", 200.0, Lower),
    ("narinfo_lookup_per_s_vs_head", "x", 20.0, Higher),
    ("up_ready_vs_initdb", "x", 2.0, Lower),
    ("eval_vs_nix", "x", 1.3, Lower),
    ("eval_noop_vs_nix", "x", 1.1, Lower),
    ("eval_first_build_ms", "ms", 200.0, Lower),
    ("farm_vs_nix", "x", 2.0, Lower),
    ("idle_rss_mb", "MB", 250.0, Lower),
    ("idle_cpu_percent", "%", 1.0, Lower),
    ("page_p99_ms", "ms", 50.0, Lower),
    ("page_first_byte_vs_healthz", "x", 10.0, Lower),
    ("sse_1000_core_percent", "%", 25.0, Lower),
    ("log_latency_ms", "ms", 2500.0, Lower),
    ("page_weight_kb", "kB", 100.0, Lower),
    ("gc_plan_vs_scan", "x", 5.0, Lower),
    ("gc_claim_impact", "x", 0.9, Higher),
    ("resync_objects_per_s_vs_head", "x", 0.8, Higher),
    ("reconcile_1000", "x", 1.5, Lower),
    ("steady_api_requests_per_min", "", 60.0, Lower),
    ("steady_cpu_percent", "%", 2.0, Lower),
    ("operator_rss_mb", "MB", 100.0, Lower),
    ("scale_up_latency_ms", "ms", 1000.0, Lower),
    ("failover_s", "s", 5.0, Lower),
    ("scaling_changes_per_h", "", 2.0, Lower),
    ("scaling_wasted_percent", "%", 15.0, Lower),
    ("scaling_wait_vs_max", "x", 1.2, Lower),
    ("first_claim_vs_bare_pod", "x", 1.5, Lower),
    ("zero_to_building_vs_bare_pod", "x", 2.0, Lower),
    ("lost_build_seconds", "s", 0.0, Lower),
    ("drain_idle_s", "s", 10.0, Lower),
    ("farm_in_pods_vs_up", "x", 1.2, Lower),
];

/// What can be measured.
const BENCHES: &[&str] = &["queue", "upload", "build", "eval", "up", "frontend", "gc", "operator", "cluster"];

/// What the command line asks for.
#[derive(Debug, Default)]
pub struct Options {
    benches: Vec<String>,
    only: Vec<String>,
    json: Option<PathBuf>,
    /// Settings of PostgreSQL beside the usual ones, to look closer.
    pub settings: Vec<(String, String)>,
}

impl Options {
    /// Reads the command line.
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Self {
        let mut options = Self::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                bench if BENCHES.contains(&bench) => options.benches.push(argument),
                "--json" => options.json = Some(arguments.next().unwrap_or_else(|| usage()).into()),
                "--only" => options.only.push(arguments.next().unwrap_or_else(|| usage())),
                "--set" => {
                    let setting = arguments.next().unwrap_or_else(|| usage());
                    let (name, value) = setting.split_once('=').unwrap_or_else(|| usage());
                    options.settings.push((name.to_owned(), value.to_owned()));
                }
                _ => usage(),
            }
        }
        if options.benches.is_empty() {
            usage();
        }
        options
    }

    /// Whether a bench is asked for.
    pub fn measures(&self, bench: &str) -> bool {
        self.benches.iter().any(|asked| asked == bench)
    }
}

fn usage() -> ! {
    eprintln!(
        "usage: bench {}… [--json FILE] [--only TEXT]… [--set POSTGRESQL-SETTING=VALUE]…",
        BENCHES.join("|")
    );
    std::process::exit(2)
}

/// What was measured so far.
pub struct Report<'a> {
    options: &'a Options,
    values: Vec<(&'static str, f64)>,
}

impl<'a> Report<'a> {
    pub fn new(options: &'a Options) -> Self {
        Self { options, values: Vec::new() }
    }

    /// Whether any of these figures is asked for.
    pub fn wants(&self, figures: &[&str]) -> bool {
        let only = &self.options.only;
        only.is_empty() || figures.iter().any(|figure| only.iter().any(|text| figure.contains(text)))
    }

    /// Takes a figure down, and says so at once.
    pub fn put(&mut self, name: &str, value: f64) {
        let (name, unit, target, better) = figure(name);
        eprintln!("** {}", line(name, value, unit, *target, *better));
        self.values.push((name, value));
    }

    /// The table.
    pub fn print(&self) {
        let mut table = format!("{:<32} {:>10} {:<3} {:>10}\n", "figure", "value", "", "target");
        for (name, value) in &self.values {
            let (name, unit, target, better) = figure(name);
            let _ = writeln!(table, "{}", line(name, *value, unit, *target, *better));
        }
        print!("{table}");
    }

    /// The file of `--json`.
    pub fn write(&self) {
        let Some(path) = &self.options.json else { return };
        let figures: Vec<_> = self
            .values
            .iter()
            .map(|(name, value)| {
                let (name, unit, target, better) = figure(name);
                let better = if *better == Higher { "higher" } else { "lower" };
                json!({"name": name, "value": value, "unit": unit, "target": target, "better": better})
            })
            .collect();
        let text = json!({"bench": self.options.benches.join(" "), "figures": figures}).to_string();
        std::fs::write(path, text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
    }
}

fn figure(name: &str) -> &'static (&'static str, &'static str, f64, Better) {
    FIGURES.iter().find(|figure| figure.0 == name).unwrap_or_else(|| panic!("{name} is no figure"))
}

fn line(name: &str, value: f64, unit: &str, target: f64, better: Better) -> String {
    let (sign, ok) = match better {
        Higher => ("≥", value >= target),
        Lower => ("≤", value <= target),
    };
    format!("{name:<32} {value:>10.3} {unit:<3} {sign} {target:>8} {}", if ok { "ok" } else { "MISSED" })
}
