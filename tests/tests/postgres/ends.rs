//! How attempts end, and what becomes of their jobs: interruptions, retries, and nodes that fail too much.

use harmonia_queue::builder::{Claim, Failure, Session};
use harmonia_queue::ingest::Node;
use harmonia_queue::people;
use harmonia_tests::farm::{Farm, PoolHandle, derivation};

async fn running(slots: i32) -> (Farm, PoolHandle, Session, Claim) {
    let (farm, pool, node) = Farm::small(slots).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    (farm, pool, node, claim)
}

/// Long enough for any back-off, with the node saying that it lives.
async fn wait(farm: &Farm, nodes: &[&Session]) {
    farm.advance(600.0).await;
    for node in nodes {
        node.heartbeat(&[], None).await.unwrap();
    }
    farm.settle().await;
    farm.pass(1.0).await;
}

#[tokio::test]
async fn a_build_that_is_given_back_is_ready_for_anybody_at_once() {
    let (farm, _, node, claim) = running(1).await;
    assert_eq!(node.give_back(&[claim.fence], "drained").await.unwrap(), [claim.fence.job]);
    farm.settle().await;
    let again = farm.claim(&node).await;
    assert_eq!(again.fence.job, claim.fence.job);
    assert!(again.fence.attempt > claim.fence.attempt);
    assert_eq!(farm.value::<i16>("SELECT retries FROM ci.job WHERE id = $1", claim.fence.job).await, 0);
}

#[tokio::test]
async fn ten_interruptions_without_an_end_are_one() {
    let (farm, _, node, mut claim) = running(1).await;
    for _ in 0..9 {
        node.give_back(&[claim.fence], "of a drain").await.unwrap();
        farm.settle().await;
        claim = farm.claim(&node).await;
    }
    node.give_back(&[claim.fence], "of a drain").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "failed");
    let error: String = farm.value("SELECT error FROM ci.job WHERE id = $1", claim.fence.job).await;
    assert_eq!(error, "interrupted 10 times without an end, the last time because of a drain");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_retry_waits_twice_as_long_each_time() {
    let (farm, _, node, mut claim) = running(1).await;
    for seconds in [30.0, 60.0, 120.0] {
        node.fail(claim.fence, Failure::Network, "reset").await.unwrap();
        farm.database.execute("UPDATE ci.session SET streak = 0").await;
        farm.pass(seconds - 1.0).await;
        assert!(node.claim(1).await.unwrap().is_empty(), "before {seconds} s");
        farm.pass(1.0).await;
        claim = farm.claim(&node).await;
    }
}

#[tokio::test]
async fn a_retry_waits_although_another_project_wants_it_meanwhile() {
    let (farm, _, node, claim) = running(1).await;
    node.fail(claim.fence, Failure::Network, "reset").await.unwrap();
    farm.project("other").await;
    farm.queue("other", &[("leaf", &[])]).await;
    assert_eq!(farm.state(claim.fence.job).await, "blocked");
}

#[tokio::test]
async fn the_fourth_failure_is_the_last() {
    let (farm, _, node, mut claim) = running(1).await;
    for _ in 0..3 {
        node.fail(claim.fence, Failure::Network, "reset").await.unwrap();
        farm.database.execute("UPDATE ci.session SET streak = 0").await;
        wait(&farm, &[&node]).await;
        claim = farm.claim(&node).await;
    }
    node.fail(claim.fence, Failure::Network, "reset").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "failed");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_build_error_is_final() {
    let (farm, _, node, claim) = running(1).await;
    node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    assert_eq!(farm.state(claim.fence.job).await, "failed");
}

#[tokio::test]
async fn a_retry_avoids_the_node_that_failed_it() {
    let (farm, pool, node, claim) = running(1).await;
    let other = farm.node(&pool, "other").await;
    node.fail(claim.fence, Failure::DiskFull, "no space").await.unwrap();
    wait(&farm, &[&node, &other]).await;
    assert!(node.claim(1).await.unwrap().is_empty());
    assert_eq!(farm.claim(&other).await.fence.job, claim.fence.job);
}

#[tokio::test]
async fn a_retry_avoids_the_node_in_a_project_of_several_systems_too() {
    let (farm, pool, node, claim) = running(1).await;
    let foreign = Node { system: "aarch64-linux".into(), ..derivation("foreign", &[]) };
    farm.evaluate_nodes("main", vec![foreign]).await;
    let other = farm.node(&pool, "other").await;
    node.fail(claim.fence, Failure::DiskFull, "no space").await.unwrap();
    wait(&farm, &[&node, &other]).await;
    assert!(node.claim(1).await.unwrap().is_empty());
    assert_eq!(farm.claim(&other).await.fence.job, claim.fence.job);
}

#[tokio::test]
async fn a_retry_goes_back_to_the_node_that_failed_it_if_no_other_can() {
    let (farm, _, node, claim) = running(1).await;
    node.fail(claim.fence, Failure::DiskFull, "no space").await.unwrap();
    wait(&farm, &[&node]).await;
    assert_eq!(farm.claim(&node).await.fence.job, claim.fence.job);
}

#[tokio::test]
async fn a_retry_stops_avoiding_a_node_when_the_last_other_one_goes() {
    let (farm, pool, node, claim) = running(1).await;
    let other = farm.node(&pool, "other").await;
    node.fail(claim.fence, Failure::DiskFull, "no space").await.unwrap();
    wait(&farm, &[&node, &other]).await;
    people::drain(&farm.operator, farm.node_of(&other).await, "cordoned", None).await.unwrap();
    farm.pass(1.0).await;
    assert_eq!(farm.claim(&node).await.fence.job, claim.fence.job);
}

/// Three builds that a node fails for reasons of its own, one after the other.
async fn three_failures(kind: Failure) -> (Farm, PoolHandle, Session) {
    let (farm, pool, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[])]).await;
    for _ in 0..3 {
        let claim = farm.claim(&node).await;
        node.fail(claim.fence, kind, "no space").await.unwrap();
    }
    (farm, pool, node)
}

#[tokio::test]
async fn a_node_that_failed_three_builds_in_a_row_stops_claiming_and_says_so() {
    let (_farm, _, node) = three_failures(Failure::DiskFull).await;
    assert!(node.claim(1).await.unwrap().is_empty());
    let notice = node.heartbeat(&[], None).await.unwrap().notice.unwrap();
    assert!(notice.contains("3 builds in a row"), "{notice}");
}

#[tokio::test]
async fn builds_that_fail_by_themselves_are_not_the_nodes_fault() {
    let (_farm, _, node) = three_failures(Failure::BuildError).await;
    assert_eq!(node.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_node_that_registers_anew_claims_again() {
    let (farm, pool, _) = three_failures(Failure::DiskFull).await;
    let again = farm.node(&pool, "node").await;
    assert_eq!(again.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_success_forgives_a_node_its_failures() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[])]).await;
    for fails in [true, true, false, true] {
        let claim = farm.claim(&node).await;
        match fails {
            true => assert!(node.fail(claim.fence, Failure::Oom, "killed").await.unwrap()),
            false => {
                farm.succeed(&node, &claim).await;
                farm.pass(1.0).await;
            }
        }
    }
    assert!(node.heartbeat(&[], None).await.unwrap().notice.is_none());
}
