//! An operator in this process, between a real Kubernetes API and a real PostgreSQL.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use axum::routing::get;
use axum::{Json, Router};
use harmonia_service::settings::Settings;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::farm::Farm;
use crate::guard::serve;
use crate::kube::{Namespace, eventually, try_kubectl};

/// How long the operator, or the cluster's own controllers, may take to do what is asked for: the machine may be busy.
pub const SOON: Duration = crate::PATIENCE;

/// Nothing more is asked for, for half a minute. The cluster's own controllers take their time, and the last word of each is
/// looked at.
pub async fn falls_silent<T: Debug>(asked: impl Fn() -> Vec<T>) {
    let mut known = asked().len();
    for _ in 0..5 {
        sleep(Duration::from_secs(30)).await;
        let asked = asked();
        if asked.len() == known {
            return;
        }
        eprintln!("{:#?}", &asked[known..]);
        known = asked.len();
    }
    panic!("it goes on asking");
}

/// A release in a namespace of its own, called like it, with a database of its own. It watches that namespace and those that it
/// was told of.
pub struct Release {
    /// Its database.
    pub farm: Farm,
    /// Its namespace.
    pub namespace: Namespace,
    files: TempDir,
    watched: String,
    frontend: (SocketAddr, oneshot::Sender<()>),
    operators: Vec<(watch::Sender<u32>, JoinHandle<()>)>,
}

impl Release {
    /// What a chart would have made, and an operator that runs.
    pub async fn new(prefix: &str) -> Release {
        let mut release = Release::prepare(prefix, &[]).await;
        release.make_secrets().await;
        release.start();
        release
    }

    /// What a chart would have made, but for the Secrets of [`Release::make_secrets`].
    pub async fn prepare(prefix: &str, others: &[&Namespace]) -> Release {
        Release::prepare_on(prefix, others, Farm::new().await).await
    }

    /// The same with a database that was made otherwise.
    pub async fn prepare_on(prefix: &str, others: &[&Namespace], farm: Farm) -> Release {
        for crd in harmonia_crds::all() {
            let yaml = harmonia_crds::yaml(&crd).expect("write a CRD");
            let applied = try_kubectl(&["apply", "--server-side", "--filename", "-"], &yaml).await;
            applied.unwrap_or_else(|complaint| panic!("apply a CRD: {complaint}"));
        }
        let namespace = Namespace::new(prefix).await;
        let name = namespace.name().to_owned();
        namespace
            .apply(&format!(
                "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: {name}-operator}}, spec: {{replicas: 0, \
                 selector: {{matchLabels: {{app: operator}}}}, template: {{metadata: {{labels: {{app: operator}}}}, \
                 spec: {{containers: [{{name: operator, image: none}}]}}}}}}}}"
            ))
            .await;
        let watched: Vec<&str> =
            [name.as_str()].into_iter().chain(others.iter().map(|other| other.name())).collect();
        let watched = watched.join(",");
        let files = tempfile::tempdir().expect("a directory");
        let frontend = serve(tell_keys);
        let installation = installation(&name, &format!("http://{}", frontend.0));
        std::fs::write(files.path().join("installation.yaml"), installation).expect("write");
        Release { farm, namespace, files, watched, frontend, operators: Vec::new() }
    }

    /// The keys to sign with and of the bucket.
    pub async fn make_secrets(&self) {
        let name = self.namespace.name();
        for (secret, keys) in [
            ("signing", &["--from-literal=key=x"][..]),
            ("s3", &["--from-literal=access-key-id=a", "--from-literal=secret-access-key=b"]),
        ] {
            let secret = format!("{name}-{secret}");
            self.namespace.kubectl(&[&["create", "secret", "generic", &secret], keys].concat()).await;
        }
    }

    /// Who the operator is to the API server.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{0}:{0}-operator", self.namespace.name())
    }

    /// The cache that builders are told of.
    pub fn cache(&self) -> String {
        format!("http://{}/cache", self.frontend.0)
    }

    /// How the operator is configured.
    pub fn settings(&self) -> Settings {
        Settings::default()
            .with("installation", self.files.path().join("installation.yaml").display().to_string())
            .with("namespace", self.namespace.name())
            .with("watch_namespaces", &self.watched)
            .with("listen", "127.0.0.1:0")
            .with("database_url", &self.farm.direct_url)
            .with("database_admin_url", self.farm.database.direct_url())
    }

    /// Starts an operator that may do everything, beside those that run.
    pub fn start(&mut self) {
        self.start_among(Some(vec!["system:masters".to_owned()]));
    }

    /// Starts one that may do everything in its namespace and see nothing that belongs to the cluster.
    pub async fn start_confined(&mut self) {
        let (name, user) = (self.namespace.name(), self.user());
        let account = format!("--serviceaccount={name}:{name}-operator");
        self.namespace
            .kubectl(&["create", "rolebinding", "all", "--clusterrole=cluster-admin", &account])
            .await;
        eventually("the API server knows its rights", SOON, async || {
            self.namespace.try_kubectl(&["auth", "can-i", "*", "*", "--as", &user]).await.is_ok()
        })
        .await;
        self.start_among(None);
    }

    /// As a member of these groups, or of those that every service account is in.
    fn start_among(&mut self, groups: Option<Vec<String>>) {
        let settings = self.settings();
        let (stop, stops) = watch::channel(0);
        let user = self.user();
        let running = tokio::spawn(async move {
            let mut config = ::kube::Config::infer().await.expect("KUBECONFIG");
            config.auth_info.impersonate = Some(user);
            config.auth_info.impersonate_groups = groups;
            harmonia_operator::run_on(&settings, config, stops).await.expect("the operator runs");
        });
        self.operators.push((stop, running));
    }

    /// What it has asked the API server for in its namespace, watches apart, each as verb and object. kubectl says who it is, the
    /// operator in this process does not.
    pub fn requests(&self) -> Vec<String> {
        let log = std::fs::read_to_string(std::env::var_os("HARMONIA_CI_TEST_AUDIT").expect("an audit log"));
        let log = log.expect("read the audit log");
        // The last line may not be whole yet.
        let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let own = |event: &Value| {
            event["objectRef"]["namespace"] == self.namespace.name()
                && event["userAgent"].is_null()
                && event["verb"] != "watch"
        };
        let word =
            |event: &Value, path| event.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let request = |event: Value| {
            let paths = ["/verb", "/objectRef/resource", "/objectRef/subresource", "/objectRef/name"];
            paths.map(|path| word(&event, path)).join(" ")
        };
        events.filter(own).map(request).collect()
    }

    /// Stops all as SIGTERM would.
    pub async fn stop(&mut self) {
        while !self.operators.is_empty() {
            self.stop_first().await;
        }
    }

    /// Stops the one that has run for longest.
    pub async fn stop_first(&mut self) {
        let (stop, running) = self.operators.remove(0);
        stop.send_replace(1);
        let ended = tokio::time::timeout(SOON, running).await;
        ended.expect("the operator ends").expect("the operator ends well");
    }
}

/// The operator goes with the test, so what it held is let go: namespaces that nobody can delete would keep the cluster's own
/// controllers busy, and other tests waiting.
impl Drop for Release {
    fn drop(&mut self) {
        let run = |words: &[&str]| {
            let output = Command::new("kubectl").args(words).stdin(Stdio::null()).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
        };
        for namespace in self.watched.split(',') {
            let space = format!("--namespace={namespace}");
            for object in run(&["get", "builderpools,projects", "--output=name", &space]).lines() {
                run(&[
                    "patch",
                    object,
                    "--type=merge",
                    "--patch={\"metadata\": {\"finalizers\": null}}",
                    &space,
                ]);
            }
        }
    }
}

/// All that operators ask a frontend.
async fn tell_keys(listener: TcpListener) {
    let keys = || async { Json(json!([{"name": "farm-1", "key": "AAAA"}])) };
    axum::serve(listener, Router::new().route("/api/public-keys", get(keys))).await.expect("serve keys");
}

/// As the chart writes it.
fn installation(name: &str, frontend: &str) -> String {
    format!(
        "name: {name}
image: localhost/harmonia-ci:test
builderImage: localhost/harmonia-ci-builder:test
imagePullPolicy: IfNotPresent
database: {{admin: {{secret: {name}-postgres, key: url}}}}
s3: {{endpoint: 'http://127.0.0.1:9', bucket: harmonia-ci, region: us-east-1, secret: {name}-s3}}
signing: {{secret: {name}-signing}}
frontend: {{replicas: 2, url: '{frontend}'}}
signer: {{replicas: 2}}
evaluator: {{replicas: 1, workers: 1, memory: 4Gi, timeout: 30m}}
adminToken: {{secret: {name}-admin-token}}
pool: {{name: default, spec: {{systems: [x86_64-linux], store: {{mode: EmptyDir, size: 1Gi}}, replicas: 0}}}}
"
    )
}
