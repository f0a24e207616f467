//! Pools that follow the queue, on a real API server without nodes: pods stay Pending, and the test is their builders.

use std::time::Duration;

use harmonia_queue::builder::{Claim, Failure, Node, Session};
use harmonia_queue::{Db, nodes, people};
use harmonia_tests::kube::eventually;
use harmonia_tests::operator::{Release, SOON};
use serde_json::Value;

use crate::pools::{condition, has, pool, secret_value};

const DEPLOYMENT: &str = "deployment/x86-builder";

/// A release with a pool of these lines and a project that has as many builds waiting.
async fn waiting(prefix: &str, spec: &str, builds: usize) -> Release {
    let release = Release::new(prefix).await;
    release.farm.project("main").await;
    release.namespace.apply(&pool("x86", spec)).await;
    release.namespace.eventually(DEPLOYMENT, SOON, Value::is_object).await;
    queue(&release, "build", builds).await;
    release
}

async fn queue(release: &Release, name: &str, builds: usize) {
    let names: Vec<String> = (0..builds).map(|number| format!("{name}-{number}")).collect();
    let graph: Vec<(&str, &[&str])> = names.iter().map(|name| (name.as_str(), &[][..])).collect();
    release.farm.queue("main", &graph).await;
    harmonia_queue::listen::notify(&release.farm.operator, harmonia_queue::listen::Channel::Ready, "")
        .await
        .unwrap();
}

async fn has_replicas(release: &Release, replicas: i32) {
    let fits = |workload: &Value| workload["spec"]["replicas"] == replicas;
    release.namespace.eventually(DEPLOYMENT, SOON, fits).await;
}

/// The pods that are to stay.
async fn pods(release: &Release) -> Vec<String> {
    let pods = release.namespace.get("pods").await;
    let stays = |pod: &&Value| {
        pod["metadata"]["labels"]["ci.harmonia.dev/pool"] == "x86"
            && pod["metadata"]["deletionTimestamp"].is_null()
    };
    let mut names: Vec<String> = pods["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(stays)
        .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort_unstable();
    names
}

/// A builder for every pod, once there are so many.
async fn builders(release: &Release, count: usize) -> Vec<(String, Session)> {
    eventually("there are pods", SOON, async || pods(release).await.len() == count).await;
    let url = secret_value(&release.namespace, "x86-builder", "database-url").await;
    let db = Db::direct(&url, 2).unwrap();
    let mut builders = Vec::new();
    for pod in pods(release).await {
        let node = Node::new(&pod, "the secret of a node", 1);
        builders.push((pod.clone(), Session::register(&db, &node).await.unwrap()));
    }
    release.farm.settle().await;
    builders
}

async fn claim_all(release: &Release, builders: &[(String, Session)]) -> Vec<Claim> {
    let mut claims = Vec::new();
    for (_, session) in builders {
        claims.push(release.farm.claim(session).await);
    }
    claims
}

/// Why a builder drains.
async fn drains(release: &Release, name: &str) -> Vec<String> {
    let nodes = nodes::list(&release.farm.operator).await.unwrap();
    let node = nodes.into_iter().find(|node| node.name == name);
    node.into_iter().flat_map(|node| node.drains).map(|drain| drain.reason).collect()
}

#[tokio::test]
async fn builders_come_for_what_waits_and_no_more_than_there_may_be() {
    let release = waiting("up", "scaling: {min: 0, max: 3}", 2).await;
    has_replicas(&release, 2).await;
    let pool = release.namespace.get("builderpool/x86").await;
    assert_eq!(pool["spec"]["replicas"], Value::Null, "what people wrote stays");
    builders(&release, 2).await;
    queue(&release, "more", 9).await;
    // None of the pods finds a node: more of them would not either.
    let full = |pool: &Value| pool["status"]["queued"] == 11 && pool["status"]["desiredReplicas"] == 2;
    release.namespace.eventually("builderpool/x86", SOON, full).await;
    let message = condition(&release.namespace.get("builderpool/x86").await, "Ready")["message"].to_string();
    assert!(message.contains("cannot be scheduled"), "{message}");
    let job = release.farm.value("SELECT min(job_id) FROM ci.ready WHERE job_id > $1", 0).await;
    eventually("why says so", SOON, async || {
        let reasons = people::why(&release.farm.frontend, job).await.unwrap();
        reasons.iter().any(|(code, sentence)| code == "pending" && sentence.contains("cannot be scheduled"))
    })
    .await;
}

#[tokio::test]
async fn idle_builders_go_and_busy_ones_stay() {
    let release = waiting("down", "scaling: {min: 0, max: 3, stabilizationWindow: 1s}", 3).await;
    has_replicas(&release, 3).await;
    let builders = builders(&release, 3).await;
    let claims = claim_all(&release, &builders).await;
    for ((_, session), claim) in builders.iter().zip(&claims).skip(1) {
        release.farm.succeed(session, claim).await;
    }
    has_replicas(&release, 1).await;
    eventually("two pods go", SOON, async || pods(&release).await.len() == 1).await;
    assert_eq!(pods(&release).await, [builders[0].0.clone()], "the busy one stays");
    assert!(drains(&release, &builders[0].0).await.is_empty());

    release.farm.succeed(&builders[0].1, &claims[0]).await;
    has_replicas(&release, 0).await;
    for (name, _) in &builders {
        eventually("no mark outlives its pod", SOON, async || drains(&release, name).await.is_empty()).await;
    }
    queue(&release, "again", 1).await;
    has_replicas(&release, 1).await;
}

#[tokio::test]
async fn what_ran_out_of_memory_starts_a_pod_of_a_larger_pool() {
    let release = waiting("memory", "memory: 1Gi, scaling: {min: 1, max: 3}", 1).await;
    release.namespace.apply(&pool("large", "memory: 4Gi, scaling: {min: 0, max: 1}")).await;
    let large = "deployment/large-builder";
    release.namespace.eventually(large, SOON, |workload| workload["spec"]["replicas"] == 0).await;
    let builders = builders(&release, 1).await;
    let claim = release.farm.claim(&builders[0].1).await;
    builders[0].1.fail(claim.fence, Failure::Oom, "killed").await.unwrap();
    release.farm.database.execute("UPDATE ci.blocked SET run_at = ci.clock()").await;
    release.farm.settle().await;
    release.namespace.eventually(large, SOON, |workload| workload["spec"]["replicas"] == 1).await;
    let workload = release.namespace.get(large).await;
    let limits = workload.pointer("/spec/template/spec/initContainers/1/resources/limits").unwrap();
    assert_eq!(limits["memory"], "4Gi");
}

#[tokio::test]
async fn what_a_paused_pool_would_take_starts_pods_of_another() {
    let release = Release::new("left").await;
    release.farm.project("main").await;
    let scaling = "scaling: {min: 0, max: 3}";
    release.namespace.apply(&pool("x86", &format!("features: [], {scaling}, paused: true"))).await;
    let paused = |pool: &Value| has(pool, "Progressing", "False", "Paused");
    release.namespace.eventually("builderpool/x86", SOON, paused).await;
    release.namespace.apply(&pool("other", &format!("features: [kvm], {scaling}"))).await;
    let other = "deployment/other-builder";
    release.namespace.eventually(other, SOON, |workload| workload["spec"]["replicas"] == 0).await;
    queue(&release, "build", 2).await;
    release.namespace.eventually(other, SOON, |workload| workload["spec"]["replicas"] == 2).await;
}

#[tokio::test]
async fn nobody_goes_before_the_window_is_over() {
    let release = waiting("window", "scaling: {min: 0, max: 3, stabilizationWindow: 1h}", 1).await;
    has_replicas(&release, 1).await;
    let builders = builders(&release, 1).await;
    let claims = claim_all(&release, &builders).await;
    release.farm.succeed(&builders[0].1, &claims[0]).await;
    let idle = |pool: &Value| pool["status"]["busy"] == 0 && pool["status"]["queued"] == 0;
    release.namespace.eventually("builderpool/x86", SOON, idle).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    has_replicas(&release, 1).await;
    assert!(drains(&release, &builders[0].0).await.is_empty());
}

#[tokio::test]
async fn what_an_operator_marked_before_it_died_claims_again_if_it_is_needed() {
    let mut release = waiting("died", "scaling: {min: 2, max: 3, stabilizationWindow: 1s}", 2).await;
    has_replicas(&release, 2).await;
    let builders = builders(&release, 2).await;
    release.stop().await;
    let node = release.farm.node_of(&builders[0].1).await;
    people::drain_idle(&release.farm.operator, &[node], "scale-in").await.unwrap();
    release.start();
    eventually("it claims again", SOON, async || drains(&release, &builders[0].0).await.is_empty()).await;
    has_replicas(&release, 2).await;
}

#[tokio::test]
async fn another_operator_ends_what_one_began_who_had_marked_a_builder() {
    another_ends("marked", false).await;
}

#[tokio::test]
async fn another_operator_ends_what_one_began_who_had_made_its_pod_cheap_too() {
    another_ends("cheap", true).await;
}

/// A scale-in from where the operator before was when it died: a builder is marked, its pod may be cheap, replicas are as they were.
async fn another_ends(prefix: &str, cheap: bool) {
    let mut release = waiting(prefix, "scaling: {min: 0, max: 2, stabilizationWindow: 1s}", 2).await;
    has_replicas(&release, 2).await;
    let builders = builders(&release, 2).await;
    let claims = claim_all(&release, &builders).await;
    release.farm.succeed(&builders[1].1, &claims[1]).await;
    release.stop().await;
    let node = release.farm.node_of(&builders[1].1).await;
    people::drain_idle(&release.farm.operator, &[node], "scale-in").await.unwrap();
    if cheap {
        let cost = "controller.kubernetes.io/pod-deletion-cost=-100";
        release.namespace.kubectl(&["annotate", "pod", &builders[1].0, cost]).await;
    }
    release.start();
    has_replicas(&release, 1).await;
    eventually("a pod goes", SOON, async || pods(&release).await == [builders[0].0.clone()]).await;
}

#[tokio::test]
async fn of_a_number_that_is_lowered_idle_builders_go_first() {
    let release = waiting("lowered", "replicas: 3", 3).await;
    has_replicas(&release, 3).await;
    let builders = builders(&release, 3).await;
    let claims = claim_all(&release, &builders[..2]).await;
    assert_eq!(claims.len(), 2);
    release.namespace.eventually("builderpool/x86", SOON, |pool| pool["status"]["busy"] == 2).await;
    release.namespace.kubectl(&["scale", "builderpool/x86", "--replicas=2"]).await;
    has_replicas(&release, 2).await;
    let busy = [builders[0].0.clone(), builders[1].0.clone()];
    eventually("the idle one goes", SOON, async || pods(&release).await == busy).await;
}

#[tokio::test]
async fn a_number_that_others_write_is_left_to_them() {
    let release = waiting("external", "scaling: {mode: External}, replicas: 1", 4).await;
    has_replicas(&release, 1).await;
    release.namespace.eventually("builderpool/x86", SOON, |pool| pool["status"]["queued"] == 4).await;
    release.namespace.kubectl(&["scale", "builderpool/x86", "--replicas=2"]).await;
    has_replicas(&release, 2).await;
}

#[tokio::test]
async fn a_pod_that_is_being_deleted_hears_how_long_it_has() {
    let release = waiting("deleted", "replicas: 1", 1).await;
    // A pod without a node is gone at once: this one waits for a finalizer.
    let builders = builders(&release, 1).await;
    let pod = format!("pod/{}", builders[0].0);
    let hold = r#"{"metadata": {"finalizers": ["example.org/hold"]}}"#;
    release.namespace.kubectl(&["patch", &pod, "--type=merge", "--patch", hold]).await;
    release.namespace.kubectl(&["delete", &pod, "--wait=false"]).await;
    let left = async || {
        let pulse = builders[0].1.heartbeat(&[], None).await.unwrap();
        pulse.drains.into_iter().find(|(reason, _)| reason == "terminating")
    };
    eventually("it hears of it", SOON, async || left().await.is_some_and(|(_, left)| left.is_some())).await;
    let free = r#"{"metadata": {"finalizers": null}}"#;
    release.namespace.kubectl(&["patch", &pod, "--type=merge", "--patch", free]).await;
    eventually("the reason goes with the pod", SOON, async || left().await.is_none()).await;
}
