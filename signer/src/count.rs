//! What is counted for `/metrics`.

use harmonia_service::metrics::{Counters, Metrics, counters};
use harmonia_service::protocol::{Outcome, Slot};
use prometheus_client::metrics::counter::Counter;

use crate::sweep::Swept;

/// All words of [`word`].
const OUTCOMES: [&str; 6] = ["published", "adopted", "stale", "again", "refused", "later"];

/// The counters of a signer.
#[derive(Debug, Clone)]
pub struct Counts {
    slots: Counters,
    results: Counters,
    recovered: Counter,
    swept_objects: Counters,
    swept_bytes: Counters,
    resigned: Counter,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            slots: Counters::default(),
            results: counters("outcome", OUTCOMES),
            recovered: Counter::default(),
            swept_objects: Counters::default(),
            swept_bytes: Counters::default(),
            resigned: Counter::default(),
        }
    }
}

impl Counts {
    /// Shown by `metrics` from now on.
    pub fn register(&self, metrics: &mut Metrics) {
        metrics.add(
            "signer_slots",
            &["answer"],
            "Upload slots that were asked for, by the answer",
            &self.slots,
        );
        let help = "Results and sources that were shown, by what became of them";
        metrics.add("signer_results", &["outcome"], help, &self.results);
        let help = "Builds that another signer had accepted and this one published";
        metrics.add("signer_recovered", &[], help, &self.recovered);
        let help =
            "What sweeps of the bucket removed: paths that nobody needs, and leftovers by what they were";
        metrics.add("signer_swept", &["kind"], help, &self.swept_objects);
        let help = "Bytes that sweeps of the bucket removed, by the same";
        metrics.add("signer_swept_bytes", &["kind"], help, &self.swept_bytes);
        let help = "Paths that were signed again in the background, after a change of keys";
        metrics.add("signer_resigned", &[], help, &self.resigned);
    }

    pub(crate) fn slot(&self, slot: &Slot) {
        let answer = match slot {
            Slot::Put { .. } => "put",
            Slot::Parts { .. } => "parts",
            Slot::Present => "present",
            Slot::Absent => "absent",
            Slot::Refused { .. } => "refused",
            Slot::Later { .. } => "later",
        };
        self.slots.get_or_create(&[("answer", answer)]).inc();
    }

    pub(crate) fn result(&self, outcome: &Outcome) {
        self.results.get_or_create(&[("outcome", word(outcome))]).inc();
    }

    pub(crate) fn swept(&self, swept: &Swept) {
        let leftovers = swept.leftovers.iter().map(|(kind, tally)| (*kind, tally));
        for (kind, tally) in leftovers.chain([("paths", &swept.paths)]) {
            self.swept_objects.get_or_create(&[("kind", kind)]).inc_by(tally.count);
            self.swept_bytes.get_or_create(&[("kind", kind)]).inc_by(tally.bytes);
        }
    }

    pub(crate) fn resigned(&self, paths: usize) {
        self.resigned.inc_by(paths as u64);
    }

    pub(crate) fn recovered(&self, jobs: usize) {
        self.recovered.inc_by(jobs as u64);
    }
}

/// What became of a result, in one word.
pub(crate) fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Published => "published",
        Outcome::Adopted => "adopted",
        Outcome::Stale => "stale",
        Outcome::Again { .. } => "again",
        Outcome::Refused { .. } => "refused",
        Outcome::Later { .. } => "later",
    }
}
