//! Conditions, and how new ones replace old ones.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The longest message that the API server takes.
const MESSAGE: usize = 32_768;

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truth {
    /// It does.
    True,
    /// It does not.
    False,
    /// Nobody can tell.
    Unknown,
}

impl Truth {
    fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// A condition as it is found now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// One of the types in [`harmonia_crds::conditions`].
    pub kind: &'static str,
    /// Whether it holds.
    pub truth: Truth,
    /// Why, as one word for programs.
    pub reason: &'static str,
    /// Why, as a sentence for people.
    pub message: String,
}

impl Finding {
    /// A condition.
    pub fn new(kind: &'static str, truth: Truth, reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind, truth, reason, message: message.into() }
    }
}

/// Why a Deployment's pods cannot be made, in the API server's words, such as for a quota or a namespace's Pod Security level.
pub fn replica_failure(deployment: &Deployment) -> Option<String> {
    let conditions = deployment.status.as_ref()?.conditions.iter().flatten();
    let mut failures = conditions
        .filter(|condition| condition.type_ == "ReplicaFailure" && condition.status == "True")
        .map(|condition| condition.message.clone().unwrap_or_default());
    failures.next()
}

/// The conditions that follow on `old`: the time moves only where the status does. Types that were not found now stay.
pub fn merge(
    old: &[Condition],
    found: &[Finding],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let mut merged: Vec<Condition> =
        old.iter().filter(|old| found.iter().all(|new| new.kind != old.type_)).cloned().collect();
    merged.extend(found.iter().map(|new| {
        let before = old.iter().find(|old| old.type_ == new.kind && old.status == new.truth.as_str());
        let mut message = new.message.clone();
        message.truncate(message.floor_char_boundary(MESSAGE));
        Condition {
            type_: new.kind.to_owned(),
            status: new.truth.as_str().to_owned(),
            reason: new.reason.to_owned(),
            message,
            observed_generation: generation,
            last_transition_time: before.map_or(Time(now), |before| before.last_transition_time.clone()),
        }
    }));
    merged.sort_by(|a, b| a.type_.cmp(&b.type_));
    merged
}

/// Findings that say something else than `old` does, for these are worth an Event.
pub fn news<'a>(old: &'a [Condition], found: &'a [Finding]) -> impl Iterator<Item = &'a Finding> {
    found.iter().filter(|new| {
        let before = old.iter().find(|old| old.type_ == new.kind);
        before.is_none_or(|before| before.status != new.truth.as_str() || before.reason != new.reason)
    })
}

#[cfg(test)]
mod tests {
    use harmonia_crds::conditions::{DATABASE_REACHABLE, READY};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap_or_default()
    }

    fn ready(truth: Truth, reason: &'static str) -> Finding {
        Finding::new(READY, truth, reason, "a sentence")
    }

    #[test]
    fn the_time_moves_only_with_the_status() {
        let first = merge(&[], &[ready(Truth::False, "Starting")], Some(1), at(10));
        assert_eq!(first[0].last_transition_time, Time(at(10)));
        let second = merge(&first, &[ready(Truth::False, "Unschedulable")], Some(2), at(20));
        assert_eq!(second[0].last_transition_time, Time(at(10)));
        assert_eq!((second[0].reason.as_str(), second[0].observed_generation), ("Unschedulable", Some(2)));
        let third = merge(&second, &[ready(Truth::True, "AsWanted")], Some(2), at(30));
        assert_eq!(third[0].last_transition_time, Time(at(30)));
    }

    #[test]
    fn the_same_again_is_the_same() {
        let first = merge(&[], &[ready(Truth::True, "AsWanted")], Some(1), at(10));
        assert_eq!(merge(&first, &[ready(Truth::True, "AsWanted")], Some(1), at(99)), first);
    }

    #[test]
    fn what_was_not_looked_at_stays() {
        let reachable = Finding::new(DATABASE_REACHABLE, Truth::True, "Answers", "");
        let both = merge(&[], &[ready(Truth::True, "AsWanted"), reachable], Some(1), at(10));
        let after = merge(&both, &[ready(Truth::False, "Starting")], Some(1), at(20));
        assert_eq!(after.len(), 2);
        assert_eq!(after[0], both[0]);
    }

    #[test]
    fn news_is_another_status_or_reason() {
        let old = merge(&[], &[ready(Truth::False, "Starting")], Some(1), at(10));
        assert_eq!(news(&old, &[ready(Truth::False, "Starting")]).count(), 0);
        assert_eq!(news(&old, &[ready(Truth::False, "Unschedulable")]).count(), 1);
        assert_eq!(news(&[], &[ready(Truth::True, "AsWanted")]).count(), 1);
    }
}
