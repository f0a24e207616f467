//! GitHub's own words: what it sends, and what it wants to be asked. GitHub itself cannot run here.

use harmonia_queue::branches::{Forge, PullRequests};
use harmonia_queue::evaluations;
use harmonia_tests::farm::Farm;
use harmonia_tests::prism::Prism;
use harmonia_tests::{cache, eventually, skip};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::desk::Desk;
use super::recorder::{NAME, Recorder, SECRET, adopt, sign};

/// As `./dev` has it.
const EXAMPLES: &str = "webhooks-examples-7.6.1/index.json";

/// A webhook as GitHub sends it.
async fn deliver(desk: &Desk, event: &str, body: &Value) -> (StatusCode, Value) {
    let body = body.to_string();
    let request = desk
        .ask(Method::POST, &format!("/webhook/{NAME}"), None)
        .header("content-type", "application/json")
        .header("x-github-event", event)
        .header("x-github-delivery", format!("{:x}", rand::random::<u64>()))
        .header("x-hub-signature-256", format!("sha256={}", sign(SECRET, body.as_bytes())));
    let answer = request.body(body).send().await.unwrap();
    (answer.status(), answer.json().await.unwrap())
}

/// The branch and the commit that a push is to be evaluated for.
fn pushed(event: &str, example: &Value) -> Option<(String, String)> {
    let branch = example["ref"].as_str()?.strip_prefix("refs/heads/")?;
    let wanted = event == "push" && example["deleted"] == false;
    wanted.then(|| (branch.to_owned(), example["after"].as_str().unwrap().to_owned()))
}

#[tokio::test]
async fn whatever_github_sends_is_understood() {
    let Ok(text) = std::fs::read_to_string(cache().join(EXAMPLES)) else {
        return skip("there are no examples of webhooks here; `./dev test api` gets them");
    };
    let recorder = Recorder::start().await;
    let desk = Desk::with(Farm::new().await, &[("forges", &recorder.github())]).await;
    let (owner, repo) = ("Codertocat".to_owned(), "Hello-World".to_owned());
    let forge = Forge::GitHub { instance: recorder.url.clone(), owner, repo };
    adopt(&desk.farm, "main", forge, PullRequests::None).await;
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let mut evaluated = 0;
    for (event, example) in events.iter().flat_map(|event| {
        event["examples"].as_array().unwrap().iter().map(|example| (event["name"].as_str().unwrap(), example))
    }) {
        let (status, said) = deliver(&desk, event, example).await;
        assert!([200, 202].contains(&status.as_u16()), "{event} {}: {said}", example["action"]);
        if let Some((branch, commit)) = pushed(event, example)
            && let Some(id) = said["evaluations"][0].as_i64()
        {
            let evaluation = evaluations::get(&desk.farm.frontend, id).await.unwrap().unwrap();
            assert_eq!((evaluation.branch, evaluation.commit), (Some(branch), Some(commit)));
            evaluated += 1;
        }
    }
    assert!(evaluated > 0, "no push was among them");
}

#[tokio::test]
async fn github_is_asked_as_its_description_wants_it() {
    let Some(prism) = Prism::start().await else {
        return skip("there is no prism here; `./dev test api` gets it");
    };
    let recorder = Recorder::start().await;
    let forges = recorder.github().replace(&recorder.url, &prism.url);
    let desk = Desk::with(Farm::new().await, &[("forges", &forges)]).await;
    let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
    let forge = Forge::GitHub { instance: prism.url.clone(), owner, repo };
    adopt(&desk.farm, "main", forge, PullRequests::Collaborators).await;

    // The App's token, the repository, its branches: the first comparison evaluates the default branch, and both statuses are told.
    let told =
        "SELECT count(*) FROM ci.report WHERE told_eval IS NOT NULL AND told_build IS NOT NULL AND $1 = 0";
    eventually("statuses are taken", || async {
        assert_eq!(prism.violations(), Vec::<String>::new());
        desk.farm.value::<i64>(told, 0).await > 0
    })
    .await;
    // Whether an author may push, and a pull request as it is now.
    let side = |id: i32| json!({"ref": "topic", "sha": "1".repeat(40), "repo": {"id": id}});
    let mut event = json!({"action": "opened", "repository": {"name": "dots", "owner": {"login": "acme"}}});
    event["pull_request"] = json!({"number": 7, "user": {"login": "eve"}, "head": side(2), "base": side(1)});
    event["sender"] = json!({"login": "eve"});
    let (status, said) = deliver(&desk, "pull_request", &event).await;
    assert_eq!(status, 202, "{said}");
    let issue = json!({"number": 7, "pull_request": {"url": "…"}});
    let at = "2026-01-01T00:00:00Z";
    let comment = json!({"id": 9, "body": "/ci run", "user": {"login": "ann"}, "created_at": at});
    let mut event = json!({"action": "created", "issue": issue, "comment": comment});
    event["repository"] = json!({"name": "dots", "owner": {"login": "acme"}});
    let (status, said) = deliver(&desk, "issue_comment", &event).await;
    assert!([200, 202].contains(&status.as_u16()), "{said}");
    assert_eq!(prism.violations(), Vec::<String>::new());
}
