//! Tests against a real PostgreSQL, one module a concern.

mod chaos;
mod harness;
mod migrate;
mod model;
