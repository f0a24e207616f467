//! What forges say: taken once, from nobody else, and never at its word about outside changes.

use std::collections::BTreeSet;

use harmonia_queue::branches::{Forge, PullRequests};
use harmonia_queue::evaluations::{self, Evaluation, Filter, Stage};
use harmonia_tests::eventually;
use harmonia_tests::farm::Farm;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::desk::{Desk, answer, json as read, problem};
use super::recorder::{NAME, Recorder, Refusal, SECRET, adopt, sign};

async fn start(pull_requests: PullRequests) -> (Desk, Recorder) {
    let recorder = Recorder::start().await;
    let desk = Desk::with(Farm::new().await, &[("forges", &recorder.gitea())]).await;
    recorder.adopt(&desk.farm, pull_requests).await;
    (desk, recorder)
}

fn commit(digit: char) -> String {
    digit.to_string().repeat(40)
}

/// A body as a forge would send it, signed with this secret.
fn signed(desk: &Desk, secret: &str, event: &str, delivery: &str, body: &[u8]) -> RequestBuilder {
    desk.ask(Method::POST, &format!("/webhook/{NAME}"), None)
        .header("content-type", "application/json")
        .header("x-gitea-event", event)
        .header("x-gitea-delivery", delivery)
        .header("x-gitea-signature", sign(secret, body))
        .body(body.to_vec())
}

/// A good one, each with a name of its own.
fn send(desk: &Desk, event: &str, mut body: Value) -> RequestBuilder {
    body["repository"] = json!({"name": "dots", "owner": {"login": "acme"}});
    let delivery = format!("{:x}", rand::random::<u64>());
    body["delivery"] = json!(delivery);
    signed(desk, SECRET, event, &delivery, body.to_string().as_bytes())
}

fn push(branch: &str, digit: char) -> Value {
    push_after(branch, '0', digit)
}

fn push_after(branch: &str, before: char, digit: char) -> Value {
    json!({"ref": format!("refs/heads/{branch}"), "before": commit(before), "after": commit(digit)})
}

fn pull_request(action: &str, digit: char, outside: bool) -> Value {
    let side = |id: i32| json!({"ref": "topic", "sha": commit(digit), "repo": {"id": id}});
    json!({"action": action, "sender": {"login": "eve"}, "pull_request": {"number": 7, "user": {"login": "eve"}, "head": side(if outside { 2 } else { 1 }), "base": side(1)}})
}

/// As Gitea has it of a change that was pushed to `refs/for/main` by somebody who may only look.
fn agit(action: &str, digit: char) -> Value {
    let mut body = pull_request(action, digit, false);
    body["pull_request"]["head"]["ref"] = json!("refs/pull/7/head");
    body
}

/// Written now: no forge says anything later of it.
fn comment(id: i64, person: &str, body: &str) -> Value {
    comment_at(id, person, body, "2999-01-01T00:00:00Z")
}

fn comment_at(id: i64, person: &str, body: &str, at: &str) -> Value {
    let comment = json!({"id": id, "body": body, "user": {"login": person}, "created_at": at});
    json!({"action": "created", "is_pull": true, "issue": {"number": 7}, "comment": comment})
}

/// Heads that were seen up to now were seen an hour ago.
async fn an_hour_passes(desk: &Desk) {
    desk.farm.database.execute("UPDATE ci.pull_request SET head_at = head_at - interval '1 hour'").await;
}

async fn accepted(request: RequestBuilder) -> Vec<i64> {
    let said: Value = read(request, StatusCode::ACCEPTED).await;
    said["evaluations"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

async fn ignored(request: RequestBuilder) -> String {
    let said: Value = read(request, StatusCode::OK).await;
    assert_eq!(said["evaluations"], json!([]), "{said}");
    said["reason"].as_str().unwrap().to_owned()
}

async fn evaluation(desk: &Desk, id: i64) -> Evaluation {
    evaluations::get(&desk.farm.frontend, id).await.unwrap().unwrap()
}

async fn all(desk: &Desk) -> usize {
    evaluations::list(&desk.farm.frontend, &Filter::default(), 100).await.unwrap().len()
}

#[tokio::test]
async fn a_push_is_evaluated_once_however_often_it_is_told() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let ids = accepted(send(&desk, "push", push("main", '1'))).await;
    assert_eq!(accepted(send(&desk, "push", push("main", '1'))).await, ids);
    let evaluation = evaluation(&desk, ids[0]).await;
    assert_eq!((evaluation.branch.as_deref(), evaluation.commit), (Some("main"), Some(commit('1'))));
    assert!(!evaluation.untrusted);
}

#[tokio::test]
async fn a_delivery_is_taken_once_by_its_name_and_by_its_body() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let body = |branch: &str| {
        let mut body = push(branch, '1');
        body["repository"] = json!({"name": "dots", "owner": {"login": "acme"}});
        body.to_string().into_bytes()
    };
    accepted(signed(&desk, SECRET, "push", "one", &body("main"))).await;
    for (delivery, body) in [("one", body("next")), ("two", body("main"))] {
        let reason = ignored(signed(&desk, SECRET, "push", delivery, &body)).await;
        assert!(reason.contains("before"), "{reason}");
    }
    assert_eq!(all(&desk).await, 1);
}

#[tokio::test]
async fn who_does_not_know_the_secret_is_refused() {
    let (desk, recorder) = start(PullRequests::default()).await;
    let body = push("main", '1').to_string();
    for secret in ["", "another", "between us\n"] {
        problem(signed(&desk, secret, "push", "one", body.as_bytes()), 401).await;
    }
    let forged = signed(&desk, SECRET, "push", "one", body.as_bytes()).body(body.replace('1', "2"));
    problem(forged, 401).await;
    let unsigned = desk.ask(Method::POST, &format!("/webhook/{NAME}"), None);
    problem(unsigned.header("content-type", "application/json").body(body.clone()), 401).await;
    std::fs::write(recorder.file("webhook"), "").unwrap();
    problem(signed(&desk, "", "push", "one", body.as_bytes()), 401).await;
    assert_eq!(all(&desk).await, 0);
}

#[tokio::test]
async fn a_secret_that_changes_counts_at_once() {
    let (desk, recorder) = start(PullRequests::default()).await;
    std::fs::write(recorder.file("webhook"), "a new one\n").unwrap();
    problem(send(&desk, "push", push("main", '1')), 401).await;
    let body = br#"{"repository": {"name": "x", "owner": {"login": "y"}}}"#;
    ignored(signed(&desk, "a new one", "push", "one", body)).await;
}

#[tokio::test]
async fn what_is_too_long_of_another_kind_or_for_nobody_is_refused() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let long = vec![b' '; (4 << 20) + 1];
    let sentence = problem(signed(&desk, SECRET, "push", "one", &long), 413).await;
    assert!(sentence.contains("4 MiB"), "{sentence}");
    let form = desk.ask(Method::POST, &format!("/webhook/{NAME}"), None);
    problem(form.header("content-type", "application/x-www-form-urlencoded").body("payload=%7B%7D"), 415)
        .await;
    for name in ["other", "..%2Fcode", "<script>", ""] {
        let request = desk.ask(Method::POST, &format!("/webhook/{name}"), None);
        problem(request.header("content-type", "application/json"), 404).await;
    }
    let broken =
        [&b"{"[..], b"[]", b"\xff", br#"{"repository": {"name": "", "owner": {"login": "a\u0000b"}}}"#];
    for body in broken {
        problem(signed(&desk, SECRET, "push", "one", body), 400).await;
    }
    assert_eq!(all(&desk).await, 0);
}

#[tokio::test]
async fn what_nobody_builds_is_ignored() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let mut tag = push("main", '1');
    tag["ref"] = json!("refs/tags/v1");
    ignored(send(&desk, "push", tag)).await;
    ignored(send(&desk, "star", json!({}))).await;
    for name in ["other", "dots' OR true --", "../dots", "%", "é\u{202e}"] {
        let mut body = push("main", '1');
        body["repository"] = json!({"name": name, "owner": {"login": "acme"}});
        let request =
            signed(&desk, SECRET, "push", name.get(..1).unwrap_or("x"), body.to_string().as_bytes());
        let reason = ignored(request).await;
        assert!(reason.contains("no project"), "{reason}");
    }
}

#[tokio::test]
async fn a_branch_of_any_name_is_only_a_name() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let name = "<script>alert('x')</script>/$(reboot);--";
    let ids = accepted(send(&desk, "push", push(name, '1'))).await;
    let shown: Value = desk.look(&format!("/api/evals/{}", ids[0])).await;
    assert_eq!(shown["branch"], name);
}

#[tokio::test]
async fn a_branch_that_is_gone_takes_its_evaluations_along() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let ids = accepted(send(&desk, "push", push("topic", '1'))).await;
    accepted(send(&desk, "delete", json!({"ref": "topic", "ref_type": "branch"}))).await;
    assert_eq!(evaluation(&desk, ids[0]).await.stage, Stage::Cancelled);
}

#[tokio::test]
async fn a_branch_or_a_pull_request_that_is_there_again_loses_nothing() {
    let (desk, recorder) = start(PullRequests::All).await;
    recorder.memory().branches = vec![("topic".to_owned(), commit('1'))];
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "open"}));
    let branch = accepted(send(&desk, "push", push("topic", '1'))).await[0];
    let outside = accepted(send(&desk, "pull_request", pull_request("opened", '2', true))).await[0];
    send(&desk, "delete", json!({"ref": "topic", "ref_type": "branch"})).send().await.unwrap();
    ignored(send(&desk, "pull_request", pull_request("closed", '2', true))).await;
    for id in [branch, outside] {
        assert_eq!(evaluation(&desk, id).await.stage, Stage::Queued);
    }
}

#[tokio::test]
async fn a_pull_request_that_was_closed_without_a_word_is_found() {
    let (desk, recorder) = start(PullRequests::All).await;
    recorder.memory().branches = vec![("main".to_owned(), commit('1'))];
    let ids = accepted(send(&desk, "pull_request", pull_request("opened", '2', true))).await;
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "closed"}));
    desk.farm.database.execute("UPDATE ci.pull_request SET seen_at = now() - interval '25 hours'").await;
    desk.farm.database.execute("UPDATE ci.comparison SET next_at = now()").await;
    eventually("it is closed", || async { evaluation(&desk, ids[0]).await.stage == Stage::Cancelled }).await;
}

#[tokio::test]
async fn a_pull_request_from_inside_is_its_branch() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let ids = accepted(send(&desk, "push", push("topic", '1'))).await;
    assert_eq!(accepted(send(&desk, "pull_request", pull_request("opened", '1', false))).await, ids);
    assert!(!evaluation(&desk, ids[0]).await.untrusted);
}

#[tokio::test]
async fn what_is_told_late_does_not_undo_a_newer_push() {
    let (desk, recorder) = start(PullRequests::default()).await;
    accepted(send(&desk, "push", push("topic", '1'))).await;
    let newer = accepted(send(&desk, "push", push_after("topic", '1', '2'))).await;
    recorder.memory().branches = vec![("topic".to_owned(), commit('2'))];
    assert_eq!(accepted(send(&desk, "push", push("topic", '1'))).await, newer);
    assert_eq!(accepted(send(&desk, "pull_request", pull_request("synchronize", '1', false))).await, newer);
    assert_eq!(evaluation(&desk, newer[0]).await.stage, Stage::Queued);
    recorder.memory().branches.clear();
    let reason = ignored(send(&desk, "push", push("topic", '1'))).await;
    assert!(reason.contains("not there"), "{reason}");
}

#[tokio::test]
async fn a_pull_requests_old_head_that_is_told_late_ends_nothing() {
    let (desk, recorder) = start(PullRequests::All).await;
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "open"}));
    let ids = accepted(send(&desk, "pull_request", pull_request("opened", '2', true))).await;
    let reason = ignored(send(&desk, "pull_request", pull_request("synchronize", '1', true))).await;
    assert!(reason.contains("another commit"), "{reason}");
    assert_eq!(evaluation(&desk, ids[0]).await.stage, Stage::Queued);
}

#[tokio::test]
async fn a_head_that_nobody_told_of_is_built_at_the_second_word() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "open"}));
    ignored(send(&desk, "issue_comment", comment(4, "ann", "/ci run"))).await;
    an_hour_passes(&desk).await;
    let ids = accepted(send(&desk, "issue_comment", comment(5, "ann", "/ci run"))).await;
    assert_eq!(evaluation(&desk, ids[0]).await.commit, Some(commit('2')));
}

#[tokio::test]
async fn the_word_is_not_for_a_head_that_was_pushed_after_it_was_written() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    an_hour_passes(&desk).await;
    let before = "2026-01-01T02:00:00+02:00";
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "open"}));
    accepted(send(&desk, "pull_request", pull_request("synchronize", '2', true))).await;
    // It comes late, and so does what names a few digits: another commit may have the same.
    for (id, body) in [(4, "/ci run"), (5, "/ci run 2222222")] {
        let reason = ignored(send(&desk, "issue_comment", comment_at(id, "ann", body, before))).await;
        assert!(reason.contains("comment again"), "{reason}");
    }
    let whole = format!("/ci run {}", commit('2'));
    let ids = accepted(send(&desk, "issue_comment", comment_at(6, "ann", &whole, before))).await;
    assert_eq!(evaluation(&desk, ids[0]).await.commit, Some(commit('2')));
}

#[tokio::test]
async fn the_word_is_not_for_a_pull_request_that_nobody_told_of() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    recorder.memory().pulls.insert(7, json!({"head": commit('1'), "state": "open"}));
    let reason = ignored(send(&desk, "issue_comment", comment(4, "ann", "/ci run"))).await;
    assert!(reason.contains("comment again"), "{reason}");
    an_hour_passes(&desk).await;
    assert_eq!(accepted(send(&desk, "issue_comment", comment(5, "ann", "/ci run"))).await.len(), 1);
}

#[tokio::test]
async fn a_word_of_which_nobody_knows_when_it_was_written_names_the_whole_commit() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    recorder.memory().pulls.insert(7, json!({"head": commit('1'), "state": "open"}));
    accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    an_hour_passes(&desk).await;
    let timeless = |id: i64, body: &str| {
        let mut comment = comment(id, "ann", body);
        comment["comment"]["created_at"] = Value::Null;
        send(&desk, "issue_comment", comment)
    };
    let reason = ignored(timeless(4, "/ci run 1111111")).await;
    assert!(reason.contains("whole commit"), "{reason}");
    assert_eq!(accepted(timeless(5, &format!("/ci run {}", commit('1')))).await.len(), 1);
}

#[tokio::test]
async fn a_change_without_a_branch_is_from_outside_whosever_repository_it_is_in() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    let agit_pull = json!({"head": commit('1'), "state": "open", "inside": true, "ref": "refs/pull/7/head"});
    recorder.memory().pulls.insert(7, agit_pull);
    assert!(accepted(send(&desk, "pull_request", agit("opened", '1'))).await.is_empty());
    assert_eq!(all(&desk).await, 0);
    an_hour_passes(&desk).await;
    let ids = accepted(send(&desk, "issue_comment", comment(4, "ann", "/ci run"))).await;
    let built = evaluation(&desk, ids[0]).await;
    assert_eq!((built.branch.as_deref(), built.untrusted), (Some("refs/pull/7/head"), true));
}

#[tokio::test]
async fn what_a_stranger_pushes_to_a_collaborators_fork_waits() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.extend(["eve".to_owned(), "ann".to_owned()]);
    let pushed_by = |digit: char, sender: Value| {
        recorder.memory().pulls.insert(7, json!({"head": commit(digit), "state": "open"}));
        let mut body = pull_request("synchronize", digit, true);
        body["sender"] = sender;
        send(&desk, "pull_request", body)
    };
    assert!(accepted(pushed_by('1', json!({"login": "mallory"}))).await.is_empty());
    assert!(accepted(pushed_by('2', Value::Null)).await.is_empty());
    assert_eq!(accepted(pushed_by('3', json!({"login": "ann"}))).await.len(), 1);
    assert_eq!(accepted(pushed_by('4', json!({"login": "eve"}))).await.len(), 1);
}

#[tokio::test]
async fn what_came_before_its_project_may_be_delivered_again() {
    let (desk, recorder) = start(PullRequests::default()).await;
    let mut body = push("main", '1');
    body["repository"] = json!({"name": "other", "owner": {"login": "acme"}});
    let request = || signed(&desk, SECRET, "push", "one", body.to_string().as_bytes());
    assert!(ignored(request()).await.contains("no project"));
    let forge =
        Forge::Gitea { instance: recorder.url.clone(), owner: "acme".to_owned(), repo: "other".to_owned() };
    adopt(&desk.farm, "main", forge, PullRequests::default()).await;
    assert_eq!(accepted(request()).await.len(), 1);
    assert!(ignored(request()).await.contains("before"));
}

#[tokio::test]
async fn a_pull_request_from_outside_waits_for_a_collaborators_word() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    recorder.memory().pulls.insert(7, json!({"head": commit('1'), "state": "open"}));
    assert!(accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await.is_empty());
    an_hour_passes(&desk).await;
    for request in
        [comment(1, "eve", "/ci run"), comment(2, "ann", "looks good"), comment(3, "ann", "/ci run 2222222")]
    {
        ignored(send(&desk, "issue_comment", request)).await;
    }
    let ids = accepted(send(&desk, "issue_comment", comment(4, "ann", "/ci run 1111111"))).await;
    let built = evaluation(&desk, ids[0]).await;
    assert_eq!((built.branch.as_deref(), built.commit), (Some("refs/pull/7/head"), Some(commit('1'))));
    assert!(built.untrusted);
}

#[tokio::test]
async fn the_word_is_for_that_head_and_used_up_by_a_push() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("ann".to_owned());
    recorder.memory().pulls.insert(7, json!({"head": commit('1'), "state": "open"}));
    accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    an_hour_passes(&desk).await;
    let ids = accepted(send(&desk, "issue_comment", comment(4, "ann", "/ci run"))).await;
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "open"}));
    let reason = ignored(send(&desk, "issue_comment", comment(5, "ann", "/ci run"))).await;
    assert!(reason.contains("meanwhile"), "the push is not told yet: {reason}");
    assert!(accepted(send(&desk, "pull_request", pull_request("synchronized", '2', true))).await.is_empty());
    assert_eq!(evaluation(&desk, ids[0]).await.stage, Stage::Cancelled);
    an_hour_passes(&desk).await;
    let reason = ignored(send(&desk, "issue_comment", comment(4, "ann", "/ci run"))).await;
    assert!(reason.contains("used before"), "{reason}");
    assert_eq!(accepted(send(&desk, "issue_comment", comment(6, "ann", "/ci run"))).await.len(), 1);
}

#[tokio::test]
async fn a_collaborators_own_fork_needs_no_word_and_is_still_from_outside() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().writers.insert("eve".to_owned());
    let ids = accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    assert!(evaluation(&desk, ids[0]).await.untrusted);
    recorder.memory().pulls.insert(7, json!({"head": commit('1'), "state": "closed"}));
    accepted(send(&desk, "pull_request", pull_request("closed", '1', true))).await;
    assert_eq!(evaluation(&desk, ids[0]).await.stage, Stage::Cancelled);
}

#[tokio::test]
async fn a_project_says_whose_pull_requests_are_built() {
    let (desk, recorder) = start(PullRequests::All).await;
    let ids = accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    assert!(evaluation(&desk, ids[0]).await.untrusted);
    recorder.adopt(&desk.farm, PullRequests::None).await;
    recorder.memory().writers.extend(["eve".to_owned(), "ann".to_owned()]);
    recorder.memory().pulls.insert(7, json!({"head": commit('2'), "state": "open"}));
    assert!(accepted(send(&desk, "pull_request", pull_request("synchronize", '2', true))).await.is_empty());
    ignored(send(&desk, "issue_comment", comment(4, "ann", "/ci run"))).await;
    assert_eq!(all(&desk).await, 1);
}

#[tokio::test]
async fn what_cannot_be_checked_now_may_be_delivered_again() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    recorder.memory().refusals.push(Refusal { of: "collaborators", status: 500, header: ("x-nothing", "") });
    let mut body = pull_request("opened", '1', true);
    body["repository"] = json!({"name": "dots", "owner": {"login": "acme"}});
    let request = || signed(&desk, SECRET, "pull_request", "one", body.to_string().as_bytes());
    problem(request(), 503).await;
    recorder.memory().writers.insert("eve".to_owned());
    assert_eq!(accepted(request()).await.len(), 1);
}

#[tokio::test]
async fn pushes_that_nobody_told_of_are_found() {
    let recorder = Recorder::start().await;
    recorder.memory().branches = vec![("main".to_owned(), commit('1')), ("old".to_owned(), commit('2'))];
    let farm = Farm::new().await;
    farm.project("main").await;
    recorder.adopt(&farm, PullRequests::default()).await;
    let desk = Desk::with(farm, &[("forges", &recorder.gitea())]).await;
    eventually("the default branch is built", || async { all(&desk).await == 1 }).await;
    recorder.memory().branches = vec![("main".to_owned(), commit('1')), ("old".to_owned(), commit('3'))];
    desk.farm.database.execute("UPDATE ci.comparison SET next_at = now()").await;
    eventually("a push is found", || async { all(&desk).await == 2 }).await;
    let newest = evaluations::list(&desk.farm.frontend, &Filter::default(), 1).await.unwrap().remove(0);
    assert_eq!((newest.branch.as_deref(), newest.commit), (Some("old"), Some(commit('3'))));
}

#[tokio::test]
async fn a_branch_is_gone_only_if_its_forge_says_so() {
    let (desk, recorder) = start(PullRequests::default()).await;
    let [left_out, gone] = [
        accepted(send(&desk, "push", push("a", '1'))).await[0],
        accepted(send(&desk, "push", push("b", '1'))).await[0],
    ];
    recorder.memory().branches = ["a", "c", "d", "e"].map(|name| (name.to_owned(), commit('1'))).to_vec();
    recorder.memory().unlisted = "a".to_owned();
    desk.farm.database.execute("UPDATE ci.comparison SET next_at = now()").await;
    eventually("a branch is gone", || async { evaluation(&desk, gone).await.stage == Stage::Cancelled })
        .await;
    assert_eq!(evaluation(&desk, left_out).await.stage, Stage::Queued);
}

#[tokio::test]
async fn a_repository_that_moved_is_told_of_where_its_project_is_shown() {
    let (desk, recorder) = start(PullRequests::default()).await;
    let to = ("location", "/api/v1/repos/acme/dotfiles");
    recorder.memory().refusals.extend((0..2).map(|_| Refusal { of: "dots", status: 301, header: to }));
    desk.farm.database.execute("UPDATE ci.comparison SET next_at = now()").await;
    eventually("it is told", || async {
        let projects: Value = desk.look("/api/projects").await;
        projects[0]["git"]["error"].as_str().is_some_and(|error| error.contains("acme/dotfiles"))
    })
    .await;
}

#[tokio::test]
async fn a_project_that_people_made_is_known_to_the_forge_that_its_address_names() {
    let (desk, recorder) = start(PullRequests::default()).await;
    let git = json!({"url": format!("{}/acme/dots.git", recorder.url), "pull_requests": "all"});
    let add = desk.ask(Method::POST, "/api/projects", Some(&desk.admin));
    answer(add.json(&json!({"name": "ours", "git": git})), StatusCode::CREATED).await;
    desk.farm.database.execute("SELECT ci.remove_project('main')").await;
    let ids = accepted(send(&desk, "pull_request", pull_request("opened", '1', true))).await;
    assert_eq!(evaluation(&desk, ids[0]).await.project, "ours");
}

#[tokio::test]
async fn webhooks_are_counted_and_no_secret_is_shown() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    accepted(send(&desk, "push", push("main", '1'))).await;
    let text = answer(desk.ask(Method::GET, "/metrics", None), StatusCode::OK).await.text().await.unwrap();
    assert!(text.contains(r#"webhooks_total{forge="code",outcome="accepted"} 1"#), "{text}");
    assert!(!text.contains(SECRET));
}

#[tokio::test]
async fn a_pull_request_from_outside_that_waits_says_so_at_its_head() {
    let (desk, recorder) = start(PullRequests::Collaborators).await;
    assert!(accepted(send(&desk, "pull_request", pull_request("opened", '2', true))).await.is_empty());
    eventually("its forge is told", || async { recorder.memory().told.len() == 2 }).await;
    for told in &recorder.memory().told {
        let said = (told.commit.as_str(), told.state.as_str(), told.description.as_str());
        assert_eq!(said, (commit('2').as_str(), "pending", "waits for a collaborator's /ci run"));
        assert!(told.page.ends_with("/projects/main"), "{told:?}");
    }
    recorder.memory().writers.insert("ann".to_owned());
    recorder.memory().pulls.insert(7, json!({"state": "open", "head": commit('2')}));
    an_hour_passes(&desk).await;
    accepted(send(&desk, "issue_comment", comment(1, "ann", "/ci run"))).await;
    let says = |words: &str| recorder.memory().told.iter().any(|told| told.description == words);
    eventually("it is evaluated", || async { says("waiting for an evaluator") }).await;
}

#[tokio::test]
async fn projects_of_one_repository_do_not_overwrite_each_others_statuses() {
    let (desk, recorder) = start(PullRequests::default()).await;
    desk.farm.project("other").await;
    let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
    let forge = Forge::Gitea { instance: recorder.url.clone(), owner, repo };
    adopt(&desk.farm, "other", forge, PullRequests::default()).await;
    assert_eq!(accepted(send(&desk, "push", push("main", '1'))).await.len(), 2);
    let contexts =
        || -> BTreeSet<String> { recorder.memory().told.iter().map(|told| told.context.clone()).collect() };
    let expected = ["main/nix-build", "main/nix-eval", "other/nix-build", "other/nix-eval"]
        .map(|name| format!("harmonia-ci/{name}"));
    eventually("all four are told", || async { contexts().len() >= 4 }).await;
    assert_eq!(contexts(), expected.into());
}

#[tokio::test]
async fn requests_that_never_end_keep_no_webhook_out() {
    let (desk, _recorder) = start(PullRequests::default()).await;
    let mut half = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(desk.url.trim_start_matches("http://")).await.unwrap();
        let head = format!(
            "POST /webhook/{NAME} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        half.push(stream);
    }
    assert_eq!(accepted(send(&desk, "push", push("main", '1'))).await.len(), 1);
}
