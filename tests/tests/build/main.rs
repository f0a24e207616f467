//! Tests with real builders: a queue, signers, a bucket, Nix daemons.

mod daemon;
mod disk;
mod drain;
mod inputs;
mod kills;
mod kinds;
mod limits;
mod logs;
mod outage;
mod races;
mod realised;
mod scene;
mod stage;
mod traces;
