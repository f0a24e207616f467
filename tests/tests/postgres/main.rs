//! Tests against a real PostgreSQL, one module a concern.

mod claim;
mod ends;
mod failure;
mod fairness;
mod fencing;
mod graph;
mod harness;
mod lanes;
mod lease;
mod migrate;
mod order;
mod publish;
mod unsupported;
