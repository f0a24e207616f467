//! Tests against a real PostgreSQL, one module a concern.

mod bad_input;
mod guard;
mod harness;
mod leader;
mod listener;
mod migrate;
