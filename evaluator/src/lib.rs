//! The evaluator: claims evaluations, fetches their sources, evaluates them with plain Nix, writes the graph.
//!
//! [`run`](run()) keeps workers going. One evaluation is one call ([`work`]): the source is fetched ([`source`], [`git`],
//! [`flake`]), evaluated by children ([`evaluate`], [`child`]) that run an expression of ours (`walk.nix`) and tell what they
//! find while they find it ([`event`]), and what was found is read from the store, its sources uploaded, and ingested ([`graph`]).

pub mod attr;
mod child;
mod config;
mod count;
mod evaluate;
mod event;
mod expression;
mod flake;
mod git;
mod graph;
mod nix;
mod run;
pub mod source;
mod words;
mod work;

pub use config::{Config, Limits};
pub use count::Counts;
pub use run::{EvaluatorError, run};
