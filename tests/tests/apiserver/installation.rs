//! The installation's own workloads on a real API server.

use harmonia_queue::people::{self, Scope};
use harmonia_tests::kube::eventually;
use harmonia_tests::operator::{Release, SOON, falls_silent};
use serde_json::Value;
use sqlx::{Connection, PgConnection};

/// A value of a Secret.
async fn secret(release: &Release, name: &str, key: &str) -> String {
    let name = format!("secret/{}-{name}", release.namespace.name());
    release.namespace.eventually(&name, SOON, |secret| secret["data"][key].is_string()).await;
    let encoded = release.namespace.get(&name).await["data"][key].as_str().unwrap().to_owned();
    let decoded = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, encoded).unwrap();
    String::from_utf8(decoded).unwrap()
}

async fn appears(release: &Release, kind: &str, names: &[&str]) {
    for name in names {
        let what = format!("{kind}/{}-{name}", release.namespace.name());
        release.namespace.eventually(&what, SOON, |object| object["metadata"]["uid"].is_string()).await;
    }
}

#[tokio::test]
async fn roles_are_made_with_logins_that_work() {
    let release = Release::new("roles").await;
    appears(&release, "deployment", &["signer", "frontend", "evaluator"]).await;
    appears(&release, "poddisruptionbudget", &["signer", "frontend"]).await;
    appears(&release, "configmap", &["evaluator"]).await;
    for role in ["signer", "frontend", "evaluator"] {
        let url = secret(&release, &format!("database-{role}"), "url").await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let groups = "SELECT rolname::text FROM pg_roles WHERE pg_has_role(session_user, oid, 'MEMBER') AND rolname LIKE 'harmonia\\_%' AND NOT rolcanlogin";
        let groups: Vec<String> = sqlx::query_scalar(groups).fetch_all(&mut connection).await.unwrap();
        assert_eq!(groups, [format!("harmonia_{role}")]);
    }
    let token = secret(&release, "admin-token", "token").await;
    let (_, scope) = people::token_scope(&release.farm.frontend, &token).await.unwrap().unwrap();
    assert_eq!(scope, Scope::Admin);
    let netrc = secret(&release, "evaluator-netrc", "netrc").await;
    let token = netrc.split_whitespace().last().unwrap();
    let (_, scope) = people::token_scope(&release.farm.frontend, token).await.unwrap().unwrap();
    assert_eq!(scope, Scope::Read);
    let pool = release.namespace.get("builderpool/default").await;
    assert_eq!(pool["metadata"]["ownerReferences"][0]["kind"], "Deployment");
}

#[tokio::test]
async fn a_hand_edited_deployment_is_repaired_and_a_deleted_one_comes_back() {
    let release = Release::new("repair").await;
    appears(&release, "deployment", &["signer"]).await;
    let name = format!("{}-signer", release.namespace.name());
    let what = format!("deployment/{name}");
    release.namespace.kubectl(&["scale", &what, "--replicas=5"]).await;
    release.namespace.eventually(&what, SOON, |signer| signer["spec"]["replicas"] == 2).await;
    let uid = release.namespace.get(&what).await["metadata"]["uid"].clone();
    release.namespace.kubectl(&["delete", &what]).await;
    release
        .namespace
        .eventually(&what, SOON, |signer: &Value| {
            signer["metadata"]["uid"].is_string() && signer["metadata"]["uid"] != uid
        })
        .await;
}

#[tokio::test]
async fn a_role_waits_for_a_secret_that_is_missing_and_nothing_else_does() {
    let mut release = Release::prepare("missing", &[]).await;
    release.start();
    let database = format!("secret/{}-database-signer", release.namespace.name());
    release.namespace.eventually(&database, SOON, |secret| secret["data"]["url"].is_string()).await;
    // Evaluators read neither the signing key nor the bucket's.
    appears(&release, "deployment", &["evaluator"]).await;
    secret(&release, "admin-token", "token").await;
    release.namespace.eventually("builderpool/default", SOON, Value::is_object).await;
    let signer = format!("deployment/{}-signer", release.namespace.name());
    assert_eq!(release.namespace.get(&signer).await, Value::Null);
    release.make_secrets().await;
    appears(&release, "deployment", &["signer", "frontend", "evaluator"]).await;
}

#[tokio::test]
async fn passwords_and_tokens_outlive_the_operator() {
    let mut release = Release::new("outlive").await;
    let url = secret(&release, "database-signer", "url").await;
    let token = secret(&release, "admin-token", "token").await;
    release.stop().await;
    // Whoever has the login may change its password; the next leader undoes it.
    let role = format!("{}_signer", release.namespace.name().replace('-', "_"));
    release.farm.database.execute(&format!("ALTER ROLE {role} PASSWORD 'another'")).await;
    release.start();
    eventually("the password is the Secret's", SOON, async || PgConnection::connect(&url).await.is_ok())
        .await;
    assert_eq!(secret(&release, "database-signer", "url").await, url);
    assert_eq!(secret(&release, "admin-token", "token").await, token);
}

#[tokio::test]
async fn an_operator_that_was_rolled_back_leads_on_the_schema_of_the_next_release() {
    let mut release = Release::new("rolled-back").await;
    appears(&release, "deployment", &["signer"]).await;
    release.stop().await;
    let next = "INSERT INTO ci._sqlx_migrations VALUES (9999, 'from the next release', now(), true, '', 0)";
    release.farm.database.execute(next).await;
    let what = format!("deployment/{}-signer", release.namespace.name());
    release.namespace.kubectl(&["delete", &what]).await;
    release.start();
    appears(&release, "deployment", &["signer"]).await;
}

#[tokio::test]
async fn a_settled_release_causes_no_request() {
    let release = Release::new("settled").await;
    appears(&release, "deployment", &["signer", "frontend", "evaluator"]).await;
    release
        .namespace
        .apply(
            "{apiVersion: ci.harmonia.dev/v1alpha1, kind: Project, metadata: {name: a}, \
             spec: {source: {github: {owner: acme, repo: a}}}}",
        )
        .await;
    let synced = |project: &Value| project["status"]["queued"] == 0;
    release.namespace.eventually("project/a", SOON, synced).await;
    assert!(!release.requests().is_empty());
    falls_silent(|| release.requests()).await;
}
