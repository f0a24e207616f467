//! Projects on a real API server, and in the queue.

use harmonia_queue::branches;
use harmonia_queue::{people, projects};
use harmonia_tests::farm::SYSTEM;
use harmonia_tests::kube::{Namespace, eventually, requests_of};
use harmonia_tests::operator::{Release, SOON};
use serde_json::Value;

fn project(spec: &str) -> String {
    format!(
        "{{apiVersion: ci.harmonia.dev/v1alpha1, kind: Project, metadata: {{name: dotfiles}}, \
         spec: {{source: {{github: {{owner: acme, repo: dotfiles}}}}, {spec}}}}}"
    )
}

/// Status and reason of a condition.
fn condition(object: &Value, kind: &str) -> (String, String) {
    let found = object["status"]["conditions"].as_array().into_iter().flatten();
    let found = found.into_iter().find(|condition| condition["type"] == kind).cloned().unwrap_or_default();
    let word = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (word("status"), word("reason"))
}

fn holds(object: &Value, kind: &str, status: &str, reason: &str) -> bool {
    condition(object, kind) == (status.to_owned(), reason.to_owned())
}

async fn shares(release: &Release, namespace: &Namespace) -> Option<i32> {
    let name = format!("{}/dotfiles", namespace.name());
    projects::get(&release.farm.operator, &name).await.unwrap().map(|project| project.shares)
}

async fn has_shares(release: &Release, namespace: &Namespace, expected: Option<i32>) {
    let what = format!("{expected:?} shares of {}", namespace.name());
    eventually(&what, SOON, async || shares(release, namespace).await == expected).await;
}

#[tokio::test]
async fn a_project_is_mirrored_and_shows_what_the_queue_knows() {
    let release = Release::new("mirror").await;
    let namespace = &release.namespace;
    namespace.apply(&project("shares: 200, maxConcurrent: 3")).await;
    let synced = |project: &Value| {
        holds(project, "Synced", "True", "Synced")
            && holds(project, "Ready", "True", "Synced")
            && project["status"]["observedGeneration"] == project["metadata"]["generation"]
            && project["status"]["queued"] == 0
    };
    namespace.eventually("project/dotfiles", SOON, synced).await;
    assert_eq!(shares(&release, namespace).await, Some(200));
    let name = format!("{}/dotfiles", namespace.name());
    let followed = branches::source(&release.farm.operator, &name).await.unwrap();
    assert!(followed.is_some(), "where its code is is known with it");
    namespace.apply(&project("shares: 300")).await;
    has_shares(&release, namespace, Some(300)).await;

    let evaluation = release.farm.queue(&name, &[("a", &[]), ("b", &[])]).await.id;
    let counted = |project: &Value| {
        let status = &project["status"];
        status["queued"] == 2 && status["lastEvaluation"]["id"] == evaluation
    };
    namespace.eventually("project/dotfiles", SOON, counted).await;
    let sentence = people::remove_project(&release.farm.frontend, &name).await.unwrap_err().to_string();
    assert!(sentence.contains("is kept by the Project dotfiles in namespace"), "{sentence}");
}

#[tokio::test]
async fn a_project_that_is_deleted_ends_its_evaluations_and_one_made_anew_takes_its_place() {
    let release = Release::new("anew").await;
    let namespace = &release.namespace;
    for shares in [100, 200, 300] {
        namespace.apply(&project(&format!("shares: {shares}"))).await;
        has_shares(&release, namespace, Some(shares)).await;
    }
    let name = format!("{}/dotfiles", namespace.name());
    let jobs = release.farm.queue(&name, &[("leaf", &[])]).await;
    namespace.kubectl(&["delete", "project", "dotfiles", "--timeout=180s"]).await;
    assert_eq!(shares(&release, namespace).await, None);
    release.farm.settle().await;
    assert_eq!(release.farm.state(jobs["leaf"]).await, "cancelled");
    namespace.apply(&project("shares: 50")).await;
    has_shares(&release, namespace, Some(50)).await;
}

#[tokio::test]
async fn projects_of_one_name_in_two_namespaces_are_two() {
    let other = Namespace::new("other").await;
    let mut release = Release::prepare("twice", &[&other]).await;
    release.make_secrets().await;
    release.start();
    release.namespace.apply(&project("shares: 1")).await;
    other.apply(&project("shares: 2")).await;
    has_shares(&release, &release.namespace, Some(1)).await;
    has_shares(&release, &other, Some(2)).await;
    other.kubectl(&["delete", "project", "dotfiles", "--timeout=180s"]).await;
    assert_eq!(shares(&release, &release.namespace).await, Some(1));
}

#[tokio::test]
async fn a_project_that_people_made_is_not_taken_and_the_status_says_so() {
    let release = Release::new("taken").await;
    let namespace = &release.namespace;
    let name = format!("{}/dotfiles", namespace.name());
    release.farm.project(&name).await;
    namespace.apply(&project("shares: 200")).await;
    namespace
        .eventually("project/dotfiles", SOON, |project| holds(project, "Synced", "False", "NameTaken"))
        .await;
    assert_eq!(shares(&release, namespace).await, Some(100));
    people::remove_project(&release.farm.frontend, &name).await.unwrap();
    has_shares(&release, namespace, Some(200)).await;
}

#[tokio::test]
async fn a_project_waits_for_the_pool_that_it_names() {
    let release = Release::new("wait").await;
    let namespace = &release.namespace;
    namespace.apply(&project("pools: [late]")).await;
    namespace
        .eventually("project/dotfiles", SOON, |project| holds(project, "Ready", "False", "UnknownPool"))
        .await;
    release.farm.pool(&format!("{}/late", namespace.name()), &[SYSTEM], 1).await;
    namespace.eventually("project/dotfiles", SOON, |project| holds(project, "Ready", "True", "Synced")).await;
}

#[tokio::test]
async fn what_was_deleted_without_its_finalizer_goes_from_the_queue_too() {
    let release = Release::new("orphan").await;
    let namespace = &release.namespace;
    namespace.apply(&project("shares: 7")).await;
    has_shares(&release, namespace, Some(7)).await;
    namespace.kubectl(&["delete", "project", "dotfiles", "--wait=false"]).await;
    // A person's way out, whoever is faster.
    let patch = "{\"metadata\": {\"finalizers\": null}}";
    let _ = namespace.try_kubectl(&["patch", "project", "dotfiles", "--type=merge", "--patch", patch]).await;
    has_shares(&release, namespace, None).await;
}

fn reader(contents: &str) -> String {
    format!("{{apiVersion: v1, kind: Secret, metadata: {{name: reader}}, stringData: {{{contents}}}}}")
}

/// What evaluators see of the Secret `reader`, decoded.
async fn brought(release: &Release, namespace: &Namespace) -> Option<String> {
    let secret = release.namespace.get(&format!("secret/{}-credentials", release.namespace.name())).await;
    let encoded = secret["data"][format!("{}.reader", namespace.name())].as_str()?.to_owned();
    let decoded = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, encoded).unwrap();
    Some(String::from_utf8(decoded).unwrap())
}

async fn is_brought(release: &Release, namespace: &Namespace, expected: Option<&str>) {
    let holds = async || brought(release, namespace).await.as_deref() == expected;
    eventually(&format!("evaluators have {expected:?}"), SOON, holds).await;
}

#[tokio::test]
async fn the_secret_that_a_project_names_reaches_the_evaluators_and_goes_with_the_project() {
    let team = Namespace::new("team").await;
    let mut release = Release::prepare("private", &[&team]).await;
    release.make_secrets().await;
    release.start();
    team.kubectl(&["create", "secret", "generic", "bystander", "--from-literal=netrc=x"]).await;
    team.apply(
        "{apiVersion: ci.harmonia.dev/v1alpha1, kind: Project, metadata: {name: dotfiles}, \
         spec: {source: {github: {owner: acme, repo: dotfiles}, secretRef: {name: reader}}}}",
    )
    .await;
    let is = |reason: &'static str| move |project: &Value| holds(project, "Ready", "False", reason);
    team.eventually("project/dotfiles", SOON, is("SecretMissing")).await;
    team.apply(&reader("password: one")).await;
    team.eventually("project/dotfiles", SOON, is("InvalidSecret")).await;
    for password in ["one", "two"] {
        let netrc = format!("machine github.com login me password {password}");
        team.apply(&reader(&format!("netrc: {netrc}"))).await;
        is_brought(&release, &team, Some(&netrc)).await;
    }
    team.eventually("project/dotfiles", SOON, |project| holds(project, "Ready", "True", "Synced")).await;
    let read = requests_of(&release.user());
    let read = |name: &str| read.iter().any(|request| request.verb == "get" && request.name == name);
    assert!(read("reader") && !read("bystander"), "only what a Project names is read");
    team.kubectl(&["delete", "project", "dotfiles", "--timeout=180s"]).await;
    is_brought(&release, &team, None).await;
}
