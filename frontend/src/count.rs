//! What is counted for `/metrics`.

use axum::http::StatusCode;
use harmonia_service::metrics::Metrics;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::key::Kind;

/// The counters of the gateway.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    requests: Family<Request, Counter>,
    memory: Family<Memory, Counter>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    kind: Label,
    status: Label,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Memory {
    result: Label,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Label(&'static str);

impl EncodeLabelValue for Label {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.0, encoder)
    }
}

impl Counts {
    /// Shown by `metrics` from now on.
    pub fn register(metrics: &mut Metrics) -> Self {
        let counts = Self::default();
        let help = "Requests to the cache, by what was asked for and how it was answered";
        metrics.add("cache_requests", &["kind", "status"], help, &counts.requests);
        let help =
            "Small objects of the cache that were in memory (hit), or had to be asked of the bucket (miss)";
        metrics.add("cache_memory", &["result"], help, &counts.memory);
        counts
    }

    /// A request was answered; `kind` is none if it named nothing that can be.
    pub fn answered(&self, kind: Option<Kind>, status: StatusCode) {
        let kind = match kind {
            Some(Kind::Info) => "info",
            Some(Kind::NarInfo) => "narinfo",
            Some(Kind::Listing) => "listing",
            Some(Kind::Nar) => "nar",
            Some(Kind::Log) => "log",
            Some(Kind::Realisation) => "realisation",
            None => "other",
        };
        let status = match status.as_u16() / 100 {
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            _ => "5xx",
        };
        self.requests.get_or_create(&Request { kind: Label(kind), status: Label(status) }).inc();
    }

    /// Something was looked for in memory.
    pub fn remembered(&self, hit: bool) {
        self.memory.get_or_create(&Memory { result: Label(if hit { "hit" } else { "miss" }) }).inc();
    }
}
