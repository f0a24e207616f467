//! Tests with real builders: a queue, signers, a bucket, Nix daemons.

mod kinds;
mod realised;
