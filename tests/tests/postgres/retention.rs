//! What the past leaves behind, and for how long.

use harmonia_queue::branches::{self, ProjectSource, Push};
use harmonia_queue::builder::Session;
use harmonia_queue::ingest::Ingest;
use harmonia_queue::leader::Leadership;
use harmonia_queue::{Error, evaluations as queued, forges, janitor};
use harmonia_tests::farm::{Farm, derivation, drv_path};

use crate::races::{after, open_words};

const YEAR: f64 = 365.0 * 86_400.0;

/// A complete evaluation of a branch, with one derivation above another.
async fn evaluate(farm: &Farm, branch: &str, leaf: &str, top: &str) -> i64 {
    let mut evaluation =
        Ingest::begin(&farm.evaluator, "main", "git", Some(branch), None, false).await.unwrap();
    evaluation.add(vec![derivation(leaf, &[]), derivation(top, &[leaf])]).await.unwrap();
    let id = evaluation.complete(&[]).await.unwrap();
    farm.settle().await;
    id
}

/// An old evaluation, all built, and a new one of the same branch.
async fn old_and_new() -> (Farm, i64, i64, Leadership) {
    let (farm, pool, node) = Farm::small(1).await;
    let old = evaluate(&farm, "main", "leaf", "old").await;
    farm.build_all(&node).await;
    farm.advance(YEAR).await;
    let new = evaluate(&farm, "main", "leaf", "new").await;
    let node = farm.node(&pool, "node").await;
    farm.build_all(&node).await;
    let lead = farm.lead().await;
    (farm, old, new, lead)
}

async fn retain(farm: &Farm, lead: &Leadership) {
    while janitor::retain(&farm.operator, lead.generation).await.unwrap() > 0 {
        farm.settle().await;
    }
    farm.assert_sound().await;
}

async fn evaluations(farm: &Farm) -> Vec<i64> {
    farm.value("SELECT array_agg(id ORDER BY id) FROM ci.evaluation WHERE $1 = 0", 0).await
}

async fn is_known(farm: &Farm, name: &str) -> bool {
    let known =
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM ci.job WHERE drv_path = $1)").bind(drv_path(name));
    known.fetch_one(&farm.database.admin()).await.unwrap()
}

#[tokio::test]
async fn an_old_evaluation_goes_with_what_only_it_needed() {
    let (farm, _, new, lead) = old_and_new().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [new]);
    assert!(!is_known(&farm, "old").await);
    assert!(is_known(&farm, "leaf").await && is_known(&farm, "new").await);
}

#[tokio::test]
async fn what_a_newer_evaluation_wants_too_stays() {
    let (farm, _, node) = Farm::small(1).await;
    evaluate(&farm, "main", "leaf", "top").await;
    farm.build_all(&node).await;
    farm.advance(YEAR).await;
    let new = evaluate(&farm, "main", "leaf", "top").await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [new]);
    assert!(is_known(&farm, "top").await);
}

#[tokio::test]
async fn what_went_leaves_no_row_behind() {
    let (farm, .., lead) = old_and_new().await;
    retain(&farm, &lead).await;
    for table in ["aterm", "output", "attempt", "twin", "want", "orphan"] {
        let stray = format!(
            "SELECT count(*) FROM ci.{table} t WHERE NOT EXISTS (SELECT FROM ci.job j WHERE j.id = t.job_id)"
        );
        let stray: i64 =
            sqlx::query_scalar(sqlx::AssertSqlSafe(stray)).fetch_one(&farm.database.admin()).await.unwrap();
        assert_eq!(stray, 0, "{table}");
    }
}

#[tokio::test]
async fn a_pinned_evaluation_stays() {
    let (farm, old, new, lead) = old_and_new().await;
    farm.database.execute("UPDATE ci.evaluation SET pinned = true").await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [old, new]);
}

#[tokio::test]
async fn the_last_complete_evaluation_of_a_branch_stays() {
    let (farm, _, node) = Farm::small(1).await;
    let last = evaluate(&farm, "release", "leaf", "top").await;
    farm.build_all(&node).await;
    farm.advance(YEAR).await;
    let other = evaluate(&farm, "main", "leaf", "top").await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [last, other]);
}

#[tokio::test]
async fn what_somebody_pins_while_retention_waits_stays() {
    let (farm, old, new, lead) = old_and_new().await;
    let held = open_words(&farm, &format!("SELECT ci.pin({old}, true)")).await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    after(&farm, held, async move { janitor::retain(&db, generation).await.unwrap() }).await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [old, new]);
}

/// A push that was evaluated a year ago.
async fn old_push(branch: &str, pull_request: Option<i32>) -> (Farm, i32, i64) {
    let (farm, _, node) = Farm::small(1).await;
    let project = farm.value("SELECT id FROM ci.project WHERE $1 = 0", 0).await;
    if let Some(number) = pull_request {
        forges::see_pull_request(&farm.frontend, project, number, "aa").await.unwrap();
    }
    let push = Push {
        project: "main",
        source: "git",
        branch,
        commit: "aa",
        untrusted: false,
        attrs: &[],
        pull_request,
    };
    let id = branches::push(&farm.frontend, &push).await.unwrap().unwrap();
    queued::claim(&farm.evaluator, "one").await.unwrap();
    let mut ingest = Ingest::of(&farm.evaluator, id);
    ingest.add(vec![derivation("leaf", &[])]).await.unwrap();
    ingest.complete(&[]).await.unwrap();
    farm.settle().await;
    farm.build_all(&node).await;
    farm.advance(YEAR).await;
    (farm, project, id)
}

#[tokio::test]
async fn the_last_push_to_a_branch_stays_as_long_as_the_branch() {
    let (farm, project, id) = old_push("release", None).await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [id]);
    forges::end_branch(&farm.frontend, project, "release", "it was deleted", None).await.unwrap();
    retain(&farm, &lead).await;
    assert!(!is_known(&farm, "leaf").await);
}

#[tokio::test]
async fn the_last_push_to_a_pull_request_stays_as_long_as_that_is_open() {
    let (farm, project, id) = old_push(&forges::pull_request_ref(7), Some(7)).await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [id]);
    forges::close_pull_request(&farm.frontend, project, 7).await.unwrap();
    retain(&farm, &lead).await;
    assert!(!is_known(&farm, "leaf").await);
}

#[tokio::test]
async fn what_a_person_had_built_once_more_stays_no_longer_than_its_branch() {
    let (farm, project, id) = old_push("release", None).await;
    let again = queued::repeat(&farm.frontend, id).await.unwrap();
    queued::claim(&farm.evaluator, "one").await.unwrap();
    let mut ingest = Ingest::of(&farm.evaluator, again);
    ingest.add(vec![derivation("leaf", &[])]).await.unwrap();
    ingest.complete(&[]).await.unwrap();
    farm.advance(YEAR).await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [again]);
    forges::end_branch(&farm.frontend, project, "release", "it was deleted", None).await.unwrap();
    retain(&farm, &lead).await;
    assert!(!is_known(&farm, "leaf").await);
}

#[tokio::test]
async fn a_branch_is_there_until_somebody_has_looked_at_the_projects_new_place() {
    let (farm, _, id) = old_push("release", None).await;
    for url in ["https://here/dots", "https://there/dots"] {
        branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(url))).await.unwrap();
    }
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [id]);
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    let seen = branches::polled(&farm.evaluator, &poll, Ok(("main", "bb"))).await.unwrap();
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [seen.unwrap()]);
}

#[tokio::test]
async fn of_what_has_no_branch_the_last_complete_evaluation_stays() {
    let (farm, _, node) = Farm::small(1).await;
    let mut ids = Vec::new();
    for name in ["old", "new"] {
        let mut ingest = Ingest::begin(&farm.evaluator, "main", "git", None, None, false).await.unwrap();
        ingest.add(vec![derivation(name, &[])]).await.unwrap();
        ids.push(ingest.complete(&[]).await.unwrap());
        farm.settle().await;
        farm.build_all(&node).await;
    }
    farm.advance(YEAR).await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, ids[1..]);
}

#[tokio::test]
async fn an_evaluation_within_its_projects_retention_stays() {
    let (farm, _, node) = Farm::small(1).await;
    let old = evaluate(&farm, "main", "leaf", "old").await;
    farm.build_all(&node).await;
    farm.advance(89.0 * 86_400.0).await;
    let new = evaluate(&farm, "main", "leaf", "new").await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [old, new]);
}

#[tokio::test]
async fn an_input_of_what_is_kept_stays_although_no_evaluation_wants_it() {
    let (farm, _, _, lead) = old_and_new().await;
    farm.database
        .execute(
            "DELETE FROM ci.want w USING ci.job j WHERE j.id = w.job_id AND j.drv_path LIKE '%-leaf.drv'",
        )
        .await;
    farm.database
        .execute("INSERT INTO ci.orphan SELECT id FROM ci.job WHERE drv_path LIKE '%-leaf.drv'")
        .await;
    retain(&farm, &lead).await;
    assert!(is_known(&farm, "leaf").await);
}

#[tokio::test]
async fn an_open_job_of_an_old_evaluation_is_cancelled_before_it_goes() {
    let (farm, _, _) = Farm::small(1).await;
    evaluate(&farm, "main", "leaf", "old").await;
    farm.advance(YEAR).await;
    let new = evaluate(&farm, "main", "leaf", "new").await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [new]);
    assert!(!is_known(&farm, "old").await);
    assert!(is_known(&farm, "leaf").await);
}

#[tokio::test]
async fn a_running_build_of_an_old_evaluation_stays_until_it_has_ended() {
    let (farm, _, node) = Farm::small(1).await;
    evaluate(&farm, "main", "lone", "old").await;
    let claim = farm.claim(&node).await;
    farm.advance(YEAR).await;
    evaluate(&farm, "main", "leaf", "new").await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert!(is_known(&farm, "lone").await);
    node.give_back(&[claim.fence], "cancelled").await.unwrap();
    farm.settle().await;
    retain(&farm, &lead).await;
    assert!(!is_known(&farm, "lone").await);
}

#[tokio::test]
async fn evaluations_that_share_their_jobs_go_without_a_break() {
    let (farm, _, node) = Farm::small(1).await;
    for _ in 0..3 {
        evaluate(&farm, "main", "leaf", "old").await;
    }
    farm.build_all(&node).await;
    farm.advance(YEAR).await;
    let new = evaluate(&farm, "main", "lone", "new").await;
    let lead = farm.lead().await;
    while farm.value::<i32>("SELECT ci.retain($1, 1)", lead.generation).await > 0 {}
    assert_eq!(evaluations(&farm).await, [new]);
    assert!(!is_known(&farm, "old").await && !is_known(&farm, "leaf").await);
}

#[tokio::test]
async fn an_evaluation_goes_although_its_attributes_are_many() {
    let (farm, old, new, lead) = old_and_new().await;
    let attrs = format!("INSERT INTO ci.evaluation_attr SELECT {old}, n FROM generate_series(1, 7) n");
    farm.database.execute(&attrs).await;
    while farm.value::<i32>("SELECT ci.retain($1, 2)", lead.generation).await > 0 {}
    assert_eq!(evaluations(&farm).await, [new]);
    assert!(!is_known(&farm, "old").await);
}

#[tokio::test]
async fn what_waits_for_a_build_to_end_keeps_no_other_evaluation() {
    let (farm, _, node) = Farm::small(1).await;
    let mut ingest = farm.begin("main").await;
    ingest.add(vec![derivation("lone", &[])]).await.unwrap();
    let waits = ingest.complete(&[]).await.unwrap();
    farm.settle().await;
    farm.claim(&node).await;
    evaluate(&farm, "main", "leaf", "old").await;
    farm.advance(YEAR).await;
    let new = evaluate(&farm, "main", "leaf", "new").await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [waits, new]);
    assert!(!is_known(&farm, "old").await);
}

/// A push to the branch `release` that is evaluated and built.
async fn push(farm: &Farm, node: &Session, commit: &str) -> i64 {
    let (attrs, pull_request) = (&[][..], None);
    let push = Push {
        project: "main",
        source: "git",
        branch: "release",
        commit,
        untrusted: false,
        attrs,
        pull_request,
    };
    let id = branches::push(&farm.frontend, &push).await.unwrap().unwrap();
    if queued::claim(&farm.evaluator, "one").await.unwrap().is_some() {
        let mut ingest = Ingest::of(&farm.evaluator, id);
        ingest.add(vec![derivation(commit, &[])]).await.unwrap();
        ingest.complete(&[]).await.unwrap();
        farm.settle().await;
        farm.build_all(node).await;
    }
    id
}

#[tokio::test]
async fn the_commit_to_which_a_branch_was_set_back_stays() {
    let (farm, _, node) = Farm::small(1).await;
    let (first, _, third) =
        (push(&farm, &node, "aa").await, push(&farm, &node, "bb").await, push(&farm, &node, "cc").await);
    assert_eq!(push(&farm, &node, "aa").await, first);
    farm.advance(YEAR).await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [first, third]);
}

#[tokio::test]
async fn what_somebody_made_by_hand_does_not_stand_for_a_push() {
    let (farm, _, node) = Farm::small(1).await;
    let pushed = push(&farm, &node, "aa").await;
    let by_hand = evaluate(&farm, "release", "leaf", "one").await;
    farm.build_all(&node).await;
    farm.database.execute("UPDATE ci.evaluation SET commit_id = 'aa'").await;
    farm.advance(YEAR).await;
    let lead = farm.lead().await;
    retain(&farm, &lead).await;
    assert_eq!(evaluations(&farm).await, [pushed, by_hand]);
}

#[tokio::test]
async fn only_the_leader_removes_the_past() {
    let (farm, .., lead) = old_and_new().await;
    let refused = janitor::retain(&farm.operator, lead.generation - 1).await.unwrap_err();
    assert!(matches!(&refused, Error::NotLeader(_)), "{refused:?}");
}
