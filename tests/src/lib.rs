//! What the tests and benches of harmonia-ci stand on: a private PostgreSQL, private Nix daemons and S3 servers,
//! and a real derivation graph.

pub mod farm;
pub mod gateway;
pub mod graph;
mod guard;
pub mod nixes;
pub mod pg;
pub mod press;
pub mod proxy;
pub mod repository;
pub mod s3;
pub mod yard;

/// Whether `./dev test --long` asked for more seeds and longer runs.
pub fn long() -> bool {
    std::env::var_os("HARMONIA_CI_LONG").is_some()
}

/// Waits until something holds, for a minute at most.
pub async fn eventually<F, Fut>(what: &str, holds: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = bool>,
{
    let until = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
    while !holds().await {
        assert!(tokio::time::Instant::now() < until, "{what}: not within a minute");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
