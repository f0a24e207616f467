//! What is counted for `/metrics`.

use std::time::Instant;

use harmonia_crds::BuilderPoolStatus;
use harmonia_service::metrics::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::standing::Standing;

type Labels<const N: usize> = [(&'static str, &'static str); N];
type OfPool = [(&'static str, String); 3];

/// What is counted of a pool's builders.
const STATES: [&str; 5] = ["desired", "current", "ready", "busy", "draining"];

/// The counters of an operator.
#[derive(Debug, Clone)]
pub struct Counts {
    failures: Family<Labels<2>, Counter>,
    durations: Family<Labels<1>, Histogram>,
    leader: Gauge,
    builders: Family<OfPool, Gauge>,
    queued: Family<[(&'static str, String); 2], Gauge>,
    nodes: Gauge,
}

impl Counts {
    /// Shown by `metrics` from now on.
    pub fn register(metrics: &mut Metrics) -> Self {
        let histogram = || Histogram::new([0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]);
        let counts = Self {
            failures: Family::default(),
            durations: Family::new_with_constructor(histogram),
            leader: Gauge::default(),
            builders: Family::default(),
            queued: Family::default(),
            nodes: Gauge::default(),
        };
        let help = "Reconciles that failed, by the kind of object and the reason";
        metrics.add("operator_reconcile_failures", &["kind", "reason"], help, &counts.failures);
        let help = "How long reconciles took, by the kind of object";
        metrics.add("operator_reconcile_seconds", &["kind"], help, &counts.durations);
        metrics.add("operator_leader", &[], "1: this replica leads", &counts.leader);
        let help = "1: Kubernetes nodes are watched, so that a cordon drains";
        metrics.add("operator_watches_nodes", &[], help, &counts.nodes);
        let help =
            "Builders of a pool, as the leader sees them, by state: desired, current, ready, busy, draining";
        metrics.add("operator_pool_builders", &["namespace", "pool", "state"], help, &counts.builders);
        let help = "Ready builds that a pool could take, as the leader sees them";
        metrics.add("operator_pool_queued", &["namespace", "pool"], help, &counts.queued);
        counts
    }

    /// A pool, as its status shows it.
    pub fn pool(&self, namespace: &str, name: &str, status: &BuilderPoolStatus) {
        let BuilderPoolStatus { desired_replicas, replicas, ready_replicas, busy, draining, queued, .. } =
            status;
        if let Some(queued) = queued {
            let labels = [("namespace", namespace.to_owned()), ("pool", name.to_owned())];
            self.queued.get_or_create(&labels).set(i64::from(*queued));
        }
        let numbers = [Some(*desired_replicas), Some(*replicas), Some(*ready_replicas), *busy, *draining];
        for (state, number) in STATES.into_iter().zip(numbers) {
            if let Some(number) = number {
                self.builders.get_or_create(&of_pool(namespace, name, state)).set(i64::from(number));
            }
        }
    }

    /// A pool is gone.
    pub fn pool_gone(&self, namespace: &str, name: &str) {
        for state in STATES {
            self.builders.remove(&of_pool(namespace, name, state));
        }
        self.queued.remove(&[("namespace", namespace.to_owned()), ("pool", name.to_owned())]);
    }

    /// Measures until it is dropped, however that comes.
    pub fn measure(&self, kind: &'static str) -> Measure {
        Measure { durations: self.durations.clone(), kind, since: Instant::now() }
    }

    /// One more failure.
    pub fn failed(&self, kind: &'static str, reason: &'static str) {
        self.failures.get_or_create(&[("kind", kind), ("reason", reason)]).inc();
    }

    /// Whether Kubernetes nodes are watched.
    pub fn watches_nodes(&self, watched: bool) {
        self.nodes.set(i64::from(watched));
    }

    /// How this replica stands now.
    pub fn stands(&self, standing: Standing) {
        self.leader.set(i64::from(standing.generation().is_some()));
        if !standing.may_apply() {
            // Another tells of them.
            self.builders.clear();
            self.queued.clear();
        }
    }
}

fn of_pool(namespace: &str, name: &str, state: &str) -> OfPool {
    [("namespace", namespace.to_owned()), ("pool", name.to_owned()), ("state", state.to_owned())]
}

/// A reconcile that runs.
pub struct Measure {
    durations: Family<Labels<1>, Histogram>,
    kind: &'static str,
    since: Instant,
}

impl Drop for Measure {
    fn drop(&mut self) {
        self.durations.get_or_create(&[("kind", self.kind)]).observe(self.since.elapsed().as_secs_f64());
    }
}
