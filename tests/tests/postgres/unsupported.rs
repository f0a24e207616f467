//! Jobs that nobody can run: how long they wait, what they say, and what opens them again.

use harmonia_queue::ingest::Node;
use harmonia_queue::janitor;
use harmonia_queue::leader::Leadership;
use harmonia_queue::people;
use harmonia_tests::farm::{Evaluation, Farm, SYSTEM, derivation};

const HALF_AN_HOUR: f64 = 1800.0;

/// A job for a system that no pool has.
async fn foreign() -> (Farm, Evaluation, Leadership) {
    let (farm, ..) = Farm::small(1).await;
    let lead = farm.lead().await;
    let arm = Node { system: "aarch64-linux".into(), ..derivation("arm", &[]) };
    let jobs = farm.evaluate_nodes("main", vec![arm, derivation("top", &["arm"])]).await;
    farm.settle().await;
    (farm, jobs, lead)
}

async fn judge(farm: &Farm, lead: &Leadership) -> i32 {
    let failed = janitor::fail_unsupported(&farm.operator, lead.generation).await.unwrap();
    farm.settle().await;
    failed
}

#[tokio::test]
async fn a_job_that_nobody_can_run_waits_for_half_an_hour() {
    let (farm, jobs, lead) = foreign().await;
    farm.advance(HALF_AN_HOUR).await;
    assert_eq!(judge(&farm, &lead).await, 0);
    farm.advance(1.0).await;
    assert_eq!(judge(&farm, &lead).await, 1);
    assert_eq!(farm.state(jobs["arm"]).await, "failed");
    assert_eq!(farm.state(jobs["top"]).await, "dep_failed");
    farm.assert_sound().await;
}

#[tokio::test]
async fn its_sentence_names_the_system_that_is_missing() {
    let (farm, jobs, lead) = foreign().await;
    farm.advance(HALF_AN_HOUR + 1.0).await;
    judge(&farm, &lead).await;
    let error: String = farm.value("SELECT error FROM ci.job WHERE id = $1", jobs["arm"]).await;
    assert_eq!(error, "No pool or node builds for aarch64-linux.");
}

#[tokio::test]
async fn its_sentence_names_the_feature_that_is_missing() {
    let (farm, ..) = Farm::small(1).await;
    let lead = farm.lead().await;
    let vm = Node { features: vec!["kvm".into(), "big-parallel".into()], ..derivation("vm", &[]) };
    let jobs = farm.evaluate_nodes("main", vec![vm]).await;
    farm.settle().await;
    farm.advance(HALF_AN_HOUR + 1.0).await;
    judge(&farm, &lead).await;
    let error: String = farm.value("SELECT error FROM ci.job WHERE id = $1", jobs["vm"]).await;
    assert_eq!(error, "No pool or node for x86_64-linux offers the feature kvm.");
}

#[tokio::test]
async fn a_pool_without_a_node_counts() {
    let (farm, jobs, lead) = foreign().await;
    farm.pool("arm", &["aarch64-linux"], 1).await;
    farm.advance(10.0 * HALF_AN_HOUR).await;
    assert_eq!(judge(&farm, &lead).await, 0);
    assert_eq!(farm.state(jobs["arm"]).await, "ready");
}

#[tokio::test]
async fn a_node_that_lives_counts_although_its_pool_was_removed() {
    let (farm, jobs, lead) = foreign().await;
    let pool = farm.pool("arm", &["aarch64-linux"], 1).await;
    let node = farm.node(&pool, "arm").await;
    farm.settle().await;
    people::remove_pool(&farm.operator, "arm").await.unwrap();
    farm.advance(10.0 * HALF_AN_HOUR).await;
    node.heartbeat(&[], None).await.unwrap();
    assert_eq!(judge(&farm, &lead).await, 0);
    assert_eq!(farm.state(jobs["arm"]).await, "ready");
}

#[tokio::test]
async fn the_time_counts_from_the_last_pool_and_not_from_the_job() {
    let (farm, jobs, lead) = foreign().await;
    farm.pool("arm", &["aarch64-linux"], 1).await;
    farm.advance(10.0 * HALF_AN_HOUR).await;
    judge(&farm, &lead).await;
    people::remove_pool(&farm.operator, "arm").await.unwrap();
    farm.advance(HALF_AN_HOUR - 1.0).await;
    assert_eq!(judge(&farm, &lead).await, 0);
    farm.advance(2.0).await;
    assert_eq!(judge(&farm, &lead).await, 1);
    assert_eq!(farm.state(jobs["arm"]).await, "failed");
}

#[tokio::test]
async fn what_others_can_run_is_not_touched() {
    let (farm, ..) = Farm::small(1).await;
    let lead = farm.lead().await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    farm.advance(10.0 * HALF_AN_HOUR).await;
    assert_eq!(judge(&farm, &lead).await, 0);
    assert_eq!(farm.state(jobs["leaf"]).await, "ready");
}

#[tokio::test]
async fn a_pool_that_appears_opens_what_had_failed_for_want_of_one() {
    let (farm, jobs, lead) = foreign().await;
    farm.advance(HALF_AN_HOUR + 1.0).await;
    judge(&farm, &lead).await;
    let pool = farm.pool("arm", &["aarch64-linux", SYSTEM], 1).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["arm"]).await, "ready");
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    let node = farm.node(&pool, "arm").await;
    farm.settle().await;
    assert_eq!(farm.build_all(&node).await, ["arm", "top"]);
}

#[tokio::test]
async fn a_pool_that_appears_opens_nothing_that_nobody_wants() {
    let (farm, jobs, lead) = foreign().await;
    farm.advance(HALF_AN_HOUR + 1.0).await;
    judge(&farm, &lead).await;
    people::end_evaluation(&farm.operator, jobs.id, people::Ending::Cancelled, None).await.unwrap();
    farm.settle().await;
    farm.pool("arm", &["aarch64-linux"], 1).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["arm"]).await, "failed");
}

#[tokio::test]
async fn only_the_leader_fails_what_nobody_can_run() {
    let (farm, _, lead) = foreign().await;
    let refused = janitor::fail_unsupported(&farm.operator, lead.generation + 1).await.unwrap_err();
    assert!(matches!(&refused, harmonia_queue::Error::NotLeader(_)), "{refused:?}");
}
