//! A running `harmonia-ci up`.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use harmonia_tests::nixes::Nix;
use harmonia_tests::pg::Database;
use harmonia_tests::press::free_port;
use sqlx::PgPool;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// A farm with an own data directory; it ends with this.
pub struct Up {
    child: Child,
    _data: TempDir,
    pub url: String,
    pub token: String,
    http: reqwest::Client,
}

impl Up {
    /// Starts one with further options and waits until it says that it is ready.
    pub async fn start(options: &[String]) -> Up {
        let data = tempfile::tempdir().expect("a directory");
        let listen = format!("127.0.0.1:{}", free_port());
        let own = std::env::current_exe().expect("this program");
        let mut child = Command::new(own.with_file_name("harmonia-ci"))
            .args(["up", "--listen", &listen, "--data"])
            .arg(data.path().join("farm"))
            .args(options)
            .env("XDG_CONFIG_HOME", data.path())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("harmonia-ci is built beside this program");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        while !lines.next_line().await.expect("text").expect("it gets ready").contains("is ready") {}
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let token = std::fs::read_to_string(data.path().join("farm/token")).expect("a token");
        let http = harmonia_builder::upload::http_client().expect("a client");
        Up { child, _data: data, url: format!("http://{listen}"), token: token.trim().to_owned(), http }
    }

    /// One that builds with this daemon and keeps its queue in this database.
    pub async fn with(nix: &Nix, database: &Database, slots: usize) -> Up {
        let daemon = format!("unix://{}?root={}", nix.socket().display(), nix.root().display());
        let options = ["--slots", &slots.to_string(), "--nix-daemon", &daemon, "--database", &database.url()];
        Up::start(&options.map(str::to_owned)).await
    }

    /// Has a directory evaluated; the evaluation's number.
    pub async fn eval(&self, source: &Path) -> i64 {
        let request = serde_json::json!({ "project": "default", "source": source });
        let answer =
            self.http.post(format!("{}/api/evals", self.url)).bearer_auth(&self.token).json(&request);
        let answer = answer.send().await.expect("an answer").error_for_status().expect("it is queued");
        answer.json::<serde_json::Value>().await.expect("JSON")["id"].as_i64().expect("a number")
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id().expect("it runs")
    }

    /// Ends it as a person does.
    pub async fn stop(mut self) {
        let pid = self.id().to_string();
        let told = Command::new("kill").args(["-INT", &pid]).status().await;
        assert!(told.expect("start kill").success(), "it ended by itself");
        self.child.wait().await.expect("it ends");
    }
}

/// Waits until an evaluation's graph is whole, or everything of it is built.
pub async fn wait(admin: &PgPool, evaluation: i64, built: bool) {
    loop {
        let (state, open): (String, bool) = sqlx::query_as(
            "SELECT e.state::text, EXISTS (SELECT FROM ci.want w JOIN ci.job j ON j.id = w.job_id WHERE w.evaluation_id = e.id AND j.state = 'open') \
             FROM ci.evaluation e WHERE e.id = $1",
        )
        .bind(evaluation)
        .fetch_one(admin)
        .await
        .expect("the evaluation");
        assert!(
            ["queued", "evaluating", "complete"].contains(&state.as_str()),
            "evaluation {evaluation} is {state}"
        );
        if state == "complete" && !(built && open) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a build of an evaluation runs; its number.
pub async fn running(admin: &PgPool, evaluation: i64) -> i64 {
    loop {
        let build: Option<i64> =
            sqlx::query_scalar("SELECT r.job_id FROM ci.want w JOIN ci.running r ON r.job_id = w.job_id WHERE w.evaluation_id = $1")
                .bind(evaluation)
                .fetch_optional(admin)
                .await
                .expect("what runs");
        if let Some(build) = build {
            return build;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A number of seconds by the database's clock.
pub async fn seconds(admin: &PgPool, sql: &'static str, evaluation: i64) -> f64 {
    sqlx::query_scalar(sql).bind(evaluation).fetch_one(admin).await.expect("a time")
}

/// What one side wrote is not the other's to wait for.
pub fn sync() {
    assert!(std::process::Command::new("sync").status().expect("start sync").success());
}
