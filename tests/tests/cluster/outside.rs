//! What people outside the cluster get from it, and what those inside do not.

use std::path::Path;
use std::process::{Command, Output};

use harmonia_tests::cluster::{Farm, NAMESPACE, RELEASE, json};
use harmonia_tests::kube::kubectl;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tempfile::TempDir;

#[tokio::test]
async fn the_demo_is_built_in_pods_and_substituted_by_a_nix_client_outside() {
    let farm = Farm::get().await;
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/demo");
    let read = |file: &str| std::fs::read_to_string(demo.join(file)).unwrap();
    let (default, shell) = (read("default.nix"), read("sandbox-shell.nix"));
    let url = farm.serve("demo", &[("default.nix", &default), ("sandbox-shell.nix", &shell)]);

    let _pool = farm.pool("demo", "  replicas: 1\n  slots: 2").await;
    let text = farm.does(&["eval", &url, "--project", &format!("{NAMESPACE}/demo"), "--wait"]).await;
    assert!(text.contains("succeeded"), "{text}");

    let build = farm.build("everything").await.unwrap();
    let path = build["outputs"][0]["path"].as_str().unwrap();
    let client = Client::new(&farm).await;
    let refused = client.fetch(path, "other-1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=");
    assert!(!refused.status.success(), "a client that trusts another key was given {path}");
    let fetched = client.fetch(path, &client.key);
    assert!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
    let contents = std::fs::read_to_string(client.root.path().join(path.trim_start_matches('/'))).unwrap();
    assert!(contents.contains("correct"), "{contents}");
}

#[tokio::test]
async fn a_pool_says_what_it_has_in_the_words_of_kubectl() {
    let farm = Farm::get().await;
    let pool = farm.pool("words", "  replicas: 1").await;
    let table = kubectl(&["-n", NAMESPACE, "get", "bp", &pool.name]).await;
    for column in ["READY", "DESIRED", "CURRENT", "BUSY", "QUEUED", "DRAINING", "SYSTEMS", "AGE"] {
        assert!(table.contains(column), "{column} is not in:\n{table}");
    }
    let explained = kubectl(&["explain", "bp.spec.drain"]).await;
    assert!(explained.contains("gracePeriod") && explained.contains("margin"), "{explained}");
}

#[tokio::test]
async fn a_builder_reads_no_table_with_the_credential_in_its_pod() {
    let farm = Farm::get().await;
    let pool = farm.pool("credential", "  replicas: 1").await;
    let (pod, _) = pool.pods().await.remove(0);
    let file = "/run/harmonia-ci/database-url";
    let url = kubectl(&["-n", NAMESPACE, "exec", &pod, "-c", "builder", "--", "cat", file]).await;
    let service = json(&["-n", NAMESPACE, "get", "service", &format!("{RELEASE}-postgres")]).await;

    let mut connection =
        PgConnection::connect(&at_host(url.trim(), service["spec"]["clusterIP"].as_str().unwrap()))
            .await
            .unwrap();
    let tables =
        "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'ci'::regnamespace";
    let tables: Vec<String> = sqlx::query_scalar(tables).fetch_all(&mut connection).await.unwrap();
    assert!(tables.len() > 10, "{tables:?}");
    for table in tables {
        let query = AssertSqlSafe(format!("SELECT * FROM ci.{table} LIMIT 1"));
        let error = sqlx::query(query).execute(&mut connection).await.unwrap_err().to_string();
        assert!(error.contains("permission denied"), "{table}: {error}");
    }
}

#[tokio::test]
async fn a_builder_has_no_token_of_the_api_server() {
    let farm = Farm::get().await;
    let pool = farm.pool("tokenless", "  replicas: 1").await;
    let (pod, _) = pool.pods().await.remove(0);
    let pod = json(&["-n", NAMESPACE, "get", "pod", &pod]).await;
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    assert!(volumes.iter().all(|volume| volume["projected"] == Value::Null), "{volumes:#?}");
}

/// The same URL at an address that is reached without the cluster's names.
fn at_host(url: &str, host: &str) -> String {
    let (login, place) = url.rsplit_once('@').unwrap();
    let after = place.find([':', '/']).unwrap();
    format!("{login}@{host}{}", &place[after..])
}

/// A Nix that shares nothing with this machine's, and finds the cluster's Services by their names.
struct Client {
    root: TempDir,
    host: String,
    key: String,
}

impl Client {
    async fn new(farm: &Farm) -> Client {
        let root = tempfile::tempdir_in("/var/lib").unwrap();
        for directory in ["conf", "home", "tmp"] {
            std::fs::create_dir(root.path().join(directory)).unwrap();
        }
        let services = json(&["-n", NAMESPACE, "get", "services"]).await;
        let line = |service: &Value| {
            let name = service["metadata"]["name"].as_str()?;
            let ip = service["spec"]["clusterIP"].as_str().filter(|ip| *ip != "None")?;
            Some(format!("{ip} {name}.{NAMESPACE}.svc\n"))
        };
        let hosts: String = services["items"].as_array().unwrap().iter().filter_map(line).collect();
        std::fs::write(root.path().join("hosts"), hosts).unwrap();
        let host = format!("{RELEASE}-frontend.{NAMESPACE}.svc");
        let netrc = format!("machine {host} login nix password {}\n", farm.token);
        std::fs::write(root.path().join("netrc"), netrc).unwrap();
        let keys = farm.api("/api/public-keys").await;
        let text = |field: &str| keys[0][field].as_str().unwrap().to_owned();
        Client { key: format!("{}:{}", text("name"), text("key")), host, root }
    }

    /// Substitutes a path, trusting one key.
    fn fetch(&self, path: &str, key: &str) -> Output {
        let root = self.root.path().display();
        let config = format!(
            "build-users-group =\nrequire-sigs = true\nnarinfo-cache-negative-ttl = 0\nnetrc-file = {root}/netrc\n\
             substituters = http://{}/cache\ntrusted-public-keys = {key}\n",
            self.host
        );
        let script = "mount --bind \"$0/hosts\" /etc/hosts; exec nix-store --realise \"$1\" --max-jobs 0";
        Command::new("unshare")
            .args(["--mount", "sh", "-euc", script])
            .arg(self.root.path())
            .arg(path)
            .env("NIX_CONF_DIR", self.root.path().join("conf"))
            .env("NIX_REMOTE", format!("local?root={root}"))
            .env("NIX_CONFIG", config)
            .env("HOME", self.root.path().join("home"))
            .env("TMPDIR", self.root.path().join("tmp"))
            .output()
            .unwrap()
    }
}

impl Drop for Client {
    /// A store's files are read-only.
    fn drop(&mut self) {
        let _ = Command::new("chmod").args(["-R", "u+w"]).arg(self.root.path()).status();
    }
}
