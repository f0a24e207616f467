//! Pools on a real API server without nodes: pods stay Pending.

use std::time::Duration;

use harmonia_queue::{Db, mirror};
use harmonia_tests::farm::Farm;
use harmonia_tests::kube::{Namespace, eventually, requests};
use harmonia_tests::operator::{Release, SOON, falls_silent};
use harmonia_tests::pg::{Options, Server};
use serde_json::Value;

const KINDS: &str = "deployment,statefulset,poddisruptionbudget,serviceaccount,configmap,networkpolicy,secret,persistentvolumeclaim";

pub fn pool(name: &str, spec: &str) -> String {
    format!(
        "{{apiVersion: ci.harmonia.dev/v1alpha1, kind: BuilderPool, metadata: {{name: {name}}}, \
         spec: {{systems: [x86_64-linux], store: {{mode: EmptyDir, size: 1Gi}}, {spec}}}}}"
    )
}

/// A release that has put itself in place, whose first pool has no builders and is left aside.
async fn release(prefix: &str) -> Release {
    Release::new(prefix).await
}

pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a Value {
    let found = object["status"]["conditions"].as_array().into_iter().flatten();
    found.into_iter().find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

pub fn has(object: &Value, kind: &str, status: &str, reason: &str) -> bool {
    let condition = condition(object, kind);
    condition["status"] == status && condition["reason"] == reason
}

/// Pods wait for a node, and nothing else is to be done.
fn settled(pool: &Value) -> bool {
    has(pool, "Ready", "False", "PodsPending")
        && has(pool, "DatabaseReachable", "True", "Connected")
        && pool["status"]["observedGeneration"] == pool["metadata"]["generation"]
}

/// What a pool has, as `kind/name`.
async fn children(namespace: &Namespace, pool: &str) -> Vec<String> {
    let selector = format!("--selector=ci.harmonia.dev/pool={pool}");
    let list = namespace.kubectl(&["get", KINDS, &selector, "--output=name"]).await;
    let mut names: Vec<String> = list.lines().map(|line| line.replace(".apps", "")).collect();
    names.sort_unstable();
    names
}

async fn pools_in_queue(release: &Release) -> Vec<String> {
    let pools = mirror::pool_counts(&release.farm.operator).await.unwrap();
    pools.into_iter().map(|pool| pool.name).collect()
}

pub async fn secret_value(namespace: &Namespace, secret: &str, key: &str) -> String {
    use base64::Engine;
    let secret = namespace.get(&format!("secret/{secret}")).await;
    let bytes =
        base64::engine::general_purpose::STANDARD.decode(secret["data"][key].as_str().unwrap_or_default());
    String::from_utf8(bytes.unwrap()).unwrap()
}

async fn events(namespace: &Namespace, reason: &str) -> Vec<Value> {
    let events = namespace.get("events.events.k8s.io").await;
    let all = events["items"].as_array().cloned().unwrap_or_default();
    all.into_iter().filter(|event| event["reason"] == reason).collect()
}

#[tokio::test]
async fn a_pool_gets_its_objects_and_nothing_else() {
    let release = release("objects").await;
    let namespace = &release.namespace;
    namespace.apply(&pool("x86", "replicas: 2")).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    let expected = [
        "configmap/x86-builder",
        "deployment/x86-builder",
        "networkpolicy.networking.k8s.io/x86-builder",
        "poddisruptionbudget.policy/x86-builder",
        "secret/x86-builder",
        "serviceaccount/x86-builder",
    ];
    assert_eq!(children(namespace, "x86").await, expected);

    // What the queue knows comes with its next answer.
    namespace.eventually("builderpool/x86", SOON, |pool| pool["status"]["busy"] == 0).await;
    let pool = namespace.get("builderpool/x86").await;
    assert_eq!(pool["metadata"]["finalizers"][0], "ci.harmonia.dev/database");
    let status = &pool["status"];
    assert_eq!(status["desiredReplicas"], 2);
    let message = condition(&pool, "Ready")["message"].as_str().unwrap();
    assert!(message.starts_with("0 of 2 builders are ready: pod x86-builder-"), "{message}");
    assert!(message.contains("no nodes available"), "{message}");
    let selector = status["selector"].as_str().unwrap();
    let pods = namespace.kubectl(&["get", "pods", "--selector", selector, "--output=name"]).await;
    assert_eq!(pods.lines().count(), 2, "{pods}");
    let uid = &pool["metadata"]["uid"];
    for child in expected {
        let child = namespace.get(child).await;
        assert_eq!(&child["metadata"]["ownerReferences"][0]["uid"], uid, "{child:#}");
    }
    let conf = namespace.get("configmap/x86-builder").await["data"]["nix.conf"].as_str().unwrap().to_owned();
    assert!(conf.contains(&format!("substituters = {} https://cache.nixos.org", release.cache())), "{conf}");
    assert!(conf.contains("trusted-public-keys = farm-1:AAAA "), "{conf}");
    assert!(!events(namespace, "PodsPending").await.is_empty());

    // Its builders can log in, and the queue knows them by that.
    let url = secret_value(namespace, "x86-builder", "database-url").await;
    let builder = Db::direct(&url, 1).unwrap();
    let refused = mirror::pool_counts(&builder).await.unwrap_err();
    assert!(matches!(refused, harmonia_queue::Error::Forbidden(_)), "{refused:?}");
    assert!(pools_in_queue(&release).await.contains(&format!("{}/x86", namespace.name())));

    // As many as people say, and a budget only where it means something.
    namespace.kubectl(&["scale", "builderpool/x86", "--replicas=1"]).await;
    namespace.eventually("deployment/x86-builder", SOON, |workload| workload["spec"]["replicas"] == 1).await;
    namespace.eventually("poddisruptionbudget/x86-builder", SOON, Value::is_null).await;
    assert_eq!(events(namespace, "Scaled").await[0]["note"], "1 builders instead of 2: the pool says so");

    namespace.kubectl(&["delete", "builderpool", "x86", "--timeout=180s"]).await;
    assert!(!pools_in_queue(&release).await.contains(&format!("{}/x86", namespace.name())));
    eventually("nothing is left", SOON, async || children(namespace, "x86").await.is_empty()).await;
}

#[tokio::test]
async fn a_policy_stays_until_the_last_pod_of_its_pool_is_gone() {
    let release = release("policy").await;
    let namespace = &release.namespace;
    namespace.apply(&pool("x86", "replicas: 1")).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    // A pod without a node is gone at once: this one waits for a finalizer, as others do for their builds.
    let selector = "--selector=ci.harmonia.dev/pool=x86";
    let pods = namespace.kubectl(&["get", "pods", selector, "--output=name"]).await;
    let pod = pods.trim();
    let hold = r#"{"metadata": {"finalizers": ["example.org/hold"]}}"#;
    namespace.kubectl(&["patch", pod, "--type=merge", "--patch", hold]).await;
    namespace.kubectl(&["delete", "builderpool", "x86", "--timeout=180s"]).await;
    namespace.eventually("deployment/x86-builder", SOON, Value::is_null).await;
    let going = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_string();
    namespace.eventually(pod, SOON, going).await;
    // The API server's own controller has seen that the pool is gone.
    let left = |policy: &Value| {
        let owners = policy["metadata"]["ownerReferences"].as_array();
        owners.is_some_and(|owners| owners.len() == 1 && owners[0]["kind"] == "Pod")
    };
    namespace.eventually("networkpolicy/x86-builder", SOON, left).await;
    let free = r#"{"metadata": {"finalizers": null}}"#;
    namespace.kubectl(&["patch", pod, "--type=merge", "--patch", free]).await;
    namespace.eventually("networkpolicy/x86-builder", SOON, Value::is_null).await;
}

#[tokio::test]
async fn a_pool_with_stores_that_stay_is_a_stateful_set() {
    let release = release("stay").await;
    let namespace = &release.namespace;
    let store = "store: {mode: Persistent, size: 2Gi, storageClassName: fast}";
    let yaml = pool("warm", "replicas: 1").replace("store: {mode: EmptyDir, size: 1Gi}", store);
    namespace.apply(&yaml).await;
    namespace.eventually("builderpool/warm", SOON, settled).await;
    let kinds = children(namespace, "warm").await;
    assert!(kinds.contains(&"statefulset/warm-builder".to_owned()), "{kinds:?}");
    assert!(!kinds.iter().any(|child| child.starts_with("deployment")), "{kinds:?}");
    let claim = namespace.get("persistentvolumeclaim/nix-warm-builder-0").await;
    assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "2Gi");
}

#[tokio::test]
async fn what_was_changed_or_deleted_by_hand_is_as_it_was() {
    let release = release("repair").await;
    let namespace = &release.namespace;
    namespace.apply(&pool("x86", "replicas: 2")).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;

    namespace.kubectl(&["set", "image", "deployment/x86-builder", "builder=other:1"]).await;
    namespace.kubectl(&["scale", "deployment/x86-builder", "--replicas=9"]).await;
    namespace
        .eventually("deployment/x86-builder", SOON, |workload| {
            workload["spec"]["replicas"] == 2
                && workload["spec"]["template"]["spec"]["containers"][0]["image"]
                    == "localhost/harmonia-ci-builder:test"
        })
        .await;

    let (before, url) =
        (children(namespace, "x86").await, secret_value(namespace, "x86-builder", "database-url").await);
    for child in &before {
        let uid = namespace.get(child).await["metadata"]["uid"].clone();
        namespace.kubectl(&["delete", child, "--wait=false"]).await;
        let again =
            |object: &Value| object["metadata"]["uid"].is_string() && object["metadata"]["uid"] != uid;
        namespace.eventually(child, SOON, again).await;
    }
    assert_eq!(children(namespace, "x86").await, before);

    // A Secret that vanished held the only copy of the password.
    let renewed = secret_value(namespace, "x86-builder", "database-url").await;
    assert_ne!(renewed, url);
    let builder = Db::direct(&renewed, 1).unwrap();
    assert!(matches!(mirror::pool_counts(&builder).await, Err(harmonia_queue::Error::Forbidden(_))));
    let lost = Db::direct(&url, 1).unwrap();
    let refused = mirror::pool_counts(&lost).await.unwrap_err();
    assert!(!matches!(refused, harmonia_queue::Error::Forbidden(_)), "{refused:?}");
}

#[tokio::test]
async fn a_field_that_is_wanted_no_more_goes() {
    let release = release("fields").await;
    let namespace = &release.namespace;
    let place = "template: {spec: {nodeSelector: {disk: fast}, priorityClassName: system-cluster-critical}}";
    namespace.apply(&pool("x86", place)).await;
    let selector = "/spec/template/spec/nodeSelector/disk";
    namespace
        .eventually("deployment/x86-builder", SOON, |workload| workload.pointer(selector).is_some())
        .await;
    namespace.apply(&pool("x86", "")).await;
    namespace
        .eventually("deployment/x86-builder", SOON, |workload| {
            workload.is_object()
                && workload.pointer(selector).is_none()
                && workload.pointer("/spec/template/spec/priorityClassName").is_none()
        })
        .await;
}

#[tokio::test]
async fn a_paused_pool_is_left_alone() {
    let release = release("paused").await;
    let namespace = &release.namespace;
    namespace.apply(&pool("x86", "replicas: 1")).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    namespace.kubectl(&["annotate", "builderpool/x86", "ci.harmonia.dev/reconcile=disabled"]).await;
    let paused = |pool: &Value| has(pool, "Progressing", "False", "Paused");
    namespace.eventually("builderpool/x86", SOON, paused).await;
    namespace.kubectl(&["scale", "deployment/x86-builder", "--replicas=0"]).await;
    namespace.kubectl(&["delete", "configmap", "x86-builder"]).await;
    namespace.apply(&pool("x86", "replicas: 3")).await;
    let seen = |pool: &Value| pool["status"]["observedGeneration"] == pool["metadata"]["generation"];
    namespace.eventually("builderpool/x86", SOON, seen).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(namespace.get("deployment/x86-builder").await["spec"]["replicas"], 0);
    assert!(namespace.get("configmap/x86-builder").await.is_null());

    namespace.kubectl(&["annotate", "builderpool/x86", "ci.harmonia.dev/reconcile-"]).await;
    namespace.eventually("deployment/x86-builder", SOON, |workload| workload["spec"]["replicas"] == 3).await;
    namespace.eventually("configmap/x86-builder", SOON, Value::is_object).await;
}

#[tokio::test]
async fn a_pool_that_cannot_be_read_stops_nothing_else_and_can_be_deleted() {
    let release = release("unreadable").await;
    let namespace = &release.namespace;
    namespace.apply(&pool("broken", "")).await;
    namespace.eventually("builderpool/broken", SOON, settled).await;
    // The API server does not look into an affinity.
    namespace.apply(&pool("broken", "template: {spec: {affinity: {nodeAffinity: 5}}}")).await;
    eventually("an event", SOON, async || !events(namespace, "Unreadable").await.is_empty()).await;
    namespace.apply(&pool("sound", "")).await;
    namespace.eventually("builderpool/sound", SOON, settled).await;
    assert!(namespace.get("deployment/broken-builder").await.is_object());
    namespace.kubectl(&["delete", "builderpool", "broken", "--timeout=180s"]).await;
    assert!(!pools_in_queue(&release).await.contains(&format!("{}/broken", namespace.name())));
}

#[tokio::test]
async fn a_secret_that_pods_need_is_waited_for_and_its_change_makes_new_pods() {
    let release = release("secret").await;
    let namespace = &release.namespace;
    let env = "[{name: TOKEN, valueFrom: {secretKeyRef: {name: mine, key: token}}}]";
    let template = format!("template: {{spec: {{containers: [{{name: builder, env: {env}}}]}}}}");
    namespace.apply(&pool("x86", &template)).await;
    let missing = |pool: &Value| has(pool, "Ready", "False", "SecretMissing");
    namespace.eventually("builderpool/x86", SOON, missing).await;
    namespace.kubectl(&["create", "secret", "generic", "mine", "--from-literal=token=1"]).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    let path = "/spec/template/metadata/annotations/ci.harmonia.dev~1secrets-hash";
    let hash = namespace.get("deployment/x86-builder").await.pointer(path).cloned().unwrap();
    namespace.kubectl(&["patch", "secret", "mine", "--patch={\"stringData\": {\"token\": \"2\"}}"]).await;
    let other = |workload: &Value| workload.pointer(path).is_some_and(|now| *now != hash);
    namespace.eventually("deployment/x86-builder", SOON, other).await;
}

#[tokio::test]
async fn what_a_quota_forbids_is_said() {
    let release = release("quota").await;
    let namespace = &release.namespace;
    namespace.kubectl(&["create", "quota", "none", "--hard=pods=0"]).await;
    namespace.apply(&pool("x86", "")).await;
    namespace
        .eventually("builderpool/x86", SOON, |pool| {
            let message = condition(pool, "Ready")["message"].as_str().unwrap_or_default();
            has(pool, "Ready", "False", "CreateFailed") && message.contains("exceeded quota")
        })
        .await;
}

#[tokio::test]
async fn a_settled_pool_causes_no_request() {
    let release = release("settled").await;
    let namespace = &release.namespace;
    namespace.apply(&pool("x86", "replicas: 2, template: {spec: {containers: [{name: nix-daemon, resources: {requests: {cpu: \"0.5\", memory: 1024Mi}, limits: {cpu: 4}}}]}}")).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    let default = |pool: &Value| has(pool, "Ready", "True", "Available");
    namespace.eventually("builderpool/default", SOON, default).await;
    let written = || -> Vec<_> {
        let user = release.user();
        requests(|asking| asking == user).into_iter().filter(|request| request.verb != "watch").collect()
    };
    assert!(written().len() > 10, "{:?}", written());
    falls_silent(written).await;
}

#[tokio::test]
async fn pools_of_one_name_in_two_namespaces_are_two() {
    let other = Namespace::new("other").await;
    let mut release = Release::prepare("same", &[&other]).await;
    release.make_secrets().await;
    release.start();
    for namespace in [&release.namespace, &other] {
        namespace.apply(&pool("same", "")).await;
    }
    for namespace in [&release.namespace, &other] {
        namespace.eventually("builderpool/same", SOON, settled).await;
    }
    let queue = pools_in_queue(&release).await;
    let url = async |namespace| secret_value(namespace, "same-builder", "database-url").await;
    assert_ne!(url(&release.namespace).await, url(&other).await);
    for namespace in [&release.namespace, &other] {
        assert!(queue.contains(&format!("{}/same", namespace.name())), "{queue:?}");
    }
    other.kubectl(&["delete", "builderpool", "same", "--timeout=180s"]).await;
    assert!(release.namespace.get("deployment/same-builder").await.is_object());
    let queue = pools_in_queue(&release).await;
    assert!(queue.contains(&format!("{}/same", release.namespace.name())), "{queue:?}");
}

#[tokio::test]
async fn a_namespace_that_went_while_no_operator_ran_is_let_go() {
    let other = Namespace::new("gone").await;
    let mut release = Release::prepare("down", &[&other]).await;
    release.make_secrets().await;
    release.start();
    other.apply(&pool("x86", "")).await;
    other.eventually("builderpool/x86", SOON, settled).await;
    release.stop().await;
    other.kubectl(&["delete", "namespace", other.name(), "--wait=false"]).await;
    let deleted = |pool: &Value| pool["metadata"]["deletionTimestamp"].is_string();
    // That is for the API server's own controller to do, in its own time.
    other.eventually("builderpool/x86", SOON * 2, deleted).await;
    release.start();
    eventually("the namespace is gone", SOON * 2, async || {
        harmonia_tests::kube::try_kubectl(&["get", "namespace", other.name()], "").await.is_err()
    })
    .await;
    assert!(!pools_in_queue(&release).await.contains(&format!("{}/x86", other.name())));
}

#[tokio::test]
async fn another_operator_takes_over_at_once() {
    let mut release = Release::prepare("over", &[]).await;
    release.make_secrets().await;
    release.start();
    release.namespace.apply(&pool("x86", "replicas: 1")).await;
    release.namespace.eventually("builderpool/x86", SOON, settled).await;
    release.start();
    release.stop_first().await;
    let namespace = &release.namespace;
    namespace.kubectl(&["scale", "builderpool/x86", "--replicas=2"]).await;
    let scaled = |workload: &Value| workload["spec"]["replicas"] == 2;
    namespace.eventually("deployment/x86-builder", SOON, scaled).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    release.stop().await;
}

#[tokio::test]
async fn what_is_released_needs_no_operator_to_go() {
    let mut release = Release::prepare("released", &[]).await;
    release.make_secrets().await;
    release.start();
    release.namespace.apply(&pool("x86", "")).await;
    release.namespace.eventually("builderpool/x86", SOON, settled).await;
    release.stop().await;
    harmonia_operator::release(&release.settings()).await.unwrap();
    let pool = release.namespace.get("builderpool/x86").await;
    assert!(pool["metadata"]["finalizers"].is_null(), "{pool:#}");
    release.namespace.kubectl(&["delete", "builderpool", "--all", "--timeout=180s"]).await;
}

#[tokio::test]
async fn a_pool_that_was_let_go_without_the_database_leaves_it_later() {
    let mut release = Release::prepare("later", &[]).await;
    release.make_secrets().await;
    release.start();
    release.namespace.apply(&pool("x86", "")).await;
    release.namespace.eventually("builderpool/x86", SOON, settled).await;
    release.stop().await;
    let gone = "--patch={\"metadata\": {\"finalizers\": null}}";
    release.namespace.kubectl(&["patch", "builderpool", "x86", "--type=merge", gone]).await;
    release.namespace.kubectl(&["delete", "builderpool", "x86", "--timeout=180s"]).await;
    let name = format!("{}/x86", release.namespace.name());
    assert!(pools_in_queue(&release).await.contains(&name));
    release.start();
    eventually("the pool leaves", SOON, async || !pools_in_queue(&release).await.contains(&name)).await;
    release.stop().await;
}

#[tokio::test]
async fn without_a_database_what_is_there_goes_on_as_it_is() {
    let server = Server::start(Options::default());
    let farm = Farm::on(server.database().await).await;
    let mut release = Release::prepare_on("away", &[], farm).await;
    release.make_secrets().await;
    release.start();
    let namespace = &release.namespace;
    namespace.apply(&pool("x86", "replicas: 2")).await;
    namespace.eventually("builderpool/x86", SOON, settled).await;

    server.stop_immediate().await;
    let away = |pool: &Value| has(pool, "DatabaseReachable", "False", "DatabaseUnreachable");
    namespace.eventually("builderpool/x86", SOON, away).await;
    // Frozen: repaired, but neither more nor fewer.
    tokio::time::sleep(Duration::from_secs(12)).await;
    namespace.kubectl(&["delete", "configmap", "x86-builder"]).await;
    namespace.eventually("configmap/x86-builder", SOON, Value::is_object).await;
    namespace.kubectl(&["scale", "builderpool/x86", "--replicas=5"]).await;
    let seen = |pool: &Value| pool["status"]["observedGeneration"] == pool["metadata"]["generation"];
    namespace.eventually("builderpool/x86", SOON, seen).await;
    assert_eq!(namespace.get("deployment/x86-builder").await["spec"]["replicas"], 2);
    assert!(!events(namespace, "DatabaseUnreachable").await.is_empty());

    server.start_again().await;
    namespace.eventually("builderpool/x86", SOON, settled).await;
    namespace.eventually("deployment/x86-builder", SOON, |workload| workload["spec"]["replicas"] == 5).await;
    release.stop().await;
}
