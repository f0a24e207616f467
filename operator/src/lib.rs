//! The operator: from custom resources to a running farm.
//!
//! Every replica watches; the one that holds PostgreSQL's lock writes ([`standing`]). A reconcile is a pipeline: dereference,
//! validate, build, apply, update_status. The middle two are plain functions, and what they build is compared with what the API
//! server has ([`cache`], [`apply`]), so that a settled object causes no request.

pub mod apply;
pub mod cache;
pub mod conditions;
pub mod context;
pub mod controller;
pub mod count;
pub mod credentials;
pub mod database;
mod error;
pub mod events;
pub mod installation;
pub mod names;
pub mod nodes;
pub mod pod;
pub mod pool;
pub mod project;
pub mod quantity;
pub mod ready;
mod referring;
mod release;
mod resources;
mod run;
pub mod scope;
pub mod secrets;
pub mod standing;
pub mod tokens;

pub use count::Counts;
pub use error::OperatorError;
pub use release::release;
pub use run::{run, run_on};
