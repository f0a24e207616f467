//! From cordons to drains, with Node objects that no kubelet stands behind.

use std::time::Duration;

use harmonia_queue::builder::{self, Session};
use harmonia_queue::{nodes, people};
use harmonia_tests::farm::{PoolHandle, SYSTEM};
use harmonia_tests::kube::{eventually, kubectl, try_kubectl};
use harmonia_tests::operator::{Release, SOON};

use crate::pools::has;

/// A Node object, deleted with the test.
struct Node(String);

impl Node {
    async fn new(release: &Release) -> Node {
        let name = format!("{}-node", release.namespace.name());
        let node = format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}");
        try_kubectl(&["apply", "--filename", "-"], &node).await.unwrap();
        Node(name)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ =
            std::process::Command::new("kubectl").args(["delete", "node", &self.0, "--wait=false"]).output();
    }
}

async fn pool(release: &Release) -> PoolHandle {
    release.farm.pool(&format!("{}/x86", release.namespace.name()), &[SYSTEM], 1).await
}

async fn register(pool: &PoolHandle, name: &str, node: &Node) -> Session {
    let mut builder = builder::Node::new(name, "the secret of a node", 1);
    builder.kube_node = Some(&node.0);
    Session::register(&pool.db, &builder).await.unwrap()
}

/// A pod that no kubelet runs, for a builder to have.
async fn pod(release: &Release, name: &str) {
    release
        .namespace
        .apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, labels: {{app.kubernetes.io/managed-by: harmonia-ci, \
             app.kubernetes.io/component: builder, ci.harmonia.dev/pool: x86}}}}, spec: {{containers: [{{name: builder, image: none}}]}}}}"
        ))
        .await;
}

async fn drains(release: &Release, name: &str) -> Vec<String> {
    let nodes = nodes::list(&release.farm.operator).await.unwrap();
    nodes
        .into_iter()
        .find(|node| node.name == name)
        .map(|node| node.drains.into_iter().map(|drain| drain.reason).collect())
        .unwrap_or_default()
}

/// The operator leads and knows the Nodes.
async fn led(release: &Release) {
    let secret = format!("secret/{}-database-signer", release.namespace.name());
    release.namespace.eventually(&secret, SOON, |secret| secret["data"].is_object()).await;
}

#[tokio::test]
async fn a_cordon_drains_at_once_and_an_uncordon_takes_back_its_own_reason_only() {
    let release = Release::new("cordon").await;
    let (node, pool) = (Node::new(&release).await, pool(&release).await);
    let session = register(&pool, "one", &node).await;
    led(&release).await;
    people::drain(&release.farm.operator, release.farm.node_of(&session).await, "by hand", None)
        .await
        .unwrap();

    kubectl(&["cordon", &node.0]).await;
    eventually("the cordon is in the queue", SOON, async || drains(&release, "one").await.len() == 2).await;
    assert_eq!(drains(&release, "one").await, ["by hand", "cordoned"]);
    release.farm.project("main").await;
    release.farm.queue("main", &[("leaf", &[])]).await;
    assert!(session.claim(1).await.unwrap().is_empty());

    // One that registers on a cordoned node is drained too.
    register(&pool, "two", &node).await;
    eventually("a later builder drains", SOON, async || drains(&release, "two").await == ["cordoned"]).await;

    kubectl(&["uncordon", &node.0]).await;
    eventually("one reason is left", SOON, async || drains(&release, "one").await == ["by hand"]).await;
    eventually("no reason is left", SOON, async || drains(&release, "two").await.is_empty()).await;
}

#[tokio::test]
async fn a_pod_whose_builder_is_drained_is_marked_until_it_claims_again() {
    let release = Release::new("mark").await;
    let (node, pool) = (Node::new(&release).await, pool(&release).await);
    pod(&release, "one").await;
    let session = register(&pool, "one", &node).await;
    led(&release).await;
    release.farm.project("main").await;
    release.farm.queue("main", &[("leaf", &[])]).await;
    let claim = release.farm.claim(&session).await;
    kubectl(&["cordon", &node.0]).await;
    eventually("the cordon is in the queue", SOON, async || !drains(&release, "one").await.is_empty()).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mark = |pod: &serde_json::Value| pod["metadata"]["labels"]["ci.harmonia.dev/drained"].clone();
    assert!(
        mark(&release.namespace.get("pod/one").await).is_null(),
        "a builder that holds something is marked"
    );

    release.farm.succeed(&session, &claim).await;
    release.namespace.eventually("pod/one", SOON, |pod| mark(pod) == "true").await;
    kubectl(&["uncordon", &node.0]).await;
    release.namespace.eventually("pod/one", SOON, |pod| mark(pod).is_null()).await;
}

#[tokio::test]
async fn where_nodes_may_not_be_watched_pools_say_so_and_deleted_pods_still_hear_how_long_they_have() {
    let mut release = Release::prepare("blind", &[]).await;
    release.make_secrets().await;
    release.start_confined().await;
    let (node, pool) = (Node::new(&release).await, pool(&release).await);
    register(&pool, "one", &node).await;
    pod(&release, "one").await;
    let says_so = |pool: &serde_json::Value| has(pool, "NodesWatched", "False", "Forbidden");
    release.namespace.eventually("builderpool/default", SOON, says_so).await;

    kubectl(&["cordon", &node.0]).await;
    // A pod without a node is gone at once: this one waits for a finalizer.
    let finalizers = |list: &str| format!(r#"{{"metadata": {{"finalizers": {list}}}}}"#);
    let patch = async |list: &str| {
        release.namespace.kubectl(&["patch", "pod/one", "--type=merge", "--patch", &finalizers(list)]).await
    };
    patch(r#"["example.org/hold"]"#).await;
    release.namespace.kubectl(&["delete", "pod/one", "--wait=false"]).await;
    eventually("it hears of its end", SOON, async || !drains(&release, "one").await.is_empty()).await;
    // Who had seen the cordon would have told of it before.
    assert_eq!(drains(&release, "one").await, ["terminating"]);
    patch("null").await;
}
