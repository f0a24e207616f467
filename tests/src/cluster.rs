//! A farm in the cluster, installed once from the chart as a newcomer does, and a person who uses it from outside.

use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::kube::{eventually, in_node, kubectl, try_kubectl};
use crate::press::free_port;

/// Where it is installed.
pub const NAMESPACE: &str = "ci";
/// The release, and so the beginning of all names.
pub const RELEASE: &str = "harmonia-ci";
/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);
/// The host, as pods reach it.
pub const HOST: &str = "10.213.0.1";

/// A person with the farm's token, and a server of repositories that ends with the test.
pub struct Farm {
    http: reqwest::Client,
    url: String,
    /// Who may do everything.
    pub token: String,
    repositories: TempDir,
    server: Child,
    port: u16,
}

/// A pool of builders and a project that builds nowhere else; gone with the test.
pub struct Pool<'a> {
    farm: &'a Farm,
    /// Of both.
    pub name: String,
}

/// A build of so many seconds.
pub struct Sleeper {
    /// Its own.
    pub name: String,
    seconds: u32,
}

impl Farm {
    /// The one farm of all tests.
    pub async fn get() -> Farm {
        static INSTALLED: OnceCell<()> = OnceCell::const_new();
        INSTALLED.get_or_init(begin).await;
        let (url, token) = way_in(NAMESPACE).await;
        let repositories = tempfile::tempdir().unwrap();
        let port = free_port();
        // Not by way of git, which would start a process that outlives it.
        let programs = Command::new("git").arg("--exec-path").output().unwrap().stdout;
        let server = Command::new(Path::new(String::from_utf8(programs).unwrap().trim()).join("git-daemon"))
            .args(["--export-all", "--reuseaddr"])
            .args([format!("--listen={HOST}"), format!("--port={port}")])
            .arg(format!("--base-path={}", repositories.path().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let http = harmonia_builder::upload::http_client().unwrap();
        Farm { http, url, token, repositories, server, port }
    }

    /// A verb as a person types it, which must succeed; what it printed.
    pub async fn does(&self, words: &[&str]) -> String {
        type_in(&self.url, &self.token, words).await
    }

    /// What the API answers, by a frontend that may be replaced meanwhile.
    pub async fn api(&self, path: &str) -> Value {
        let until = Instant::now() + PATIENCE;
        let answer = loop {
            let request = self.http.get(format!("{}{path}", self.url)).bearer_auth(&self.token);
            match request.send().await {
                Ok(answer) => break answer,
                Err(error) => assert!(Instant::now() < until, "{path}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap_or_default());
        answer.json().await.unwrap()
    }

    /// A narinfo of the cache, as a client with a netrc sees it.
    pub async fn narinfo(&self, path: &str) -> String {
        let hash = path.trim_start_matches("/nix/store/").split('-').next().unwrap();
        let request = self.http.get(format!("{}/cache/{hash}.narinfo", self.url));
        let answer = request.basic_auth("nix", Some(&self.token)).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        answer.text().await.unwrap()
    }

    /// Makes files a repository that evaluators can fetch; its URL.
    pub fn serve(&self, name: &str, files: &[(&str, &str)]) -> String {
        let place = self.repositories.path().join(name);
        std::fs::create_dir_all(&place).unwrap();
        for (file, text) in files {
            std::fs::write(place.join(file), text).unwrap();
        }
        git(&place, &["init", "--quiet", "--initial-branch=main"]);
        git(&place, &["add", "."]);
        git(&place, &["-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message=all"]);
        format!("git://{HOST}:{}/{name}", self.port)
    }

    /// A pool whose pods are ready, with these lines in its spec, and a project of the same name.
    pub async fn pool(&self, name: &str, spec: &str) -> Pool<'_> {
        self.pool_with_store(name, "{mode: EmptyDir, size: 2Gi}", spec).await
    }

    /// The same with another store. Nothing is fetched from outside, where there is nothing, unless the spec says how.
    pub async fn pool_with_store(&self, name: &str, store: &str, spec: &str) -> Pool<'_> {
        let pool = Pool { farm: self, name: name.to_owned() };
        let nix = if spec.contains("  nix: ") { "" } else { "  nix: {substituters: []}\n" };
        apply(&format!(
            "apiVersion: ci.harmonia.dev/v1alpha1\nkind: BuilderPool\nmetadata: {{name: {name}, namespace: {NAMESPACE}}}\n\
             spec:\n  systems: [x86_64-linux]\n  store: {store}\n{nix}{spec}\n---\n\
             apiVersion: ci.harmonia.dev/v1alpha1\nkind: Project\nmetadata: {{name: {name}, namespace: {NAMESPACE}}}\n\
             spec: {{source: {{git: {{url: 'https://example.org/{name}.git'}}}}, pools: [{name}]}}\n"
        ))
        .await;
        for kind in ["builderpool", "project"] {
            let object = format!("{kind}/{name}");
            kubectl(&["-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=180s", &object]).await;
        }
        pool
    }

    /// The build with this name, if the queue knows it.
    pub async fn build(&self, name: &str) -> Option<Value> {
        let found = self.api("/api/builds?limit=200").await;
        let build = found["items"].as_array()?.iter().find(|build| build["name"] == name)?;
        Some(self.api(&format!("/api/builds/{}", build["id"])).await)
    }

    /// Waits until a build is as wanted.
    pub async fn until(&self, name: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let found = RefCell::new(None);
        eventually(name, PATIENCE, async || {
            found.replace(self.build(name).await.filter(&holds));
            found.borrow().is_some()
        })
        .await;
        found.take().unwrap()
    }

    /// Waits until somebody has begun to build it; the last who has, and may have ended.
    pub async fn begun_by(&self, name: &str) -> Value {
        let last = |build: &Value| build["attempts"].as_array().and_then(|attempts| attempts.last().cloned());
        let build = self.until(name, |build| last(build).is_some()).await;
        last(&build).unwrap()["node"].clone()
    }

    /// The same; the Kubernetes node of it.
    pub async fn runs_on(&self, name: &str) -> String {
        self.kube_node(&self.begun_by(name).await).await
    }

    /// Waits for the good end of builds, each at its first attempt and signed.
    pub async fn end_undisturbed(&self, builds: &[Sleeper]) {
        for build in builds {
            let build = self.ends(build).await;
            assert_eq!(outcomes(&build), ["succeeded"], "{build:#}");
        }
    }

    /// Waits for the good end of a build, which is signed.
    pub async fn ends(&self, build: &Sleeper) -> Value {
        let build = self.until(&build.name, succeeded).await;
        let narinfo = self.narinfo(build["outputs"][0]["path"].as_str().unwrap()).await;
        assert!(narinfo.contains("\nSig: "), "{narinfo}");
        build
    }

    /// The Kubernetes node of a builder.
    pub async fn kube_node(&self, builder: &Value) -> String {
        let nodes = self.api("/api/nodes").await;
        let node = nodes.as_array().unwrap().iter().find(|node| node["name"] == *builder);
        let node = node.unwrap_or_else(|| panic!("no node is called {builder}: {nodes:#}"));
        node["kube_node"].as_str().unwrap().to_owned()
    }
}

impl Pool<'_> {
    /// Queues builds in this pool.
    pub async fn queue(&self, builds: &[Sleeper]) {
        let attribute = |build: &Sleeper| {
            let script = format!("echo begun; ${{busybox}} sleep {}; echo ended; echo >$out", build.seconds);
            format!("  {name} = make \"{name}\" \"{script}\";\n", name = build.name)
        };
        self.evaluate(&builds[0].name, &builds.iter().map(attribute).collect::<String>()).await;
    }

    /// Queues fetches of URLs that have `hello` for an answer, by Nix itself.
    pub async fn queue_fetches(&self, fetches: &[(Sleeper, String)]) {
        let attribute = |(build, url): &(Sleeper, String)| {
            format!("  {name} = fetch \"{name}\" \"{url}\";\n", name = build.name)
        };
        self.evaluate(&fetches[0].0.name, &fetches.iter().map(attribute).collect::<String>()).await;
    }

    async fn evaluate(&self, repository: &str, attributes: &str) {
        let expression = format!("{MAKE}{{\n{attributes}}}\n");
        let url = self.farm.serve(repository, &[("default.nix", &expression)]);
        self.farm.does(&["eval", &url, "--project", &format!("{NAMESPACE}/{}", self.name)]).await;
    }

    /// Queues builds and waits until all of them have begun; the pod of each.
    pub async fn run(&self, builds: &[Sleeper]) -> Vec<String> {
        self.queue(builds).await;
        let mut pods = Vec::new();
        for build in builds {
            pods.push(self.farm.begun_by(&build.name).await.as_str().unwrap().to_owned());
        }
        pods
    }

    /// Kills a container of a pod as a kernel does that is out of memory.
    pub async fn kill(&self, pod: &str, container: &str) {
        let object = json(&["-n", NAMESPACE, "get", "pod", pod]).await;
        kill_container(&object, container).await;
    }

    /// The pods that are to stay: their names and Kubernetes nodes.
    pub async fn pods(&self) -> Vec<(String, String)> {
        let pods = json(&["-n", NAMESPACE, "get", "pods", "-l", &self.selector()]).await;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let stays = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
        let place = |pod: &Value| (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"]));
        pods["items"].as_array().unwrap().iter().filter(stays).map(place).collect()
    }

    fn selector(&self) -> String {
        format!("ci.harmonia.dev/pool={}", self.name)
    }

    /// `kubectl drain`, of this pool's pods.
    pub async fn drain(&self, node: &str) {
        let selector = format!("--pod-selector={}", self.selector());
        kubectl(&[
            "drain",
            node,
            "--delete-emptydir-data",
            "--ignore-daemonsets",
            &selector,
            "--timeout=180s",
        ])
        .await;
    }

    /// Whether its builders on a Kubernetes node drain.
    pub async fn drains(&self, kube_node: &str) -> bool {
        let nodes = self.farm.api("/api/nodes").await;
        let (pool, here) = (format!("{NAMESPACE}/{}", self.name), Value::from(kube_node));
        let mut builders = nodes
            .as_array()
            .unwrap()
            .iter()
            .filter(|node| node["pool"] == pool.as_str() && node["kube_node"] == here)
            .peekable();
        builders.peek().is_some() && builders.all(|node| !node["drains"].as_array().unwrap().is_empty())
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        let quietly = |words: &[&str]| {
            let _ = Command::new("kubectl").args(words).stdin(Stdio::null()).output();
        };
        if std::thread::panicking() {
            // With the pool go its pods and what they said.
            let place = format!("{}/../target/cluster-{}", env!("CARGO_MANIFEST_DIR"), self.name);
            let _ = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/cluster/report")).arg(&place).status();
            eprintln!("logs, events and objects are in {place}");
        }
        quietly(&["uncordon", "node1", "node2"]);
        let objects = [format!("builderpool/{}", self.name), format!("project/{}", self.name)];
        quietly(&["-n", NAMESPACE, "delete", "--timeout=180s", &objects[0], &objects[1]]);
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Derivations whose shell is the static busybox of the builders' image.
const MAKE: &str = r#"let
  busybox = builtins.path {
    name = "busybox";
    path = /usr/bin;
    filter = path: type: path == "/usr/bin/busybox";
  } + "/busybox";
  make = name: script: derivation {
    inherit name;
    builder = busybox;
    system = builtins.currentSystem;
    args = [ "sh" "-euc" script ];
  };
  fetch = name: url: derivation {
    inherit name url;
    builder = "builtin:fetchurl";
    system = "builtin";
    outputHashMode = "flat";
    outputHashAlgo = "sha256";
    outputHash = builtins.hashString "sha256" "hello\n";
  };
in
"#;

/// A build whose name no other one has, so that nobody knows how long it takes.
pub fn sleeper(name: &str, seconds: u32) -> Sleeper {
    Sleeper { name: format!("{name}-x{:08x}", rand::random::<u32>()), seconds }
}

/// Another version of something that was built before.
pub fn version(name: &str, seconds: u32) -> Sleeper {
    Sleeper { name: format!("{name}-0{:08x}", rand::random::<u32>()), seconds }
}

/// Whether a build has come to a good end.
pub fn succeeded(build: &Value) -> bool {
    build["state"] == "succeeded"
}

/// How the attempts at a build ended, the first one first.
pub fn outcomes(build: &Value) -> Vec<String> {
    let attempts = build["attempts"].as_array().unwrap().iter();
    attempts.map(|attempt| attempt["outcome"].as_str().unwrap_or("runs").to_owned()).collect()
}

/// A verb as a person of that farm types it, which must succeed; what it printed.
pub async fn type_in(url: &str, token: &str, words: &[&str]) -> String {
    // A test is in target/debug/deps, the program above it; a bench is beside it.
    let own = std::env::current_exe().unwrap();
    let program = own.ancestors().skip(1).map(|place| place.join("harmonia-ci")).find(|file| file.is_file());
    let mut command = tokio::process::Command::new(program.expect("harmonia-ci is built"));
    command.args(words).env("HARMONIA_CI_URL", url).env("HARMONIA_CI_TOKEN", token);
    succeed(command.kill_on_drop(true)).await
}

/// `helm install --wait` of the quickstart, which must succeed at the first try; where it was installed before, an upgrade.
pub async fn install(namespace: &str, more: &[&str]) {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/harmonia-ci");
    // Images that are there, nothing that lasts, one of each role.
    let values = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/values.yaml");
    let place = ["upgrade", "--install", RELEASE, chart, "--namespace", namespace, "--create-namespace"];
    let how = ["--values", values, "--set", "quickstart.enabled=true", "--wait", "--timeout", "4m"];
    helm(&[&place[..], &how, more].concat()).await;
}

/// Installs the farm on one node, so that the other can lose its power.
async fn begin() {
    kubectl(&["uncordon", "node1", "node2"]).await;
    kubectl(&["cordon", "node2"]).await;
    install(NAMESPACE, &[]).await;
    kubectl(&["uncordon", "node2"]).await;
}

/// The frontend's address and the first admin token, found as NOTES.txt says.
pub async fn way_in(namespace: &str) -> (String, String) {
    let service = json(&["-n", namespace, "get", "service", &format!("{RELEASE}-frontend")]).await;
    let secret = json(&["-n", namespace, "get", "secret", &format!("{RELEASE}-admin-token")]).await;
    let token = STANDARD.decode(secret["data"]["token"].as_str().unwrap()).unwrap();
    let url = format!("http://{}", service["spec"]["clusterIP"].as_str().unwrap());
    (url, String::from_utf8(token).unwrap())
}

/// Kills a container of a pod, wherever it runs.
pub async fn kill_container(pod: &Value, container: &str) {
    let status = &pod["status"];
    let all = ["containerStatuses", "initContainerStatuses"]
        .map(|kind| status[kind].as_array().cloned().unwrap_or_default());
    let found = all.concat().into_iter().find(|status| status["name"] == container);
    let id = found.unwrap_or_else(|| panic!("{container} is not in {status:#}"))["containerID"].clone();
    let id = id.as_str().unwrap().trim_start_matches("containerd://").to_owned();
    let node = pod["spec"]["nodeName"].as_str().unwrap();
    in_node(node, &["ctr", "--namespace", "k8s.io", "task", "kill", "--signal", "SIGKILL", &id]).await;
}

/// Takes the operator away without a word. Another one is started at once.
pub async fn lose_operator() {
    let pod = pod_of("operator").await["metadata"]["name"].clone();
    kubectl(&["-n", NAMESPACE, "delete", "pod", pod.as_str().unwrap(), "--force", "--grace-period=0"]).await;
}

/// The only pod of a role of the release.
pub async fn pod_of(component: &str) -> Value {
    let selector = format!("app.kubernetes.io/component={component},app.kubernetes.io/instance={RELEASE}");
    let pods = json(&["-n", NAMESPACE, "get", "pods", "--selector", &selector]).await;
    let going = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
    pods["items"]
        .as_array()
        .unwrap()
        .iter()
        .find(going)
        .unwrap_or_else(|| panic!("no pod of {component}"))
        .clone()
}

/// Runs Helm, which must succeed; what it printed.
pub async fn helm(words: &[&str]) -> String {
    succeed(tokio::process::Command::new("helm").args(words).kill_on_drop(true)).await
}

/// What kubectl answers as JSON.
pub async fn json(words: &[&str]) -> Value {
    serde_json::from_str(&kubectl(&[words, &["--output", "json"]].concat()).await).unwrap()
}

/// `kubectl apply` of YAML.
pub async fn apply(yaml: &str) {
    let applied = try_kubectl(&["apply", "--filename", "-"], yaml).await;
    applied.unwrap_or_else(|complaint| panic!("kubectl apply: {complaint}\n{yaml}"));
}

async fn succeed(command: &mut tokio::process::Command) -> String {
    let output = command.stdin(Stdio::null()).output().await.unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

fn git(place: &Path, words: &[&str]) {
    let status = Command::new("git").arg("-C").arg(place).args(words).status().unwrap();
    assert!(status.success(), "git {words:?}");
}
