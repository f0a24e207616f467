//! What the tests and benches of harmonia-ci stand on: a private PostgreSQL, private Nix daemons and S3 servers,
//! a real Kubernetes, and a real derivation graph.

pub mod cluster;
pub mod desk;
pub mod document;
pub mod farm;
pub mod gateway;
pub mod gitea;
pub mod graph;
mod guard;
pub mod kube;
pub mod nixes;
pub mod operator;
pub mod pg;
pub mod press;
pub mod prism;
pub mod proxy;
pub mod repository;
pub mod s3;
pub mod yard;

use std::io::Write;
use std::time::{Duration, Instant};

pub use guard::cache;

/// How long a test waits for what should come at once: machines may be busy, and stall.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Whether `./dev test --long` asked for more seeds and longer runs.
pub fn long() -> bool {
    std::env::var_os("HARMONIA_CI_LONG").is_some()
}

/// Says that a test is skipped, and why, past what keeps the words of tests that do not fail. Where `CI` is set nothing may be
/// missing.
pub fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let _ = writeln!(std::io::stderr(), "{test} is skipped: {why}");
}

/// Waits until something holds; three times as long in long runs, where more is done.
pub async fn eventually<F, Fut>(what: &str, holds: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = bool>,
{
    let patience = if long() { 3 * PATIENCE } else { PATIENCE };
    let until = Instant::now() + patience;
    while !holds().await {
        assert!(Instant::now() < until, "{what}: not within {patience:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The same where nothing can be awaited.
fn until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
