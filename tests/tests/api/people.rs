//! Projects, tokens, nodes, the queue, the leader.

use harmonia_queue::mirror::{self, Resource};
use harmonia_queue::people;
use harmonia_service::api::{Leader, Node, Project, Queue, Token};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};

use super::desk::{Desk, answer, json as read, problem};

fn admin(desk: &Desk, method: Method, path: &str) -> RequestBuilder {
    desk.ask(method, path, Some(&desk.admin))
}

#[tokio::test]
async fn a_project_is_made_changed_and_removed() {
    let desk = Desk::new().await;
    let new = json!({"name": "acme/dots", "shares": 200, "max_concurrent": 3, "pools": ["pool"], "retention": "2w"});
    let response = answer(admin(&desk, Method::POST, "/api/projects").json(&new), StatusCode::CREATED).await;
    let place = response.headers()["location"].to_str().unwrap().to_owned();
    let made: Project = response.json().await.unwrap();
    assert_eq!((made.shares, made.max_concurrent, made.retention.as_str()), (200, Some(3), "14d"));
    problem(admin(&desk, Method::POST, "/api/projects").json(&new), 409).await;

    let change = json!({"paused": true, "max_concurrent": null});
    let changed: Project = read(admin(&desk, Method::PATCH, &place).json(&change), StatusCode::OK).await;
    assert_eq!((changed.paused, changed.max_concurrent, changed.shares), (true, None, 200));
    assert_eq!(changed.pools, Some(vec!["pool".to_owned()]));

    answer(admin(&desk, Method::DELETE, &place), StatusCode::OK).await;
    problem(admin(&desk, Method::DELETE, &place), 404).await;
    problem(admin(&desk, Method::PATCH, &place).json(&change), 404).await;
    let left: Vec<Project> = desk.look("/api/projects").await;
    assert_eq!(left.iter().map(|project| project.name.as_str()).collect::<Vec<_>>(), ["main"]);
}

#[tokio::test]
async fn a_project_follows_a_repository_until_it_is_told_otherwise() {
    let desk = Desk::new().await;
    let follow =
        json!({"git": {"url": "https://git.example.org/dots.git", "ref": "next", "attrs": ["checks"]}});
    let place = "/api/projects/main";
    let change =
        |change: Value| read::<Project>(admin(&desk, Method::PATCH, place).json(&change), StatusCode::OK);
    let git = change(follow).await.git.unwrap();
    assert_eq!((git.r#ref.as_deref(), git.poll.as_str(), git.attrs.len()), (Some("next"), "5m", 1));
    let git = change(json!({"git": {"poll": "1h", "ref": null}})).await.git.unwrap();
    assert_eq!((git.r#ref.as_deref(), git.poll.as_str(), git.attrs.len()), (None, "1h", 1));
    let password = json!({"git": {"url": "https://me:secret@git.example.org/dots.git"}});
    let sentence = problem(admin(&desk, Method::PATCH, place).json(&password), 400).await;
    assert!(sentence.contains("credential") && !sentence.contains("me:secret"), "{sentence}");
    assert_eq!(desk.look::<Vec<Project>>("/api/projects").await[0].git.as_ref(), Some(&git));
    assert_eq!(change(json!({"git": null})).await.git, None);
}

#[tokio::test]
async fn a_project_that_cannot_be_is_refused_and_stays_as_it_is() {
    let desk = Desk::new().await;
    for (change, status, named) in [
        (json!({"shares": 0}), 400, "shares"),
        (json!({"max_concurrent": 10_001}), 400, "max_concurrent"),
        (json!({"retention": "for ever"}), 400, "retention"),
        (json!({"pools": ["moon"]}), 404, "moon"),
        (json!({"name": "other"}), 400, "name"),
        (json!({"shares": "many"}), 422, "shares"),
    ] {
        let sentence = problem(admin(&desk, Method::PATCH, "/api/projects/main").json(&change), status).await;
        assert!(sentence.contains(named), "{sentence}");
    }
    for name in ["", "..", "a\nb", "é"] {
        problem(admin(&desk, Method::POST, "/api/projects").json(&json!({"name": name})), 400).await;
    }
    problem(admin(&desk, Method::POST, "/api/projects").json(&json!({})), 422).await;
    let projects: Vec<Project> = desk.look("/api/projects").await;
    assert_eq!((projects.len(), projects[0].shares), (1, 100));
}

#[tokio::test]
async fn a_project_that_a_custom_resource_keeps_is_changed_there() {
    let desk = Desk::new().await;
    let lead = desk.farm.operate().await;
    let (kept, resource) = (people::Project::new("ci/dots"), Resource { uid: "one", generation: 1 });
    mirror::project(&desk.farm.operator, lead.generation, resource, &kept).await.unwrap();
    let place = "/api/projects/ci%2Fdots";
    let change = admin(&desk, Method::PATCH, place).json(&json!({"shares": 7}));
    for refused in [change, admin(&desk, Method::DELETE, place)] {
        let sentence = problem(refused, 409).await;
        assert!(sentence.contains("kept by the Project dots in namespace ci"), "{sentence}");
    }
}

#[tokio::test]
async fn a_token_is_made_works_and_is_revoked_either_way() {
    let desk = Desk::new().await;
    for (name, path) in [("laptop", "/api/tokens/laptop"), ("my phone", "/api/tokens?name=my%20phone")] {
        let new = json!({"name": name, "scope": "operate", "expires_in": "1h"});
        let made: Value =
            read(admin(&desk, Method::POST, "/api/tokens").json(&new), StatusCode::CREATED).await;
        let secret = made["secret"].as_str().unwrap();
        problem(desk.ask(Method::POST, "/api/evals/999/cancel", Some(secret)), 404).await;
        problem(admin(&desk, Method::POST, "/api/tokens").json(&new), 409).await;
        let tokens: Vec<Token> = read(admin(&desk, Method::GET, "/api/tokens"), StatusCode::OK).await;
        let token = tokens.iter().find(|token| token.name == name).unwrap();
        assert_eq!((token.scope.as_str(), token.expired), ("operate", false));
        answer(admin(&desk, Method::DELETE, path), StatusCode::OK).await;
        problem(desk.ask(Method::POST, "/api/evals/999/cancel", Some(secret)), 401).await;
        problem(admin(&desk, Method::DELETE, path), 404).await;
    }
}

#[tokio::test]
async fn a_token_that_cannot_be_is_refused() {
    let desk = Desk::new().await;
    for new in [
        json!({"name": "x", "scope": "root"}),
        json!({"name": "", "scope": "read"}),
        json!({"name": "x", "scope": "read", "expires_in": "0s"}),
        json!({"name": "x", "scope": "read", "expires_in": "9999999999d"}),
    ] {
        problem(admin(&desk, Method::POST, "/api/tokens").json(&new), 400).await;
    }
}

#[tokio::test]
async fn a_node_drains_and_claims_again() {
    let desk = Desk::new().await;
    desk.farm.queue("main", &[("a", &[])]).await;
    let nodes: Vec<Node> = desk.look("/api/nodes").await;
    assert_eq!((nodes[0].name.as_str(), nodes[0].state.as_str(), nodes[0].slots), ("node", "active", 4));
    let path = format!("/api/nodes/{}/drain", nodes[0].id);
    assert_eq!(desk.change(&path).await, 1);
    let nodes: Vec<Node> = desk.look("/api/nodes").await;
    assert_eq!((nodes[0].state.as_str(), nodes[0].drains[0].as_str()), ("drained", "by hand"));
    assert!(desk.node.claim(1).await.unwrap().is_empty());
    for changed in [1, 0] {
        let resume = desk.ask(Method::DELETE, &path, Some(&desk.operate));
        let answer: Value = read(resume, StatusCode::OK).await;
        assert_eq!(answer["changed"], changed);
    }
    assert_eq!(desk.node.claim(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_drain_has_the_deadline_that_was_asked_for() {
    let desk = Desk::new().await;
    let node = desk.farm.node_of(&desk.node).await;
    let path = format!("/api/nodes/{node}/drain");
    for (drain, expected) in [(json!({"deadline": "2h"}), 7200), (json!({"now": true}), 0)] {
        answer(desk.post(&path).json(&drain), StatusCode::OK).await;
        let pulse = desk.node.heartbeat(&[], None).await.unwrap();
        let left = pulse.drains[0].1.unwrap().as_secs();
        assert!(left <= expected && left + 60 >= expected, "{left}");
    }
    problem(desk.post(&path).json(&json!({"deadline": "soon"})), 400).await;
    problem(desk.post("/api/nodes/9999999999/drain"), 404).await;
}

#[tokio::test]
async fn the_queue_is_shown_in_order() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("a", &[]), ("b", &["a"]), ("c", &[]), ("d", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    assert_eq!(claim.fence.job, evaluation["a"]);
    let queue: Queue = desk.look("/api/queue?limit=1").await;
    assert_eq!((queue.blocked, queue.ready, queue.running), (1, 2, 1));
    assert_eq!(queue.now[0].id, evaluation["a"]);
    assert_eq!((queue.next.len(), queue.next[0].project.as_str()), (1, "main"));
}

#[tokio::test]
async fn who_leads_is_told() {
    let desk = Desk::new().await;
    let before: Leader = desk.look("/api/leader").await;
    assert!(!before.held);
    let lead = desk.farm.lead().await;
    let after: Leader = desk.look("/api/leader").await;
    assert!(after.held && after.since.is_some());
    assert_eq!(after.generation, lead.generation);
}
