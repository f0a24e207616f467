//! What is counted for `/metrics`.

use std::time::Duration;

use harmonia_queue::builder::Failure;
use harmonia_service::metrics::{Counters, Metrics, counters};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::job::End;
use crate::life::Life;

/// From 30 ms to four hours, each some three times the one before.
const SECONDS: [f64; 13] =
    [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 7200.0, 14400.0];

/// The counters of a builder.
#[derive(Debug, Clone)]
pub struct Counts {
    ends: Counters,
    failures: Counters,
    builds: Histogram,
    uploads: Histogram,
    bytes: Counter,
    slots: Gauge,
    building: Gauge,
    uploading: Gauge,
    draining: Gauge,
    free: Gauge,
}

impl Counts {
    /// Shown by `metrics` from now on.
    pub fn register(metrics: &mut Metrics) -> Self {
        let counts = Self {
            ends: counters("end", End::NAMES),
            failures: counters("kind", Failure::ALL.map(Failure::as_str)),
            builds: Histogram::new(SECONDS),
            uploads: Histogram::new(SECONDS),
            bytes: Counter::default(),
            slots: Gauge::default(),
            building: Gauge::default(),
            uploading: Gauge::default(),
            draining: Gauge::default(),
            free: Gauge::default(),
        };
        let Self { ends, failures, builds, uploads, bytes, slots, building, uploading, draining, free } =
            &counts;
        metrics.add(
            "builder_attempts",
            &["end"],
            "Attempts that ended here: settled, failed, given_back, input_missing, dropped",
            ends,
        );
        metrics.add("builder_failures", &["kind"], "Attempts that failed, by the kind of failure", failures);
        metrics.add(
            "builder_build_seconds",
            &[],
            "How long builds took that succeeded, inputs and uploads apart",
            builds,
        );
        metrics.add("builder_publish_seconds", &[], "How long it took from built to signed", uploads);
        metrics.add("builder_built_bytes", &[], "Bytes of the outputs that were built, as NARs", bytes);
        metrics.add("builder_slots", &[], "Builds that may run at once", slots);
        metrics.add("builder_building", &[], "Builds that run", building);
        metrics.add("builder_uploading", &[], "Builds that are done and not signed yet", uploading);
        metrics.add("builder_draining", &[], "1: nothing more is claimed", draining);
        metrics.add("builder_store_free_bytes", &[], "What is free on the disk of the Nix store", free);
        counts
    }

    /// An attempt has ended.
    pub fn ended(&self, end: &End) {
        if let End::Failed(failure, _) = end {
            self.failures.get_or_create(&[("kind", failure.as_str())]).inc();
        }
        self.ends.get_or_create(&[("end", end.name())]).inc();
    }

    /// A build has succeeded.
    pub fn built(&self, took: Duration, bytes: u64) {
        self.builds.observe(took.as_secs_f64());
        self.bytes.inc_by(bytes);
    }

    /// A result was published, or not.
    pub fn uploaded(&self, took: Duration) {
        self.uploads.observe(took.as_secs_f64());
    }

    /// What a life holds now.
    pub fn look(&self, life: &Life, free: Option<u64>) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.slots.set(i64::from(life.session.slots));
        self.building.set(number(life.held.building()));
        self.uploading.set(number(life.held.backlog().0));
        self.draining.set(i64::from(life.is_draining()));
        if let Some(free) = free {
            self.free.set(i64::try_from(free).unwrap_or(i64::MAX));
        }
    }
}
