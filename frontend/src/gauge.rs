//! The queue in numbers, for `/metrics`. Every frontend shows the same ones.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use harmonia_queue::Db;
use harmonia_queue::order::{self, Figures};
use harmonia_service::metrics::Metrics;
use harmonia_service::sentence::sentence;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// How old a number may be.
const EVERY: Duration = Duration::from_secs(15);

type BySystem = Family<[(&'static str, String); 1], Gauge>;

/// What a frontend shows of the queue.
#[derive(Debug, Clone, Default)]
pub struct Gauges {
    ready: BySystem,
    /// All that are in `ready`.
    systems: Arc<Mutex<BTreeMap<String, i64>>>,
    running: Family<[(&'static str, &'static str); 1], Gauge>,
    blocked: Gauge,
    oldest: Gauge,
    backlog: Gauge,
    nodes: Gauge,
    slots: Gauge,
}

impl Gauges {
    /// Shown by `metrics` from now on.
    pub fn register(metrics: &mut Metrics) -> Self {
        let gauges = Self::default();
        let Self { ready, systems: _, running, blocked, oldest, backlog, nodes, slots } = &gauges;
        metrics.add("queue_ready", &["system"], "Builds that could be claimed, up to 100,000", ready);
        let help = "Builds that run, by phase: building, uploading, accepted (to be signed)";
        metrics.add("queue_running", &["phase"], help, running);
        metrics.add(
            "queue_blocked",
            &[],
            "Builds that wait for others or for a retry, up to 100,000",
            blocked,
        );
        metrics.add(
            "queue_oldest_ready_seconds",
            &[],
            "How long the build has waited that could be claimed first",
            oldest,
        );
        metrics.add(
            "queue_events",
            &[],
            "Changes that the resolver has not looked at yet, up to 100,000",
            backlog,
        );
        metrics.add("queue_nodes", &[], "Builders that live", nodes);
        metrics.add("queue_slots", &[], "Builds that those may run at once", slots);
        gauges
    }

    /// Keeps them up to date.
    pub(crate) async fn follow(&self, db: &Db) -> Infallible {
        loop {
            match order::figures(db).await {
                Ok(figures) => self.show(figures),
                Err(error) => tracing::debug!(error = sentence(&error), "the queue cannot be counted"),
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    fn show(&self, figures: Figures) {
        let Figures { ready, building, uploading, accepted, blocked, oldest, events, nodes, slots } = figures;
        // A system of which nothing waits any more has 0: who forgot it would end its line in graphs.
        let mut systems = self.systems.lock().unwrap_or_else(PoisonError::into_inner);
        systems.values_mut().for_each(|builds| *builds = 0);
        systems.extend(ready);
        for (system, builds) in &*systems {
            self.ready.get_or_create(&[("system", system.clone())]).set(*builds);
        }
        for (phase, builds) in [("building", building), ("uploading", uploading), ("accepted", accepted)] {
            self.running.get_or_create(&[("phase", phase)]).set(builds);
        }
        self.blocked.set(blocked);
        self.oldest.set(oldest);
        self.backlog.set(events);
        self.nodes.set(nodes);
        self.slots.set(slots);
    }
}
