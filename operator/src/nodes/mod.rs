//! From Kubernetes to drains: builders on a node that is cordoned, or about to be deleted, claim nothing more, before anybody
//! evicts them; those whose pod is being deleted hear how long they have; and builders that have nothing left are marked, so
//! that no disruption budget counts them.

mod decide;
mod mark;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use harmonia_queue::{Db, nodes, people};
use harmonia_service::sentence::sentence;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use tokio::time::{MissedTickBehavior, interval, sleep};

pub use decide::{CORDONED, Departures, Step, TERMINATING, steps};

use crate::cache::Touched;
use crate::context::Context;
use crate::names::{COMPONENT, POOL};

#[cfg(test)]
pub(crate) use decide::tests;

/// How soon a builder that begins on a cordoned node is drained, and one that has ended its work is marked.
const LOOK: Duration = Duration::from_secs(2);
/// Changes that come together are one.
const DEBOUNCE: Duration = Duration::from_millis(100);

/// Until it is stopped.
pub async fn run(context: Arc<Context>) {
    let (leaving, watching) = watch::leaving(&context);
    tokio::select! {
        () = watching => {}
        () = follow(&context, leaving) => {}
        () = context.stop.cancelled() => {}
    }
}

/// Looks whenever a Kubernetes node has come or gone, and every two seconds: builders come and go by themselves.
async fn follow(context: &Context, mut leaving: tokio::sync::watch::Receiver<watch::Leaving>) {
    let mut pods = std::pin::pin!(context.caches.touched().filter(|touched| {
        std::future::ready(
            matches!(touched, Touched::Object(seen) if seen.kind == "Pod" && seen.labels.contains_key(POOL)),
        )
    }));
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut standings = context.standings();
    let mut away = false;
    loop {
        tokio::select! {
            changed = leaving.changed() => if changed.is_err() { return },
            changed = standings.changed() => if changed.is_err() { return },
            _ = pods.next() => sleep(DEBOUNCE).await,
            _ = ticks.tick() => {}
        }
        let Some(lead) = context.lead() else { continue };
        let departures = Departures {
            nodes: leaving.borrow_and_update().clone(),
            pods: deleted(context, Timestamp::now()),
        };
        match look(context, &lead.db, &departures).await {
            Ok(()) => away = false,
            Err(error) if !away => {
                tracing::warn!(
                    error = sentence(&error),
                    "cordons cannot be told to the queue; tried again every 2 s"
                );
                away = true;
            }
            Err(_) => {}
        }
    }
}

/// The builders' pods that are being deleted, and how long each has.
fn deleted(context: &Context, now: Timestamp) -> std::collections::BTreeMap<(String, String), Duration> {
    let of_builder = |pod: &Pod| pod.labels().get(COMPONENT).is_some_and(|role| role == "builder");
    let going = context.caches.pods.all(|pod| of_builder(pod) && pod.metadata.deletion_timestamp.is_some());
    going.iter().filter_map(|pod| left(pod, now)).collect()
}

/// What is left of a pod's grace. Never more than all of it: this machine's clock may be behind the API server's.
fn left(pod: &Pod, now: Timestamp) -> Option<((String, String), Duration)> {
    let pool = format!("{}/{}", pod.namespace()?, pod.labels().get(POOL)?);
    let until = pod.metadata.deletion_timestamp.as_ref()?.0.duration_since(now);
    let grace = pod.metadata.deletion_grace_period_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    let until = Duration::try_from(until).unwrap_or_default();
    Some(((pool, pod.name_any()), grace.map_or(until, |grace| until.min(Duration::from_secs(grace)))))
}

/// Makes the queue's drains follow the departures, and the pods' marks follow the queue.
async fn look(context: &Context, db: &Db, departures: &Departures) -> harmonia_queue::Result<()> {
    let mut builders = nodes::list(db).await?;
    let todo = steps(departures, &builders);
    if !todo.is_empty() {
        // A drain waits for its builder's claim in flight: the others' do not wait for that.
        let done = join_all(todo.into_iter().map(|step| take(db, step))).await;
        done.into_iter().collect::<harmonia_queue::Result<()>>()?;
        builders = nodes::list(db).await?;
    }
    mark::mark(context, &builders).await;
    Ok(())
}

async fn take(db: &Db, step: Step) -> harmonia_queue::Result<()> {
    match step {
        Step::Drain(node, reason, left) => people::drain(db, node, reason, left).await,
        Step::Resume(node, reason) => people::resume(db, node, reason).await.map(drop),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod left_tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_has_what_is_left_of_its_grace_and_never_more_than_all_of_it() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {
            "name": "one", "namespace": "ci", "labels": {POOL: "x86"},
            "deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30,
        }}))
        .unwrap();
        for (now, seconds) in
            [("2026-01-01T00:00:50Z", 10), ("2026-01-01T00:00:00Z", 30), ("2026-01-01T00:02:00Z", 0)]
        {
            let (key, left) = left(&pod, now.parse().unwrap()).unwrap();
            assert_eq!((key.0.as_str(), key.1.as_str(), left.as_secs()), ("ci/x86", "one", seconds), "{now}");
        }
    }
}
