//! Requests that cannot be right: a problem document with a sentence, whatever comes.

use reqwest::{Method, RequestBuilder};
use serde_json::json;

use super::desk::{Desk, problem};

fn body(desk: &Desk, text: impl Into<String>) -> RequestBuilder {
    desk.post("/api/evals").header("content-type", "application/json").body(text.into())
}

#[tokio::test]
async fn what_is_no_json_or_does_not_fit_is_told_so() {
    let desk = Desk::new().await;
    assert!(problem(body(&desk, "{\"project\": "), 400).await.contains("EOF"));
    assert!(problem(body(&desk, ""), 422).await.contains("the body is missing"));
    assert!(problem(body(&desk, "{}"), 422).await.contains("missing field `project`"));
    assert!(problem(body(&desk, "{\"projekt\": \"main\"}"), 422).await.contains("unknown field `projekt`"));
    let wrong = json!({"project": "main", "source": "/src", "attrs": [1]}).to_string();
    assert!(problem(body(&desk, wrong), 422).await.contains("`attrs[0]`"));
    problem(desk.post("/api/evals").header("content-type", "text/plain").body("{}"), 415).await;
}

#[tokio::test]
async fn a_body_that_is_too_long_is_not_read() {
    let desk = Desk::new().await;
    let huge = json!({"project": "main", "source": "x".repeat(65 << 10)}).to_string();
    problem(body(&desk, huge), 413).await;
}

#[tokio::test]
async fn what_no_text_of_a_database_can_hold_is_refused_wherever_it_is() {
    let desk = Desk::new().await;
    for source in ["\0", "/a\0b"] {
        problem(body(&desk, json!({"project": "main", "source": source}).to_string()), 400).await;
    }
    problem(desk.get("/api/evals?project=a%00b"), 400).await;
    problem(desk.get("/api/builds?target=%00"), 400).await;
    problem(desk.get("/api/evals/1?after=%00"), 400).await;
    problem(desk.ask(Method::DELETE, "/api/projects/a%00b", Some(&desk.admin)), 400).await;
    problem(desk.ask(Method::DELETE, "/api/tokens?name=%00", Some(&desk.admin)), 400).await;
}

#[tokio::test]
async fn what_is_asked_wrongly_is_named() {
    let desk = Desk::new().await;
    for (path, named) in [
        ("/api/evals?limit=0", "limit"),
        ("/api/evals?limit=201", "limit"),
        ("/api/evals?limit=many", "limit"),
        ("/api/evals?after=never", "after"),
        ("/api/evals?page=2", "page"),
        ("/api/builds?state=lost", "lost"),
        ("/api/builds?evaluation=x", "evaluation"),
        ("/api/builds/first", "first"),
        ("/api/builds/0", "0"),
        ("/api/builds/-1", "-1"),
        ("/api/builds/99999999999999999999", "99999999999999999999"),
        ("/api/queue?limit=0", "limit"),
    ] {
        let sentence = problem(desk.get(path), 400).await;
        assert!(sentence.contains(named), "{path}: {sentence}");
    }
}

#[tokio::test]
async fn where_there_is_nothing_a_problem_says_so() {
    let desk = Desk::new().await;
    problem(desk.get("/api/nothing"), 404).await;
    problem(desk.get("/api/evals/1/nothing"), 404).await;
    problem(desk.get("/api"), 404).await;
    for path in ["/api/evals/999", "/api/builds/999", "/api/builds/999/why", "/api/builds/999/log"] {
        assert!(problem(desk.get(path), 404).await.contains("999"), "{path}");
    }
    for path in ["/api/evals/999/cancel", "/api/evals/999/re-evaluate", "/api/evals/999/rebuild-failed"] {
        assert!(problem(desk.post(path), 404).await.contains("no evaluation 999"), "{path}");
    }
    for path in ["/api/builds/999/cancel", "/api/builds/999/rebuild", "/api/nodes/999/drain"] {
        assert!(problem(desk.post(path), 404).await.contains("999"), "{path}");
    }
}

#[tokio::test]
async fn a_method_that_a_page_does_not_know_is_told_which_it_does() {
    let desk = Desk::new().await;
    let response = desk.ask(Method::PUT, "/api/evals", Some(&desk.admin)).send().await.unwrap();
    assert_eq!(response.headers()["allow"], "GET,HEAD,POST");
    problem(desk.ask(Method::PUT, "/api/evals", Some(&desk.admin)), 405).await;
}

#[tokio::test]
async fn sources_and_attributes_have_bounds() {
    let desk = Desk::new().await;
    for new in [
        json!({"project": "main", "source": ""}),
        json!({"project": "main", "source": "x".repeat(5000)}),
        json!({"project": "main", "source": "/src", "branch": "b".repeat(2000)}),
        json!({"project": "main", "source": "/src", "attrs": [""]}),
        json!({"project": "main", "source": "/src", "attrs": vec!["a"; 2000]}),
    ] {
        problem(desk.post("/api/evals").json(&new), 400).await;
    }
    let unknown = json!({"project": "nobody's", "source": "/src"});
    assert!(problem(desk.post("/api/evals").json(&unknown), 404).await.contains("nobody's"));
}
