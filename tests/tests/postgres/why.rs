//! Why a job is not running: one sentence for each reason there is.

use harmonia_queue::builder::{Claim, Failure, Session};
use harmonia_queue::ingest::Node;
use harmonia_queue::people::{self, Project};
use harmonia_tests::farm::{Evaluation, Farm, PoolHandle, SYSTEM, derivation, drv_path, store_path};

/// The first reason, code and sentence.
async fn why(farm: &Farm, job: i64) -> (String, String) {
    people::why(&farm.frontend, job).await.unwrap().remove(0)
}

async fn explain(farm: &Farm, job: i64, code: &str, sentence: &str) {
    let reasons = people::why(&farm.frontend, job).await.unwrap();
    assert!(reasons.contains(&(code.to_owned(), sentence.to_owned())), "{reasons:?}");
}

async fn leaf() -> (Farm, PoolHandle, Session, Evaluation) {
    let (farm, pool, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    (farm, pool, node, jobs)
}

async fn running() -> (Farm, PoolHandle, Session, Claim) {
    let (farm, pool, node, _) = leaf().await;
    let claim = farm.claim(&node).await;
    farm.advance(42.0).await;
    (farm, pool, node, claim)
}

#[tokio::test]
async fn when_it_should_be_done_follows_from_its_name() {
    let (farm, _, _, claim) = running().await;
    farm.database.execute("INSERT INTO ci.duration VALUES ('leaf', '{762}', 762)").await;
    let sentence = "It is building on node, 42 s after it was claimed, done in about 12 minutes.";
    explain(&farm, claim.fence.job, "building", sentence).await;
    farm.advance(700.0).await;
    let sentence = "It is building on node, 742 s after it was claimed, done in about 20 s.";
    explain(&farm, claim.fence.job, "building", sentence).await;
    farm.advance(100.0).await;
    let sentence = "It is building on node, 842 s after it was claimed.";
    explain(&farm, claim.fence.job, "building", sentence).await;
}

#[tokio::test]
async fn how_long_a_name_takes_is_learnt_from_its_builds() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("gcc-13.2", &[])]).await;
    let first = farm.claim(&node).await;
    farm.advance(762.0).await;
    farm.succeed(&node, &first).await;
    farm.pass(2.0).await;
    let next = farm.queue("main", &[("gcc-14.1", &[]), ("top", &["gcc-14.1"])]).await;
    farm.claim(&node).await;
    let sentence = "It is building on node, 0 s after it was claimed, done in about 13 minutes.";
    explain(&farm, next["gcc-14.1"], "building", sentence).await;
    let (_, sentence) = why(&farm, next["top"]).await;
    assert!(sentence.ends_with("building on node for 0 s, done in about 13 minutes."), "{sentence}");
}

#[tokio::test]
async fn it_is_cached() {
    let (farm, ..) = Farm::small(1).await;
    let cached = Node { cached: true, aterm: None, ..derivation("libc", &[]) };
    let jobs = farm.evaluate_nodes("main", vec![cached]).await;
    explain(&farm, jobs["libc"], "cached", "A substituter has it: there is nothing to build.").await;
}

#[tokio::test]
async fn it_was_built() {
    let (farm, _, node, jobs) = leaf().await;
    farm.build_all(&node).await;
    let (code, sentence) = why(&farm, jobs["leaf"]).await;
    assert_eq!(code, "succeeded");
    assert!(sentence.starts_with("It was built; it ended at ") && sentence.ends_with(" UTC."), "{sentence}");
}

#[tokio::test]
async fn it_failed() {
    let (farm, _, node, claim) = running().await;
    node.fail(claim.fence, Failure::BuildError, "builder failed with exit code 1").await.unwrap();
    explain(&farm, claim.fence.job, "failed", "It failed: builder failed with exit code 1.").await;
}

#[tokio::test]
async fn an_input_failed() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("bad", &[]), ("top", &["bad"])]).await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, Failure::BuildError, "no").await.unwrap();
    farm.settle().await;
    let sentence = format!("It depends on {} (build {}), which failed.", drv_path("bad"), jobs["bad"]);
    explain(&farm, jobs["top"], "dep_failed", &sentence).await;
}

#[tokio::test]
async fn an_input_was_cancelled() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("bad", &[]), ("top", &["bad"])]).await;
    people::cancel(&farm.frontend, jobs["bad"]).await.unwrap();
    farm.settle().await;
    let sentence = format!("It depends on {} (build {}), which was cancelled.", drv_path("bad"), jobs["bad"]);
    explain(&farm, jobs["top"], "dep_failed", &sentence).await;
}

#[tokio::test]
async fn it_was_cancelled() {
    let (farm, .., jobs) = leaf().await;
    people::cancel(&farm.frontend, jobs["leaf"]).await.unwrap();
    explain(&farm, jobs["leaf"], "cancelled", "It was cancelled: cancelled by hand.").await;
}

#[tokio::test]
async fn it_is_building() {
    let (farm, .., claim) = running().await;
    explain(&farm, claim.fence.job, "building", "It is building on node, 42 s after it was claimed.").await;
}

#[tokio::test]
async fn it_is_building_and_will_be_stopped() {
    let (farm, .., claim) = running().await;
    people::cancel(&farm.frontend, claim.fence.job).await.unwrap();
    let sentence = "It is building on node, 42 s after it was claimed, and will be stopped.";
    explain(&farm, claim.fence.job, "building", sentence).await;
}

#[tokio::test]
async fn it_is_uploading() {
    let (farm, _, node, claim) = running().await;
    node.start_upload(&[claim.fence]).await.unwrap();
    let sentence = "It is uploading its outputs on node, 42 s after it was claimed.";
    explain(&farm, claim.fence.job, "uploading", sentence).await;
}

#[tokio::test]
async fn it_is_being_published() {
    let (farm, _, node, claim) = running().await;
    farm.accept(&node, &claim).await;
    let sentence = "It is being published on node, 42 s after it was claimed.";
    explain(&farm, claim.fence.job, "accepted", sentence).await;
}

#[tokio::test]
async fn it_waits_for_its_retry() {
    let (farm, _, node, claim) = running().await;
    node.fail(claim.fence, Failure::Network, "connection reset").await.unwrap();
    let (code, sentence) = why(&farm, claim.fence.job).await;
    assert_eq!(code, "retry");
    assert!(sentence.starts_with("Attempt 1 failed (connection reset); the next is due at "), "{sentence}");
}

#[tokio::test]
async fn its_retry_is_due() {
    let (farm, _, node, claim) = running().await;
    node.fail(claim.fence, Failure::Network, "connection reset").await.unwrap();
    farm.advance(31.0).await;
    let sentence = "It is about to be looked at by the resolver.";
    explain(&farm, claim.fence.job, "resolving", sentence).await;
}

#[tokio::test]
async fn it_was_just_evaluated() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.evaluate("main", &[("leaf", &[])]).await;
    let sentence = "It is about to be looked at by the resolver.";
    explain(&farm, jobs["leaf"], "resolving", sentence).await;
}

#[tokio::test]
async fn an_input_is_missing() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let path = store_path("leaf", "leaf");
    node.input_missing(claim.fence, &path).await.unwrap();
    farm.settle().await;
    let sentence = format!("Its input {path} could not be fetched; a signer will look for it.");
    explain(&farm, jobs["top"], "missing", &sentence).await;
}

#[tokio::test]
async fn it_waits_for_inputs() {
    let (farm, _, node) = Farm::small(1).await;
    let graph: &[(&str, &[&str])] = &[("a", &[]), ("deep", &["a"]), ("top", &["deep", "a"])];
    let jobs = farm.queue("main", graph).await;
    let waits = |state: &str| {
        let (path, id) = (drv_path("deep"), jobs["deep"]);
        format!("It waits for 2 inputs; the deepest is {path} (build {id}), which is {state}.")
    };
    explain(&farm, jobs["top"], "blocked", &waits("waiting itself")).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    let one = |state: &str| waits(state).replace("2 inputs", "1 inputs");
    explain(&farm, jobs["top"], "blocked", &one("ready to be claimed")).await;
    farm.claim(&node).await;
    farm.advance(9.0).await;
    explain(&farm, jobs["top"], "blocked", &one("building on node for 9 s")).await;
}

#[tokio::test]
async fn nobody_can_run_it() {
    let (farm, ..) = Farm::small(1).await;
    let arm = Node { system: "aarch64-linux".into(), ..derivation("arm", &[]) };
    let jobs = farm.evaluate_nodes("main", vec![arm]).await;
    farm.settle().await;
    let (code, sentence) = why(&farm, jobs["arm"]).await;
    assert_eq!(code, "unsupported");
    assert!(
        sentence.starts_with("No pool or node builds for aarch64-linux. It fails 30 minutes after"),
        "{sentence}"
    );
}

#[tokio::test]
async fn its_project_is_paused() {
    let (farm, .., jobs) = leaf().await;
    farm.put_project(Project { paused: true, ..Project::new("main") }).await;
    explain(&farm, jobs["leaf"], "paused", "Project main is paused.").await;
}

#[tokio::test]
async fn its_project_is_at_its_limit() {
    let (farm, _, node) = Farm::small(2).await;
    farm.put_project(Project { max_concurrent: Some(1), ..Project::new("main") }).await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    let claim = farm.claim(&node).await;
    let other = if claim.fence.job == jobs["a"] { "b" } else { "a" };
    explain(&farm, jobs[other], "limit", "Project main has 1 builds running, which is its limit.").await;
}

#[tokio::test]
async fn its_project_may_not_use_the_pools_that_could() {
    let (farm, .., jobs) = leaf().await;
    farm.pool("arm", &["aarch64-linux"], 1).await;
    farm.put_project(Project { pools: Some(vec!["arm".into()]), ..Project::new("main") }).await;
    let sentence = "Project main may build this only in pools that cannot run it.";
    explain(&farm, jobs["leaf"], "pools", sentence).await;
}

#[tokio::test]
async fn the_node_that_could_take_it_drains() {
    let (farm, _, node, jobs) = leaf().await;
    people::drain(&farm.operator, farm.node_of(&node).await, "cordoned", None).await.unwrap();
    explain(&farm, jobs["leaf"], "draining", "Node node could take it but drains (cordoned).").await;
}

#[tokio::test]
async fn the_node_that_could_take_it_has_uploads_waiting() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[])]).await;
    for _ in 0..3 {
        let claim = farm.claim(&node).await;
        node.start_upload(&[claim.fence]).await.unwrap();
    }
    let last: i64 = farm.value("SELECT job_id FROM ci.ready WHERE $1 = 0", 0).await;
    assert!(["a", "b", "c", "d"].iter().any(|name| jobs[name] == last));
    explain(&farm, last, "uploads", "Node node could take it but has 3 uploads waiting.").await;
}

#[tokio::test]
async fn no_node_lives() {
    let (farm, _, node, jobs) = leaf().await;
    node.deregister().await.unwrap();
    let sentence = "No node that can run it claims at the moment; a pool that can exists.";
    explain(&farm, jobs["leaf"], "no_node", sentence).await;
}

#[tokio::test]
async fn no_node_lives_and_no_pool_can_grow() {
    let (farm, _, node, jobs) = leaf().await;
    node.deregister().await.unwrap();
    farm.database.execute("UPDATE ci.pool SET at_maximum = true").await;
    let sentence = "Every pool that can run it is at its maximum and has no node that would claim it.";
    explain(&farm, jobs["leaf"], "no_node", sentence).await;
}

#[tokio::test]
async fn nodes_that_should_be_there_do_not_run() {
    let (farm, _, node, jobs) = leaf().await;
    node.deregister().await.unwrap();
    farm.database
        .execute("UPDATE ci.pool SET note = 'pod x cannot be scheduled: 0/2 nodes are available'")
        .await;
    let sentence = "Pool pool should have more nodes: pod x cannot be scheduled: 0/2 nodes are available.";
    explain(&farm, jobs["leaf"], "pending", sentence).await;
}

#[tokio::test]
async fn it_avoids_the_node_that_failed_it() {
    let (farm, pool, node, claim) = running().await;
    farm.node(&pool, "other").await;
    node.fail(claim.fence, Failure::Oom, "killed").await.unwrap();
    farm.pass(31.0).await;
    explain(&farm, claim.fence.job, "avoid", "It failed on node node and waits for another.").await;
}

#[tokio::test]
async fn it_waits_in_line() {
    let (farm, ..) = Farm::small(1).await;
    farm.evaluate("main", &[("first", &[])]).await;
    let jobs = farm.queue("main", &[("second", &[])]).await;
    let sentence = "It is number 2 in the line of project main, which has used 0.0 s of builder time per share (100 shares).";
    explain(&farm, jobs["second"], "order", sentence).await;
}

#[tokio::test]
async fn every_reason_is_told_the_most_telling_first() {
    let (farm, _, node, jobs) = leaf().await;
    let arm = farm.pool("arm", &["aarch64-linux", SYSTEM], 1).await;
    assert_eq!(arm.name, "arm");
    farm.put_project(Project { paused: true, max_concurrent: Some(0), ..Project::new("main") }).await;
    people::drain(&farm.operator, farm.node_of(&node).await, "cordoned", None).await.unwrap();
    assert_eq!(farm.why(jobs["leaf"]).await, ["paused", "limit", "draining", "no_node", "order"]);
}

#[tokio::test]
async fn a_build_that_does_not_exist_has_no_reasons() {
    let (farm, ..) = Farm::small(1).await;
    let refused = people::why(&farm.frontend, 4711).await.unwrap_err();
    assert!(matches!(&refused, harmonia_queue::Error::NotFound(_)), "{refused:?}");
}
