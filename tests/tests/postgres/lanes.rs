//! One job, many lanes: it is claimable through every project that wants it, and paid by the one it was claimed through.

use harmonia_queue::builder::{Claim, Session};
use harmonia_queue::ingest::Ingest;
use harmonia_queue::people::{self, Project};
use harmonia_tests::farm::{Evaluation, Farm, PoolHandle, SYSTEM, derivation, drv_path};

/// Two projects that want the same derivation, and one node.
async fn shared() -> (Farm, Session, Evaluation) {
    let (farm, _, node) = Farm::small(4).await;
    farm.project("other").await;
    farm.evaluate("main", &[("shared", &[])]).await;
    let jobs = farm.queue("other", &[("shared", &[])]).await;
    (farm, node, jobs)
}

async fn payer(farm: &Farm, claim: &Claim) -> String {
    let sql = "SELECT p.name FROM ci.running r JOIN ci.lane l ON l.id = r.lane_id JOIN ci.project p ON p.id = l.project_id WHERE r.job_id = $1";
    farm.value(sql, claim.fence.job).await
}

/// A change from outside to the project, with one derivation.
async fn outside_change(farm: &Farm, project: &str, name: &str) {
    let mut change = Ingest::begin(&farm.evaluator, project, "git", None, None, true).await.unwrap();
    change.add(vec![derivation(name, &[])]).await.unwrap();
    change.complete(&[]).await.unwrap();
    farm.settle().await;
}

async fn two_pools() -> (Farm, PoolHandle, PoolHandle) {
    let farm = Farm::new().await;
    farm.freeze().await;
    let inner = farm.pool("inner", &[SYSTEM], 4).await;
    let outer = farm.pool("outer", &[SYSTEM], 4).await;
    (farm, inner, outer)
}

#[tokio::test]
async fn a_shared_job_is_one_job_with_a_lane_in_each_project() {
    let (farm, node, jobs) = shared().await;
    let lanes = "SELECT count(*) FROM ci.offer WHERE job_id = $1";
    assert_eq!(farm.value::<i64>(lanes, jobs["shared"]).await, 2);
    assert_eq!(node.claim(4).await.unwrap().len(), 1);
    assert_eq!(farm.value::<i64>(lanes, jobs["shared"]).await, 0);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_shared_job_takes_the_best_rank_and_is_paid_by_that_project() {
    let (farm, node, _) = shared().await;
    farm.database.execute("UPDATE ci.lane SET used = 1000 WHERE project_id = 1; SELECT ci.rank()").await;
    farm.pass(1.0).await;
    let claim = farm.claim(&node).await;
    assert_eq!(payer(&farm, &claim).await, "other");
}

#[tokio::test]
async fn a_paused_project_does_not_hold_up_a_shared_job() {
    let (farm, node, _) = shared().await;
    farm.put_project(Project { paused: true, ..Project::new("main") }).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    assert_eq!(payer(&farm, &claim).await, "other");
    farm.assert_sound().await;
}

#[tokio::test]
async fn nothing_is_claimed_for_a_paused_project() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    farm.put_project(Project { paused: true, ..Project::new("main") }).await;
    farm.settle().await;
    assert!(node.claim(1).await.unwrap().is_empty());
    farm.put_project(Project::new("main")).await;
    farm.settle().await;
    assert_eq!(node.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_project_at_its_limit_does_not_hold_up_a_shared_job() {
    let (farm, node, _) = shared().await;
    farm.put_project(Project { max_concurrent: Some(0), ..Project::new("main") }).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    assert_eq!(payer(&farm, &claim).await, "other");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_removed_project_leaves_a_shared_job_to_the_others() {
    let (farm, node, _) = shared().await;
    people::remove_project(&farm.operator, "main").await.unwrap();
    farm.settle().await;
    let claim = farm.claim(&node).await;
    assert_eq!(payer(&farm, &claim).await, "other");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_only_a_removed_project_wanted_is_cancelled() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    assert!(people::remove_project(&farm.operator, "main").await.unwrap());
    farm.settle().await;
    assert_eq!(farm.state(jobs["leaf"]).await, "cancelled");
}

#[tokio::test]
async fn a_ready_job_gains_a_lane_when_another_project_wants_it() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("shared", &[])]).await;
    farm.put_project(Project { paused: true, ..Project::new("main") }).await;
    farm.project("other").await;
    farm.queue("other", &[("shared", &[])]).await;
    let claim = farm.claim(&node).await;
    assert_eq!(payer(&farm, &claim).await, "other");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_project_builds_only_in_its_pools() {
    let (farm, inner, outer) = two_pools().await;
    farm.put_project(Project { pools: Some(vec!["inner".into()]), ..Project::new("main") }).await;
    let (here, there) = (farm.node(&inner, "here").await, farm.node(&outer, "there").await);
    farm.queue("main", &[("leaf", &[])]).await;
    assert!(there.claim(1).await.unwrap().is_empty());
    assert_eq!(here.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_change_from_outside_builds_only_in_the_pools_for_it() {
    let (farm, inner, outer) = two_pools().await;
    farm.put_project(Project { untrusted_pools: vec!["outer".into()], ..Project::new("main") }).await;
    let (here, there) = (farm.node(&inner, "here").await, farm.node(&outer, "there").await);
    outside_change(&farm, "main", "fork").await;
    assert!(here.claim(1).await.unwrap().is_empty());
    assert_eq!(there.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_change_from_outside_builds_nowhere_unless_a_pool_is_named() {
    let (farm, _, node) = Farm::small(1).await;
    outside_change(&farm, "main", "fork").await;
    assert!(node.claim(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn what_a_trusted_evaluation_wants_is_never_built_among_the_untrusted() {
    let (farm, inner, outer) = two_pools().await;
    let pools = Some(vec!["inner".into()]);
    farm.put_project(Project { pools, untrusted_pools: vec!["outer".into()], ..Project::new("main") }).await;
    let (here, there) = (farm.node(&inner, "here").await, farm.node(&outer, "there").await);
    outside_change(&farm, "main", "shared").await;
    farm.queue("main", &[("shared", &[])]).await;
    assert!(there.claim(1).await.unwrap().is_empty());
    assert_eq!(here.claim(1).await.unwrap()[0].drv_path, drv_path("shared"));
    farm.assert_sound().await;
}

#[tokio::test]
async fn of_a_removed_project_only_what_has_not_ended_is_looked_at() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[])]).await;
    farm.build_all(&node).await;
    let open = farm.queue("main", &[("b", &[])]).await;
    assert!(people::remove_project(&farm.operator, "main").await.unwrap());
    let looked_at = "SELECT array_agg(subject) FROM ci.event WHERE kind = 'v' AND $1 = 0";
    assert_eq!(farm.value::<Vec<i64>>(looked_at, 0).await, [open.id]);
    farm.settle().await;
    assert_eq!(farm.state(open["b"]).await, "cancelled");
    farm.assert_sound().await;
}
