//! The evaluator: claims evaluations, fetches their sources, evaluates them with plain Nix, writes the graph.
//!
//! [`run`](run()) keeps workers going. One evaluation is one call ([`work`]): the source is fetched ([`source`], [`git`],
//! [`flake`]), evaluated by children ([`evaluate`], [`child`]) that run an expression of ours (`walk.nix`) and tell what they
//! find while they find it ([`event`], in a [`sandbox`]), and what was found is read from the store, its sources uploaded, and ingested ([`graph`]).

pub mod attr;
mod child;
mod conf;
mod config;
mod confine;
mod count;
mod credentials;
mod evaluate;
mod event;
mod expression;
mod file;
mod flake;
mod git;
mod graph;
mod inputs;
mod jobs;
mod nix;
mod poll;
mod proxy;
mod run;
mod sandbox;
pub mod source;
pub mod substituters;
mod wishes;
mod witness;
mod words;
mod work;

pub use config::{Config, Limits};
pub use confine::{ConfineError, confine};
pub use count::Counts;
pub use run::{EvaluatorError, run};
pub use sandbox::try_out as try_sandbox;
