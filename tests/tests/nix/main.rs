//! Tests against real Nix daemons, one module a concern.

mod daemon;
mod database;
mod harness;
mod narinfo;
mod proof;
mod resolve;
mod source;
