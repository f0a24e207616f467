//! What is counted of forges for `/metrics`.

use harmonia_service::metrics::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

type ByForge = Family<[(&'static str, String); 2], Counter>;

/// The counters of the forges.
#[derive(Debug, Clone, Default)]
pub struct ForgeCounts {
    webhooks: ByForge,
    reports: ByForge,
}

impl ForgeCounts {
    /// Shown by `metrics` from now on.
    pub fn register(metrics: &mut Metrics) -> Self {
        let counts = Self::default();
        let help = "Webhooks, by forge and by what became of them: accepted, ignored, seen (before), refused";
        metrics.add("webhooks", &["forge", "outcome"], help, &counts.webhooks);
        let help = "Statuses, by forge and by what it said: told, limited (it asks for patience), failed";
        metrics.add("forge_reports", &["forge", "result"], help, &counts.reports);
        counts
    }

    pub(super) fn webhook(&self, forge: &str, outcome: &'static str) {
        self.webhooks.get_or_create(&[("forge", forge.to_owned()), ("outcome", outcome.to_owned())]).inc();
    }

    pub(super) fn report(&self, forge: &str, result: &'static str) {
        self.reports.get_or_create(&[("forge", forge.to_owned()), ("result", result.to_owned())]).inc();
    }
}
