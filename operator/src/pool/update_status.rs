//! What is shown of a pool.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harmonia_crds::conditions::{DATABASE_REACHABLE, NODES_WATCHED, PROGRESSING, READY, reason};
use harmonia_crds::{BuilderPool, BuilderPoolStatus};
use harmonia_queue::mirror::PoolCounts;
use harmonia_service::sentence::sentence;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource, ResourceExt};
use serde_json::json;

use super::apply::Outcome;
use super::build::{Workload, selector};
use super::numbers::Reach;
use super::{PoolError, Pools, database};
use crate::conditions::{Finding, Truth, merge, news, replica_failure};
use crate::controller::Failing;
use crate::events::News;
use crate::names::{FIELD_MANAGER, POOL};

/// Why a container does not run, in the kubelet's words, and is not about to.
const STUCK: [&str; 8] = [
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
];
/// Pods that are told about: the others wait for the same, as a rule.
const PODS: usize = 3;

/// How much is done and to do is shown no more often than this: each build changes that of every pool that could take it, and
/// two hundred pools would ask two hundred times as much of the API server as of the queue.
pub const CALM: Duration = Duration::from_secs(10);

/// When the status of each pool was last written, by its name in the database.
#[derive(Default)]
pub struct Shown(Mutex<HashMap<String, Instant>>);

impl Shown {
    /// How long a pool whose numbers alone have changed waits until they are shown.
    fn wait(&self, name: &str) -> Option<Duration> {
        let age = self.lock().get(name)?.elapsed();
        CALM.checked_sub(age).filter(|rest| !rest.is_zero())
    }

    fn note(&self, name: String) {
        self.lock().insert(name, Instant::now());
    }

    /// The pool is gone.
    pub fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shows how the pool is. Sends nothing if that is what is shown. Answers how long what is not shown yet waits.
pub async fn update_status(
    pools: &Pools,
    pool: &BuilderPool,
    outcome: &Result<Outcome, PoolError>,
) -> Result<Option<Duration>, PoolError> {
    let context = &pools.context;
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    let of_pool = |pod: &Pod| pod.labels().get(POOL) == Some(&name);
    let pods = context.caches.pods.select(&namespace, of_pool);
    let troubles: Vec<String> = pods.iter().filter_map(|pod| trouble(pod)).collect();
    let before = pool.status.clone().unwrap_or_default();
    let seen = Seen {
        counts: outcome.as_ref().ok().and_then(|outcome| outcome.applied.as_ref()).map(count),
        error: outcome.as_ref().err().map(|error| (error.reason(), sentence(error))),
        paused: pool.is_paused(),
        desired: outcome.as_ref().map_or(before.desired_replicas, |outcome| outcome.scaled.target),
        reach: outcome.as_ref().map_or_else(|_| pools.numbers.reach(), |outcome| outcome.reach.clone()),
        sees_nodes: *context.sees_nodes.borrow(),
        troubles,
    };
    let found = findings(&seen);
    let known_as = database::name_of(pool.meta());
    let numbers = pools.numbers.last_counts(&known_as);
    let status = status(pool, &before, &seen, &found, numbers.as_ref(), Timestamp::now());
    context.counts.pool(&namespace, &name, &status);
    if status == before {
        return Ok(None);
    }
    if is_as_well(&status, &before)
        && let Some(rest) = pools.shown.wait(&known_as)
    {
        return Ok(Some(rest));
    }
    if !context.standing().may_apply() {
        return Err(PoolError::NotLeading);
    }
    let api: Api<BuilderPool> = Api::namespaced(context.client.clone(), &namespace);
    let patch = json!({
        "apiVersion": BuilderPool::api_version(&()), "kind": BuilderPool::kind(&()),
        "metadata": {"name": name}, "status": status,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_status(&name, &parameters, &Patch::Apply(patch)).await {
        Ok(_) => pools.shown.note(known_as),
        // It was deleted meanwhile: applying would make it anew.
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(None),
        Err(error) => return Err(PoolError::api("show the pool's status")(error)),
    }
    for finding in news(&before.conditions, &found) {
        if let Some(news) = told(finding, before.conditions.is_empty()) {
            context.publish(pool, news).await;
        }
    }
    Ok(None)
}

/// Whether no more has changed than how much is done and to do. The first numbers of a pool are news.
fn is_as_well(status: &BuilderPoolStatus, before: &BuilderPoolStatus) -> bool {
    before.queued.is_some()
        && BuilderPoolStatus { busy: before.busy, queued: before.queued, ..status.clone() } == *before
}

/// What a status follows from.
#[derive(Debug)]
struct Seen {
    counts: Option<Counts>,
    error: Option<(&'static str, String)>,
    paused: bool,
    desired: i32,
    reach: Reach,
    sees_nodes: Option<bool>,
    troubles: Vec<String>,
}

/// A workload in numbers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    replicas: i32,
    ready: i32,
    updated: i32,
    /// Its controller has seen its last change.
    observed: bool,
    /// Pods cannot be made, and why.
    failure: Option<String>,
}

fn count(workload: &Workload) -> Counts {
    match workload {
        Workload::Deployment(deployment) => {
            let Some(status) = &deployment.status else { return Counts::default() };
            Counts {
                replicas: status.replicas.unwrap_or(0),
                ready: status.ready_replicas.unwrap_or(0),
                updated: status.updated_replicas.unwrap_or(0),
                observed: status.observed_generation >= deployment.meta().generation,
                failure: replica_failure(deployment),
            }
        }
        Workload::StatefulSet(set) => {
            let Some(status) = &set.status else { return Counts::default() };
            Counts {
                replicas: status.replicas,
                ready: status.ready_replicas.unwrap_or(0),
                updated: status.updated_replicas.unwrap_or(0),
                observed: status.observed_generation >= set.meta().generation,
                failure: None,
            }
        }
    }
}

/// Why a pod does not run. None: it does, or is about to, or is gone.
pub fn trouble(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if pod.meta().deletion_timestamp.is_some()
        || matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"))
    {
        return None;
    }
    let unscheduled = status.conditions.iter().flatten().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    let unscheduled = unscheduled.map(|condition| {
        format!(
            "pod {} cannot be scheduled: {}",
            pod.name_any(),
            condition.message.as_deref().unwrap_or_default()
        )
    });
    unscheduled.or_else(|| {
        let of_init = status.init_container_statuses.iter().flatten();
        let mut containers = of_init.chain(status.container_statuses.iter().flatten());
        containers.find_map(|container| stuck(&pod.name_any(), container))
    })
}

fn stuck(pod: &str, container: &ContainerStatus) -> Option<String> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().filter(|reason| STUCK.contains(reason))?;
    let message = waiting.message.as_deref().unwrap_or_default();
    Some(format!("container {} of pod {pod} does not run: {reason}: {message}", container.name))
}

/// The conditions that follow.
fn findings(seen: &Seen) -> Vec<Finding> {
    let mut findings = vec![ready(seen), progressing(seen), reachable(&seen.reach)];
    findings.extend(seen.sees_nodes.map(nodes_watched));
    findings
}

fn ready(seen: &Seen) -> Finding {
    let no = |reason, message: String| Finding::new(READY, Truth::False, reason, message);
    if let Some((reason, message)) = &seen.error {
        return no(reason, message.clone());
    }
    let Some(counts) = &seen.counts else {
        return no(reason::PAUSED, "there is no workload, and the pool is paused".to_owned());
    };
    let missing = format!("{} of {} builders are ready", counts.ready, seen.desired);
    match &counts.failure {
        _ if counts.observed && counts.ready >= seen.desired => {
            Finding::new(READY, Truth::True, reason::AVAILABLE, missing)
        }
        Some(failure) => no(reason::CREATE_FAILED, format!("{missing}: {failure}")),
        None if seen.troubles.is_empty() => no(reason::ROLLING_OUT, missing),
        None => {
            let more = seen.troubles.len().saturating_sub(PODS);
            let mut words: Vec<String> = seen.troubles.iter().take(PODS).cloned().collect();
            words.extend((more > 0).then(|| format!("and {more} more")));
            no(reason::PODS_PENDING, format!("{missing}: {}", words.join("; ")))
        }
    }
}

fn progressing(seen: &Seen) -> Finding {
    let finding = |truth, reason, message: &str| Finding::new(PROGRESSING, truth, reason, message);
    if seen.paused {
        return finding(
            Truth::False,
            reason::PAUSED,
            "the pool is paused: nothing is changed until it is not",
        );
    }
    match &seen.counts {
        Some(counts) if counts.observed && counts.updated >= seen.desired && counts.ready >= seen.desired => {
            finding(Truth::False, reason::SETTLED, "nothing is under way")
        }
        Some(_) => finding(Truth::True, reason::ROLLING_OUT, "builders are started or replaced"),
        None => finding(
            Truth::False,
            reason::SETTLED,
            "nothing can be done until the pool is ready to be followed",
        ),
    }
}

fn reachable(reach: &Reach) -> Finding {
    match reach {
        Reach::Unknown => {
            Finding::new(DATABASE_REACHABLE, Truth::Unknown, reason::WAITING_FOR_DATABASE, "not asked yet")
        }
        Reach::Yes => {
            Finding::new(DATABASE_REACHABLE, Truth::True, reason::CONNECTED, "the database answers")
        }
        Reach::No(why) => {
            let message = format!("{why}; builders go on, and there are as many as there are");
            Finding::new(DATABASE_REACHABLE, Truth::False, reason::DATABASE_UNREACHABLE, message)
        }
    }
}

fn nodes_watched(sees: bool) -> Finding {
    match sees {
        true => Finding::new(NODES_WATCHED, Truth::True, reason::WATCHED, "a cordon drains builders"),
        false => Finding::new(
            NODES_WATCHED,
            Truth::False,
            reason::FORBIDDEN,
            "the operator may not watch nodes: builders hear of a drain when they are evicted, by SIGTERM",
        ),
    }
}

/// What is worth an Event. That the database of a new pool answers is not.
fn told(finding: &Finding, first: bool) -> Option<News> {
    let warning = match (finding.kind, finding.truth, finding.reason) {
        (DATABASE_REACHABLE, Truth::True, _) if first => return None,
        (READY, Truth::False, reason::ROLLING_OUT | reason::PAUSED) => return None,
        (READY | DATABASE_REACHABLE, Truth::False, _) => true,
        (READY | DATABASE_REACHABLE, Truth::True, _) | (PROGRESSING, Truth::False, reason::PAUSED) => false,
        _ => return None,
    };
    Some(News { warning, reason: finding.reason, action: "Reconcile", note: finding.message.clone() })
}

/// Numbers that nobody can tell now stay as they were.
fn status(
    pool: &BuilderPool,
    before: &BuilderPoolStatus,
    seen: &Seen,
    found: &[Finding],
    numbers: Option<&PoolCounts>,
    now: Timestamp,
) -> BuilderPoolStatus {
    let generation = pool.meta().generation;
    let number = |count: fn(&PoolCounts) -> i64, before: Option<i32>| {
        numbers.map_or(before, |numbers| Some(i32::try_from(count(numbers)).unwrap_or(i32::MAX)))
    };
    let counts = seen.counts.as_ref();
    BuilderPoolStatus {
        replicas: counts.map_or(before.replicas, |counts| counts.replicas),
        ready_replicas: counts.map_or(before.ready_replicas, |counts| counts.ready),
        desired_replicas: seen.desired,
        busy: number(|numbers| numbers.busy, before.busy),
        draining: number(|numbers| numbers.draining, before.draining),
        queued: number(|numbers| numbers.queued, before.queued),
        selector: Some(selector(&pool.name_any())),
        observed_generation: generation,
        conditions: merge(&before.conditions, found, generation, now),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use k8s_openapi::api::apps::v1::Deployment;

    use super::super::validate::tests::pool;
    use super::*;

    fn seen(desired: i32, counts: Counts) -> Seen {
        Seen {
            counts: Some(counts),
            error: None,
            paused: false,
            desired,
            reach: Reach::Yes,
            sees_nodes: None,
            troubles: Vec::new(),
        }
    }

    fn counts(replicas: i32, ready: i32, updated: i32) -> Counts {
        Counts { replicas, ready, updated, observed: true, failure: None }
    }

    fn words(finding: &Finding) -> (Truth, &'static str) {
        (finding.truth, finding.reason)
    }

    #[test]
    fn only_how_much_there_is_to_do_may_wait_to_be_shown() {
        let before = BuilderPoolStatus { busy: Some(1), queued: Some(2), ..BuilderPoolStatus::default() };
        let more = BuilderPoolStatus { queued: Some(3), ..before.clone() };
        assert!(is_as_well(&more, &before));
        assert!(!is_as_well(&BuilderPoolStatus { draining: Some(1), ..more.clone() }, &before));
        assert!(!is_as_well(&BuilderPoolStatus { desired_replicas: 1, ..more.clone() }, &before));
        assert!(!is_as_well(&more, &BuilderPoolStatus { queued: None, ..more.clone() }));
    }

    #[test]
    fn a_pool_that_was_not_shown_lately_does_not_wait() {
        let shown = Shown::default();
        assert_eq!(shown.wait("ci/a"), None);
        shown.note("ci/a".to_owned());
        assert!(shown.wait("ci/a").is_some_and(|rest| rest <= CALM));
        shown.forget("ci/a");
        assert_eq!(shown.wait("ci/a"), None);
    }

    #[test]
    fn a_pool_is_ready_when_all_builders_are() {
        assert_eq!(words(&ready(&seen(2, counts(2, 2, 2)))), (Truth::True, reason::AVAILABLE));
        assert_eq!(words(&ready(&seen(0, counts(0, 0, 0)))), (Truth::True, reason::AVAILABLE));
        assert_eq!(words(&ready(&seen(2, counts(2, 1, 2)))), (Truth::False, reason::ROLLING_OUT));
        let stale = Counts { observed: false, ..counts(2, 2, 2) };
        assert_eq!(words(&ready(&seen(2, stale))), (Truth::False, reason::ROLLING_OUT));
    }

    #[test]
    fn old_pods_serve_while_new_ones_come() {
        let seen = seen(2, counts(3, 2, 1));
        assert_eq!(words(&ready(&seen)), (Truth::True, reason::AVAILABLE));
        assert_eq!(words(&progressing(&seen)), (Truth::True, reason::ROLLING_OUT));
    }

    #[test]
    fn what_the_api_server_refuses_is_said() {
        let failure = Counts { failure: Some("exceeded quota".into()), ..counts(0, 0, 0) };
        let ready = ready(&seen(1, failure));
        assert_eq!(words(&ready), (Truth::False, reason::CREATE_FAILED));
        assert!(ready.message.contains("0 of 1 builders are ready: exceeded quota"), "{}", ready.message);
    }

    #[test]
    fn pods_that_wait_say_why() {
        let pods: Vec<Pod> = serde_json::from_value(json!([
            {"metadata": {"name": "a"}, "status": {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}]}},
            {"metadata": {"name": "b"}, "status": {"initContainerStatuses": [
                {"name": "nix-daemon", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                 "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}},
            {"metadata": {"name": "c"}, "status": {"containerStatuses": [
                {"name": "builder", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                 "state": {"waiting": {"reason": "PodInitializing"}}}]}},
            {"metadata": {"name": "d", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x"}]}},
            {"metadata": {"name": "e"}, "status": {"phase": "Failed", "reason": "Evicted"}},
        ]))
        .unwrap();
        let troubles: Vec<String> = pods.iter().filter_map(trouble).collect();
        let ready = ready(&Seen { troubles, ..seen(3, counts(3, 0, 3)) });
        assert_eq!(words(&ready), (Truth::False, reason::PODS_PENDING));
        let expected = "0 of 3 builders are ready: pod a cannot be scheduled: 0/2 nodes are available; \
                        container nix-daemon of pod b does not run: ImagePullBackOff: no such image";
        assert_eq!(ready.message, expected);
    }

    #[test]
    fn many_pods_that_wait_are_counted() {
        let troubles = (0..9).map(|number| format!("pod {number}")).collect();
        let ready = ready(&Seen { troubles, ..seen(9, counts(9, 0, 9)) });
        assert!(ready.message.ends_with("pod 0; pod 1; pod 2; and 6 more"), "{}", ready.message);
    }

    #[test]
    fn a_paused_pool_says_so_and_is_as_ready_as_it_is() {
        let paused = Seen { paused: true, ..seen(1, counts(1, 1, 1)) };
        assert_eq!(words(&ready(&paused)), (Truth::True, reason::AVAILABLE));
        assert_eq!(words(&progressing(&paused)), (Truth::False, reason::PAUSED));
    }

    #[test]
    fn numbers_that_nobody_can_tell_stay() {
        let pool = pool(json!({}));
        let before = BuilderPoolStatus { busy: Some(3), ..BuilderPoolStatus::default() };
        let seen = seen(1, counts(1, 1, 1));
        let status = status(&pool, &before, &seen, &findings(&seen), None, Timestamp::UNIX_EPOCH);
        assert_eq!((status.busy, status.queued, status.observed_generation), (Some(3), None, Some(3)));
        let found: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
        assert_eq!(found, [DATABASE_REACHABLE, PROGRESSING, READY]);
    }

    #[test]
    fn only_what_somebody_should_know_is_an_event() {
        let finding = |kind, truth, reason| {
            told(&Finding::new(kind, truth, reason, "x"), false).map(|news| news.warning)
        };
        assert_eq!(finding(READY, Truth::False, reason::ROLLING_OUT), None);
        assert_eq!(finding(READY, Truth::False, reason::INVALID_SPEC), Some(true));
        assert_eq!(finding(READY, Truth::True, reason::AVAILABLE), Some(false));
        assert_eq!(finding(DATABASE_REACHABLE, Truth::False, reason::DATABASE_UNREACHABLE), Some(true));
        assert_eq!(finding(PROGRESSING, Truth::False, reason::PAUSED), Some(false));
        assert_eq!(finding(PROGRESSING, Truth::True, reason::ROLLING_OUT), None);
        let reachable = Finding::new(DATABASE_REACHABLE, Truth::True, reason::CONNECTED, "x");
        assert!(told(&reachable, true).is_none() && told(&reachable, false).is_some());
    }

    #[test]
    fn a_deployment_is_counted() {
        let deployment: Deployment = serde_json::from_value(json!({
            "metadata": {"generation": 2},
            "status": {"observedGeneration": 2, "replicas": 2, "readyReplicas": 1, "updatedReplicas": 2, "conditions": [
                {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]},
        }))
        .unwrap();
        let expected = Counts { failure: Some("exceeded quota".into()), ..counts(2, 1, 2) };
        assert_eq!(count(&Workload::Deployment(Box::new(deployment))), expected);
    }
}
