//! What the tests and benches of harmonia-ci stand on: a private PostgreSQL, private Nix daemons and S3 servers,
//! and a real derivation graph.

pub mod farm;
pub mod graph;
mod guard;
pub mod nixes;
pub mod pg;
pub mod proxy;
pub mod s3;

/// Whether `./dev test --long` asked for more seeds and longer runs.
pub fn long() -> bool {
    std::env::var_os("HARMONIA_CI_LONG").is_some()
}
