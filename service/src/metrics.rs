//! What a role counts, with what people read about it: `/metrics` and docs/reference/metrics.md have the same source.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry};

/// Before every name.
const PREFIX: &str = "harmonia_ci";

/// Counters that one label tells apart.
pub type Counters = Family<[(&'static str, &'static str); 1], Counter>;

/// Counters that are shown from the beginning. To Prometheus one that appears with its first event has not grown: of a builder that
/// lives for an hour and fails once, nobody would hear.
pub fn counters(label: &'static str, words: impl IntoIterator<Item = &'static str>) -> Counters {
    let counters = Counters::default();
    for word in words {
        drop(counters.get_or_create(&[(label, word)]));
    }
    counters
}

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
        let suffix = if self.counts() { "_total" } else { "" };
        format!("{PREFIX}_{}{suffix}", self.name)
    }

    fn counts(&self) -> bool {
        matches!(self.kind, MetricType::Counter)
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

    /// The text of OpenMetrics in the format before it, in which a counter is described by its whole name and nothing marks the end.
    pub(crate) fn in_older_words(&self, text: &str) -> String {
        let is_counter = |name: &str| {
            let name = name.strip_prefix(PREFIX).and_then(|name| name.strip_prefix('_'));
            self.known.iter().any(|known| known.counts() && Some(known.name) == name)
        };
        let mut older = String::with_capacity(text.len());
        for line in text.lines().filter(|line| *line != "# EOF") {
            let mut words = line.splitn(4, ' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("#"), Some(what), Some(name), Some(rest)) if is_counter(name) => {
                    older.extend(["# ", what, " ", name, "_total ", rest, "\n"]);
                }
                _ => older.extend([line, "\n"]),
            }
        }
        older
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;

    #[test]
    fn the_older_format_describes_a_counter_by_its_whole_name() {
        let mut metrics = Metrics::default();
        metrics.add("ends", &[], "What ended", &<Counter>::default());
        metrics.add("ends_soon", &[], "What ends", &<Gauge>::default());
        let mut text = String::new();
        encode(&mut text, metrics.registry()).unwrap();
        let expected = "# HELP harmonia_ci_ends_total What ended.\n# TYPE harmonia_ci_ends_total counter\nharmonia_ci_ends_total 0\n\
                        # HELP harmonia_ci_ends_soon What ends.\n# TYPE harmonia_ci_ends_soon gauge\nharmonia_ci_ends_soon 0\n";
        assert_eq!(metrics.in_older_words(&text), expected);
    }

    #[test]
    fn what_has_not_happened_yet_is_none() {
        let mut metrics = Metrics::default();
        metrics.add("ends", &["end"], "What ended", &counters("end", ["good", "bad"]));
        let mut text = String::new();
        encode(&mut text, metrics.registry()).unwrap();
        for end in ["good", "bad"] {
            assert!(text.contains(&format!("harmonia_ci_ends_total{{end=\"{end}\"}} 0")), "{text}");
        }
    }
}
