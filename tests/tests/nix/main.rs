//! Tests against real Nix daemons, one module a concern.

mod harness;
