//! What Helm does with the chart: a second release beside the farm of the other tests, in a namespace of its own.

use std::process::Command;

use harmonia_tests::PATIENCE;
use harmonia_tests::cluster::{self, Farm, RELEASE, apply, helm, install, json, way_in};
use harmonia_tests::kube::{eventually, kubectl, try_kubectl};
use serde_json::Value;

const NAMESPACE: &str = "second";
/// As it is where several teams share a cluster.
const OWN: [&str; 4] = ["--set", "watchNamespaces={second}", "--set", "crds.install=false"];

#[tokio::test]
async fn a_release_is_installed_tested_upgraded_rolled_back_and_uninstalled_and_leaves_projects_alone() {
    let _farm = Farm::get().await;
    let _alone = Alone::new().await;
    install(NAMESPACE, &OWN).await;
    let before = way_in(NAMESPACE).await;
    helm(&["test", RELEASE, "--namespace", NAMESPACE, "--timeout", "5m"]).await;
    apply(
        "apiVersion: ci.harmonia.dev/v1alpha1\nkind: Project\nmetadata: {name: kept, namespace: second}\n\
         spec: {source: {git: {url: 'https://example.org/x.git'}}}\n",
    )
    .await;
    kubectl(&["-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=180s", "project/kept"]).await;

    install(NAMESPACE, &[&OWN[..], &["--set", "frontend.replicas=2"]].concat()).await;
    assert_eq!(way_in(NAMESPACE).await, before, "an upgrade keeps what the installation generated");
    eventually("the operator follows", PATIENCE, async || {
        let frontend = json(&["-n", NAMESPACE, "get", "deployment", "harmonia-ci-frontend"]).await;
        frontend["status"]["readyReplicas"] == 2
    })
    .await;

    helm(&["rollback", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "5m"]).await;
    assert_eq!(way_in(NAMESPACE).await, before, "and so does a rollback");
    eventually("the operator follows", PATIENCE, async || {
        let frontend = json(&["-n", NAMESPACE, "get", "deployment", "harmonia-ci-frontend"]).await;
        frontend["status"]["replicas"] == 1
    })
    .await;

    helm(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "5m"]).await;
    let kept = json(&["-n", NAMESPACE, "get", "project", "kept"]).await;
    assert_eq!(kept["metadata"]["finalizers"], Value::Null, "nothing holds it");
    // Another installation takes over what this one had generated.
    let secrets = ["harmonia-ci-postgres", "harmonia-ci-s3", "harmonia-ci-signing"];
    kubectl(&[&["-n", NAMESPACE, "get", "secrets"], &secrets[..]].concat()).await;
    let operator = try_kubectl(&["-n", NAMESPACE, "get", "deployment", "harmonia-ci-operator"], "").await;
    assert!(operator.unwrap_err().contains("NotFound"), "an operator is left");
    kubectl(&["delete", "namespace", NAMESPACE, "--timeout=180s"]).await;
    let gone = try_kubectl(&["get", "namespace", NAMESPACE], "").await;
    assert!(gone.is_err(), "the namespace is stuck");
}

/// The operator of the other tests looks after all namespaces: for as long as this lives, there is none.
struct Alone;

impl Alone {
    async fn new() -> Alone {
        kubectl(&SCALE.map(|word| if word == "--replicas=1" { "--replicas=0" } else { word })).await;
        kubectl(&[
            "-n",
            cluster::NAMESPACE,
            "wait",
            "--for=delete",
            "pod",
            "--selector",
            OPERATOR,
            "--timeout=180s",
        ])
        .await;
        Alone
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = Command::new("kubectl").args(SCALE).output();
    }
}

const OPERATOR: &str = "app.kubernetes.io/component=operator";
const SCALE: [&str; 5] =
    ["-n", cluster::NAMESPACE, "scale", "deployment/harmonia-ci-operator", "--replicas=1"];
