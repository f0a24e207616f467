//! Evaluations.

use harmonia_queue::evaluations::{self, Request};
use harmonia_queue::ingest::Attr;
use harmonia_service::api::{Changed, Evaluation, EvaluationDetail, EvaluationStatus, NewEvaluation, Page};
use harmonia_tests::farm::{derivation, drv_path};
use reqwest::{Method, StatusCode};

use super::desk::{Desk, answer, json, problem};

async fn queue(desk: &Desk, project: &str, source: &str, branch: Option<&str>) -> Evaluation {
    let (project, source, branch) = (project.to_owned(), source.to_owned(), branch.map(str::to_owned));
    let new = NewEvaluation { project, source, branch, attrs: vec!["checks".to_owned()] };
    json(desk.post("/api/evals").json(&new), StatusCode::CREATED).await
}

async fn ids(desk: &Desk, path: &str) -> (Vec<i64>, Option<String>) {
    let page: Page<Evaluation> = desk.look(path).await;
    (page.items.iter().map(|evaluation| evaluation.id).collect(), page.next)
}

#[tokio::test]
async fn what_is_queued_is_found_where_the_answer_says() {
    let desk = Desk::new().await;
    let new = NewEvaluation {
        project: "main".to_owned(),
        source: "git+https://example.org/x?ref=next".to_owned(),
        branch: Some("next".to_owned()),
        attrs: vec!["checks".to_owned()],
    };
    let response = answer(desk.post("/api/evals").json(&new), StatusCode::CREATED).await;
    let place = response.headers()["location"].to_str().unwrap().to_owned();
    let queued: Evaluation = response.json().await.unwrap();
    let found: EvaluationDetail = desk.look(&place).await;
    assert_eq!(found.evaluation.id, queued.id);
    assert_eq!(found.evaluation.status, EvaluationStatus::Queued);
    assert_eq!((found.evaluation.source, found.evaluation.attrs), (new.source, new.attrs));
    assert_eq!((found.evaluation.project.as_str(), found.evaluation.branch), ("main", new.branch));
}

#[tokio::test]
async fn pages_follow_each_other_whatever_is_queued_meanwhile() {
    let desk = Desk::new().await;
    let mut expected = Vec::new();
    for _ in 0..5 {
        expected.insert(0, queue(&desk, "main", "/src", None).await.id);
    }
    let (mut found, mut next) = ids(&desk, "/api/evals?limit=2").await;
    while let Some(after) = next {
        queue(&desk, "main", "/later", None).await;
        let page = ids(&desk, &format!("/api/evals?limit=2&after={after}")).await;
        found.extend(page.0);
        next = page.1;
    }
    assert_eq!(found, expected);
}

#[tokio::test]
async fn lists_are_of_a_project_and_of_a_branch() {
    let desk = Desk::new().await;
    desk.farm.project("other").await;
    let main = queue(&desk, "main", "/src", Some("main")).await.id;
    let next = queue(&desk, "main", "/src", Some("next")).await.id;
    let other = queue(&desk, "other", "/src", Some("next")).await.id;
    assert_eq!(ids(&desk, "/api/evals?project=main").await.0, [next, main]);
    assert_eq!(ids(&desk, "/api/evals?branch=next").await.0, [other, next]);
    assert_eq!(ids(&desk, "/api/evals?branch=next&project=main").await.0, [next]);
    assert_eq!(ids(&desk, "/api/evals?project=nobody").await, (Vec::new(), None));
}

#[tokio::test]
async fn attributes_come_by_name_and_page_by_page() {
    let desk = Desk::new().await;
    let mut ingest = desk.farm.begin("main").await;
    ingest.add(vec![derivation("a", &[])]).await.unwrap();
    let mut attrs: Vec<Attr> = (0..5)
        .map(|n| Attr { name: format!("checks.{n}"), drv_path: Some(drv_path("a")), error: None })
        .collect();
    attrs.push(Attr { name: "checks.bad".to_owned(), drv_path: None, error: Some("error: no".to_owned()) });
    let id = ingest.complete(&attrs).await.unwrap();
    let (mut names, mut after) = (Vec::new(), String::new());
    loop {
        let found: EvaluationDetail = desk.look(&format!("/api/evals/{id}?limit=4{after}")).await;
        assert_eq!((found.evaluation.attributes, found.evaluation.attribute_errors), (6, 1));
        names.extend(found.attribute_page.items.into_iter().map(|attribute| attribute.name));
        match found.attribute_page.next {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(names, ["checks.0", "checks.1", "checks.2", "checks.3", "checks.4", "checks.bad"]);
    let failed: EvaluationDetail = desk.look(&format!("/api/evals/{id}?failed=true&limit=4")).await;
    let failed: Vec<_> = failed.attribute_page.items.into_iter().map(|attribute| attribute.name).collect();
    assert_eq!(failed, ["checks.bad"]);
}

#[tokio::test]
async fn a_cancelled_evaluation_is_cancelled_once() {
    let desk = Desk::new().await;
    let id = queue(&desk, "main", "/src", None).await.id;
    assert_eq!(desk.change(&format!("/api/evals/{id}/cancel")).await, 1);
    assert_eq!(desk.change(&format!("/api/evals/{id}/cancel")).await, 0);
    let found: EvaluationDetail = desk.look(&format!("/api/evals/{id}")).await;
    assert_eq!(found.evaluation.status, EvaluationStatus::Cancelled);
}

#[tokio::test]
async fn what_has_succeeded_is_not_cancelled() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[])]).await;
    desk.farm.build_all(&desk.node).await;
    assert_eq!(desk.change(&format!("/api/evals/{}/cancel", evaluation.id)).await, 0);
    let found: EvaluationDetail = desk.look(&format!("/api/evals/{}", evaluation.id)).await;
    assert_eq!(found.evaluation.status, EvaluationStatus::Succeeded);
}

#[tokio::test]
async fn evaluating_again_asks_the_same_and_trusts_no_more() {
    let desk = Desk::new().await;
    let attrs = ["checks".to_owned()];
    let request = Request {
        project: "main",
        source: "/src",
        branch: Some("pr"),
        commit: Some("c0ffee"),
        untrusted: true,
        attrs: &attrs,
    };
    let old = evaluations::queue(&desk.farm.frontend, &request).await.unwrap();
    let again = desk.post(&format!("/api/evals/{old}/re-evaluate"));
    let new: Evaluation = json(again, StatusCode::CREATED).await;
    assert_ne!(new.id, old);
    assert_eq!(
        (new.project.as_str(), new.source.as_str(), new.branch.as_deref()),
        ("main", "/src", Some("pr"))
    );
    assert_eq!((new.attrs, new.untrusted, new.commit), (attrs.to_vec(), true, None));
}

#[tokio::test]
async fn what_failed_is_built_again() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    let failure = harmonia_queue::builder::Failure::BuildError;
    desk.node.fail(claim.fence, failure, "exit 1").await.unwrap();
    desk.farm.settle().await;
    let path = format!("/api/evals/{}/rebuild-failed", evaluation.id);
    assert_eq!(desk.change(&path).await, 1);
    assert_eq!(desk.change(&path).await, 0);
    desk.post(&format!("/api/evals/{}/cancel", evaluation.id)).send().await.unwrap();
    problem(desk.post(&path), 409).await;
}

#[tokio::test]
async fn a_pin_is_shown_and_taken_back() {
    let desk = Desk::new().await;
    let queued = queue(&desk, "main", "/src", None).await;
    assert!(!queued.pinned);
    let place = format!("/api/evals/{}", queued.id);
    assert_eq!(desk.change(&format!("{place}/pin")).await, 1);
    assert_eq!(desk.change(&format!("{place}/pin")).await, 0);
    assert!(desk.look::<EvaluationDetail>(&place).await.evaluation.pinned);
    let undo = desk.ask(Method::DELETE, &format!("{place}/pin"), Some(&desk.operate));
    assert_eq!(json::<Changed>(undo, StatusCode::OK).await.changed, 1);
    assert!(!desk.look::<EvaluationDetail>(&place).await.evaluation.pinned);
    let refused = problem(desk.post("/api/evals/4711/pin"), 404).await;
    assert!(refused.contains("4711"), "{refused}");
}
