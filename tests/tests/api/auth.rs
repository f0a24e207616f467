//! Who may do what, for every route that is described.

use harmonia_queue::people::revoke_token;
use harmonia_tests::farm::Farm;
use reqwest::{Method, StatusCode};
use serde_json::Value;

use super::desk::{Desk, answer, json, problem};

/// Every route that takes a token, with a path that leads to nothing.
async fn routes(desk: &Desk) -> Vec<(Method, String)> {
    let description: Value = json(desk.ask(Method::GET, "/api/openapi.json", None), StatusCode::OK).await;
    let mut routes = Vec::new();
    for (path, methods) in description["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            if operation["security"] == serde_json::json!([{}]) {
                continue;
            }
            let path = path.replace("{id}", "999999").replace("{name}", "nobody");
            routes.push((method.to_uppercase().parse().unwrap(), path));
        }
    }
    assert!(routes.len() > 20, "{routes:?}");
    routes
}

/// 1: read, 2: operate, 3: admin.
fn needed(method: &Method, path: &str) -> usize {
    match (method, path) {
        (_, path) if path.starts_with("/api/tokens") => 3,
        (method, _) if *method == Method::GET => 1,
        (_, path) if path.starts_with("/api/projects") => 3,
        _ => 2,
    }
}

#[tokio::test]
async fn nobody_comes_in_without_a_token_that_is_known() {
    let desk = Desk::new().await;
    for (method, path) in routes(&desk).await {
        problem(desk.ask(method.clone(), &path, None), 401).await;
        problem(desk.ask(method, &path, Some("0123456789abcdef")), 401).await;
    }
}

#[tokio::test]
async fn each_scope_does_what_it_may_and_no_more() {
    let desk = Desk::new().await;
    for (method, path) in routes(&desk).await {
        for (held, token) in [(1, &desk.read), (2, &desk.operate), (3, &desk.admin)] {
            let status = desk.ask(method.clone(), &path, Some(token)).send().await.unwrap().status();
            let needed = needed(&method, &path);
            assert_eq!(status == StatusCode::FORBIDDEN, held < needed, "{method} {path} as {held}: {status}");
            assert_ne!(status, StatusCode::UNAUTHORIZED, "{method} {path} as {held}");
        }
    }
}

#[tokio::test]
async fn where_everybody_may_look_nobody_may_do_more_and_a_wrong_token_is_still_wrong() {
    let desk = Desk::with(Farm::new().await, &[("anonymous_read", "true")]).await;
    answer(desk.ask(Method::GET, "/api/evals", None), StatusCode::OK).await;
    problem(desk.ask(Method::GET, "/api/evals", Some("wrong")), 401).await;
    problem(desk.ask(Method::POST, "/api/evals/1/cancel", None), 403).await;
    problem(desk.ask(Method::GET, "/api/tokens", None), 403).await;
}

#[tokio::test]
async fn a_revoked_token_changes_nothing_more() {
    let desk = Desk::new().await;
    problem(desk.post("/api/evals/999/cancel"), 404).await;
    revoke_token(&desk.farm.frontend, "operate").await.unwrap();
    problem(desk.post("/api/evals/999/cancel"), 401).await;
}

#[tokio::test]
async fn while_the_database_is_away_nobody_comes_in() {
    let desk = Desk::alone().await;
    desk.farm.database.server().stop_immediate().await;
    let sentence = problem(desk.get("/api/evals"), 503).await;
    assert!(sentence.contains("try again"), "{sentence}");
    desk.farm.database.server().start_again().await;
    harmonia_tests::eventually("the API answers again", || async {
        desk.get("/api/evals").send().await.unwrap().status() == StatusCode::OK
    })
    .await;
}

#[tokio::test]
async fn what_is_public_is_answered_without_a_token() {
    let key = "cache-1:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=";
    let desk = Desk::with(Farm::new().await, &[("public_keys", key)]).await;
    answer(desk.ask(Method::GET, "/api/openapi.json", None), StatusCode::OK).await;
    let keys: Value = json(desk.ask(Method::GET, "/api/public-keys", None), StatusCode::OK).await;
    assert_eq!(keys[0]["name"], "cache-1");
}
