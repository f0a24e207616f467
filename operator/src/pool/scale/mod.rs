//! How many builders a pool has: what it is told, or what the queue needs; and how the surplus goes.

mod desire;
mod share;
mod shrink;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use harmonia_crds::pool::{Scaling, ScalingMode, StoreMode};
use harmonia_crds::{BuilderPool, BuilderPoolSpec};
use harmonia_queue::nodes::Node;
use harmonia_queue::{mirror, people};
use harmonia_service::sentence::sentence;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource, ResourceExt};
use serde_json::json;
use tokio::time::Instant;

pub use desire::{Bounds, Decision, History, Snapshot, desired_replicas, needed};
pub use share::{Capacity, share};
pub use shrink::SCALE_IN;
use shrink::{Plan, PodView, Step, View, shrink, shrink_by_number};

use crate::context::Lead;
use crate::names::POOL;

use super::build::child_name;
use super::numbers::Figures;
use super::update_status::trouble;
use super::{Pools, database};

/// Makes a ReplicaSet choose a pod before others that are as well as it is.
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
const CHEAP: &str = "-100";
/// A pod that cannot be scheduled may be what an autoscaler makes a node for: it is waited for, and its builds with it, for so long.
const PATIENCE: SignedDuration = SignedDuration::from_mins(3);

/// What all pools needed lately, each for as long as this replica has led.
#[derive(Debug, Default)]
pub struct Histories(Mutex<HashMap<String, (i64, History)>>);

impl Histories {
    /// The pool is gone.
    pub fn forget(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

/// What scaling came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scaled {
    /// How many builders there are to be from now on,
    pub replicas: i32,
    /// how many there should be in the end,
    pub target: i32,
    /// and why.
    pub reason: String,
    /// There is something left to do that no watch tells.
    pub unfinished: bool,
}

impl Scaled {
    fn at(replicas: i32, reason: &str) -> Self {
        Self { replicas, target: replicas, reason: reason.to_owned(), unfinished: false }
    }
}

/// A workload, as far as it counts here.
#[derive(Debug, Clone, Copy, Default)]
struct Live {
    replicas: Option<i32>,
    rolling: bool,
}

/// Decides, and does what comes before pods go. Answers what the workload is to be told.
pub async fn scale(pools: &Pools, pool: &BuilderPool) -> Scaled {
    let live = live(pools, pool);
    if let Some(replicas) = live.replicas.filter(|_| pool.is_paused()) {
        return Scaled::at(replicas, "the pool is paused");
    }
    let name = database::name_of(pool.meta());
    let known = pools.context.lead().zip(pools.numbers.of(&name));
    let (Some((lead, figures)), Some(replicas)) = (known, live.replicas) else {
        // Without the database nobody can tell who is busy: then there are as many as there are.
        return Scaled::at(
            live.replicas.unwrap_or_else(|| fewest(&pool.spec)),
            "nobody can tell who is busy",
        );
    };
    let pods = pods_of(pools, pool);
    let troubles: Vec<String> = pods.iter().filter_map(|pod| trouble(pod)).collect();
    let decision = decide(pools, pool, &lead, &figures, &pods, replicas, !troubles.is_empty());
    let views: Vec<PodView> = pods.iter().map(|pod| view(pod)).collect();
    let plan = plan(pool, &views, &figures.builders, replicas, &decision, live.rolling);
    note(pools, pool, &lead, decision.replicas, troubles).await;
    let steps = plan.steps.len();
    for step in plan.steps {
        if let Err(error) = take(pools, pool, &lead, &step).await {
            tracing::warn!(name, ?step, error, "a pool cannot get smaller yet");
            return Scaled { unfinished: true, ..Scaled::at(replicas, &decision.reason) };
        }
    }
    if steps > 0 {
        // What the queue says of it is wanted now, not in two seconds.
        pools.hurry.notify_one();
    }
    let to_come = needed(&snapshot(pool, &figures, &pods, replicas, false)) < plan.replicas;
    Scaled {
        replicas: plan.replicas.max(decision.replicas),
        target: decision.replicas,
        reason: decision.reason,
        unfinished: steps > 0 || (auto(&pool.spec).is_some() && to_come),
    }
}

/// How many pods of each pool, by its name in the database, have been in trouble for too long to be waited for.
pub fn stuck(pools: &Pools) -> HashMap<String, i32> {
    let now = Timestamp::now();
    let mut stuck = HashMap::new();
    for pod in pools.context.caches.pods.all(|pod| is_stuck(pod, now)) {
        if let Some(pool) = pod.labels().get(POOL) {
            *stuck.entry(format!("{}/{pool}", pod.namespace().unwrap_or_default())).or_default() += 1;
        }
    }
    stuck
}

fn is_stuck(pod: &Pod, now: Timestamp) -> bool {
    let made = pod.metadata.creation_timestamp.as_ref().map_or(now, |made| made.0);
    now.duration_since(made) > PATIENCE && trouble(pod).is_some()
}

/// What a pool could take, of which these builders are known, and so many pods that do not start: for [`share`].
pub fn capacity(pools: &Pools, pool: &BuilderPool, builders: &[Node], stuck: i32) -> Capacity {
    let replicas = live(pools, pool).replicas.unwrap_or(0);
    Capacity { room: room(pool, replicas, builders, stuck), ..idle(builders) }
}

/// Slots that builders would have that may still come: those that start, and those that may be started. A pool that is left
/// alone, or whose last pods do not start, gets no more: what it cannot take is another's.
fn room(pool: &BuilderPool, replicas: i32, builders: &[Node], stuck: i32) -> i64 {
    let there = count(builders.iter().filter(|builder| builder.seen.is_some()).count());
    let starting = replicas.saturating_sub(there).saturating_sub(stuck).max(0);
    let grows = stuck == 0 && !pool.is_paused();
    let more = auto(&pool.spec).filter(|_| grows).map_or(0, |bounds| bounds.max - replicas).max(0);
    i64::from(more + starting) * i64::from(pool.spec.slots)
}

/// What builders outside of Kubernetes could take, or those of a pool that nobody scales.
pub fn idle(builders: &[Node]) -> Capacity {
    Capacity { idle: builders.iter().filter(|builder| claims(builder)).map(free).sum(), room: 0 }
}

fn claims(builder: &Node) -> bool {
    builder.seen.is_some() && builder.drains.is_empty()
}

fn free(builder: &Node) -> i64 {
    (i64::from(builder.slots) - builder.building).max(0)
}

fn holds(builder: &Node) -> bool {
    builder.building + builder.uploading > 0
}

/// How many builders there should be.
fn decide(
    pools: &Pools,
    pool: &BuilderPool,
    lead: &Lead,
    figures: &Figures,
    pods: &[Arc<Pod>],
    replicas: i32,
    stuck: bool,
) -> Decision {
    let Some(bounds) = auto(&pool.spec) else {
        let replicas = pool.spec.replicas.unwrap_or(1);
        return Decision { replicas, reason: "the pool says so".to_owned() };
    };
    let snapshot = snapshot(pool, figures, pods, replicas, stuck);
    let now = pools.begun.elapsed();
    let mut histories = pools.histories.0.lock().unwrap_or_else(PoisonError::into_inner);
    let (generation, history) = histories.entry(database::name_of(pool.meta())).or_default();
    if *generation != lead.generation {
        (*generation, *history) = (lead.generation, History::default());
    }
    history.note(now, &snapshot, bounds.window);
    desired_replicas(&snapshot, &bounds, history, now)
}

fn snapshot(
    pool: &BuilderPool,
    figures: &Figures,
    pods: &[Arc<Pod>],
    replicas: i32,
    stuck: bool,
) -> Snapshot {
    let stays = |name: &str| {
        pods.iter().any(|pod| {
            pod.metadata.deletion_timestamp.is_none() && pod.metadata.name.as_deref() == Some(name)
        })
    };
    let busy: Vec<&Node> =
        figures.builders.iter().filter(|builder| claims(builder) && holds(builder)).collect();
    // Those that are to go by scale-in are not replaced.
    let lingers = |builder: &&Node| {
        builder.seen.is_some()
            && builder.drains.iter().any(|drain| drain.reason != SCALE_IN)
            && (holds(builder) || builder.drains_for(SCALE_IN).is_none())
            && stays(&builder.name)
    };
    Snapshot {
        waiting: figures.waiting,
        slots: pool.spec.slots,
        free: busy.iter().map(|builder| free(builder)).sum(),
        busy: count(busy.len()),
        lingering: count(figures.builders.iter().filter(lingers).count()),
        replicas,
        stuck,
    }
}

fn plan(
    pool: &BuilderPool,
    pods: &[PodView],
    builders: &[Node],
    replicas: i32,
    decision: &Decision,
    rolling: bool,
) -> Plan {
    let told = auto(&pool.spec).is_none();
    let view = View { pods, builders, replicas, target: decision.replicas, rolling, told };
    match pool.spec.store.mode {
        StoreMode::Ephemeral | StoreMode::EmptyDir => shrink(&view),
        StoreMode::Persistent => shrink_by_number(&view),
    }
}

/// Between what the operator chooses. None: somebody else does.
fn auto(spec: &BuilderPoolSpec) -> Option<Bounds> {
    let Scaling { mode, min, max, stabilization_window } = spec.scaling.as_ref()?;
    let max = max.filter(|_| *mode == ScalingMode::Auto)?;
    Some(Bounds { min: *min, max, window: stabilization_window.0 })
}

/// What is there without a queue to follow.
fn fewest(spec: &BuilderPoolSpec) -> i32 {
    auto(spec).map_or_else(|| spec.replicas.unwrap_or(1), |bounds| bounds.min)
}

/// How many builders there may be at once.
pub fn most(spec: &BuilderPoolSpec) -> i32 {
    auto(spec).map_or_else(|| spec.replicas.unwrap_or(1), |bounds| bounds.max)
}

fn pods_of(pools: &Pools, pool: &BuilderPool) -> Vec<Arc<Pod>> {
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    pools.context.caches.pods.select(&namespace, |pod| pod.labels().get(POOL) == Some(&name))
}

fn view(pod: &Pod) -> PodView {
    PodView {
        name: pod.name_any(),
        going: pod.metadata.deletion_timestamp.is_some()
            || pod
                .status
                .as_ref()
                .is_some_and(|status| matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"))),
        cheap: pod.annotations().get(COST).is_some_and(|cost| cost == CHEAP),
    }
}

fn live(pools: &Pools, pool: &BuilderPool) -> Live {
    let (namespace, child) = (pool.namespace().unwrap_or_default(), child_name(&pool.name_any()));
    let caches = &pools.context.caches;
    if let Some(workload) = caches.deployments.get(&namespace, &child) {
        let status = workload.status.clone().unwrap_or_default();
        return Live {
            replicas: workload.spec.as_ref().and_then(|spec| spec.replicas),
            rolling: status.observed_generation < workload.meta().generation
                || status.updated_replicas.unwrap_or(0) < status.replicas.unwrap_or(0),
        };
    }
    let Some(workload) = caches.stateful_sets.get(&namespace, &child) else { return Live::default() };
    let status = workload.status.clone().unwrap_or_default();
    Live {
        replicas: workload.spec.as_ref().and_then(|spec| spec.replicas),
        rolling: status.observed_generation < workload.meta().generation
            || status.update_revision.is_some() && status.updated_replicas.unwrap_or(0) < status.replicas,
    }
}

async fn take(pools: &Pools, pool: &BuilderPool, lead: &Lead, step: &Step) -> Result<(), String> {
    let told = |error: database::Trouble| sentence(&error);
    match step {
        Step::MarkIdle(builders) => {
            database::bounded(people::drain_idle(&lead.db, builders, SCALE_IN)).await.map(drop).map_err(told)
        }
        Step::Mark(builder) => {
            database::bounded(people::drain(&lead.db, *builder, SCALE_IN, None)).await.map_err(told)
        }
        Step::Unmark(builder) => {
            database::bounded(people::resume(&lead.db, *builder, SCALE_IN)).await.map(drop).map_err(told)
        }
        Step::Cheapen(pod) => price(pools, pool, pod, Some(CHEAP)).await,
        Step::Spare(pod) => price(pools, pool, pod, None).await,
    }
}

async fn price(pools: &Pools, pool: &BuilderPool, pod: &str, cost: Option<&str>) -> Result<(), String> {
    if !pools.context.standing().may_apply() {
        return Err("another replica leads".to_owned());
    }
    let api: Api<Pod> = Api::namespaced(pools.context.client.clone(), &pool.namespace().unwrap_or_default());
    let patch = Patch::Merge(json!({"metadata": {"annotations": {COST: cost}}}));
    match api.patch(pod, &PatchParams::default(), &patch).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(sentence(&error)),
    }
}

/// Tells the queue what stands between the pool and more builders, where that has changed.
async fn note(pools: &Pools, pool: &BuilderPool, lead: &Lead, target: i32, mut troubles: Vec<String>) {
    let external = pool.spec.scaling.as_ref().is_some_and(|scaling| scaling.mode == ScalingMode::External);
    let bounds = mirror::Bounds {
        at_maximum: !external && target >= most(&pool.spec),
        note: (!troubles.is_empty()).then(|| troubles.swap_remove(0)),
    };
    let (name, uid) = (database::name_of(pool.meta()), pool.meta().uid.clone().unwrap_or_default());
    let word = (lead.generation, uid.clone(), bounds.clone());
    if pools.noted.lock().unwrap_or_else(PoisonError::into_inner).get(&name) == Some(&word) {
        return;
    }
    match database::bounded(mirror::note_pool(&lead.db, lead.generation, &uid, &name, &bounds)).await {
        Ok(_) => drop(pools.noted.lock().unwrap_or_else(PoisonError::into_inner).insert(name, word)),
        Err(error) => {
            tracing::debug!(name, error = sentence(&error), "the queue does not know what a pool lacks")
        }
    }
}

fn count(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

/// How long ago pools were first looked at: a time that only grows.
#[derive(Debug, Clone, Copy)]
pub struct Begun(Instant);

impl Begun {
    /// Now.
    pub fn now() -> Self {
        Self(Instant::now())
    }

    fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::pool::validate::tests::pool;

    fn builder(seen: bool) -> Node {
        Node {
            id: 1,
            pool: "team/big".to_owned(),
            name: "big-builder-0".to_owned(),
            slots: 2,
            building: 0,
            uploading: 0,
            speed: 1.0,
            drains: Vec::new(),
            kube_node: None,
            version: None,
            seen: seen.then_some(Duration::ZERO),
        }
    }

    #[test]
    fn a_pool_has_room_for_what_starts_and_for_what_may_be_started() {
        let pool = pool(json!({"slots": 2, "scaling": {"min": 0, "max": 5}}));
        assert_eq!(room(&pool, 0, &[], 0), 10);
        assert_eq!(room(&pool, 3, &[builder(true), builder(false)], 0), 8);
        assert_eq!(room(&pool, 7, &[], 0), 14, "of more than there may be, those that start still count");
    }

    #[test]
    fn a_pool_that_is_left_alone_or_whose_pods_do_not_start_cannot_grow() {
        let pool = |paused| pool(json!({"scaling": {"min": 0, "max": 5}, "paused": paused}));
        assert_eq!((room(&pool(false), 0, &[], 0), room(&pool(true), 0, &[], 0)), (5, 0));
        let mut disabled = pool(false);
        disabled.annotations_mut().insert("ci.harmonia.dev/reconcile".to_owned(), "disabled".to_owned());
        assert_eq!(room(&disabled, 2, &[], 0), 2, "what starts comes all the same");
        assert_eq!((room(&pool(false), 2, &[], 2), room(&pool(false), 3, &[], 1)), (0, 2));
    }

    #[test]
    fn a_pod_without_a_node_is_waited_for_as_long_as_an_autoscaler_may_take() {
        let made = Timestamp::UNIX_EPOCH;
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "a", "creationTimestamp": made},
            "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
        }))
        .unwrap();
        assert!(!is_stuck(&pod, made + SignedDuration::from_secs(180)));
        assert!(is_stuck(&pod, made + SignedDuration::from_secs(181)));
        assert!(!is_stuck(&Pod { status: None, ..pod }, made + SignedDuration::from_secs(181)));
    }
}
