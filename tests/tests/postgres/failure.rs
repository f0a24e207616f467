//! Failure goes up, rebuilds undo it, cancels reach what nobody wants, and lost inputs are made again.

use harmonia_queue::builder::{Claim, Failure, Session};
use harmonia_queue::people::{self, Ending};
use harmonia_queue::{Error, resolver, signer};
use harmonia_tests::farm::{Evaluation, Farm, derivation, drv_path, name, store_path};

async fn fail(farm: &Farm, node: &Session, claim: &Claim) {
    assert!(node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap());
    farm.settle().await;
}

async fn root(farm: &Farm, job: i64) -> i64 {
    farm.value("SELECT root FROM ci.job WHERE id = $1", job).await
}

async fn cancel_evaluation(farm: &Farm, evaluation: &Evaluation) {
    people::end_evaluation(&farm.frontend, evaluation.id, Ending::Cancelled, None).await.unwrap();
    farm.settle().await;
}

/// The claim of a derivation by its short name, out of all that can be claimed.
fn find<'a>(claims: &'a [Claim], wanted: &str) -> &'a Claim {
    claims.iter().find(|claim| name(claim) == wanted).unwrap()
}

#[tokio::test]
async fn a_failure_reaches_every_dependent_and_names_the_root() {
    let (farm, _, node) = Farm::small(1).await;
    let graph: &[(&str, &[&str])] = &[("bad", &[]), ("middle", &["bad"]), ("top", &["middle"])];
    let jobs = farm.queue("main", graph).await;
    let claim = farm.claim(&node).await;
    fail(&farm, &node, &claim).await;
    for dependent in ["middle", "top"] {
        assert_eq!(farm.state(jobs[dependent]).await, "dep_failed");
        assert_eq!(root(&farm, jobs[dependent]).await, jobs["bad"]);
    }
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_failure_is_heard_whatever_its_words() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("bad", &[])]).await;
    let claim = farm.claim(&node).await;
    assert!(node.fail(claim.fence, Failure::BuildError, "it printed \0 and died").await.unwrap());
    let error: String = farm.value("SELECT error FROM ci.job WHERE id = $1", jobs["bad"]).await;
    assert_eq!(error, "it printed \u{fffd} and died");
}

#[tokio::test]
async fn a_failure_spares_what_does_not_depend_on_it() {
    let (farm, _, node) = Farm::small(2).await;
    let jobs = farm.queue("main", &[("bad", &[]), ("good", &[]), ("top", &["bad", "good"])]).await;
    let claims = node.claim(2).await.unwrap();
    fail(&farm, &node, find(&claims, "bad")).await;
    assert_eq!(farm.state(jobs["good"]).await, "building");
    assert_eq!(farm.state(jobs["top"]).await, "dep_failed");
}

/// A hub with more dependents than a step takes; every step leaves the queue sound.
async fn step_through_hub(end: impl AsyncFn(&Farm, &Session, &Claim), state: &str) {
    const DEPENDENTS: usize = 25;
    let (farm, _, node) = Farm::small(1).await;
    let mut nodes = vec![derivation("hub", &[])];
    nodes.extend((0..DEPENDENTS).map(|n| derivation(&format!("d{n}"), &["hub"])));
    farm.evaluate_nodes("main", nodes).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    end(&farm, &node, &claim).await;
    let mut steps = 0;
    while resolver::step(&farm.operator, 4).await.unwrap().events > 0 {
        farm.assert_sound().await;
        steps += 1;
    }
    assert!(steps >= DEPENDENTS / 4, "{steps} steps");
    let count = "SELECT count(*) FROM ci.job j LEFT JOIN ci.ready r ON r.job_id = j.id WHERE coalesce(CASE WHEN r.job_id > $1 THEN 'ready' END, j.state::text) = ";
    let sql: &'static str = if state == "ready" { "'ready'" } else { "'dep_failed'" };
    let moved: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("{count}{sql}")))
        .bind(0_i64)
        .fetch_one(&farm.database.admin())
        .await
        .unwrap();
    assert_eq!(moved, DEPENDENTS as i64);
}

#[tokio::test]
async fn the_failure_of_a_hub_goes_up_in_bounded_steps() {
    let fail = async |_: &Farm, node: &Session, claim: &Claim| {
        node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    };
    step_through_hub(fail, "dep_failed").await;
}

#[tokio::test]
async fn the_success_of_a_hub_goes_up_in_bounded_steps() {
    let succeed = async |farm: &Farm, node: &Session, claim: &Claim| farm.succeed(node, claim).await;
    step_through_hub(succeed, "ready").await;
}

#[tokio::test]
async fn a_rebuild_undoes_what_the_failure_did() {
    let (farm, _, node) = Farm::small(1).await;
    let graph: &[(&str, &[&str])] = &[("bad", &[]), ("middle", &["bad"]), ("top", &["middle"])];
    let jobs = farm.queue("main", graph).await;
    let claim = farm.claim(&node).await;
    fail(&farm, &node, &claim).await;
    assert!(people::rebuild(&farm.frontend, jobs["bad"]).await.unwrap());
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    assert_eq!(farm.build_all(&node).await, ["bad", "middle", "top"]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_rebuild_that_succeeds_before_the_resolver_looks_frees_its_dependents() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("bad", &[]), ("top", &["bad"])]).await;
    let claim = farm.claim(&node).await;
    fail(&farm, &node, &claim).await;
    people::rebuild(&farm.frontend, jobs["bad"]).await.unwrap();
    // One row: the job itself is made ready, its dependents are not looked at yet.
    resolver::step(&farm.operator, 1).await.unwrap();
    let again = farm.claim(&node).await;
    farm.succeed(&node, &again).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_rebuild_leaves_failed_what_failed_for_another_reason_too() {
    let (farm, _, node) = Farm::small(2).await;
    let graph: &[(&str, &[&str])] = &[("a", &[]), ("b", &[]), ("middle", &["a", "b"]), ("top", &["middle"])];
    let jobs = farm.queue("main", graph).await;
    let claims = node.claim(2).await.unwrap();
    fail(&farm, &node, find(&claims, "a")).await;
    fail(&farm, &node, find(&claims, "b")).await;
    people::rebuild(&farm.frontend, jobs["a"]).await.unwrap();
    farm.settle().await;
    for dependent in ["middle", "top"] {
        assert_eq!(farm.state(jobs[dependent]).await, "dep_failed");
        assert_eq!(root(&farm, jobs[dependent]).await, jobs["b"], "{dependent}");
    }
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_rebuild_of_a_dependent_names_what_must_be_rebuilt() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("bad", &[]), ("top", &["bad"])]).await;
    let claim = farm.claim(&node).await;
    fail(&farm, &node, &claim).await;
    let refused = people::rebuild(&farm.frontend, jobs["top"]).await.unwrap_err();
    let bad = format!("rebuild {},", jobs["bad"]);
    assert!(matches!(&refused, Error::WrongState(sentence) if sentence.contains(&bad)), "{refused:?}");
}

#[tokio::test]
async fn what_nobody_wants_is_not_rebuilt() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    cancel_evaluation(&farm, &jobs).await;
    let refused = people::rebuild(&farm.frontend, jobs["leaf"]).await.unwrap_err();
    assert!(matches!(&refused, Error::WrongState(_)), "{refused:?}");
    assert_eq!(farm.state(jobs["leaf"]).await, "cancelled");
}

#[tokio::test]
async fn what_has_not_failed_is_not_rebuilt() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    farm.build_all(&node).await;
    assert!(!people::rebuild(&farm.frontend, jobs["leaf"]).await.unwrap());
    assert_eq!(farm.state(jobs["leaf"]).await, "succeeded");
}

// --- what a new evaluation opens again

#[tokio::test]
async fn a_new_evaluation_opens_what_was_cancelled() {
    let (farm, _, node) = Farm::small(1).await;
    let first = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    cancel_evaluation(&farm, &first).await;
    farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    assert_eq!(farm.build_all(&node).await, ["leaf", "top"]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_new_evaluation_opens_what_ran_out_of_retries() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    farm.database.execute("UPDATE ci.job SET retries = 3").await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, Failure::Network, "reset").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "failed");
    farm.queue("main", &[("leaf", &[])]).await;
    assert_eq!(farm.build_all(&node).await, ["leaf"]);
}

#[tokio::test]
async fn a_new_evaluation_does_not_open_what_failed_to_build() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    fail(&farm, &node, &claim).await;
    let again = farm.queue("main", &[("leaf", &[])]).await;
    assert_eq!(farm.state(again["leaf"]).await, "failed");
}

// --- cancels

#[tokio::test]
async fn a_cancelled_evaluation_leaves_what_another_wants() {
    let (farm, ..) = Farm::small(1).await;
    let first = farm.evaluate("main", &[("shared", &[]), ("own", &["shared"])]).await;
    farm.queue("main", &[("shared", &[])]).await;
    cancel_evaluation(&farm, &first).await;
    assert_eq!(farm.state(first["own"]).await, "cancelled");
    assert_eq!(farm.state(first["shared"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_cancel_reaches_a_running_build_with_the_next_heartbeat() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    cancel_evaluation(&farm, &jobs).await;
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
    node.give_back(&[claim.fence], "cancelled").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "cancelled");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_running_build_that_is_wanted_again_goes_on() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    cancel_evaluation(&farm, &jobs).await;
    farm.queue("main", &[("leaf", &[])]).await;
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
}

#[tokio::test]
async fn a_running_build_that_another_evaluation_wants_goes_on() {
    let (farm, _, node) = Farm::small(1).await;
    let first = farm.evaluate("main", &[("leaf", &[])]).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    cancel_evaluation(&farm, &first).await;
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
}

#[tokio::test]
async fn a_cancelled_build_gets_no_upload_slot() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    cancel_evaluation(&farm, &jobs).await;
    let holder = harmonia_tests::farm::holder(&node, &claim);
    assert!(signer::check_claim(&farm.signer, &holder).await.unwrap().is_none());
}

#[tokio::test]
async fn a_cancelled_build_that_fails_was_cancelled() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    cancel_evaluation(&farm, &jobs).await;
    fail(&farm, &node, &claim).await;
    assert_eq!(farm.state(claim.fence.job).await, "cancelled");
}

#[tokio::test]
async fn a_cancelled_build_that_misses_an_input_was_cancelled() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    cancel_evaluation(&farm, &jobs).await;
    assert!(node.input_missing(claim.fence, &store_path("leaf", "leaf")).await.unwrap());
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "cancelled");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_person_cancels_one_build_and_what_needs_it_fails() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"]), ("other", &[])]).await;
    assert!(people::cancel(&farm.frontend, jobs["leaf"]).await.unwrap());
    farm.settle().await;
    assert_eq!(farm.state(jobs["leaf"]).await, "cancelled");
    assert_eq!(farm.state(jobs["top"]).await, "dep_failed");
    assert_eq!(farm.state(jobs["other"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_person_cancels_a_running_build() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    assert!(people::cancel(&farm.frontend, claim.fence.job).await.unwrap());
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
    node.give_back(&[claim.fence], "cancelled").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "cancelled");
}

#[tokio::test]
async fn a_persons_cancel_is_not_undone_by_the_end_of_an_evaluation() {
    let (farm, _, node) = Farm::small(1).await;
    let first = farm.evaluate("main", &[("leaf", &[])]).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    people::cancel(&farm.frontend, claim.fence.job).await.unwrap();
    cancel_evaluation(&farm, &first).await;
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
}

#[tokio::test]
async fn a_new_evaluation_takes_back_a_persons_cancel() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    people::cancel(&farm.frontend, claim.fence.job).await.unwrap();
    farm.queue("main", &[("leaf", &[])]).await;
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
}

#[tokio::test]
async fn a_later_chunk_of_the_same_evaluation_does_not_take_back_a_persons_cancel() {
    let (farm, ..) = Farm::small(1).await;
    let mut evaluation = farm.begin("main").await;
    evaluation.add(vec![derivation("leaf", &[])]).await.unwrap();
    farm.settle().await;
    let leaf = evaluation.job(&drv_path("leaf")).unwrap();
    people::cancel(&farm.frontend, leaf).await.unwrap();
    evaluation.add(vec![derivation("top", &["leaf"])]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(leaf).await, "cancelled");
}

#[tokio::test]
async fn dependents_that_nobody_wants_do_not_open_with_their_root() {
    let (farm, _, node) = Farm::small(1).await;
    farm.evaluate("main", &[("bad", &[])]).await;
    let graph: &[(&str, &[&str])] = &[("bad", &[]), ("middle", &["bad"]), ("top", &["middle"])];
    let jobs = farm.queue("main", graph).await;
    let claim = farm.claim(&node).await;
    fail(&farm, &node, &claim).await;
    cancel_evaluation(&farm, &jobs).await;
    people::rebuild(&farm.frontend, jobs["bad"]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["middle"]).await, "cancelled");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_has_ended_is_not_cancelled() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[])]).await;
    farm.build_all(&node).await;
    assert!(!people::cancel(&farm.frontend, jobs["leaf"]).await.unwrap());
}

// --- inputs that the cache lost

/// `top` runs and has reported that the output of `leaf` cannot be fetched.
async fn missing() -> (Farm, Session, Evaluation, String) {
    let (farm, _, node) = Farm::small(2).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"]), ("also", &["leaf"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    let path = store_path("leaf", "leaf");
    let claims = node.claim(2).await.unwrap();
    assert!(node.input_missing(find(&claims, "top").fence, &path).await.unwrap());
    farm.settle().await;
    (farm, node, jobs, path)
}

#[tokio::test]
async fn a_job_that_misses_an_input_waits_for_a_signer() {
    let (farm, _, jobs, path) = missing().await;
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    assert_eq!(signer::missing_reports(&farm.signer).await.unwrap(), [(path, jobs["top"])]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn an_input_that_is_gone_is_built_again_at_no_cost_to_who_waits() {
    let (farm, node, jobs, path) = missing().await;
    assert_eq!(signer::settle_missing(&farm.signer, &path, true).await.unwrap(), 1);
    farm.settle().await;
    assert_eq!(farm.state(jobs["leaf"]).await, "ready");
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    let retries: i16 =
        farm.value("SELECT retries + interruptions FROM ci.job WHERE id = $1", jobs["top"]).await;
    assert_eq!(retries, 0);
    assert_eq!(farm.build_all(&node).await, ["leaf", "top"]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn an_input_that_is_there_after_all_holds_nobody_up() {
    let (farm, _, jobs, path) = missing().await;
    assert_eq!(signer::settle_missing(&farm.signer, &path, false).await.unwrap(), 0);
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "ready");
    assert_eq!(farm.state(jobs["leaf"]).await, "succeeded");
}

#[tokio::test]
async fn a_second_report_of_an_input_that_is_being_built_again_only_waits() {
    let (farm, _, jobs, path) = missing().await;
    signer::settle_missing(&farm.signer, &path, true).await.unwrap();
    farm.settle().await;
    farm.database
        .execute("INSERT INTO ci.missing (path, job_id) SELECT o.path, b.job_id FROM ci.output o, ci.blocked b LIMIT 1")
        .await;
    let waiting: i64 = farm.value("SELECT job_id FROM ci.missing WHERE $1 = 0", 0).await;
    signer::settle_missing(&farm.signer, &path, true).await.unwrap();
    farm.settle().await;
    assert_eq!(waiting, jobs["top"]);
    assert_eq!(farm.state(waiting).await, "blocked");
}

#[tokio::test]
async fn a_source_that_is_gone_fails_the_job_with_a_sentence() {
    let (farm, _, node) = Farm::small(1).await;
    let source = store_path("source", "source.tar");
    let text = Some(format!("Derive({source})").into_bytes());
    let jobs = farm
        .evaluate_nodes("main", vec![harmonia_queue::ingest::Node { aterm: text, ..derivation("top", &[]) }])
        .await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    assert!(node.input_missing(claim.fence, &source).await.unwrap());
    signer::settle_missing(&farm.signer, &source, true).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "failed");
    let error: String = farm.value("SELECT error FROM ci.job WHERE id = $1", jobs["top"]).await;
    assert!(error.starts_with(&source) && error.ends_with("evaluate again"), "{error}");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_is_no_input_cannot_be_missing() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    let refused = node.input_missing(claim.fence, &store_path("other", "other")).await.unwrap_err();
    assert!(matches!(&refused, Error::Invalid(_)), "{refused:?}");
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn an_input_is_missed_only_before_the_upload() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    node.start_upload(&[claim.fence]).await.unwrap();
    assert!(!node.input_missing(claim.fence, &store_path("leaf", "leaf")).await.unwrap());
    assert_eq!(farm.state(claim.fence.job).await, "uploading");
}

#[tokio::test]
async fn what_is_forgotten_is_built_again_and_pulls_back_what_waits_for_it() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    let path = store_path("leaf", "leaf");
    assert_eq!(signer::forget(&farm.signer, std::slice::from_ref(&path), None).await.unwrap(), [path]);
    farm.settle().await;
    assert_eq!(farm.state(jobs["leaf"]).await, "ready");
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    farm.assert_sound().await;
    assert_eq!(farm.build_all(&node).await, ["leaf", "top"]);
}

#[tokio::test]
async fn all_that_a_node_built_can_be_forgotten() {
    let (farm, pool, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    let other = farm.node(&pool, "other").await;
    farm.build_all(&other).await;
    signer::forget(&farm.signer, &[], Some(farm.node_of(&node).await)).await.unwrap();
    farm.settle().await;
    let kept = if name(&claim) == "a" { "b" } else { "a" };
    assert_eq!(farm.state(claim.fence.job).await, "ready");
    assert_eq!(farm.state(jobs[kept]).await, "succeeded");
}

#[tokio::test]
async fn a_retry_does_not_wait_for_an_input_that_was_lost_and_failed_meanwhile() {
    let (farm, _, node) = Farm::small(2).await;
    let jobs = farm.queue("main", &[("base", &[]), ("top", &["base"])]).await;
    let base = farm.claim(&node).await;
    farm.succeed(&node, &base).await;
    farm.settle().await;
    let top = farm.claim(&node).await;
    signer::forget(&farm.signer, &[store_path("base", "base")], None).await.unwrap();
    farm.settle().await;
    let base = farm.claim(&node).await;
    fail(&farm, &node, &base).await;
    assert!(node.fail(top.fence, Failure::DiskFull, "no space").await.unwrap());
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "dep_failed");
    farm.assert_sound().await;
}

/// `top` waits, for its node did not get its input, which is there.
async fn not_fetched(farm: &Farm, node: &Session) {
    let claim = farm.claim(node).await;
    assert_eq!(name(&claim), "top");
    let path = store_path("leaf", "leaf");
    assert!(node.input_missing(claim.fence, &path).await.unwrap());
    signer::settle_missing(&farm.signer, &path, false).await.unwrap();
    farm.settle().await;
}

#[tokio::test]
async fn what_a_node_cannot_fetch_although_it_is_there_another_builds() {
    let (farm, pool, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    let other = farm.node(&pool, "other").await;
    farm.settle().await;
    not_fetched(&farm, &node).await;
    assert!(node.claim(1).await.unwrap().is_empty());
    assert_eq!(farm.build_all(&other).await, ["top"]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_no_node_can_fetch_although_it_is_there_ends_with_a_sentence() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"]), ("above", &["top"])]).await;
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    farm.settle().await;
    for _ in 0..10 {
        assert_eq!(farm.state(jobs["top"]).await, "ready");
        not_fetched(&farm, &node).await;
    }
    assert_eq!(farm.state(jobs["top"]).await, "failed");
    assert_eq!(farm.state(jobs["above"]).await, "dep_failed");
    let error: String = farm.value("SELECT error FROM ci.job WHERE id = $1", jobs["top"]).await;
    let words = ["10 times", "node node", &store_path("leaf", "leaf"), "trusted-public-keys"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
    farm.assert_sound().await;
    farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    assert_eq!(farm.state(jobs["top"]).await, "ready");
}
