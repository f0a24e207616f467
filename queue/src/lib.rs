//! The queue of harmonia-ci: its schema, its protocol and its typed calls.
//!
//! The protocol is SQL: functions in `migrations/`, one transaction each, which hold under any interleaving and any
//! crash. This crate only gives them types, an [`Error`] with a sentence, and the loops that must run somewhere:
//! [`resolver`], [`janitor`], [`leader`] and [`listen`]. No other crate contains SQL.

pub mod branches;
pub mod builder;
pub mod builds;
mod db;
mod error;
pub mod evaluations;
pub mod forges;
pub mod ingest;
pub mod janitor;
pub mod leader;
pub mod listen;
pub mod logins;
pub mod migrate;
pub mod mirror;
pub mod nodes;
pub mod order;
pub mod pages;
pub mod people;
pub mod projects;
pub mod replica;
pub mod resign;
pub mod resolver;
pub mod signer;
pub mod sweep;

pub use db::Db;
pub use error::{Error, Result};

/// What a claim hands out and every later word about it must carry: stale ones change nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence {
    /// The job.
    pub job: i64,
    /// The attempt at it.
    pub attempt: i64,
}

impl Fence {
    fn columns(fences: &[Self]) -> (Vec<i64>, Vec<i64>) {
        fences.iter().map(|fence| (fence.job, fence.attempt)).unzip()
    }
}
