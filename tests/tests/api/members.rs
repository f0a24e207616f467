//! People of forges: who they are by the forge's word, and what they may do in the projects whose repositories they may push to.

use std::time::{Duration, Instant};

use harmonia_queue::branches::{Forge, PullRequests};
use harmonia_queue::builder::Failure;
use harmonia_tests::farm::Farm;
use harmonia_tests::gitea::Gitea;
use harmonia_tests::skip;
use reqwest::Method;
use serde_json::json;

use super::desk::Desk;
use super::reader::{Reader, cookie};
use super::recorder::{Recorder, Refusal, adopt};

/// Where people would reach the frontend: its port is not known when the forge has to know it.
const PUBLIC: &str = "http://ci.example.org";

/// A build of a project that failed, and its evaluation.
async fn failed(desk: &Desk, project: &str, name: &str) -> (i64, i64) {
    let evaluation = desk.farm.queue(project, &[(name, &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    desk.farm.settle().await;
    (evaluation[name], evaluation.id)
}

/// The value of a field of an address.
fn field<'a>(address: &'a str, name: &str) -> &'a str {
    let mut fields = address.split(['?', '&']).filter_map(|pair| pair.split_once('='));
    fields.find(|(key, _)| *key == name).unwrap().1
}

/// Begins a sign-in: where one is sent to.
async fn begin(reader: &mut Reader<'_>) -> String {
    let answer = reader.get("/sign-in/code?to=/queue").await;
    assert_eq!(answer.status(), 303);
    reader.cookie = Some(cookie(&answer));
    answer.headers()["location"].to_str().unwrap().to_owned()
}

/// Whether somebody may have a build rebuilt: a button is there, and it does it.
async fn may_rebuild(reader: &Reader<'_>, build: i64) -> bool {
    let answer = reader.press("/queue", &format!("/builds/{build}/rebuild"), &[]).await;
    assert!([303, 403].contains(&answer.status().as_u16()), "{}", answer.status());
    answer.status() == 303
}

/// GitHub cannot run here, so somebody plays it who answers as its documentation says.
async fn github() -> (Desk, Recorder) {
    let recorder = Recorder::start().await;
    recorder.memory().person = "ann".to_owned();
    let forges = recorder.github();
    let more =
        [("forges", forges.as_str()), ("operators", "ann, code:olga"), ("readers", "code:ann, code:eve")];
    let desk = Desk::with(Farm::new().await, &more).await;
    let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
    let forge = Forge::GitHub { instance: recorder.url.clone(), owner, repo };
    adopt(&desk.farm, "main", forge, PullRequests::default()).await;
    (desk, recorder)
}

async fn with_github<'a>(desk: &'a Desk, recorder: &Recorder, person: &str) -> Reader<'a> {
    recorder.memory().person = person.to_owned();
    let mut reader = Reader::new(desk);
    let address = begin(&mut reader).await;
    let answer =
        reader.get(&format!("/sign-in/code/back?code=good&state={}", field(&address, "state"))).await;
    assert_eq!(answer.headers()["location"], "/queue");
    reader.cookie = Some(cookie(&answer));
    reader
}

#[tokio::test]
async fn github_says_who_somebody_is() {
    let (desk, recorder) = github().await;
    let mut reader = Reader::new(&desk);
    assert!(reader.page("/sign-in").await.contains("Sign in with GitHub"));
    let address = begin(&mut reader).await;
    assert!(
        address.starts_with(&format!("{}/login/oauth/authorize?client_id=us&", recorder.url)),
        "{address}"
    );
    assert_eq!(field(&address, "code_challenge_method"), "S256");
    let reader = with_github(&desk, &recorder, "ann").await;
    assert!(reader.page("/queue").await.contains("ann"));
}

#[tokio::test]
async fn a_page_waits_for_no_slow_forge_and_has_no_button_then() {
    let (desk, recorder) = github().await;
    let (build, _) = failed(&desk, "main", "leaf").await;
    let eve = with_github(&desk, &recorder, "eve").await;
    recorder.memory().writers.insert("eve".to_owned());
    recorder.memory().thinks = Duration::from_secs(8);
    let (path, begun) = (format!("/builds/{build}"), Instant::now());
    assert!(!eve.page(&path).await.contains("Rebuild"));
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    recorder.memory().thinks = Duration::ZERO;
    assert!(eve.page(&path).await.contains("Rebuild"));
}

#[tokio::test]
async fn a_code_that_is_wrong_or_of_another_sign_in_signs_nobody_in() {
    let (desk, _recorder) = github().await;
    let mut reader = Reader::new(&desk);
    let address = begin(&mut reader).await;
    let state = field(&address, "state");
    for (path, status) in [
        (format!("/sign-in/code/back?code=bad&state={state}"), 401),
        ("/sign-in/code/back?code=good&state=another".to_owned(), 403),
        (format!("/sign-in/code/back?state={state}"), 403),
        (format!("/sign-in/code/back?error=access_denied&state={state}"), 403),
        (format!("/sign-in/oidc/back?code=good&state={state}"), 404),
    ] {
        let answer = reader.get(&path).await;
        assert_eq!(answer.status(), status, "{path}");
        assert!(!answer.headers().contains_key("set-cookie"), "{path}");
    }
    let stranger = Reader::new(&desk).get(&format!("/sign-in/code/back?code=good&state={state}")).await;
    assert_eq!(stranger.status(), 403);
}

#[tokio::test]
async fn whoever_is_listed_nowhere_and_may_push_nowhere_is_not_let_in() {
    let (desk, recorder) = github().await;
    recorder.memory().writers.insert("bob".to_owned());
    for (person, status) in [("mallory", 403), ("bob", 303)] {
        recorder.memory().person = person.to_owned();
        let mut reader = Reader::new(&desk);
        let address = begin(&mut reader).await;
        let back = format!("/sign-in/code/back?code=good&state={}", field(&address, "state"));
        let answer = reader.get(&back).await;
        assert_eq!(answer.status(), status);
        let said = answer.text().await.unwrap();
        assert!(status == 303 || said.contains("readers"), "{said}");
    }
}

#[tokio::test]
async fn who_may_push_nowhere_is_not_asked_about_again_at_once() {
    let (desk, recorder) = github().await;
    for status in [404, 500] {
        let header = ("x-nothing", "");
        recorder.memory().refusals.push(Refusal { of: "collaborators", status, header });
        recorder.memory().person = "mallory".to_owned();
        let mut reader = Reader::new(&desk);
        let address = begin(&mut reader).await;
        let back = format!("/sign-in/code/back?code=good&state={}", field(&address, "state"));
        let said = reader.get(&back).await.text().await.unwrap();
        assert!(said.contains("readers"), "{said}");
    }
    assert_eq!(recorder.memory().refusals.len(), 1, "the second time, nobody was asked");
}

#[tokio::test]
async fn whoever_may_push_may_rebuild_and_cancel_there_and_nowhere_else() {
    let (desk, recorder) = github().await;
    desk.farm.project("other").await;
    let ((ours, evaluation), (theirs, other)) =
        (failed(&desk, "main", "a").await, failed(&desk, "other", "b").await);
    let reader = with_github(&desk, &recorder, "ann").await;
    assert!(!may_rebuild(&reader, ours).await, "who may not push may only look");
    recorder.memory().writers.insert("ann".to_owned());
    assert!(may_rebuild(&reader, ours).await && !may_rebuild(&reader, theirs).await);
    let cancelled = reader.press("/queue", &format!("/evals/{evaluation}/cancel"), &[]).await;
    assert_eq!(cancelled.status(), 303);
    for path in [
        format!("/evals/{other}/re-evaluate"),
        format!("/builds/{theirs}/cancel"),
        format!("/evals/{evaluation}/pin"),
        format!("/nodes/{}/drain", desk.farm.node_of(&desk.node).await),
    ] {
        assert_eq!(reader.press("/queue", &path, &[]).await.status(), 403, "{path}");
    }
}

#[tokio::test]
async fn a_build_that_others_want_too_is_not_cancelled_by_one_of_them() {
    let (desk, recorder) = github().await;
    desk.farm.project("other").await;
    let build = desk.farm.queue("main", &[("a", &[])]).await["a"];
    desk.farm.queue("other", &[("a", &[])]).await;
    recorder.memory().writers.insert("ann".to_owned());
    let reader = with_github(&desk, &recorder, "ann").await;
    let cancelled = reader.press("/queue", &format!("/builds/{build}/cancel"), &[]).await;
    assert_eq!(cancelled.status(), 403);
    assert!(!reader.page(&format!("/builds/{build}")).await.contains("Cancel this build"));
}

#[tokio::test]
async fn whoever_is_listed_by_forge_and_name_operates_everywhere() {
    let (desk, recorder) = github().await;
    desk.farm.project("other").await;
    let (build, _) = failed(&desk, "other", "b").await;
    let ann = with_github(&desk, &recorder, "ann").await;
    assert!(!may_rebuild(&ann, build).await, "a bare name is somebody of oidc_issuer");
    let olga = with_github(&desk, &recorder, "olga").await;
    assert!(may_rebuild(&olga, build).await);
}

#[tokio::test]
async fn people_of_a_real_gitea_sign_in_and_operate_where_they_may_push() {
    let Some(gitea) = Gitea::start().await else {
        return skip("there is no Gitea here; `./dev test api` makes it");
    };
    let (id, secret) = gitea.program(&format!("{PUBLIC}/sign-in/code/back")).await;
    let secrets = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(secrets.path().join(name), text).unwrap();
        secrets.path().join(name)
    };
    let forges = json!([{"name": "code", "type": "gitea", "url": gitea.url, "token_file": file("token", &gitea.bot),
                         "webhook_secret_file": file("webhook", "of a webhook"), "client_id": id, "client_secret_file": file("client", &secret)}]);
    let more =
        [("forges", forges.to_string()), ("public_url", PUBLIC.to_owned()), ("readers", "code:*".to_owned())];
    let more = more.each_ref().map(|(name, value)| (*name, value.as_str()));
    let desk = Desk::with(Farm::new().await, &more).await;
    gitea.repository(&format!("{}/webhook/code", desk.url), "of a webhook").await;
    let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
    adopt(
        &desk.farm,
        "main",
        Forge::Gitea { instance: gitea.url.clone(), owner, repo },
        PullRequests::default(),
    )
    .await;
    gitea.person("bob").await;

    let mut reader = Reader::new(&desk);
    let address = begin(&mut reader).await;
    let back = gitea.agree("bob", &address).await;
    let answer = reader.get(back.strip_prefix(PUBLIC).unwrap()).await;
    assert_eq!(answer.headers()["location"], "/queue");
    reader.cookie = Some(cookie(&answer));
    assert!(reader.page("/queue").await.contains("bob"));

    let (build, _) = failed(&desk, "main", "a").await;
    assert!(!may_rebuild(&reader, build).await);
    let collaborator = "repos/acme/dots/collaborators/bob";
    gitea.ask("acme", Method::PUT, collaborator, json!({"permission": "write"})).await;
    assert!(may_rebuild(&reader, build).await);
    gitea.ask("acme", Method::DELETE, collaborator, json!({})).await;
    assert!(!may_rebuild(&reader, build).await, "the forge is asked each time");
}

/// A token of somebody who is signed in; its secret.
async fn own_token(reader: &Reader<'_>) -> String {
    let made = reader.press("/you", "/you/tokens", &[("name", "laptop")]).await;
    assert_eq!(made.status(), 200);
    let page = made.text().await.unwrap();
    let rest =
        page.split("class=\"words command\" tabindex=\"0\">").nth(1).unwrap_or_else(|| panic!("{page}"));
    rest.split('<').next().unwrap().to_owned()
}

#[tokio::test]
async fn a_token_of_ones_own_may_do_by_the_api_what_its_owner_may() {
    let (desk, recorder) = github().await;
    desk.farm.project("other").await;
    let ((ours, _), (theirs, other)) = (failed(&desk, "main", "a").await, failed(&desk, "other", "b").await);
    let reader = with_github(&desk, &recorder, "ann").await;
    let token = own_token(&reader).await;
    let post = |path: String| desk.ask(Method::POST, &path, Some(&token)).send();
    let rebuild = format!("/api/builds/{ours}/rebuild");
    assert_eq!(post(rebuild.clone()).await.unwrap().status(), 403, "who may not push may only look");
    recorder.memory().writers.insert("ann".to_owned());
    assert_eq!(post(rebuild.clone()).await.unwrap().status(), 200);
    for path in [
        format!("/api/builds/{theirs}/rebuild"),
        format!("/api/evals/{other}/cancel"),
        format!("/api/evals/{other}/pin"),
        "/api/projects".to_owned(),
        "/api/tokens".to_owned(),
    ] {
        assert_eq!(post(path.clone()).await.unwrap().status(), 403, "{path}");
    }
    let name = format!("ann@{} laptop", recorder.url.trim_start_matches("http://"));
    let eve = with_github(&desk, &recorder, "eve").await;
    assert_eq!(eve.press("/you", "/you/tokens/revoke", &[("name", &name)]).await.status(), 404);
    assert_eq!(reader.press("/you", "/you/tokens/revoke", &[("name", &name)]).await.status(), 303);
    assert_eq!(post(rebuild).await.unwrap().status(), 401);
}

#[tokio::test]
async fn who_is_of_no_forge_makes_no_token_of_their_own() {
    let desk = Desk::new().await;
    let reader = Reader::signed_in(&desk, &desk.operate).await;
    assert_eq!(reader.get("/you").await.status(), 403);
    assert_eq!(reader.press("/queue", "/you/tokens", &[("name", "x")]).await.status(), 403);
}
