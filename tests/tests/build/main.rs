//! Tests with real builders: a queue, signers, a bucket, Nix daemons.

mod daemon;
mod disk;
mod inputs;
mod kills;
mod kinds;
mod races;
mod scene;
