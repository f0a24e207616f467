//! What is counted for `/metrics`.

use harmonia_service::protocol::{Outcome, Slot};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

type Counters = Family<[(&'static str, &'static str); 1], Counter>;

/// The counters of a signer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    slots: Counters,
    results: Counters,
    recovered: Counter,
}

impl Counts {
    /// Shown by `metrics` from now on.
    pub fn register(&self, metrics: &mut Registry) {
        metrics.register("signer_slots", "Slots that were asked for", self.slots.clone());
        metrics.register("signer_results", "Results and sources that were shown", self.results.clone());
        let help = "Jobs that another signer had accepted and this one published";
        metrics.register("signer_recovered", help, self.recovered.clone());
    }

    pub fn slot(&self, slot: &Slot) {
        let answer = match slot {
            Slot::Put { .. } => "put",
            Slot::Parts { .. } => "parts",
            Slot::Present => "present",
            Slot::Refused { .. } => "refused",
            Slot::Later { .. } => "later",
        };
        self.slots.get_or_create(&[("answer", answer)]).inc();
    }

    pub fn result(&self, outcome: &Outcome) {
        let outcome = match outcome {
            Outcome::Published => "published",
            Outcome::Adopted => "adopted",
            Outcome::Stale => "stale",
            Outcome::Again { .. } => "again",
            Outcome::Refused { .. } => "refused",
            Outcome::Later { .. } => "later",
        };
        self.results.get_or_create(&[("outcome", outcome)]).inc();
    }

    pub fn recovered(&self, jobs: usize) {
        self.recovered.inc_by(jobs as u64);
    }
}
