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

pub use guard::cache;

/// Whether `./dev test --long` asked for more seeds and longer runs.
pub fn long() -> bool {
    std::env::var_os("HARMONIA_CI_LONG").is_some()
}

/// Waits until something holds, for three minutes at most, since machines may be busy; for ten in long runs, where more is done.
pub async fn eventually<F, Fut>(what: &str, holds: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = bool>,
{
    let minutes = if long() { 10 } else { 3 };
    let until = tokio::time::Instant::now() + std::time::Duration::from_secs(60 * minutes);
    while !holds().await {
        assert!(tokio::time::Instant::now() < until, "{what}: not within {minutes} minutes");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
