//! Tests with real builders: a queue, signers, a bucket, Nix daemons.

mod drain;
mod kinds;
mod limits;
mod logs;
mod outage;
mod scene;
