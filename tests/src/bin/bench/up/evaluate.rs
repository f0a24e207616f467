//! Evaluations, from the request to the whole graph, or to the last signature.

use std::any::Any;
use std::path::Path;
use std::time::Instant;

use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::pg::{Options, Server};

use super::expressions;
use super::farm::{Up, seconds, sync, wait};
use crate::baseline::phase;
use crate::measure::quantile;

/// Builds at once on both sides.
pub const SLOTS: usize = 2;
/// Evaluations whose first build is waited for.
const FIRST: usize = 15;

const TOOK: &str =
    "SELECT extract(epoch FROM ended_at - created_at)::float8 FROM ci.evaluation WHERE id = $1";

/// Stores and servers of earlier rounds. Removing thousands of files makes the disk slow for a while, which only the next round
/// would pay for: they go when all is measured.
pub type Kept = Vec<Box<dyn Any>>;

/// Evaluating and ingesting over `nix-instantiate` alone: the first time, and after a change that changes no derivation.
pub async fn against_instantiate(kept: &mut Kept) -> (f64, f64) {
    let source = tempfile::tempdir().expect("a directory");
    expressions::large(source.path(), &salt());
    let alone = Nix::start(Version::Old);
    let bare = [instantiate(&alone, source.path()), instantiate(&alone, source.path())];

    let (nix, database) =
        (Nix::start(Version::Old), Server::start(Options::default()).empty_database().await);
    let up = Up::with(&nix, &database, SLOTS).await;
    let admin = database.admin();
    let mut ours = Vec::new();
    for change in ["first", "second"] {
        std::fs::write(source.path().join("README"), change).expect("a change");
        sync();
        let evaluation = up.eval(source.path()).await;
        phase(&format!("evaluation, {change}"), wait(&admin, evaluation, false)).await;
        ours.push(seconds(&admin, TOOK, evaluation).await);
    }
    up.stop().await;
    eprintln!(
        "   nix {:.2} s, again {:.2} s; ours {:.2} s, again {:.2} s",
        bare[0], bare[1], ours[0], ours[1]
    );
    kept.extend([Box::new(alone) as Box<dyn Any>, Box::new(nix), Box::new(database)]);
    (ours[0] / bare[0], ours[1] / bare[1])
}

/// From the end of an evaluation to the claim of its first build, half of them.
pub async fn first_build_ms() -> f64 {
    let source = tempfile::tempdir().expect("a directory");
    let (nix, database) =
        (Nix::start(Version::Old), Server::start(Options::default()).empty_database().await);
    let up = Up::with(&nix, &database, SLOTS).await;
    let admin = database.admin();
    let mut waits = Vec::new();
    for round in 0..FIRST {
        expressions::small(source.path(), &format!("{}-{round}", salt()));
        let evaluation = up.eval(source.path()).await;
        wait(&admin, evaluation, true).await;
        // A chunk is ingested before the evaluation ends: then the first build may have begun before, too.
        let first = "SELECT greatest(0, extract(epoch FROM min(a.claimed_at) - min(e.ended_at)))::float8 FROM ci.evaluation e \
                     JOIN ci.want w ON w.evaluation_id = e.id JOIN ci.attempt a ON a.job_id = w.job_id WHERE e.id = $1";
        waits.push(1000.0 * seconds(&admin, first, evaluation).await);
    }
    up.stop().await;
    quantile(&mut waits, 0.5)
}

/// The demo built, uploaded and signed, over `nix-build` with as many builds at once.
pub async fn demo_against_nix_build(kept: &mut Kept) -> f64 {
    let demo = expressions::demo();
    let alone = Nix::start(Version::Old);
    sync();
    let begin = Instant::now();
    let path = demo.to_str().expect("UTF-8");
    alone.run("nix-build", &[path, "--no-out-link", "-j", &SLOTS.to_string()]);
    let bare = begin.elapsed().as_secs_f64();
    kept.push(Box::new(alone));
    let ours = self::demo(kept).await;
    eprintln!("   nix {bare:.2} s; ours {ours:.2} s");
    ours / bare
}

/// How long the demo takes to be built, uploaded and signed.
async fn demo(kept: &mut Kept) -> f64 {
    let (nix, database) =
        (Nix::start(Version::Old), Server::start(Options::default()).empty_database().await);
    let up = Up::with(&nix, &database, SLOTS).await;
    let admin = database.admin();
    sync();
    let evaluation = up.eval(&expressions::demo()).await;
    phase("the demo", wait(&admin, evaluation, true)).await;
    let took = "SELECT extract(epoch FROM max(j.ended_at) - min(e.created_at))::float8 FROM ci.evaluation e \
                JOIN ci.want w ON w.evaluation_id = e.id JOIN ci.job j ON j.id = w.job_id WHERE e.id = $1";
    let ours = seconds(&admin, took, evaluation).await;
    up.stop().await;
    kept.extend([Box::new(nix) as Box<dyn Any>, Box::new(database)]);
    ours
}

fn instantiate(nix: &Nix, directory: &Path) -> f64 {
    sync();
    let begin = Instant::now();
    nix.run("nix-instantiate", &[directory.to_str().expect("UTF-8")]);
    begin.elapsed().as_secs_f64()
}

fn salt() -> String {
    format!("{:x}", rand::random::<u64>())
}
