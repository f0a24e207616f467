//! The custom resources, as people meet them: what `kubectl` applies, refuses, explains and shows.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use harmonia_tests::PATIENCE;
use harmonia_tests::document;
use harmonia_tests::kube::{Namespace, define, eventually, kubectl, try_kubectl};
use serde_json::{Value, json};

async fn namespace() -> Namespace {
    define().await;
    Namespace::new("resources").await
}

/// A pool with a spec in YAML's short form.
fn pool(spec: &str) -> String {
    format!(
        "{{apiVersion: ci.harmonia.dev/v1alpha1, kind: BuilderPool, metadata: {{name: x86}}, spec: {spec}}}"
    )
}

fn project(spec: &str) -> String {
    format!(
        "{{apiVersion: ci.harmonia.dev/v1alpha1, kind: Project, metadata: {{name: dotfiles}}, spec: {spec}}}"
    )
}

#[tokio::test]
async fn the_definitions_are_accepted_as_they_are() {
    define().await;
    for name in ["builderpools.ci.harmonia.dev", "projects.ci.harmonia.dev"] {
        let conditions = kubectl(&[
            "get",
            "crd",
            name,
            "--output",
            "jsonpath={range .status.conditions[*]}{.type}={.status} {end}",
        ])
        .await;
        assert!(conditions.contains("Established=True"), "{conditions}");
        assert!(!conditions.contains("NonStructuralSchema"), "{conditions}");
    }
}

#[tokio::test]
async fn what_is_wrong_is_refused_with_a_sentence() {
    let namespace = namespace().await;
    let git = "git: {url: 'https://git.example.org/x.git'}";
    let table = [
        (
            pool("{systems: []}"),
            "spec.systems: Invalid value: name at least one system, such as x86_64-linux",
        ),
        (pool("{slots: 2}"), "spec.systems: Required value"),
        (
            pool("{systems: [x86_64-linux], drain: {gracePeriod: 2 hours}}"),
            r#"spec.drain.gracePeriod: Invalid value: "2 hours": write a time from 10s to 168h, such as 90s, 30m, 2h or 1h30m"#,
        ),
        (
            pool("{systems: [x86_64-linux], drain: {gracePeriod: 30s, margin: 1m}}"),
            "spec.drain: Invalid value: margin must be shorter than gracePeriod",
        ),
        (
            pool("{systems: [x86_64-linux], store: {size: 4GB}}"),
            r#"spec.store.size: Invalid value: "4GB": write a size from 1Mi to 1024Ti, such as 64Mi or 100Gi"#,
        ),
        (
            pool("{systems: [x86_64-linux], store: {mode: EmptyDir, storageClassName: fast}}"),
            "spec.store.storageClassName: Invalid value: storageClassName is for the modes Ephemeral and Persistent",
        ),
        (
            pool("{systems: [x86_64-linux], store: {mode: Tape}}"),
            r#"spec.store.mode: Unsupported value: "Tape": supported values: "Ephemeral", "EmptyDir", "Persistent""#,
        ),
        (
            pool("{systems: [x86_64-linux], replicas: 3, scaling: {max: 10}}"),
            "spec.replicas: Invalid value: replicas cannot be set while scaling.max is",
        ),
        (
            pool("{systems: [x86_64-linux], scaling: {min: 3, max: 2}}"),
            "spec.scaling: Invalid value: min must not be more than max",
        ),
        (
            pool("{systems: [x86_64-linux], template: {spec: {containers: [{name: miner}]}}}"),
            "the containers are builder and nix-daemon: no other can be added",
        ),
        (
            pool("{systems: [x86_64-linux], template: {spec: {containers: [{name: builder, image: evil}]}}}"),
            r#"unknown field "spec.template.spec.containers[0].image""#,
        ),
        (
            pool(
                "{systems: [x86_64-linux], template: {spec: {containers: [{name: builder, command: [sh]}]}}}",
            ),
            r#"unknown field "spec.template.spec.containers[0].command""#,
        ),
        (
            pool(
                "{systems: [x86_64-linux], template: {spec: {containers: [{name: builder}, {name: builder}]}}}",
            ),
            "spec.template.spec.containers[1]: Duplicate value",
        ),
        (
            pool(
                "{systems: [x86_64-linux], template: {spec: {containers: [{name: builder, \
                 env: [{name: HARMONIA_CI_SLOTS, value: '9'}]}]}}}",
            ),
            "variables that start with HARMONIA_CI_ are the operator's: set the field of the pool instead",
        ),
        (
            pool("{systems: [x86_64-linux], nix: {settings: {sandbox: 'false'}}}"),
            "spec.nix.settings: Invalid value: the Nix setting sandbox is refused",
        ),
        (
            pool(r#"{systems: [x86_64-linux], nix: {settings: {keep-failed: "true\nsandbox = false"}}}"#),
            "spec.nix.settings.keep-failed: Invalid value",
        ),
        (pool("{systems: [x86_64-linux, x86_64-linux]}"), "spec.systems[1]: Duplicate value"),
        (pool("{systems: [x86_64-linux], slotz: 2}"), r#"unknown field "spec.slotz""#),
        (
            pool("{systems: [x86_64-linux]}").replace("x86}", "a.b}"),
            "the name must have at most 40 characters and no dot",
        ),
        (project("{}"), "spec.source: Required value"),
        (project("{source: {}}"), "spec.source: Invalid value: give exactly one of github, gitea and git"),
        (
            project(&format!("{{source: {{{git}, github: {{owner: acme, repo: x}}}}}}")),
            "spec.source: Invalid value: give exactly one of github, gitea and git",
        ),
        (
            project(&format!("{{source: {{{git}}}, retention: 3 months}}")),
            r#"spec.retention: Invalid value: "3 months": write a number of days from 1d to 9999d, such as 90d"#,
        ),
        (project(&format!("{{source: {{{git}}}, shares: 0}}")), "spec.shares: Invalid value: 0"),
    ];
    for (object, sentence) in table {
        let complaint = namespace.try_apply(&object).await.expect_err(&object);
        assert!(complaint.contains(sentence), "{complaint}\nfor {object}");
    }
    assert_eq!(namespace.kubectl(&["get", "harmonia", "--output", "name"]).await, "");
}

#[tokio::test]
async fn what_cannot_change_is_refused_with_a_sentence() {
    let namespace = namespace().await;
    namespace
        .apply(&pool("{systems: [x86_64-linux, i686-linux], store: {mode: Persistent, size: 1Gi}}"))
        .await;
    for (spec, sentence) in [
        (
            "{systems: [x86_64-linux], store: {mode: Persistent, size: 1Gi}}",
            "spec.systems: Invalid value: systems cannot be changed: make another pool and delete this one",
        ),
        (
            "{systems: [x86_64-linux, i686-linux], store: {mode: Ephemeral, size: 1Gi}}",
            r#"spec.store.mode: Invalid value: "Ephemeral": store.mode cannot be changed: make another pool and delete this one"#,
        ),
        (
            "{systems: [x86_64-linux, i686-linux], store: {mode: Persistent, size: 2Gi}}",
            "spec.store: Invalid value: size and storageClassName of a Persistent store cannot be changed",
        ),
    ] {
        let complaint = namespace.try_apply(&pool(spec)).await.expect_err(spec);
        assert!(complaint.contains(sentence), "{complaint}\nfor {spec}");
    }
    namespace
        .apply(&pool("{systems: [i686-linux, x86_64-linux], store: {mode: Persistent, size: 1Gi}, slots: 4}"))
        .await;
}

#[tokio::test]
async fn an_object_shows_what_is_in_force() {
    let namespace = namespace().await;
    namespace.apply(&pool("{systems: [x86_64-linux], scaling: null, drain: {margin: 5s}}")).await;
    let spec = namespace.get("bp/x86").await["spec"].take();
    assert_eq!(spec["drain"], json!({ "gracePeriod": "2h", "margin": "5s" }));
    assert_eq!(spec["store"], json!({ "mode": "Ephemeral", "size": "100Gi" }));
    assert_eq!((&spec["slots"], &spec["cores"], &spec["paused"]), (&1.into(), &0.into(), &false.into()));
    assert_eq!(spec["scaling"], Value::Null);
    let spec: harmonia_crds::BuilderPoolSpec =
        serde_json::from_value(spec).expect("a spec that the operator can read");
    assert_eq!(spec.drain.grace_period.to_string(), "2h");
}

#[tokio::test]
async fn every_example_is_accepted() {
    let namespace = namespace().await;
    let examples = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/examples");
    let mut count = 0;
    for entry in fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        let applied = namespace.apply(&fs::read_to_string(&path).unwrap()).await;
        assert!(applied.contains("created"), "{}: {applied}", path.display());
        count += 1;
    }
    assert!(count >= 2);
}

/// Of the page for owners: its Secret as it is made there, and the Project that names it.
#[tokio::test]
async fn what_the_page_on_projects_shows_is_accepted() {
    let namespace = namespace().await;
    let own = format!("--namespace {}", namespace.name());
    let page = "projects.md";
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("netrc"), document::examples(page, "netrc").concat()).unwrap();
    let shell: Vec<String> =
        document::examples(page, "sh").into_iter().filter(|text| text.starts_with("kubectl ")).collect();
    assert!(!shell.is_empty());
    for text in shell {
        let script = text.replace("--namespace ci", &own);
        let output =
            Command::new("sh").args(["-euc", &script]).current_dir(directory.path()).output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for text in document::examples(page, "yaml") {
        let applied = namespace
            .apply(&text.replace("namespace: ci", &format!("namespace: {}", namespace.name())))
            .await;
        assert!(applied.contains("created"), "{applied}");
    }
    let secret = namespace.get("project/dots").await["spec"]["source"]["secretRef"]["name"].take();
    let secret = namespace.get(&format!("secret/{}", secret.as_str().unwrap())).await;
    assert!(secret["data"]["netrc"].is_string(), "{secret}");
}

#[tokio::test]
async fn kubectl_explains_every_field() {
    define().await;
    // What is explained is published a moment after the definition.
    eventually("an explanation", PATIENCE, async || {
        try_kubectl(&["explain", "bp.spec.drain"], "").await.is_ok()
    })
    .await;
    let words = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let drain = words(kubectl(&["explain", "bp.spec.drain"]).await);
    for sentence in [
        "What happens when a builder has to go: its node is drained, the pool gets smaller, or its pod changes.",
        "What cannot be finished is given back to the queue and built elsewhere; that does not count as a failed attempt.",
        "Must be shorter than `gracePeriod`. Default: 1m.",
    ] {
        assert!(drain.contains(sentence), "{drain}");
    }
    for kind in ["bp", "proj"] {
        let all = kubectl(&["explain", kind, "--recursive"]).await;
        assert!(!all.contains("<no description>"), "{all}");
    }
    assert!(words(kubectl(&["explain", "proj.spec.source"]).await).contains("Any git repository"));
}

#[tokio::test]
async fn a_pool_can_be_scaled_unless_the_operator_does_it() {
    let namespace = namespace().await;
    namespace.apply(&pool("{systems: [x86_64-linux]}")).await;
    namespace.kubectl(&["scale", "bp/x86", "--replicas=3"]).await;
    assert_eq!(namespace.get("bp/x86").await["spec"]["replicas"], 3);
    namespace.kubectl(&["delete", "bp/x86"]).await;
    namespace.apply(&pool("{systems: [x86_64-linux], scaling: {max: 10}}")).await;
    let complaint = namespace.try_kubectl(&["scale", "bp/x86", "--replicas=3"]).await.unwrap_err();
    assert!(complaint.contains("replicas cannot be set while scaling.max is"), "{complaint}");
}

#[tokio::test]
async fn kubectl_shows_what_matters_at_a_glance() {
    let namespace = namespace().await;
    namespace.apply(&pool("{systems: [x86_64-linux], replicas: 4}")).await;
    let status = json!({ "status": {
        "desiredReplicas": 4, "replicas": 3, "readyReplicas": 3, "busy": 2, "queued": 17, "draining": 1,
        "conditions": [{
            "type": "Ready", "status": "False", "reason": "RollingOut", "message": "3 of 4 builders are ready",
            "lastTransitionTime": "2026-01-01T00:00:00Z"
        }]
    } });
    let status = status.to_string();
    let patch = ["patch", "bp/x86", "--subresource=status", "--type=merge", "--patch", &status];
    namespace.kubectl(&patch).await;
    let table = namespace.kubectl(&["get", "bp", "--output", "wide"]).await;
    let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let head =
        ["NAME", "READY", "DESIRED", "CURRENT", "BUSY", "QUEUED", "DRAINING", "SYSTEMS", "AGE", "REASON"];
    assert_eq!(rows.next().unwrap(), head);
    let row = rows.next().unwrap();
    assert_eq!(row[..8], ["x86", "False", "4", "3", "2", "17", "1", r#"["x86_64-linux"]"#]);
    assert_eq!(row[9], "RollingOut");
    namespace.apply(&project("{source: {github: {owner: acme, repo: dotfiles}}}")).await;
    let table = namespace.kubectl(&["get", "harmonia"]).await;
    assert!(table.contains("project.ci.harmonia.dev/dotfiles"), "{table}");
    let table = namespace.kubectl(&["get", "proj"]).await;
    let head: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["NAME", "READY", "SHARES", "QUEUED", "RUNNING", "LAST", "AGE"]);
}
