//! `./dev bench upload`: what it costs to publish, as ratios to `nix copy` and to what the machine can do, in the same run.
//!
//! The signer, the frontend and the uploader are processes of their own: this program, started again. Their CPU is
//! theirs alone; that of PostgreSQL and of the S3 server counts for nobody.

pub mod child;
mod copy;
mod goods;
mod narinfo;
mod pass;
mod slots;
pub mod stage;

use crate::baseline::phase;
use crate::measure::median;
use crate::report::Report;
use goods::Goods;
use stage::Stage;

/// How often a ratio is taken after a round that does not count; the median of them does.
const ROUNDS: usize = 3;

/// Measures what is asked for.
pub async fn run(report: &mut Report<'_>) {
    let large = ["upload_vs_nix_copy", "upload_cpu_vs_nix_copy"];
    if report.wants(&large) || report.wants(&["nar_pass_vs_limit"]) {
        let goods = phase("500 MB in 20,000 files", async { Goods::tree() }).await;
        if report.wants(&["nar_pass_vs_limit"]) {
            report.put("nar_pass_vs_limit", pass::against_limit(&goods).await);
        }
        if report.wants(&large) {
            let (wall, cpu) = against_nix_copy(&goods).await;
            report.put(large[0], wall);
            report.put(large[1], cpu);
        }
    }
    let small = ["upload_small_vs_nix_copy", "signer_slots_vs_head", "cache_narinfo_vs_healthz"];
    if report.wants(&small) {
        let goods = phase("500 paths of 10 KB", async { Goods::small() }).await;
        if report.wants(&small[..1]) {
            report.put(small[0], against_nix_copy(&goods).await.0);
        }
        if report.wants(&small[1..2]) {
            report.put(small[1], slots::against_heads(&goods).await);
        }
        if report.wants(&small[2..]) {
            report.put(small[2], narinfo::against_healthz(&goods).await);
        }
    }
    if report.wants(&["upload_rss_mb"]) {
        let goods = phase("4 GB in one file", async { Goods::huge() }).await;
        let stage = Stage::set(&goods).await;
        report.put("upload_rss_mb", stage.publish().await.peak_mb);
    }
}

/// Time of `nix copy` over ours, and our CPU over its.
async fn against_nix_copy(goods: &Goods) -> (f64, f64) {
    let (mut wall, mut cpu) = (vec![], vec![]);
    for round in 0..=ROUNDS {
        let stage = Stage::set(goods).await;
        let theirs = copy::nix_copy(goods, &stage.press).await;
        let ours = stage.publish().await.cost;
        eprintln!("   nix copy {theirs}; ours {ours}{}", if round == 0 { " (warm-up)" } else { "" });
        if round > 0 {
            wall.push(theirs.wall / ours.wall);
            cpu.push(ours.cpu / theirs.cpu);
        }
    }
    (median(wall), median(cpu))
}
