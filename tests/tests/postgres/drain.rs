//! Draining: a set of reasons, some the node's, one the session's; nothing is claimed while there is any.

use std::time::Duration;

use harmonia_queue::builder::Session;
use harmonia_queue::people;
use harmonia_tests::farm::Farm;

async fn backlog() -> (Farm, harmonia_tests::farm::PoolHandle, Session, i32) {
    let (farm, pool, node) = Farm::small(2).await;
    farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    let id = farm.node_of(&node).await;
    (farm, pool, node, id)
}

async fn drain(farm: &Farm, node: i32, reason: &str, seconds: Option<u64>) {
    people::drain(&farm.operator, node, reason, seconds.map(Duration::from_secs)).await.unwrap();
}

async fn reasons(node: &Session) -> Vec<String> {
    let pulse = node.heartbeat(&[], None).await.unwrap();
    pulse.drains.into_iter().map(|(reason, _)| reason).collect()
}

#[tokio::test]
async fn a_draining_node_claims_nothing() {
    let (farm, _, node, id) = backlog().await;
    drain(&farm, id, "cordoned", None).await;
    assert!(node.claim(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_draining_node_finishes_what_it_has() {
    let (farm, _, node, id) = backlog().await;
    let claim = farm.claim(&node).await;
    drain(&farm, id, "cordoned", None).await;
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
    farm.succeed(&node, &claim).await;
}

#[tokio::test]
async fn the_earliest_deadline_comes_first() {
    let (farm, _, node, id) = backlog().await;
    drain(&farm, id, "rollout", None).await;
    drain(&farm, id, "cordoned", Some(600)).await;
    drain(&farm, id, "spot", Some(30)).await;
    let drains = node.heartbeat(&[], None).await.unwrap().drains;
    let expected = [("spot", Some(30)), ("cordoned", Some(600)), ("rollout", None)];
    let expected = expected.map(|(reason, left)| (reason.to_owned(), left.map(Duration::from_secs)));
    assert_eq!(drains, expected);
}

#[tokio::test]
async fn a_reason_that_is_given_again_moves_its_deadline() {
    let (farm, _, node, id) = backlog().await;
    drain(&farm, id, "cordoned", Some(600)).await;
    drain(&farm, id, "cordoned", Some(60)).await;
    let drains = node.heartbeat(&[], None).await.unwrap().drains;
    assert_eq!(drains, [("cordoned".to_owned(), Some(Duration::from_secs(60)))]);
}

#[tokio::test]
async fn resume_takes_back_one_reason_only() {
    let (farm, _, node, id) = backlog().await;
    drain(&farm, id, "cordoned", None).await;
    drain(&farm, id, "scale-in", None).await;
    assert!(people::resume(&farm.operator, id, "cordoned").await.unwrap());
    assert!(!people::resume(&farm.operator, id, "cordoned").await.unwrap());
    assert_eq!(reasons(&node).await, ["scale-in"]);
    assert!(node.claim(1).await.unwrap().is_empty());
    people::resume(&farm.operator, id, "scale-in").await.unwrap();
    assert_eq!(node.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_new_session_of_a_drained_node_is_born_draining() {
    let (farm, pool, _, id) = backlog().await;
    drain(&farm, id, "cordoned", None).await;
    let again = farm.node(&pool, "node").await;
    assert_eq!(reasons(&again).await, ["cordoned"]);
    assert!(again.claim(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_reason_of_a_sigterm_goes_with_its_session() {
    let (farm, pool, node, _) = backlog().await;
    node.heartbeat(&[], Some(Duration::from_secs(30))).await.unwrap();
    assert!(node.claim(1).await.unwrap().is_empty());
    let again = farm.node(&pool, "node").await;
    assert!(reasons(&again).await.is_empty());
    assert_eq!(again.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_person_cannot_take_back_a_sigterm() {
    let (farm, _, node, id) = backlog().await;
    node.heartbeat(&[], Some(Duration::from_secs(30))).await.unwrap();
    assert!(!people::resume(&farm.operator, id, "SIGTERM").await.unwrap());
    assert!(node.claim(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn only_idle_nodes_are_marked_for_scale_in() {
    let (farm, pool, node, busy) = backlog().await;
    let idle = farm.node(&pool, "idle").await;
    let idle_id = farm.node_of(&idle).await;
    farm.claim(&node).await;
    let marked = people::drain_idle(&farm.operator, &[busy, idle_id], "scale-in").await.unwrap();
    assert_eq!(marked, [idle_id]);
    assert!(idle.claim(1).await.unwrap().is_empty());
    assert_eq!(node.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_node_that_does_not_exist_cannot_be_drained() {
    let (farm, ..) = backlog().await;
    let refused = people::drain(&farm.operator, 4711, "cordoned", None).await.unwrap_err();
    assert!(matches!(&refused, harmonia_queue::Error::NotFound(_)), "{refused:?}");
}
