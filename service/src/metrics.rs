//! What a role counts, with what people read about it: `/metrics` and docs/reference/metrics.md have the same source.

use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry};

/// Before every name.
const PREFIX: &str = "harmonia_ci";

/// The metrics of a role.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    known: Vec<Known>,
}

/// One of them, in words.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    name: &'static str,
    kind: MetricType,
    /// What tells its values apart.
    pub labels: &'static [&'static str],
    /// What it counts.
    pub help: &'static str,
}

impl Known {
    /// As Prometheus shows it.
    pub fn name(&self) -> String {
        let suffix = if matches!(self.kind, MetricType::Counter) { "_total" } else { "" };
        format!("{PREFIX}_{}{suffix}", self.name)
    }

    /// Such as `counter`.
    pub fn kind(&self) -> &str {
        self.kind.as_str()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self { registry: Registry::with_prefix(PREFIX), known: Vec::new() }
    }
}

impl Metrics {
    /// Shows a metric from now on.
    pub fn add<M>(
        &mut self,
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
        metric: &M,
    ) where
        M: Metric + TypedMetric + Clone,
    {
        self.registry.register(name, help, metric.clone());
        self.known.push(Known { name, kind: M::TYPE, labels, help });
    }

    /// All of them.
    pub fn known(&self) -> &[Known] {
        &self.known
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }
}
