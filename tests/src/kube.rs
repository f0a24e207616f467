//! A real Kubernetes API, which `./dev` starts: alone for tier apiserver, with two nodes for tier cluster.
//!
//! Tests speak to it as people do, with kubectl, each in a namespace of its own.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep};

/// Runs kubectl; what it printed, or its complaint.
pub async fn try_kubectl(words: &[&str], input: &str) -> Result<String, String> {
    let mut command = tokio::process::Command::new("kubectl");
    command.args(words).env("KUBECONFIG", setting("KUBECONFIG")).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("kubectl, which `./dev test` puts into PATH");
    let mut stdin = child.stdin.take().expect("a pipe to kubectl");
    // It may end without having read everything, and says itself why.
    let feed = async {
        let _ = stdin.write_all(input.as_bytes()).await;
        drop(stdin);
    };
    let (output, ()) = tokio::join!(child.wait_with_output(), feed);
    outcome(&output.expect("wait for kubectl"))
}

/// Runs kubectl, which must succeed; what it printed.
pub async fn kubectl(words: &[&str]) -> String {
    try_kubectl(words, "")
        .await
        .unwrap_or_else(|complaint| panic!("kubectl {}: {complaint}", words.join(" ")))
}

/// Defines the custom resources.
pub async fn define() {
    for crd in harmonia_crds::all() {
        let yaml = harmonia_crds::yaml(&crd).expect("YAML of a definition");
        let apply = ["apply", "--server-side", "--force-conflicts", "--filename", "-"];
        try_kubectl(&apply, &yaml).await.unwrap_or_else(|complaint| panic!("kubectl apply: {complaint}"));
        let name = crd.metadata.name.expect("a definition's name");
        kubectl(&["wait", "--for=condition=Established", "--timeout=180s", &format!("crd/{name}")]).await;
    }
}

/// Waits until something holds that is asked for every 200 ms.
pub async fn eventually(what: &str, within: Duration, holds: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + within;
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}: not within {within:?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Cuts a node's power. Its disk stays. With what this returns it is switched on again at the latest.
pub async fn node_off(name: &str) -> Off {
    let off = Off(name.to_owned());
    script("node-off", name).await;
    off
}

/// A node without power.
#[must_use]
pub struct Off(String);

impl Drop for Off {
    fn drop(&mut self) {
        let _ = Command::new(program("node-on")).arg(&self.0).stdin(Stdio::null()).output();
    }
}

/// Switches a node on again.
pub async fn node_on(name: &str) {
    script("node-on", name).await;
}

/// Runs a command among the processes of a node, which must succeed; what it printed.
pub async fn in_node(name: &str, words: &[&str]) -> String {
    let output = script_output("in-node", &[&[name], words].concat()).await;
    outcome(&output).unwrap_or_else(|complaint| panic!("in {name}, {}: {complaint}", words.join(" ")))
}

/// A request that the API server was asked for; empty words where it has none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// `get`, `list`, `patch`…
    pub verb: String,
    /// The API group, empty for the core.
    pub group: String,
    /// The resource, in plural.
    pub resource: String,
    /// Such as `status`.
    pub subresource: String,
    /// The object's namespace.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// How it was answered, as HTTP says it.
    pub code: u64,
}

/// The kinds of requests of one user so far, such as `system:serviceaccount:NAMESPACE:NAME`.
pub fn requests_of(user: &str) -> BTreeSet<Request> {
    requests(|found| found == user).into_iter().collect()
}

/// All requests so far of the users that are meant, in all audit logs that there are, in order. Those of the cluster's own parts are
/// not written down.
pub fn requests(is_meant: impl Fn(&str) -> bool) -> Vec<Request> {
    let logs = setting("HARMONIA_CI_TEST_AUDIT");
    let logs = env::split_paths(&logs).map(|log| fs::read_to_string(log).expect("read an audit log"));
    let logs: Vec<String> = logs.collect();
    // The last line may not be whole yet.
    let events =
        logs.iter().flat_map(|log| log.lines()).filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let actor = |event: &Value| match &event["impersonatedUser"]["username"] {
        Value::Null => event["user"]["username"].as_str().is_some_and(&is_meant),
        impersonated => impersonated.as_str().is_some_and(&is_meant),
    };
    let asked = events.filter(|event| actor(event) && event["objectRef"].is_object());
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let request = |event: Value| Request {
        verb: word(&event["verb"]),
        group: word(&event["objectRef"]["apiGroup"]),
        resource: word(&event["objectRef"]["resource"]),
        subresource: word(&event["objectRef"]["subresource"]),
        namespace: word(&event["objectRef"]["namespace"]),
        name: word(&event["objectRef"]["name"]),
        code: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
    };
    asked.map(request).collect()
}

/// A namespace of one test. It is deleted with the test; if that failed, what was in it is printed before.
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes one whose name begins with this.
    pub async fn new(prefix: &str) -> Namespace {
        let name = format!("{prefix}-{}", &uuid::Uuid::new_v4().simple().to_string()[..6]);
        kubectl(&["create", "namespace", &name]).await;
        let namespace = Namespace { name };
        // Without it, pods are refused.
        eventually("the default service account", crate::PATIENCE, async || {
            namespace.try_kubectl(&["get", "serviceaccount", "default"]).await.is_ok()
        })
        .await;
        namespace
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs kubectl in it; what it printed, or its complaint.
    pub async fn try_kubectl(&self, words: &[&str]) -> Result<String, String> {
        try_kubectl(&[&["--namespace", &self.name], words].concat(), "").await
    }

    /// Runs kubectl in it, which must succeed; what it printed.
    pub async fn kubectl(&self, words: &[&str]) -> String {
        kubectl(&[&["--namespace", &self.name], words].concat()).await
    }

    /// `kubectl apply` of YAML; what it printed, or its complaint.
    pub async fn try_apply(&self, yaml: &str) -> Result<String, String> {
        try_kubectl(&["--namespace", &self.name, "apply", "--filename", "-"], yaml).await
    }

    /// `kubectl apply` of YAML, which must succeed.
    pub async fn apply(&self, yaml: &str) -> String {
        self.try_apply(yaml).await.unwrap_or_else(|complaint| panic!("kubectl apply: {complaint}\n{yaml}"))
    }

    /// An object, such as `pod/x`, or with a kind alone a list of all; null if there is none.
    pub async fn get(&self, what: &str) -> Value {
        let text = self.kubectl(&["get", what, "--output", "json", "--ignore-not-found"]).await;
        if text.is_empty() { Value::Null } else { serde_json::from_str(&text).expect("JSON from kubectl") }
    }

    /// Waits until an object is as it should be.
    pub async fn eventually(&self, what: &str, within: Duration, holds: impl Fn(&Value) -> bool) {
        eventually(&format!("{what} as expected"), within, async || holds(&self.get(what).await)).await;
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for words in [
                &["get", "all,persistentvolumeclaims", "--output=wide"][..],
                &["get", "events", "--sort-by=.lastTimestamp"],
                &["describe", "pods"],
                &["logs", "--selector=!none", "--ignore-errors", "--all-containers", "--prefix", "--tail=50"],
            ] {
                let output = self.plain(words).output().map_err(|error| error.to_string());
                let (Ok(text) | Err(text)) = output.and_then(|output| outcome(&output));
                eprintln!("--- kubectl --namespace {} {}\n{text}", self.name, words.join(" "));
            }
        }
        let _ = self.plain(&["delete", "namespace", &self.name, "--wait=false"]).output();
    }
}

impl Namespace {
    fn plain(&self, words: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(["--namespace", &self.name]).args(words).stdin(Stdio::null());
        command
    }
}

fn outcome(output: &Output) -> Result<String, String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

async fn script(verb: &str, argument: &str) {
    let output = script_output(verb, &[argument]).await;
    outcome(&output).unwrap_or_else(|complaint| panic!("{verb} {argument}: {complaint}"));
}

async fn script_output(verb: &str, words: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(program(verb));
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    command.output().await.expect("run a script of the cluster")
}

fn program(verb: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster").join(verb)
}

fn setting(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| {
        panic!("{name} is not set: run `./dev test apiserver` or `./dev test cluster`, which start a Kubernetes API first")
    })
}
