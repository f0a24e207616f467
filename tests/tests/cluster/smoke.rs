use harmonia_tests::PATIENCE;
use harmonia_tests::kube::{Namespace, eventually, node_off, node_on};

/// A server on each node, which says its node's name once its sidecar runs, and is found by its name in other pods.
const SERVERS: &str = r"
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: server}
spec:
  selector: {matchLabels: {app: server}}
  template:
    metadata: {labels: {app: server}}
    spec:
      terminationGracePeriodSeconds: 1
      initContainers:
        - name: sidecar
          image: localhost/busybox:test
          restartPolicy: Always
          command: [sh, -c, 'echo $NODE > /page/index.html; exec sleep infinity']
          env: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
          startupProbe: {exec: {command: [test, -s, /page/index.html]}, periodSeconds: 1}
          volumeMounts: [{name: page, mountPath: /page}]
      containers:
        - name: server
          image: localhost/busybox:test
          command: [httpd, -f, -p, '80', -h, /page]
          readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
          volumeMounts: [{name: page, mountPath: /page}]
      volumes: [{name: page, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: server}
spec: {selector: {app: server}, ports: [{port: 80}]}
";

#[tokio::test]
async fn both_nodes_run_pods_with_sidecars_which_a_service_name_reaches() {
    let namespace = Namespace::new("smoke").await;
    namespace.kubectl(&["wait", "--for=condition=Ready", "node/node1", "node/node2", "--timeout=180s"]).await;
    namespace.apply(SERVERS).await;
    namespace.kubectl(&["rollout", "status", "daemonset/server", "--timeout=180s"]).await;
    // A Service learns of its pods in its own time, and chooses among them by chance.
    let ask = "for i in $(seq 30); do wget -q -O - http://server; done | sort -u";
    eventually("an answer from each node", PATIENCE, async || {
        let words = ["exec", "daemonset/server", "--container", "server", "--", "sh", "-c", ask];
        namespace.kubectl(&words).await == "node1\nnode2\n"
    })
    .await;
}

#[tokio::test]
async fn a_pod_in_a_user_namespace_may_mount_proc_if_it_is_unmasked() {
    let namespace = Namespace::new("smoke").await;
    namespace
        .apply(
            r#"
apiVersion: v1
kind: Pod
metadata: {name: sandbox}
spec:
  hostUsers: false
  restartPolicy: Never
  containers:
    - name: sandbox
      image: localhost/busybox:test
      command: [sh, -euc, 'head -n 1 /proc/self/uid_map; unshare --mount --pid --fork sh -c "mount -t proc proc /proc && echo mounted"']
      securityContext: {procMount: Unmasked, capabilities: {add: [SYS_ADMIN]}}
"#,
        )
        .await;
    namespace
        .eventually("pod/sandbox", PATIENCE, |pod| {
            ["Succeeded", "Failed"].contains(&pod["status"]["phase"].as_str().unwrap_or_default())
        })
        .await;
    let log = namespace.kubectl(&["logs", "sandbox"]).await;
    let (map, rest) = log.split_once('\n').unwrap();
    assert_ne!(map.split_whitespace().nth(1), Some("0"), "root of the pod is root of the machine");
    assert_eq!(rest, "mounted\n");
}

#[tokio::test]
async fn a_node_that_lost_its_power_comes_back_with_its_disk() {
    let namespace = Namespace::new("smoke").await;
    namespace
        .apply(
            r"
apiVersion: v1
kind: Pod
metadata: {name: diary}
spec:
  nodeName: node1
  containers:
    - name: diary
      image: localhost/busybox:test
      command: [sh, -c, 'echo started >> /diary/page; exec sleep infinity']
      volumeMounts: [{name: diary, mountPath: /diary}]
  volumes: [{name: diary, emptyDir: {}}]
",
        )
        .await;
    namespace.kubectl(&["wait", "--for=condition=Ready", "pod/diary", "--timeout=180s"]).await;
    let _off = node_off("node1").await;
    node_on("node1").await;
    namespace
        .eventually("pod/diary", PATIENCE, |pod| {
            let container = &pod["status"]["containerStatuses"][0];
            container["restartCount"] == 1 && container["ready"] == true
        })
        .await;
    assert_eq!(namespace.kubectl(&["exec", "diary", "--", "cat", "/diary/page"]).await, "started\nstarted\n");
}
