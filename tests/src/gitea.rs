//! A real Gitea on a database of its own, with people, repositories and webhooks.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use reqwest::{Client, Method};
use serde_json::{Value, json};

use crate::guard::{Guard, cache};
use crate::pg::{Database, Server};

/// As `./dev` makes it.
const VERSION: &str = "1.26.0";
const PASSWORD: &str = "correct-horse-battery";

/// The server; it stops when it is dropped.
pub struct Gitea {
    /// Its address, without a slash at the end.
    pub url: String,
    /// The token of the user `acme`, who may do everything there.
    pub token: String,
    client: Client,
    _guard: Guard,
    _database: Database,
}

impl Gitea {
    /// With the user `acme`. None: `./dev test api` has not made it.
    pub async fn start() -> Option<Gitea> {
        let place = cache().join(format!("gitea-{VERSION}"));
        if !place.join("gitea").exists() {
            return None;
        }
        let guard = Guard::new("gitea-");
        let database = Server::shared().empty_database().await;
        let role = database.server().unique("gitea");
        database.execute(&format!("CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'gitea'")).await;
        let port = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("it").port();
        fs::write(guard.directory().join("app.ini"), settings(&guard, &place, &database, &role, port))
            .expect("write the settings");
        run(program(&place, guard.directory()).arg("migrate"));
        guard.start(program(&place, guard.directory()).arg("web"));
        let url = format!("http://127.0.0.1:{port}");
        crate::eventually("Gitea listens", || async {
            assert!(guard.runs(), "{}", guard.log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
        .await;
        make_person(&place, guard.directory(), "acme");
        let token = run(program(&place, guard.directory()).args([
            "admin",
            "user",
            "generate-access-token",
            "--username",
            "acme",
            "--token-name",
            "tests",
            "--scopes",
            "all",
            "--raw",
        ]));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().timeout(Duration::from_secs(60)).build().expect("a client");
        // Before it, it says again that it should not run as root.
        let token = token.lines().last().unwrap_or_default().to_owned();
        Some(Gitea { url, token, client, _guard: guard, _database: database })
    }

    /// Asks its API as the user `acme`, or as another.
    pub async fn ask(&self, person: &str, method: Method, path: &str, body: Value) -> Value {
        let request = self.client.request(method.clone(), format!("{}/api/v1/{path}", self.url));
        let response =
            request.basic_auth(person, Some(PASSWORD)).json(&body).send().await.expect("an answer");
        let (status, text) = (response.status(), response.text().await.expect("a text"));
        assert!(status.is_success(), "{method} {path}: {status}: {text}");
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Where somebody pushes to.
    pub fn clone_url(&self, person: &str, repository: &str) -> String {
        self.url.replace("http://", &format!("http://{person}:{PASSWORD}@")) + &format!("/{repository}.git")
    }

    /// The repository `acme/dots` with a webhook to this address.
    pub async fn repository(&self, webhook: &str, secret: &str) {
        self.ask("acme", Method::POST, "user/repos", json!({"name": "dots", "default_branch": "main"})).await;
        let events =
            ["push", "delete", "pull_request", "pull_request_sync", "issue_comment", "pull_request_comment"];
        let config = json!({"url": webhook, "content_type": "json", "secret": secret});
        let hook = json!({"type": "gitea", "active": true, "events": events, "config": config});
        self.ask("acme", Method::POST, "repos/acme/dots/hooks", hook).await;
    }
}

fn settings(guard: &Guard, place: &Path, database: &Database, role: &str, port: u16) -> String {
    let (work, place) = (guard.directory().display(), place.display());
    let sockets = database.server().sockets().display();
    let user = std::env::var("USER").unwrap_or_else(|_| "root".to_owned());
    format!(
        "RUN_USER = {user}\nWORK_PATH = {work}\n
[database]\nDB_TYPE = postgres\nHOST = {sockets}:{}\nNAME = {}\nUSER = {role}\nPASSWD = gitea\nSSL_MODE = disable\n
[server]\nHTTP_ADDR = 127.0.0.1\nHTTP_PORT = {port}\nROOT_URL = http://127.0.0.1:{port}/\nSTATIC_ROOT_PATH = {place}\nOFFLINE_MODE = true\nDISABLE_SSH = true\n
[repository]\nROOT = {work}/repositories\n
[security]\nINSTALL_LOCK = true\nSECRET_KEY = tests\nPASSWORD_HASH_ALGO = pbkdf2$1000$50\n
[webhook]\nALLOWED_HOST_LIST = loopback\n
[indexer]\nISSUE_INDEXER_TYPE = db\n
[cron]\nENABLED = false\n
[actions]\nENABLED = false\n
[log]\nLEVEL = warn\n",
        database.server().port(),
        database.name()
    )
}

fn program(place: &Path, work: &Path) -> Command {
    let mut command = Command::new(place.join("gitea"));
    command
        .arg("--config")
        .arg(work.join("app.ini"))
        .env("GITEA_WORK_DIR", work)
        .env("GITEA_I_AM_BEING_UNSAFE_RUNNING_AS_ROOT", "true")
        .env("HOME", work);
    command
}

fn make_person(place: &Path, work: &Path, name: &str) {
    let mut command = program(place, work);
    let mail = format!("{name}@example.org");
    command.args(["admin", "user", "create", "--username", name, "--password", PASSWORD, "--email", &mail]);
    command.args(["--must-change-password=false", "--admin"]);
    run(&mut command);
}

/// What a command prints; it must go well.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {said}{errors}");
    said.into_owned()
}
