//! Processes beside the API server: operators, kwok, a watch.

use std::fs;
use std::process::Stdio;

use harmonia_tests::kube::{Namespace, kubectl, try_kubectl};
use harmonia_tests::operator::Release;
use harmonia_tests::press::free_port;
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// What an operator is told, of what a release knows.
const SETTINGS: [&str; 5] =
    ["installation", "namespace", "watch_namespaces", "database_url", "database_admin_url"];

/// `harmonia-ci operator`; it ends with this.
pub struct Operator {
    child: Child,
    page: String,
    http: reqwest::Client,
    _kubeconfig: NamedTempFile,
}

impl Operator {
    /// One more, which the API server knows as the release's own.
    pub async fn start(release: &Release) -> Operator {
        let kubeconfig = kubeconfig_as(&release.user()).await;
        let own = std::env::current_exe().expect("this program");
        let listen = format!("127.0.0.1:{}", free_port());
        let mut command = Command::new(own.with_file_name("harmonia-ci"));
        command.arg("operator").env("KUBECONFIG", kubeconfig.path()).env("HARMONIA_CI_LISTEN", &listen);
        let settings = release.settings();
        for name in SETTINGS {
            let value = settings.get(name).expect("a release has it");
            command.env(format!("HARMONIA_CI_{}", name.to_ascii_uppercase()), value);
        }
        command.env("HARMONIA_CI_LOG", "warn").stdout(Stdio::null()).kill_on_drop(true);
        let child = command.spawn().expect("harmonia-ci is built beside this program");
        let http = harmonia_builder::upload::http_client().expect("a client");
        Operator { child, page: format!("http://{listen}/metrics"), http, _kubeconfig: kubeconfig }
    }

    pub fn id(&self) -> u32 {
        self.child.id().expect("it runs")
    }

    pub async fn answers(&self) -> bool {
        self.metrics().await.is_some()
    }

    pub async fn leads(&self) -> bool {
        self.metrics().await.is_some_and(|text| text.contains("\nharmonia_ci_operator_leader 1\n"))
    }

    async fn metrics(&self) -> Option<String> {
        self.http.get(&self.page).send().await.ok()?.text().await.ok()
    }

    pub async fn kill(mut self) {
        self.child.kill().await.expect("it ran");
    }
}

/// The kubeconfig with which somebody acts as somebody else.
async fn kubeconfig_as(user: &str) -> NamedTempFile {
    let file = NamedTempFile::new().expect("a file");
    let mut config: serde_json::Value =
        serde_json::from_str(&kubectl(&["config", "view", "--raw", "--output=json"]).await).expect("JSON");
    let whole = &mut config["users"][0]["user"];
    whole["as"] = user.into();
    whole["as-groups"] = serde_json::json!(["system:masters"]);
    fs::write(file.path(), config.to_string()).expect("write");
    file
}

/// A node without a machine, and kwok, which says that its pods run.
pub struct Kwok(Child);

const NODE: &str = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "played",
    "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}},
    "status": {"capacity": {"cpu": "1000", "memory": "1000Gi", "pods": "5000", "ephemeral-storage": "100Ti"},
               "allocatable": {"cpu": "1000", "memory": "1000Gi", "pods": "5000", "ephemeral-storage": "100Ti"}}}"#;

impl Kwok {
    pub async fn start() -> Kwok {
        try_kubectl(&["create", "--filename", "-"], NODE).await.expect("a node");
        let stages = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin/bench/operator/kwok.yaml");
        let child = Command::new("kwok")
            // With leases, or the node would be given up after some seconds.
            .args(["--config", stages, "--node-lease-duration-seconds=40"])
            .arg("--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake")
            .arg("--kubeconfig")
            .arg(std::env::var_os("KUBECONFIG").expect("a cluster"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("kwok, which `./dev bench` puts into PATH");
        kubectl(&["wait", "--for=condition=Ready", "node/played", "--timeout=60s"]).await;
        Kwok(child)
    }
}

impl Drop for Kwok {
    fn drop(&mut self) {
        let _ = self.0.start_kill();
        let _ =
            std::process::Command::new("kubectl").args(["delete", "node", "played", "--wait=false"]).output();
    }
}

/// Deployments that are told to have more pods, as they are told.
pub struct Growth {
    _child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    sum: i64,
    known: std::collections::HashMap<String, i64>,
}

impl Growth {
    pub async fn watch(release: &Release) -> Growth {
        let namespace: &Namespace = &release.namespace;
        let columns = "--output=custom-columns=A:.metadata.name,B:.spec.replicas";
        let mut child = Command::new("kubectl")
            .args(["--namespace", namespace.name(), "get", "deployments", "--watch", "--no-headers", columns])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("kubectl");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut growth = Growth { _child: child, lines, sum: 0, known: std::collections::HashMap::new() };
        let there = namespace.get("deployments").await["items"].as_array().map_or(0, Vec::len);
        while growth.known.len() < there {
            growth.read().await;
        }
        growth
    }

    /// Waits until there are more than there ever were.
    pub async fn next(&mut self) {
        let before = self.sum;
        while self.sum <= before {
            self.read().await;
        }
    }

    async fn read(&mut self) {
        let line = self.lines.next_line().await.expect("text").expect("kubectl goes on");
        let mut words = line.split_whitespace();
        let (Some(name), Some(replicas)) = (words.next(), words.next()) else { return };
        self.known.insert(name.to_owned(), replicas.parse().unwrap_or(0));
        self.sum = self.known.values().sum();
    }
}
