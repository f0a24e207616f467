//! Tests against a real PostgreSQL, one module a concern.

mod audit;
mod claim;
mod drain;
mod ends;
mod failure;
mod fairness;
mod fencing;
mod graph;
mod harness;
mod lanes;
mod lease;
mod logs;
mod migrate;
mod order;
mod publish;
mod retention;
mod unsupported;
mod why;
