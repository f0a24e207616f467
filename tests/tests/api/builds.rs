//! Builds.

use std::collections::BTreeSet;

use harmonia_queue::builder::Failure;
use harmonia_queue::ingest::Attr;
use harmonia_service::api::{Build, BuildDetail, Page, Reason};
use harmonia_tests::farm::{derivation, drv_path, store_path};

use super::desk::{Desk, problem};

fn attr(name: &str, drv: &str) -> Attr {
    Attr { name: name.to_owned(), drv_path: Some(drv_path(drv)), error: None }
}

async fn ids(desk: &Desk, query: &str) -> Vec<i64> {
    let page: Page<Build> = desk.look(&format!("/api/builds?{query}")).await;
    page.items.iter().map(|build| build.id).collect()
}

#[tokio::test]
async fn a_build_is_found_by_whatever_people_call_it() {
    let desk = Desk::new().await;
    let mut ingest = desk.farm.begin("main").await;
    ingest.add(vec![derivation("a", &[]), derivation("b", &[])]).await.unwrap();
    let (a, b) = (ingest.job(&drv_path("a")).unwrap(), ingest.job(&drv_path("b")).unwrap());
    let broken =
        Attr { name: "broken".to_owned(), drv_path: None, error: Some("error: undefined x".to_owned()) };
    let attrs = [attr("checks.x.unit", "a"), attr("checks.y.unit", "b"), attr("hello", "a"), broken];
    ingest.complete(&attrs).await.unwrap();
    for target in [a.to_string(), drv_path("a"), store_path("a", "a"), "hello".into(), "checks.x.unit".into()]
    {
        assert_eq!(ids(&desk, &format!("target={target}")).await, [a], "{target}");
    }
    assert_eq!(ids(&desk, "target=y.unit&project=main").await, [b]);
    let several = problem(desk.get("/api/builds?target=unit"), 409).await;
    assert!(several.contains("checks.x.unit, checks.y.unit"), "{several}");
    assert_eq!(problem(desk.get("/api/builds?target=broken"), 422).await, "error: undefined x");
    for nothing in ["nothing", "999", "/nix/store/nothing", "hello&project=other"] {
        problem(desk.get(&format!("/api/builds?target={nothing}")), 404).await;
    }
}

#[tokio::test]
async fn lists_are_of_an_evaluation_a_project_and_a_state() {
    let desk = Desk::new().await;
    desk.farm.project("other").await;
    let first = desk.farm.queue("main", &[("a", &[]), ("b", &["a"])]).await;
    let second = desk.farm.queue("other", &[("c", &[])]).await;
    let mut both = [first["a"], first["b"]];
    both.sort_by_key(|id| -id);
    assert_eq!(ids(&desk, &format!("evaluation={}", first.id)).await, both);
    assert_eq!(ids(&desk, "state=blocked").await, [first["b"]]);
    assert_eq!(ids(&desk, "project=other").await, [second["c"]]);
    assert_eq!(ids(&desk, "limit=1").await, [second["c"]]);
    assert_eq!(ids(&desk, &format!("after={}", second["c"])).await, both);
}

#[tokio::test]
async fn each_build_is_listed_in_the_state_that_it_shows() {
    let desk = Desk::new().await;
    desk.farm
        .queue("main", &[("a", &[]), ("b", &["a"]), ("c", &[]), ("d", &[]), ("e", &[]), ("f", &["e"])])
        .await;
    let failed = desk.farm.claim(&desk.node).await;
    desk.node.fail(failed.fence, Failure::BuildError, "exit 1").await.unwrap();
    desk.farm.settle().await;
    let uploading = desk.farm.claim(&desk.node).await;
    desk.node.start_upload(&[uploading.fence]).await.unwrap();
    desk.farm.claim(&desk.node).await;
    let all: Page<Build> = desk.look("/api/builds").await;
    let states: BTreeSet<&str> = all.items.iter().map(|build| build.state.as_str()).collect();
    assert!(states.len() >= 4, "{states:?}");
    for state in states {
        let shown = all.items.iter().filter(|build| build.state == state).map(|build| build.id);
        assert_eq!(ids(&desk, &format!("state={state}")).await, shown.collect::<Vec<_>>(), "{state}");
    }
}

#[tokio::test]
async fn a_build_is_shown_with_its_outputs_and_attempts() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[])]).await;
    let first = desk.farm.claim(&desk.node).await;
    desk.node.give_back(&[first.fence], "drained").await.unwrap();
    desk.farm.settle().await;
    let second = desk.farm.claim(&desk.node).await;
    let found: BuildDetail = desk.look(&format!("/api/builds/{}", evaluation["a"])).await;
    assert_eq!((found.build.name.as_str(), found.build.state.as_str()), ("a", "building"));
    assert_eq!(
        (found.build.node.as_deref(), found.build.attempt),
        (Some("node"), Some(second.fence.attempt))
    );
    assert_eq!(found.outputs[0].path.as_deref(), Some(store_path("a", "a").as_str()));
    let attempts: Vec<_> = found.attempts.iter().map(|attempt| attempt.outcome.as_deref()).collect();
    assert_eq!(attempts, [Some("interrupted"), None]);
}

#[tokio::test]
async fn why_is_answered_in_sentences() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[]), ("b", &["a"])]).await;
    let why: Vec<Reason> = desk.look(&format!("/api/builds/{}/why", evaluation["b"])).await;
    assert_eq!(why[0].code, "blocked");
    assert!(why[0].sentence.contains(&drv_path("a")), "{}", why[0].sentence);
}

#[tokio::test]
async fn only_what_failed_itself_is_built_again() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[]), ("b", &["a"])]).await;
    let (a, b) = (evaluation["a"], evaluation["b"]);
    assert_eq!(desk.change(&format!("/api/builds/{a}/rebuild")).await, 0);
    let claim = desk.farm.claim(&desk.node).await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    desk.farm.settle().await;
    let sentence = problem(desk.post(&format!("/api/builds/{b}/rebuild")), 409).await;
    assert!(sentence.contains(&format!("rebuild {a}")), "{sentence}");
    assert_eq!(desk.change(&format!("/api/builds/{a}/rebuild")).await, 1);
}

#[tokio::test]
async fn a_cancelled_build_is_cancelled_once() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[])]).await;
    let path = format!("/api/builds/{}", evaluation["a"]);
    assert_eq!(desk.change(&format!("{path}/cancel")).await, 1);
    assert_eq!(desk.change(&format!("{path}/cancel")).await, 0);
    let found: BuildDetail = desk.look(&path).await;
    assert_eq!(found.build.state, "cancelled");
}
