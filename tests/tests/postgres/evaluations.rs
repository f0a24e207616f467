//! Evaluations wait, are claimed under a lease, and are taken over from whoever went away.

use harmonia_queue::builds::{self, Found};
use harmonia_queue::evaluations::{self, Claimed, Request, Stage, Status};
use harmonia_queue::ingest::{Attr, Node};
use harmonia_queue::people::{self, Ending, Project};
use harmonia_tests::farm::{Farm, derivation, drv_path, store_path};

async fn farm() -> Farm {
    let farm = Farm::new().await;
    farm.freeze().await;
    farm.project("main").await;
    farm
}

async fn queue(farm: &Farm, project: &str) -> i64 {
    let request = Request { project, source: "/src", ..Request::default() };
    evaluations::queue(&farm.frontend, &request).await.unwrap()
}

async fn claim(farm: &Farm, evaluator: &str) -> Option<Claimed> {
    evaluations::claim(&farm.evaluator, evaluator).await.unwrap()
}

async fn keep(farm: &Farm, claimed: &Claimed) -> bool {
    evaluations::keep(&farm.evaluator, claimed.id, claimed.attempt, None).await.unwrap()
}

async fn stage(farm: &Farm, id: i64) -> Stage {
    evaluations::get(&farm.frontend, id).await.unwrap().unwrap().stage
}

#[tokio::test]
async fn an_evaluation_is_claimed_once_with_all_that_was_asked() {
    let farm = farm().await;
    let attrs = ["checks".to_owned(), "packages.x86_64-linux".to_owned()];
    let request = Request {
        project: "main",
        source: "git+https://example.org/x",
        branch: Some("next"),
        untrusted: true,
        attrs: &attrs,
        ..Request::default()
    };
    let id = evaluations::queue(&farm.frontend, &request).await.unwrap();
    assert_eq!(stage(&farm, id).await, Stage::Queued);
    let expected = Claimed {
        id,
        attempt: 1,
        project: "main".to_owned(),
        source: "git+https://example.org/x".to_owned(),
        branch: Some("next".to_owned()),
        commit: None,
        untrusted: true,
        attrs: attrs.to_vec(),
    };
    assert_eq!(claim(&farm, "one").await, Some(expected));
    assert_eq!(claim(&farm, "two").await, None);
    assert_eq!(stage(&farm, id).await, Stage::Evaluating);
}

#[tokio::test]
async fn the_project_with_the_fewest_being_evaluated_is_next() {
    let farm = farm().await;
    farm.project("other").await;
    let first = queue(&farm, "main").await;
    queue(&farm, "main").await;
    let other = queue(&farm, "other").await;
    assert_eq!(claim(&farm, "one").await.unwrap().id, first);
    assert_eq!(claim(&farm, "one").await.unwrap().id, other);
}

#[tokio::test]
async fn a_paused_project_waits() {
    let farm = farm().await;
    queue(&farm, "main").await;
    farm.put_project(Project { paused: true, ..Project::new("main") }).await;
    assert_eq!(claim(&farm, "one").await, None);
    farm.project("main").await;
    assert!(claim(&farm, "one").await.is_some());
}

#[tokio::test]
async fn who_keeps_its_lease_keeps_the_evaluation() {
    let farm = farm().await;
    queue(&farm, "main").await;
    let claimed = claim(&farm, "one").await.unwrap();
    for _ in 0..5 {
        farm.advance(50.0).await;
        assert!(keep(&farm, &claimed).await);
        assert_eq!(claim(&farm, "two").await, None);
    }
}

#[tokio::test]
async fn whoever_went_away_is_taken_over_and_not_heard_any_more() {
    let farm = farm().await;
    queue(&farm, "main").await;
    let lost = claim(&farm, "one").await.unwrap();
    farm.advance(61.0).await;
    let taken = claim(&farm, "two").await.unwrap();
    assert_eq!((taken.id, taken.attempt), (lost.id, 2));
    assert!(!keep(&farm, &lost).await);
    assert!(keep(&farm, &taken).await);
}

#[tokio::test]
async fn what_costs_three_evaluators_their_lives_is_aborted_with_a_sentence() {
    let farm = farm().await;
    let id = queue(&farm, "main").await;
    for _ in 0..3 {
        claim(&farm, "one").await.unwrap();
        farm.advance(61.0).await;
    }
    assert_eq!(claim(&farm, "one").await, None);
    let evaluation = evaluations::get(&farm.frontend, id).await.unwrap().unwrap();
    assert_eq!((evaluation.stage, evaluation.status()), (Stage::Aborted, Status::Failed));
    assert!(evaluation.error.unwrap().contains("more memory"));
}

#[tokio::test]
async fn an_evaluator_that_stops_costs_its_evaluations_no_attempt() {
    let farm = farm().await;
    queue(&farm, "main").await;
    for _ in 0..4 {
        assert_eq!(claim(&farm, "one").await.unwrap().attempt, 1);
        assert_eq!(evaluations::release(&farm.evaluator, "one", true).await.unwrap(), 1);
    }
}

#[tokio::test]
async fn a_name_releases_only_its_own() {
    let farm = farm().await;
    queue(&farm, "main").await;
    let claimed = claim(&farm, "one").await.unwrap();
    assert_eq!(evaluations::release(&farm.evaluator, "two", false).await.unwrap(), 0);
    assert!(keep(&farm, &claimed).await);
    assert_eq!(evaluations::release(&farm.evaluator, "one", false).await.unwrap(), 1);
    assert_eq!(claim(&farm, "two").await.unwrap().attempt, 2);
}

#[tokio::test]
async fn a_cancelled_evaluation_is_neither_claimed_nor_kept() {
    let farm = farm().await;
    let waiting = queue(&farm, "main").await;
    people::end_evaluation(&farm.frontend, waiting, Ending::Cancelled, None).await.unwrap();
    queue(&farm, "main").await;
    let running = claim(&farm, "one").await.unwrap();
    assert_ne!(running.id, waiting);
    people::end_evaluation(&farm.frontend, running.id, Ending::Cancelled, None).await.unwrap();
    assert!(!keep(&farm, &running).await);
}

#[tokio::test]
async fn the_commit_is_known_once_its_evaluator_says_so() {
    let farm = farm().await;
    let id = queue(&farm, "main").await;
    let claimed = claim(&farm, "one").await.unwrap();
    assert!(evaluations::keep(&farm.evaluator, id, claimed.attempt, Some("abc")).await.unwrap());
    assert!(keep(&farm, &claimed).await);
    assert_eq!(evaluations::get(&farm.frontend, id).await.unwrap().unwrap().commit.as_deref(), Some("abc"));
}

#[tokio::test]
async fn all_that_failed_of_an_evaluation_is_tried_again() {
    let (farm, _, node) = Farm::small(3).await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[]), ("good", &[]), ("top", &["a"])]).await;
    for claim in node.claim(3).await.unwrap() {
        match harmonia_tests::farm::name(&claim) {
            "good" => farm.succeed(&node, &claim).await,
            _ => assert!(
                node.fail(claim.fence, harmonia_queue::builder::Failure::BuildError, "exit 1").await.unwrap()
            ),
        }
    }
    farm.settle().await;
    let evaluation = evaluations::get(&farm.frontend, jobs.id).await.unwrap().unwrap();
    assert_eq!(evaluation.status(), Status::Failed);
    assert_eq!(
        (evaluation.builds.failed, evaluation.builds.dep_failed, evaluation.builds.succeeded),
        (2, 1, 1)
    );
    assert_eq!(evaluations::rebuild_failed(&farm.frontend, jobs.id).await.unwrap(), 2);
    farm.settle().await;
    assert_eq!(farm.build_all(&node).await.len(), 3);
    let evaluation = evaluations::get(&farm.frontend, jobs.id).await.unwrap().unwrap();
    assert_eq!(evaluation.status(), Status::Succeeded);
    farm.assert_sound().await;
}

/// Evaluates these attributes, each a derivation of its own name, and one that cannot be evaluated.
async fn evaluate(farm: &Farm, attrs: &[&str]) -> Vec<i64> {
    let mut ingest = farm.begin("main").await;
    let nodes: Vec<Node> = attrs.iter().map(|attr| derivation(attr, &[])).collect();
    ingest.add(nodes).await.unwrap();
    let jobs = attrs.iter().map(|attr| ingest.job(&drv_path(attr)).unwrap()).collect();
    let attr = |name: &&str| Attr { name: (*name).to_owned(), drv_path: Some(drv_path(name)), error: None };
    let mut all: Vec<Attr> = attrs.iter().map(attr).collect();
    all.push(Attr {
        name: "broken".to_owned(),
        drv_path: None,
        error: Some("undefined variable".to_owned()),
    });
    ingest.complete(&all).await.unwrap();
    jobs
}

async fn find(farm: &Farm, target: &str) -> Found {
    builds::find(&farm.frontend, target, None).await.unwrap()
}

#[tokio::test]
async fn a_build_is_found_by_whatever_names_it() {
    let farm = farm().await;
    let jobs = evaluate(&farm, &["checks.unit", "checks.lint", "doc"]).await;
    for target in [&jobs[0].to_string(), &drv_path("checks.unit"), &store_path("checks.unit", "checks.unit")]
    {
        assert_eq!(find(&farm, target).await, Found::Build(jobs[0]), "{target}");
    }
    assert_eq!(find(&farm, "checks.unit").await, Found::Build(jobs[0]));
    assert_eq!(find(&farm, "unit").await, Found::Build(jobs[0]));
    assert_eq!(find(&farm, "doc").await, Found::Build(jobs[2]));
}

#[tokio::test]
async fn what_names_several_builds_or_none_says_so() {
    let farm = farm().await;
    evaluate(&farm, &["checks.unit", "checks.lint"]).await;
    let both = ["checks.lint", "checks.unit"].map(str::to_owned).to_vec();
    assert_eq!(find(&farm, "checks").await, Found::Several(both));
    assert_eq!(find(&farm, "broken").await, Found::Error("undefined variable".to_owned()));
    assert_eq!(find(&farm, "nit").await, Found::Nothing);
    assert_eq!(find(&farm, "999").await, Found::Nothing);
}

#[tokio::test]
async fn an_attribute_is_that_of_the_latest_evaluation_that_has_it() {
    let farm = farm().await;
    let first = evaluate(&farm, &["old", "both"]).await;
    evaluate(&farm, &["both"]).await;
    assert_eq!(find(&farm, "old").await, Found::Build(first[0]));
    assert_eq!(find(&farm, "both").await, Found::Build(first[1]));
}
