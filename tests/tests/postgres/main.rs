//! Tests against a real PostgreSQL, one module a concern.

mod harness;
mod migrate;
