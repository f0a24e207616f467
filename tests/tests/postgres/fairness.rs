//! Who gets the builders' time, and the limits of projects.

use std::collections::HashSet;

use futures::future::join_all;
use harmonia_queue::builder::{Failure, Session};
use harmonia_queue::ingest::Node;
use harmonia_queue::janitor;
use harmonia_queue::people::{Pool, Project};
use harmonia_tests::farm::{Farm, SYSTEM, derivation, name};

/// So many leaves that nobody else wants.
async fn backlog(farm: &Farm, project: &str, count: usize) {
    let leaf = |n| derivation(&format!("{project}{n}"), &[]);
    farm.evaluate_nodes(project, (0..count).map(leaf).collect()).await;
    farm.settle().await;
}

/// `main` and `other`, each with a backlog.
async fn rivals(slots: i32) -> (Farm, Session) {
    let (farm, _, node) = Farm::small(slots).await;
    farm.project("other").await;
    backlog(&farm, "main", 8).await;
    backlog(&farm, "other", 8).await;
    (farm, node)
}

async fn set_used(farm: &Farm, project: &str, seconds: f64) {
    let update = "UPDATE ci.lane l SET used = $2 FROM ci.project p WHERE p.id = l.project_id AND p.name = $1";
    sqlx::query(update).bind(project).bind(seconds).execute(&farm.database.admin()).await.unwrap();
    farm.database.execute("SELECT ci.rank()").await;
    farm.pass(1.0).await;
}

/// Settled use of `main`.
async fn used(farm: &Farm) -> f64 {
    farm.value("SELECT sum(used) FROM ci.lane WHERE project_id = $1::int", 1).await
}

/// How many of up to `want` claims go to `main`.
async fn share_of_main(farm: &Farm, node: &Session, want: i32) -> usize {
    farm.claim_names(node, want).await.iter().filter(|name| name.starts_with("main")).count()
}

async fn limit(farm: &Farm, most: Option<i32>) {
    farm.put_project(Project { max_concurrent: most, ..Project::new("main") }).await;
    farm.settle().await;
}

#[tokio::test]
async fn the_project_that_used_less_goes_first() {
    let (farm, node) = rivals(1).await;
    set_used(&farm, "main", 100.0).await;
    assert_eq!(share_of_main(&farm, &node, 1).await, 0);
}

#[tokio::test]
async fn use_is_counted_per_share() {
    let (farm, node) = rivals(1).await;
    farm.put_project(Project { shares: 300, ..Project::new("main") }).await;
    set_used(&farm, "other", 100.0).await;
    set_used(&farm, "main", 200.0).await;
    assert_eq!(share_of_main(&farm, &node, 1).await, 1);
}

#[tokio::test]
async fn a_claim_is_charged_while_it_runs() {
    let (farm, node) = rivals(2).await;
    let first = farm.claim(&node).await;
    farm.pass(1.0).await;
    let second = farm.claim(&node).await;
    assert_ne!(name(&first)[..4], name(&second)[..4]);
}

#[tokio::test]
async fn a_build_that_runs_longer_than_expected_weighs_more() {
    let (farm, _, node) = Farm::small(1).await;
    backlog(&farm, "main", 1).await;
    farm.claim(&node).await;
    farm.pass(500.0).await;
    assert_eq!(farm.value::<f64>("SELECT inflight FROM ci.lane WHERE project_id = $1::int", 1).await, 500.0);
}

#[tokio::test]
async fn the_charge_is_corrected_at_the_end() {
    let (farm, _, node) = Farm::small(1).await;
    backlog(&farm, "main", 1).await;
    let claim = farm.claim(&node).await;
    farm.pass(7.0).await;
    farm.succeed(&node, &claim).await;
    farm.pass(1.0).await;
    assert_eq!(used(&farm).await, 7.0);
    assert_eq!(farm.value::<f64>("SELECT inflight FROM ci.lane WHERE project_id = $1::int", 1).await, 0.0);
}

#[tokio::test]
async fn a_failed_build_is_paid_too() {
    let (farm, _, node) = Farm::small(1).await;
    backlog(&farm, "main", 1).await;
    let claim = farm.claim(&node).await;
    farm.pass(7.0).await;
    node.fail(claim.fence, Failure::BuildError, "no").await.unwrap();
    farm.pass(1.0).await;
    assert_eq!(used(&farm).await, 7.0);
}

#[tokio::test]
async fn interrupted_time_is_free() {
    let (farm, _, node) = Farm::small(1).await;
    backlog(&farm, "main", 1).await;
    let claim = farm.claim(&node).await;
    farm.pass(100.0).await;
    node.give_back(&[claim.fence], "drained").await.unwrap();
    farm.pass(1.0).await;
    assert_eq!(used(&farm).await, 0.0);
}

#[tokio::test]
async fn the_time_of_an_upload_is_free() {
    let (farm, _, node) = Farm::small(1).await;
    backlog(&farm, "main", 1).await;
    let claim = farm.claim(&node).await;
    farm.pass(7.0).await;
    node.start_upload(&[claim.fence]).await.unwrap();
    farm.pass(100.0).await;
    farm.succeed(&node, &claim).await;
    farm.pass(1.0).await;
    assert_eq!(used(&farm).await, 7.0);
}

#[tokio::test]
async fn a_project_that_wakes_up_joins_at_the_least_of_the_active() {
    let (farm, _, node) = Farm::small(1).await;
    farm.project("other").await;
    backlog(&farm, "other", 2).await;
    set_used(&farm, "other", 500.0).await;
    backlog(&farm, "main", 1).await;
    assert_eq!(used(&farm).await, 500.0);
    drop(node);
}

#[tokio::test]
async fn a_project_that_wakes_up_keeps_what_it_used_if_that_is_more() {
    let (farm, _, node) = Farm::small(1).await;
    farm.project("other").await;
    backlog(&farm, "main", 1).await;
    farm.build_all(&node).await;
    set_used(&farm, "main", 800.0).await;
    backlog(&farm, "other", 2).await;
    set_used(&farm, "other", 500.0).await;
    let again = derivation("again", &[]);
    farm.evaluate_nodes("main", vec![again]).await;
    farm.settle().await;
    assert_eq!(used(&farm).await, 800.0);
}

#[tokio::test]
async fn use_on_machines_that_a_node_cannot_be_does_not_count_for_it() {
    let (farm, node) = rivals(1).await;
    let arm = Node { system: "aarch64-linux".into(), ..derivation("arm", &[]) };
    farm.evaluate_nodes("main", vec![arm]).await;
    farm.settle().await;
    set_used(&farm, "other", 50.0).await;
    let foreign = "UPDATE ci.lane l SET used = 1000 FROM ci.class c WHERE c.id = l.class_id AND c.system = 'aarch64-linux'; SELECT ci.rank()";
    farm.database.execute(foreign).await;
    farm.pass(1.0).await;
    assert_eq!(share_of_main(&farm, &node, 1).await, 1);
}

#[tokio::test]
async fn a_batch_that_one_project_cannot_fill_is_filled_by_the_others() {
    let (farm, _, node) = Farm::small(6).await;
    farm.project("other").await;
    backlog(&farm, "main", 1).await;
    backlog(&farm, "other", 8).await;
    set_used(&farm, "other", 1_000_000.0).await;
    assert_eq!(farm.claim_names(&node, 6).await.len(), 6);
}

#[tokio::test]
async fn a_batch_is_spread_as_if_it_were_picked_one_by_one() {
    let (farm, node) = rivals(6).await;
    assert_eq!(share_of_main(&farm, &node, 6).await, 3);
}

#[tokio::test]
async fn a_batch_goes_to_the_project_that_is_far_behind() {
    let (farm, node) = rivals(6).await;
    set_used(&farm, "other", 1_000_000.0).await;
    assert_eq!(share_of_main(&farm, &node, 6).await, 6);
}

#[tokio::test]
async fn a_batch_takes_from_others_what_a_project_lacks() {
    let (farm, _, node) = Farm::small(6).await;
    farm.project("other").await;
    backlog(&farm, "main", 1).await;
    backlog(&farm, "other", 8).await;
    assert_eq!(share_of_main(&farm, &node, 6).await, 1);
    assert_eq!(farm.value::<i64>("SELECT count(*) FROM ci.running WHERE $1 = 0", 0).await, 6);
}

#[tokio::test]
async fn use_is_forgotten_by_a_twentieth_an_hour() {
    let (farm, ..) = Farm::small(1).await;
    backlog(&farm, "main", 1).await;
    let lead = farm.lead().await;
    set_used(&farm, "main", 1000.0).await;
    // The template that this database was cloned from may be some minutes old.
    farm.database.execute("UPDATE ci.resolver SET decayed_at = ci.clock()").await;
    farm.advance(3500.0).await;
    assert_eq!(janitor::decay(&farm.operator, lead.generation).await.unwrap(), 0);
    farm.advance(2.0 * 3600.0).await;
    assert_eq!(janitor::decay(&farm.operator, lead.generation).await.unwrap(), 2);
    assert!((used(&farm).await - 1000.0 * 0.95 * 0.95).abs() < 1e-6);
}

#[tokio::test]
async fn a_claim_is_charged_what_builds_of_that_name_took() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("hello-1.0", &[])]).await;
    let claim = farm.claim(&node).await;
    farm.advance(300.0).await;
    farm.succeed(&node, &claim).await;
    farm.pass(1.0).await;
    farm.queue("main", &[("hello-1.1", &[])]).await;
    assert_eq!(farm.claim(&node).await.estimate.map(|estimate| estimate.as_secs()), Some(300));
}

#[tokio::test]
async fn a_node_that_builds_faster_than_the_fleet_is_known_for_it() {
    let (farm, _, node) = Farm::small(1).await;
    for (version, seconds) in [("1", 100.0), ("2", 100.0), ("3", 100.0), ("4", 10.0)] {
        farm.queue("main", &[(&format!("hello-{version}"), &[])]).await;
        let claim = farm.claim(&node).await;
        farm.advance(seconds).await;
        farm.succeed(&node, &claim).await;
        farm.pass(1.0).await;
    }
    let id = i64::from(farm.node_of(&node).await);
    assert!(farm.value::<f32>("SELECT speed FROM ci.node WHERE id = $1", id).await > 1.0);
}

// --- limits

#[tokio::test]
async fn sixteen_simultaneous_claimers_do_not_exceed_a_limit() {
    let (farm, pool, _) = Farm::small(4).await;
    limit(&farm, Some(5)).await;
    backlog(&farm, "main", 60).await;
    let nodes = join_all((0..16).map(|n| {
        let (farm, pool) = (&farm, &pool);
        async move { farm.node(pool, &format!("node{n}")).await }
    }))
    .await;
    farm.settle().await;
    let claims = join_all(nodes.iter().map(|node| node.claim(3))).await;
    let jobs: Vec<i64> = claims.into_iter().flatten().flatten().map(|claim| claim.fence.job).collect();
    assert!(!jobs.is_empty() && jobs.len() <= 5, "{jobs:?}");
    assert_eq!(jobs.iter().collect::<HashSet<_>>().len(), jobs.len());
    // Whoever came too late finds what those that were passed over left.
    let mut more = 0;
    for node in &nodes {
        more += node.claim(1).await.unwrap().len();
    }
    assert_eq!(jobs.len() + more, 5);
    farm.assert_sound().await;
}

#[tokio::test]
async fn the_end_of_a_build_makes_room_under_a_limit() {
    let (farm, _, node) = Farm::small(4).await;
    limit(&farm, Some(1)).await;
    backlog(&farm, "main", 3).await;
    let claim = farm.claim(&node).await;
    assert!(node.claim(4).await.unwrap().is_empty());
    farm.succeed(&node, &claim).await;
    assert_eq!(node.claim(4).await.unwrap().len(), 1);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_limit_that_is_set_counts_builds_that_run_already() {
    let (farm, _, node) = Farm::small(4).await;
    backlog(&farm, "main", 4).await;
    let claims = node.claim(2).await.unwrap();
    limit(&farm, Some(2)).await;
    assert!(node.claim(2).await.unwrap().is_empty());
    farm.succeed(&node, &claims[0]).await;
    assert_eq!(node.claim(2).await.unwrap().len(), 1);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_limit_holds_from_the_moment_it_is_set() {
    let (farm, _, node) = Farm::small(4).await;
    backlog(&farm, "main", 4).await;
    farm.put_project(Project { max_concurrent: Some(1), ..Project::new("main") }).await;
    assert_eq!(node.claim(4).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_lowered_limit_lets_nothing_in_until_enough_builds_have_ended() {
    let (farm, _, node) = Farm::small(4).await;
    limit(&farm, Some(4)).await;
    backlog(&farm, "main", 8).await;
    let claims = node.claim(4).await.unwrap();
    limit(&farm, Some(2)).await;
    let mut running = 4;
    for claim in &claims[..3] {
        farm.succeed(&node, claim).await;
        running -= 1;
        running += node.claim(4).await.unwrap().len();
        assert!(running <= 2 || running <= 3 && claim.fence == claims[0].fence, "{running} run");
    }
    assert_eq!(running, 2);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_lowered_limit_counts_the_builds_that_were_claimed_last() {
    let (farm, _, node) = Farm::small(4).await;
    limit(&farm, Some(4)).await;
    backlog(&farm, "main", 8).await;
    let mut claims = Vec::new();
    for _ in 0..4 {
        claims.push(farm.claim(&node).await);
    }
    for claim in &claims[..2] {
        farm.succeed(&node, claim).await;
    }
    limit(&farm, Some(2)).await;
    assert!(node.claim(4).await.unwrap().is_empty());
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_limit_that_is_lifted_lets_everything_in() {
    let (farm, _, node) = Farm::small(4).await;
    limit(&farm, Some(1)).await;
    backlog(&farm, "main", 4).await;
    limit(&farm, None).await;
    assert_eq!(node.claim(4).await.unwrap().len(), 4);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_manual_build_that_a_node_cannot_take_gives_its_project_no_precedence() {
    let (farm, node) = rivals(2).await;
    let gpu = Pool {
        name: "gpu",
        login: "",
        systems: vec![SYSTEM.into()],
        features: Some(vec!["cuda".into()]),
        mandatory_features: vec!["cuda".into()],
        slots: 1,
        memory: 0,
    };
    let gpus = farm.put_pool(gpu).await;
    let cuda = Node { features: vec!["cuda".into()], ..derivation("cuda", &[]) };
    let jobs = farm.evaluate_nodes("main", vec![cuda]).await;
    let capable = farm.node(&gpus, "gpu").await;
    farm.settle().await;
    let claim = farm.claim(&capable).await;
    capable.fail(claim.fence, Failure::BuildError, "no").await.unwrap();
    harmonia_queue::people::rebuild(&farm.frontend, jobs["cuda"]).await.unwrap();
    farm.settle().await;
    set_used(&farm, "main", 1000.0).await;
    assert_eq!(share_of_main(&farm, &node, 1).await, 0);
}
