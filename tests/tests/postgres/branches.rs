//! Pushes, branch heads and looks at repositories.

use futures::stream::{self, StreamExt};
use harmonia_queue::branches::{self, Forge, ProjectSource, PullRequests, Push};
use harmonia_queue::evaluations::{self, Claimed, Stage};
use harmonia_queue::forges;
use harmonia_queue::ingest::{Attr, Ingest};
use harmonia_queue::mirror::{self, Resource};
use harmonia_queue::people::{self, Ending, Project};
use harmonia_queue::{Error, resolver};
use harmonia_tests::farm::{Farm, derivation, drv_path};

const URL: &str = "https://git.example.org/x.git";

async fn farm() -> Farm {
    let farm = Farm::new().await;
    farm.freeze().await;
    farm.project("main").await;
    farm
}

fn at<'a>(branch: &'a str, commit: &'a str) -> Push<'a> {
    Push { project: "main", source: URL, branch, commit, untrusted: false, attrs: &[], pull_request: None }
}

fn outside<'a>(branch: &'a str, commit: &'a str, number: i32) -> Push<'a> {
    Push { untrusted: true, pull_request: Some(number), ..at(branch, commit) }
}

async fn push(farm: &Farm, push: Push<'_>) -> i64 {
    branches::push(&farm.frontend, &push).await.unwrap().expect("it is the head")
}

async fn stage(farm: &Farm, id: i64) -> Stage {
    evaluations::get(&farm.frontend, id).await.unwrap().unwrap().stage
}

/// Claims what is next and completes it with one derivation.
async fn evaluate(farm: &Farm, name: &str, error: Option<&str>) -> Claimed {
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    let mut ingest = Ingest::of(&farm.evaluator, claimed.id);
    ingest.add(vec![derivation(name, &[])]).await.unwrap();
    let good = Attr { name: name.to_owned(), drv_path: Some(drv_path(name)), error: None };
    let bad =
        error.map(|error| Attr { name: "bad".to_owned(), drv_path: None, error: Some(error.to_owned()) });
    ingest.complete(&[vec![good], bad.into_iter().collect()].concat()).await.unwrap();
    claimed
}

#[tokio::test]
async fn a_push_is_queued_once() {
    let farm = farm().await;
    let first = push(&farm, at("main", "aa")).await;
    assert_eq!(push(&farm, at("main", "aa")).await, first);
    assert_ne!(push(&farm, at("next", "aa")).await, first);
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    let said = (claimed.id, claimed.branch.as_deref(), claimed.commit.as_deref(), claimed.source.as_str());
    assert_eq!(said, (first, Some("main"), Some("aa"), URL));
}

#[tokio::test]
async fn a_newer_push_stands_for_the_unfinished_ones_before_it() {
    let farm = farm().await;
    let built = push(&farm, at("main", "aa")).await;
    evaluate(&farm, "a", None).await;
    farm.settle().await;
    let evaluating = push(&farm, at("next", "aa")).await;
    evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    let newer = [push(&farm, at("main", "bb")).await, push(&farm, at("next", "bb")).await];
    assert_eq!([stage(&farm, built).await, stage(&farm, evaluating).await], [Stage::Cancelled; 2]);
    assert_eq!([stage(&farm, newer[0]).await, stage(&farm, newer[1]).await], [Stage::Queued; 2]);
    let error = evaluations::get(&farm.frontend, built).await.unwrap().unwrap().error.unwrap();
    assert!(error.contains("a newer push to main"), "{error}");
    farm.settle().await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_is_finished_stays_as_it_is() {
    let (farm, _pool, node) = Farm::small(1).await;
    let done = push(&farm, at("main", "aa")).await;
    evaluate(&farm, "a", None).await;
    farm.settle().await;
    farm.build_all(&node).await;
    push(&farm, at("main", "bb")).await;
    assert_eq!(stage(&farm, done).await, Stage::Complete);
}

#[tokio::test]
async fn a_branch_that_comes_back_to_a_commit_is_evaluated_again() {
    let farm = farm().await;
    let first = push(&farm, at("main", "aa")).await;
    push(&farm, at("main", "bb")).await;
    let again = push(&farm, at("main", "aa")).await;
    assert!(again > first);
    assert_eq!(stage(&farm, again).await, Stage::Queued);
}

#[tokio::test]
async fn what_a_person_cancelled_is_not_begun_anew_by_the_same_push() {
    let farm = farm().await;
    let id = push(&farm, at("main", "aa")).await;
    people::end_evaluation(&farm.frontend, id, Ending::Cancelled, None).await.unwrap();
    assert_eq!(push(&farm, at("main", "aa")).await, id);
}

#[tokio::test]
async fn what_could_not_be_evaluated_is_begun_anew_by_the_same_push() {
    let farm = farm().await;
    let id = push(&farm, at("main", "aa")).await;
    people::end_evaluation(&farm.evaluator, id, Ending::Aborted, Some("no network")).await.unwrap();
    let again = push(&farm, at("main", "aa")).await;
    assert_eq!((stage(&farm, id).await, stage(&farm, again).await), (Stage::Aborted, Stage::Queued));
}

#[tokio::test]
async fn a_project_that_is_made_again_has_its_code_evaluated_again() {
    let farm = farm().await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(URL))).await.unwrap();
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    let seen = || branches::polled(&farm.evaluator, &poll, Ok(("main", "aa")));
    let before = seen().await.unwrap();
    people::remove_project(&farm.frontend, "main").await.unwrap();
    farm.project("main").await;
    let after = seen().await.unwrap();
    assert!(after.is_some() && after > before, "{after:?}");
    assert_eq!(stage(&farm, after.unwrap()).await, Stage::Queued);
}

#[tokio::test]
async fn another_repository_has_no_branch_that_is_known() {
    let farm = farm().await;
    let source = ProjectSource::git(URL);
    branches::put_source(&farm.frontend, "main", Some(&source)).await.unwrap();
    let head = || async { branches::head(&farm.frontend, "main", "main").await.unwrap() };
    let changes = [
        (ProjectSource { attrs: vec!["checks".to_owned()], ..source.clone() }, Some("aa")),
        (ProjectSource { branch: Some("main".to_owned()), ..source.clone() }, None),
        (ProjectSource::git("https://git.example.org/y.git"), None),
    ];
    for (change, known) in changes {
        push(&farm, at("main", "aa")).await;
        branches::put_source(&farm.frontend, "main", Some(&change)).await.unwrap();
        assert_eq!(head().await.as_deref(), known, "{change:?}");
    }
}

#[tokio::test]
async fn what_was_pushed_is_repeated_at_its_commit_however_often() {
    let farm = farm().await;
    let mut id = push(&farm, outside("refs/pull/7/head", "aa", 7)).await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(URL))).await.unwrap();
    for _ in 0..2 {
        evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
        id = evaluations::repeat(&farm.frontend, id).await.unwrap();
    }
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!((claimed.id, claimed.commit.as_deref(), claimed.untrusted), (id, Some("aa"), true));
    let source = branches::evaluation_source(&farm.evaluator, id).await.unwrap().unwrap();
    assert_eq!(source.pull_request, Some(7));
}

#[tokio::test]
async fn what_a_person_asked_for_is_repeated_as_its_source_is_now() {
    let farm = farm().await;
    let request = evaluations::Request { project: "main", source: URL, ..evaluations::Request::default() };
    let asked = evaluations::queue(&farm.frontend, &request).await.unwrap();
    let found = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert!(evaluations::keep(&farm.evaluator, asked, found.attempt, Some("aa")).await.unwrap());
    let again = evaluations::repeat(&farm.frontend, asked).await.unwrap();
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!((claimed.id, claimed.commit), (again, None));
}

#[tokio::test]
async fn candidates_of_a_merge_queue_are_all_evaluated() {
    let farm = farm().await;
    for branch in ["gh-readonly-queue/main/pr-1", "staging", "trying"] {
        let first = push(&farm, at(branch, "aa")).await;
        push(&farm, at(branch, "bb")).await;
        assert_eq!(stage(&farm, first).await, Stage::Queued, "{branch}");
    }
}

#[tokio::test]
async fn a_pull_request_ends_no_evaluation_but_its_own() {
    let farm = farm().await;
    let other = push(&farm, outside("main", "aa", 6)).await;
    let own = push(&farm, outside("main", "bb", 7)).await;
    push(&farm, outside("main", "cc", 7)).await;
    assert_eq!([stage(&farm, other).await, stage(&farm, own).await], [Stage::Queued, Stage::Cancelled]);
}

#[tokio::test]
async fn nothing_from_outside_ends_what_is_trusted() {
    let farm = farm().await;
    let trusted = push(&farm, Push { untrusted: false, ..outside("main", "aa", 7) }).await;
    push(&farm, outside("main", "bb", 7)).await;
    assert_eq!(stage(&farm, trusted).await, Stage::Queued);
}

#[tokio::test]
async fn what_was_proposed_before_the_head_is_not_built() {
    let farm = farm().await;
    let project = farm.value("SELECT id FROM ci.project WHERE name = 'main' AND id > $1", 0).await;
    forges::see_pull_request(&farm.frontend, project, 7, "bb").await.unwrap();
    let late = branches::push(&farm.frontend, &outside("refs/pull/7/head", "aa", 7)).await.unwrap();
    assert_eq!(late, None);
    push(&farm, outside("refs/pull/7/head", "bb", 7)).await;
}

#[tokio::test]
async fn the_head_of_a_branch_is_where_it_was_last_pushed() {
    let farm = farm().await;
    push(&farm, at("main", "aa")).await;
    push(&farm, at("main", "bb")).await;
    push(&farm, outside("main", "cc", 7)).await;
    push(&farm, Push { pull_request: Some(8), ..at("main", "dd") }).await;
    assert_eq!(branches::head(&farm.frontend, "main", "main").await.unwrap().as_deref(), Some("bb"));
}

#[tokio::test]
async fn five_hundred_pushes_at_once_leave_one_evaluation() {
    let farm = farm().await;
    let push = |n: u32| {
        let (db, commit) = (farm.frontend.clone(), format!("{n:040x}"));
        async move { branches::push(&db, &at("main", &commit)).await.unwrap().unwrap() }
    };
    // As many as have a connection: others would wait for one, and not for ever.
    stream::iter(0..500).map(push).buffer_unordered(8).collect::<Vec<_>>().await;
    let live: i64 =
        farm.value("SELECT count(*) FROM ci.evaluation WHERE state = 'queued' AND id > $1", 0).await;
    let head = branches::head(&farm.frontend, "main", "main").await.unwrap();
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!((live, claimed.commit), (1, head));
}

#[tokio::test]
async fn a_project_is_looked_at_by_one_and_again_after_a_while() {
    let farm = farm().await;
    let source = ProjectSource { attrs: vec!["checks".to_owned()], ..ProjectSource::git(URL) };
    branches::put_source(&farm.frontend, "main", Some(&source)).await.unwrap();
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    assert_eq!((poll.project.as_str(), poll.url.as_str()), ("main", URL));
    assert_eq!(branches::claim_poll(&farm.evaluator).await.unwrap(), None);
    let new = branches::polled(&farm.evaluator, &poll, Ok(("main", "aa"))).await.unwrap();
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!((Some(claimed.id), claimed.attrs), (new, source.attrs));
    farm.advance(260.0).await;
    assert_eq!(branches::claim_poll(&farm.evaluator).await.unwrap(), None);
    farm.advance(80.0).await;
    assert_eq!(branches::claim_poll(&farm.evaluator).await.unwrap(), Some(poll));
}

#[tokio::test]
async fn a_commit_that_is_known_is_no_push() {
    let farm = farm().await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(URL))).await.unwrap();
    push(&farm, at("main", "aa")).await;
    push(&farm, at("main", "bb")).await;
    push(&farm, at("main", "aa")).await;
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    let seen = branches::polled(&farm.evaluator, &poll, Ok(("main", "aa"))).await.unwrap();
    assert_eq!(seen, None);
    let missed = branches::polled(&farm.evaluator, &poll, Ok(("main", "cc"))).await.unwrap();
    assert!(missed.is_some());
}

#[tokio::test]
async fn what_was_pushed_since_a_look_began_is_newer_than_what_it_saw() {
    let farm = farm().await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(URL))).await.unwrap();
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    farm.advance(1.0).await;
    let newer = push(&farm, at("main", "bb")).await;
    assert_eq!(branches::polled(&farm.evaluator, &poll, Ok(("main", "aa"))).await.unwrap(), None);
    assert_eq!(stage(&farm, newer).await, Stage::Queued);
}

#[tokio::test]
async fn what_a_look_saw_where_the_code_was_before_is_no_push() {
    let farm = farm().await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(URL))).await.unwrap();
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    let moved = ProjectSource::git("https://elsewhere/dots");
    branches::put_source(&farm.frontend, "main", Some(&moved)).await.unwrap();
    assert_eq!(branches::polled(&farm.evaluator, &poll, Ok(("main", "aa"))).await.unwrap(), None);
    let poll =
        branches::claim_poll(&farm.evaluator).await.unwrap().expect("the new place is looked at, at once");
    assert_eq!(poll.url, "https://elsewhere/dots");
}

#[tokio::test]
async fn a_look_that_saw_nothing_is_told_until_the_next() {
    let farm = farm().await;
    branches::put_source(&farm.frontend, "main", Some(&ProjectSource::git(URL))).await.unwrap();
    let poll = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    branches::polled(&farm.evaluator, &poll, Err("no such repository")).await.unwrap();
    let told = || async { branches::source(&farm.frontend, "main").await.unwrap().unwrap().1 };
    assert_eq!(told().await.as_deref(), Some("no such repository"));
    branches::polled(&farm.evaluator, &poll, Ok(("main", "aa"))).await.unwrap();
    assert_eq!(told().await, None);
}

#[tokio::test]
async fn where_a_projects_code_is_is_told_as_it_was_said() {
    let farm = farm().await;
    let forge = Forge::Gitea { instance: "https://git".into(), owner: "acme".into(), repo: "dots".into() };
    let source = ProjectSource {
        forge,
        branch: Some("next".into()),
        pull_requests: PullRequests::All,
        credential: Some("ci.token".into()),
        ..ProjectSource::git(URL)
    };
    branches::put_source(&farm.frontend, "main", Some(&source)).await.unwrap();
    let told = branches::source(&farm.frontend, "main").await.unwrap();
    assert_eq!(told, Some((source, None)));
    branches::put_source(&farm.frontend, "main", None).await.unwrap();
    assert_eq!(branches::source(&farm.frontend, "main").await.unwrap(), None);
}

#[tokio::test]
async fn a_resources_source_is_changed_by_that_generation_of_it_alone() {
    let farm = Farm::new().await;
    let lead = farm.operate().await;
    let at = |generation| Resource { uid: "one", generation };
    let project = Project::new("ci/dots");
    mirror::project(&farm.operator, lead.generation, at(2), &project).await.unwrap();
    let source = |url: &str| ProjectSource::git(url);
    let said = |generation, url| {
        let (db, leader, source) = (farm.operator.clone(), lead.generation, source(url));
        async move { branches::mirror_source(&db, leader, at(generation), "ci/dots", &source).await.unwrap() }
    };
    assert!(said(2, "https://two").await);
    assert!(!said(1, "https://one").await);
    let told = branches::source(&farm.frontend, "ci/dots").await.unwrap();
    assert_eq!(told.map(|(source, _)| source.url).as_deref(), Some("https://two"));
}

#[tokio::test]
async fn people_do_not_change_the_source_that_a_resource_keeps() {
    let farm = Farm::new().await;
    let lead = farm.operate().await;
    let resource = Resource { uid: "one", generation: 1 };
    mirror::project(&farm.operator, lead.generation, resource, &Project::new("ci/dots")).await.unwrap();
    let refused = branches::put_source(&farm.frontend, "ci/dots", Some(&ProjectSource::git(URL))).await;
    assert!(matches!(refused, Err(Error::WrongState(sentence)) if sentence.contains("change it there")));
}

#[tokio::test]
async fn a_tree_that_was_evaluated_is_not_evaluated_again() {
    let farm = farm().await;
    let same = |claimed: &Claimed| branches::same_tree(&farm.evaluator, claimed.id, claimed.attempt, "tree");
    push(&farm, at("main", "aa")).await;
    let first = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!(same(&first).await.unwrap(), None);
    let mut ingest = Ingest::of(&farm.evaluator, first.id);
    ingest.add(vec![derivation("a", &[])]).await.unwrap();
    let attr = Attr { name: "a".to_owned(), drv_path: Some(drv_path("a")), error: None };
    ingest.complete(&[attr]).await.unwrap();
    push(&farm, at("next", "bb")).await;
    let second = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!(same(&second).await.unwrap(), Some(vec![("a".to_owned(), drv_path("a"))]));
    resolver::step(&farm.operator, 1000).await.unwrap();
}

/// Two evaluations of a tree; whether the second may take what the first found.
async fn reused(first: Push<'_>, error: Option<&str>, second: Push<'_>) -> bool {
    let farm = farm().await;
    push(&farm, first).await;
    let claimed = evaluate(&farm, "a", error).await;
    farm.database.execute("UPDATE ci.evaluation SET tree = 'tree'").await;
    push(&farm, second).await;
    let next = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_ne!(claimed.id, next.id);
    branches::same_tree(&farm.evaluator, next.id, next.attempt, "tree").await.unwrap().is_some()
}

#[tokio::test]
async fn what_could_not_be_evaluated_is_tried_again() {
    assert!(reused(at("main", "aa"), None, at("next", "bb")).await);
    assert!(!reused(at("main", "aa"), Some("no network"), at("next", "bb")).await);
}

#[tokio::test]
async fn nothing_from_outside_is_taken_for_what_is_trusted() {
    assert!(!reused(outside("x", "aa", 7), None, at("main", "aa")).await);
}

#[tokio::test]
async fn who_asks_by_hand_has_it_evaluated() {
    let farm = farm().await;
    push(&farm, at("main", "aa")).await;
    evaluate(&farm, "a", None).await;
    farm.database.execute("UPDATE ci.evaluation SET tree = 'tree'").await;
    let request = evaluations::Request { project: "main", source: URL, ..evaluations::Request::default() };
    let asked = evaluations::queue(&farm.frontend, &request).await.unwrap();
    let claimed = evaluations::claim(&farm.evaluator, "one").await.unwrap().unwrap();
    assert_eq!(claimed.id, asked);
    let found = branches::same_tree(&farm.evaluator, asked, claimed.attempt, "tree").await.unwrap();
    assert_eq!(found, None);
}
