//! Tests against a real PostgreSQL, one module a concern.

mod claim;
mod fairness;
mod graph;
mod harness;
mod lanes;
mod migrate;
mod order;
