//! The drain matrix: what `kubectl cordon` and `kubectl drain` do to builds. Builds sleep; more than one attempt at one is an interruption.

use std::time::Duration;

use harmonia_tests::cluster::{Farm, NAMESPACE, install, lose_operator, outcomes, sleeper, succeeded};
use harmonia_tests::kube::{eventually, kubectl};
use tokio::time::Instant;

/// Two pods, one on each node, one build at once in each.
const TWO: &str = "  replicas: 2\n  slots: 1";
/// Generous: how long it took is printed, and measured in a bench.
const SOON: Duration = harmonia_tests::PATIENCE;

#[tokio::test]
async fn a_cordoned_node_finishes_what_it_builds_and_claims_nothing_until_it_is_uncordoned() {
    let farm = Farm::get().await;
    let pool = farm.pool("cordon", TWO).await;
    let first = sleeper("first", 15);
    pool.queue(std::slice::from_ref(&first)).await;
    let cordoned = farm.runs_on(&first.name).await;

    kubectl(&["cordon", &cordoned]).await;
    let begun = Instant::now();
    eventually("the builder drains", SOON, async || pool.drains(&cordoned).await).await;
    eprintln!("the queue knew of the cordon after {} ms", begun.elapsed().as_millis());

    let others = [sleeper("second", 1), sleeper("third", 1)];
    pool.queue(&others).await;
    for other in &others {
        let build = farm.until(&other.name, succeeded).await;
        assert_ne!(farm.kube_node(&build["attempts"][0]["node"]).await, cordoned, "{build:#}");
    }
    farm.end_undisturbed(std::slice::from_ref(&first)).await;

    kubectl(&["uncordon", &cordoned]).await;
    eventually("the builder claims again", SOON, async || !pool.drains(&cordoned).await).await;
    let more = [sleeper("fourth", 30), sleeper("fifth", 30)];
    pool.queue(&more).await;
    let mut nodes = [farm.runs_on(&more[0].name).await, farm.runs_on(&more[1].name).await];
    nodes.sort();
    assert_eq!(nodes, ["node1", "node2"]);
}

#[tokio::test]
async fn an_idle_node_is_drained_in_seconds_and_its_builder_replaced_elsewhere() {
    let farm = Farm::get().await;
    let pool = farm.pool("idle", TWO).await;
    let (pod, node) = pool.pods().await.remove(0);

    let begun = Instant::now();
    pool.drain(&node).await;
    eprintln!("the idle node was drained after {:.1} s", begun.elapsed().as_secs_f32());

    eventually("a replacement runs elsewhere", SOON, async || {
        let pods = pool.pods().await;
        pods.len() == 2 && pods.iter().all(|(name, at)| *name != pod && *at != node)
    })
    .await;
    kubectl(&["-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=180s", "builderpool/idle"]).await;
}

#[tokio::test]
async fn a_drain_waits_for_builds_that_are_shorter_than_the_grace() {
    let farm = Farm::get().await;
    let pool = farm.pool("busy", TWO).await;
    let builds = [sleeper("left", 15), sleeper("right", 15)];
    pool.queue(&builds).await;
    let node = farm.runs_on(&builds[0].name).await;
    farm.runs_on(&builds[1].name).await;

    pool.drain(&node).await;

    let build = farm.build(&builds[0].name).await.unwrap();
    assert!(succeeded(&build), "its pod went before it was published: {build:#}");
    farm.end_undisturbed(&builds).await;
}

#[tokio::test]
async fn a_build_that_is_longer_than_the_grace_is_given_back_and_finished_elsewhere() {
    let farm = Farm::get().await;
    let pool = farm.pool("short", &format!("{TWO}\n  drain: {{gracePeriod: 20s, margin: 10s}}")).await;
    let long = sleeper("long", 60);
    pool.queue(std::slice::from_ref(&long)).await;
    let first = farm.begun_by(&long.name).await;

    pool.drain(&farm.kube_node(&first).await).await;

    let build = farm.ends(&long).await;
    assert_eq!(outcomes(&build), ["interrupted", "succeeded"], "{build:#}");
    assert_eq!(build["attempts"][0]["node"], first, "{build:#}");
}

#[tokio::test]
async fn where_nodes_may_not_be_watched_builders_hear_of_a_drain_by_sigterm() {
    let farm = Farm::get().await;
    let watches = async |pool: &str, truth: &str| {
        let (condition, pool) =
            (format!("--for=condition=NodesWatched={truth}"), format!("builderpool/{pool}"));
        kubectl(&["-n", NAMESPACE, "wait", &condition, "--timeout=180s", &pool]).await
    };
    install(NAMESPACE, &["--set", "watchNodes=false"]).await;
    // A watch that runs goes on without the right: the next operator has to ask for it.
    lose_operator().await;
    let pool = farm.pool("blind", TWO).await;
    watches("blind", "False").await;
    let build = sleeper("unseen", 15);
    pool.queue(std::slice::from_ref(&build)).await;
    let node = farm.runs_on(&build.name).await;

    pool.drain(&node).await;

    farm.end_undisturbed(std::slice::from_ref(&build)).await;
    install(NAMESPACE, &[]).await;
    lose_operator().await;
    watches("blind", "True").await;
}
