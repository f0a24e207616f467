//! Everything that the real graph is needed for: ingested once, copied for each part.

use crate::baseline::{Bench, phase};
use crate::graphs::Nixpkgs;
use crate::report::Report;
use crate::{drain, enqueue};

pub async fn run(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&[drain::FIGURES, enqueue::FIGURES].concat()) {
        return;
    }
    let nixpkgs = phase("read nixpkgs", async { Nixpkgs::read(true) }).await;
    enqueue::run(bench, report, &nixpkgs).await;
    if !report.wants(drain::FIGURES) {
        return;
    }
    let template = phase("ingest nixpkgs", drain::template(bench, &nixpkgs)).await;
    drain::run(bench, report, &nixpkgs, &template).await;
}
