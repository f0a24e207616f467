//! Leases: what keeps a claim alive, and who takes it back when nothing does.

use std::time::Duration;

use harmonia_queue::builder::{Claim, Session};
use harmonia_queue::leader::{self, Leadership, Office};
use harmonia_queue::replica::Replica;
use harmonia_queue::{Error, janitor};
use harmonia_tests::farm::{Farm, PoolHandle};
use uuid::Uuid;

/// A build that runs under a janitor that has led for longer than a lease.
async fn led() -> (Farm, PoolHandle, Session, Claim, Leadership) {
    let (farm, pool, node) = Farm::small(2).await;
    let lead = farm.lead().await;
    farm.advance(121.0).await;
    node.heartbeat(&[], None).await.unwrap();
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    (farm, pool, node, claim, lead)
}

async fn reap(farm: &Farm, lead: &Leadership) -> i32 {
    let reaped = janitor::reap(&farm.operator, lead.generation).await.unwrap();
    farm.settle().await;
    reaped
}

async fn counts(farm: &Farm, claim: &Claim) -> (i16, i16) {
    let job = claim.fence.job;
    let retries = farm.value("SELECT retries FROM ci.job WHERE id = $1", job).await;
    (retries, farm.value("SELECT interruptions FROM ci.job WHERE id = $1", job).await)
}

#[tokio::test]
async fn a_heartbeat_keeps_what_it_names() {
    let (farm, _, node, claim, lead) = led().await;
    for _ in 0..5 {
        farm.advance(100.0).await;
        assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
        assert_eq!(reap(&farm, &lead).await, 0);
    }
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_build_of_a_dead_node_is_taken_back_as_a_failure() {
    let (farm, _, _, claim, lead) = led().await;
    farm.advance(121.0).await;
    assert_eq!(reap(&farm, &lead).await, 1);
    assert_eq!(counts(&farm, &claim).await, (1, 0));
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_build_of_a_dead_node_is_ready_for_another_at_once() {
    let (farm, pool, _, claim, lead) = led().await;
    let other = farm.node(&pool, "other").await;
    farm.advance(121.0).await;
    other.heartbeat(&[], None).await.unwrap();
    assert_eq!(reap(&farm, &lead).await, 1);
    assert_eq!(farm.claim(&other).await.fence.job, claim.fence.job);
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_is_taken_back_as_an_interruption() {
    let (farm, _, node, claim, lead) = led().await;
    farm.advance(100.0).await;
    node.heartbeat(&[], None).await.unwrap();
    farm.advance(21.0).await;
    assert_eq!(reap(&farm, &lead).await, 1);
    assert_eq!(counts(&farm, &claim).await, (0, 1));
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_heartbeat_revives_a_lease_that_nobody_has_reaped() {
    let (farm, _, node, claim, lead) = led().await;
    farm.advance(300.0).await;
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
    assert_eq!(reap(&farm, &lead).await, 0);
    assert_eq!(counts(&farm, &claim).await, (0, 0));
}

#[tokio::test]
async fn a_reaper_judges_nothing_until_it_has_led_for_a_lease() {
    let (farm, _, node, claim, lead) = led().await;
    lead.release().await.unwrap();
    farm.advance(300.0).await;
    let lead = farm.lead().await;
    assert_eq!(reap(&farm, &lead).await, 0);
    farm.advance(30.0).await;
    node.heartbeat(&[claim.fence], None).await.unwrap();
    farm.advance(91.0).await;
    assert_eq!(reap(&farm, &lead).await, 0);
    assert_eq!(counts(&farm, &claim).await, (0, 0));
}

#[tokio::test]
async fn a_clock_that_jumped_costs_no_attempt() {
    let (farm, _, node, claim, lead) = led().await;
    // Nobody looked meanwhile: the machine slept.
    farm.database.advance(3600.0).await;
    assert_eq!(reap(&farm, &lead).await, 0);
    farm.advance(119.0).await;
    assert_eq!(reap(&farm, &lead).await, 0);
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
    farm.advance(2.0).await;
    assert_eq!(reap(&farm, &lead).await, 0);
    assert_eq!(counts(&farm, &claim).await, (0, 0));
}

#[tokio::test]
async fn an_accepted_result_outlives_its_lease() {
    let (farm, _, node, claim, lead) = led().await;
    farm.accept(&node, &claim).await;
    farm.advance(300.0).await;
    assert_eq!(reap(&farm, &lead).await, 0);
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn a_node_that_comes_back_after_its_lease_is_told_to_abandon() {
    let (farm, pool, node, claim, lead) = led().await;
    farm.advance(121.0).await;
    reap(&farm, &lead).await;
    assert!(matches!(node.heartbeat(&[claim.fence], None).await.unwrap_err(), Error::SessionOver(_)));
    let again = farm.node(&pool, "node").await;
    assert_eq!(again.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
}

#[tokio::test]
async fn only_the_leader_reaps() {
    let (farm, .., lead) = led().await;
    let refused = janitor::reap(&farm.operator, lead.generation - 1).await.unwrap_err();
    assert!(matches!(&refused, Error::NotLeader(_)), "{refused:?}");
}

#[tokio::test]
async fn a_leader_whose_connection_has_ended_judges_nothing() {
    let (farm, .., lead) = led().await;
    let generation = lead.generation;
    lead.release().await.unwrap();
    while leader::current(&farm.operator, Office::Janitor).await.unwrap().held {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let refused = janitor::reap(&farm.operator, generation).await.unwrap_err();
    assert!(matches!(&refused, Error::NotLeader(_)), "{refused:?}");
}

#[tokio::test]
async fn nobody_leads_without_the_lock() {
    let (farm, ..) = Farm::small(1).await;
    let lead =
        sqlx::query("SELECT ci.lead('janitor', gen_random_uuid())").execute(&farm.database.admin()).await;
    let refused = Error::from(lead.unwrap_err());
    assert!(matches!(&refused, Error::NotLeader(_)), "{refused:?}");
}

#[tokio::test]
async fn a_node_that_signs_off_gives_back_what_it_holds() {
    let (farm, _, node, claim, _lead) = led().await;
    assert_eq!(node.deregister().await.unwrap(), 1);
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "ready");
    assert_eq!(counts(&farm, &claim).await, (0, 1));
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_node_that_signs_off_leaves_accepted_results_to_the_signers() {
    let (farm, _, node, claim, _lead) = led().await;
    farm.accept(&node, &claim).await;
    assert_eq!(node.deregister().await.unwrap(), 0);
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn a_heartbeat_names_the_signers_that_live() {
    let (farm, _, node) = Farm::small(1).await;
    let replica = |n: u128, role: &str| Replica {
        id: Uuid::from_u128(n),
        role: role.into(),
        url: format!("http://replica-{n}"),
    };
    replica(1, "signer").beat(&farm.signer).await.unwrap();
    replica(2, "frontend").beat(&farm.frontend).await.unwrap();
    replica(4, "up").beat(&farm.operator).await.unwrap();
    farm.advance(20.0).await;
    replica(3, "signer").beat(&farm.signer).await.unwrap();
    let signers = node.heartbeat(&[], None).await.unwrap().signers;
    assert_eq!(signers, ["http://replica-1", "http://replica-3"]);
    farm.advance(15.0).await;
    assert_eq!(node.heartbeat(&[], None).await.unwrap().signers, ["http://replica-3"]);
}

#[tokio::test]
async fn the_time_left_is_told_by_the_clock_of_the_database() {
    let (farm, _, node) = Farm::small(1).await;
    node.heartbeat(&[], Some(Duration::from_secs(600))).await.unwrap();
    farm.advance(60.0).await;
    let pulse = node.heartbeat(&[], None).await.unwrap();
    assert_eq!(pulse.drains, [("SIGTERM".to_owned(), Some(Duration::from_secs(540)))]);
}
