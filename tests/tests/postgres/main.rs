//! Tests against a real PostgreSQL, one module a concern.

mod audit;
mod bad_input;
mod chaos;
mod claim;
mod drain;
mod ends;
mod failure;
mod fairness;
mod fencing;
mod graph;
mod guard;
mod harness;
mod lanes;
mod leader;
mod lease;
mod listener;
mod logs;
mod migrate;
mod model;
mod order;
mod publish;
mod races;
mod retention;
mod tokens;
mod unsupported;
mod why;
