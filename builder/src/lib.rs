//! The builder: claims jobs, builds them with a Nix daemon, gets the outputs into the cache.
//!
//! [`run`](run()) keeps lives going one after the other: a canary, a session, claims. A claim is one task ([`job`]): its
//! inputs are made ready ([`inputs`]), it is built ([`build`]), and it is uploaded ([`upload`]). What a failure means is a table
//! ([`verdict`]), and so is what a draining builder gives back ([`drain`]).

mod build;
pub mod canary;
pub mod collect;
mod config;
mod count;
pub mod drain;
pub mod inputs;
mod job;
mod life;
mod log;
mod lonely;
mod misses;
pub mod persist;
mod plan;
pub mod roots;
mod run;
pub mod store;
pub mod upload;
pub mod verdict;
mod witness;

pub use config::{Config, Limits, machine_name};
pub use count::Counts;
pub use run::{Builder, BuilderError, run};
