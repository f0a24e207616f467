//! What is counted for `/metrics`.

use harmonia_service::metrics::{Counters, Metrics, counters};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

use crate::work::End;

/// From a tenth of a second to half an hour.
const SECONDS: [f64; 9] = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1800.0];

/// The counters of an evaluator.
#[derive(Debug, Clone)]
pub struct Counts {
    ended: Counters,
    seconds: Histogram,
    running: Gauge,
}

impl Counts {
    /// Shown by `metrics` from now on.
    pub fn register(metrics: &mut Metrics) -> Self {
        let ended = counters("end", ["complete", "aborted", "left", "later"]);
        let counts = Self { ended, seconds: Histogram::new(SECONDS), running: Gauge::default() };
        let help = "Evaluations that ended here: complete, aborted, left, later";
        metrics.add("evaluator_evaluations", &["end"], help, &counts.ended);
        metrics.add("evaluator_seconds", &[], "How long evaluations took", &counts.seconds);
        metrics.add("evaluator_running", &[], "Evaluations that run", &counts.running);
        counts
    }

    /// An evaluation has begun.
    pub(crate) fn begin(&self) -> Measure<'_> {
        self.running.inc();
        Measure { counts: self, since: Instant::now() }
    }
}

/// An evaluation that runs.
pub(crate) struct Measure<'a> {
    counts: &'a Counts,
    since: Instant,
}

impl Measure<'_> {
    /// It has ended.
    pub fn end(self, end: End) {
        let word = match end {
            End::Complete => "complete",
            End::Aborted => "aborted",
            End::Left => "left",
            End::Later => "later",
        };
        self.counts.ended.get_or_create(&[("end", word)]).inc();
        self.counts.seconds.observe(self.since.elapsed().as_secs_f64());
    }
}

impl Drop for Measure<'_> {
    fn drop(&mut self) {
        self.counts.running.dec();
    }
}
