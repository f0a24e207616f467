//! Which job a claim takes first: manual priority, the least used project, the older evaluation, the longest chain, id.

use harmonia_queue::builder::Failure;
use harmonia_queue::people;
use harmonia_tests::farm::{Farm, derivation, name};

/// Fails builds until none is left.
async fn fail_all(farm: &Farm, node: &harmonia_queue::builder::Session) {
    while let Some(claim) = node.claim(1).await.unwrap().pop() {
        node.fail(claim.fence, Failure::BuildError, "no").await.unwrap();
        farm.settle().await;
    }
}

#[tokio::test]
async fn the_older_evaluation_goes_first() {
    let (farm, _, node) = Farm::small(1).await;
    farm.evaluate("main", &[("old", &[])]).await;
    farm.queue("main", &[("long", &[]), ("above", &["long"])]).await;
    assert_eq!(farm.build_all(&node).await, ["old", "long", "above"]);
}

#[tokio::test]
async fn the_longest_chain_above_goes_first() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[]), ("b", &[]), ("above", &["b"])]).await;
    assert_eq!(name(&farm.claim(&node).await), "b");
}

#[tokio::test]
async fn of_equals_the_smaller_id_goes_first() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[]), ("c", &[])]).await;
    let first = ["a", "b", "c"].into_iter().min_by_key(|name| jobs[name]).unwrap();
    assert_eq!(name(&farm.claim(&node).await), first);
}

#[tokio::test]
async fn a_chain_that_a_later_evaluation_attaches_moves_a_ready_job_forward() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("a", &[]), ("above", &["a"]), ("b", &[])]).await;
    let longer: &[(&str, &[&str])] = &[("b", &[]), ("c", &["b"]), ("d", &["c"])];
    farm.queue("main", longer).await;
    assert_eq!(name(&farm.claim(&node).await), "b");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_chain_that_a_later_chunk_attaches_moves_a_ready_job_forward() {
    let (farm, _, node) = Farm::small(1).await;
    let mut evaluation = farm.begin("main").await;
    let leaves = vec![derivation("a", &[]), derivation("above", &["a"]), derivation("b", &[])];
    evaluation.add(leaves).await.unwrap();
    farm.settle().await;
    evaluation.add(vec![derivation("c", &["b"]), derivation("d", &["c"])]).await.unwrap();
    evaluation.complete(&[]).await.unwrap();
    farm.settle().await;
    assert_eq!(name(&farm.claim(&node).await), "b");
}

#[tokio::test]
async fn a_rebuild_goes_before_everything_else() {
    let (farm, _, node) = Farm::small(2).await;
    farm.queue("main", &[("older", &[])]).await;
    let held = farm.claim(&node).await;
    let jobs = farm.queue("main", &[("late", &[])]).await;
    fail_all(&farm, &node).await;
    node.give_back(&[held.fence], "not now").await.unwrap();
    people::rebuild(&farm.frontend, jobs["late"]).await.unwrap();
    farm.settle().await;
    assert_eq!(name(&farm.claim(&node).await), "late");
}

#[tokio::test]
async fn only_the_named_build_has_the_priority_of_a_rebuild() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("bad", &[]), ("top", &["bad"])]).await;
    fail_all(&farm, &node).await;
    people::rebuild(&farm.frontend, jobs["bad"]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    assert_eq!(farm.value::<i16>("SELECT priority FROM ci.job WHERE id = $1", jobs["top"]).await, 0);
}

#[tokio::test]
async fn rebuilds_of_two_projects_are_in_the_order_of_their_use() {
    let (farm, _, node) = Farm::small(1).await;
    farm.project("other").await;
    let one = farm.evaluate("main", &[("one", &[])]).await;
    let two = farm.queue("other", &[("two", &[])]).await;
    fail_all(&farm, &node).await;
    farm.database.execute("UPDATE ci.lane SET used = 1000 WHERE project_id = 1; SELECT ci.rank()").await;
    people::rebuild(&farm.frontend, one["one"]).await.unwrap();
    people::rebuild(&farm.frontend, two["two"]).await.unwrap();
    farm.pass(1.0).await;
    assert_eq!(name(&farm.claim(&node).await), "two");
}

#[tokio::test]
async fn after_its_rebuild_a_project_waits_its_turn_again() {
    let (farm, _, node) = Farm::small(2).await;
    farm.project("other").await;
    let first = farm.queue("main", &[("manual", &[])]).await;
    fail_all(&farm, &node).await;
    farm.evaluate("main", &[("ordinary", &[])]).await;
    farm.evaluate("other", &[("turn", &[])]).await;
    people::rebuild(&farm.frontend, first["manual"]).await.unwrap();
    farm.settle().await;
    farm.database.execute("UPDATE ci.lane SET used = 1000 WHERE project_id = 1; SELECT ci.rank()").await;
    farm.pass(1.0).await;
    assert_eq!(name(&farm.claim(&node).await), "manual");
    assert_eq!(name(&farm.claim(&node).await), "turn");
}
