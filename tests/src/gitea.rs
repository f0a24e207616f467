//! A real Gitea on a database of its own, with people, repositories and webhooks.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, Method, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::guard::{Guard, cache};
use crate::pg::{Database, Server};
use crate::press::free_port;

/// As `./dev` makes it.
const VERSION: &str = "1.26.0";
const PASSWORD: &str = "correct-horse-battery";

/// The server; it stops when it is dropped.
pub struct Gitea {
    /// Its address, without a slash at the end.
    pub url: String,
    /// The token of the user `acme`, who may do everything there.
    pub token: String,
    /// One as docs/forges.md wants it: of the user `bot`, an administrator of `acme/dots` and of nothing else.
    pub bot: String,
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
        static BEGINNING: OnceCell<Beginning> = OnceCell::const_new();
        let beginning = BEGINNING.get_or_init(|| Beginning::make(&place)).await;
        let database = Server::shared().empty_database_from(beginning.database.name()).await;
        let port = free_port();
        let guard = furnished(&place, &database, port);
        guard.start(program(&place, guard.directory()).arg("web"));
        let url = format!("http://127.0.0.1:{port}");
        crate::eventually("Gitea listens", || async {
            assert!(guard.runs(), "{}", guard.log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
        .await;
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().timeout(Duration::from_secs(60)).build().expect("a client");
        let token = beginning.token.clone();
        let gitea = Gitea { url, token, bot: String::new(), client, _guard: guard, _database: database };
        gitea.person("bot").await;
        let token = json!({"name": "ci", "scopes": ["write:repository", "read:issue"]});
        let made = gitea.ask("bot", Method::POST, "users/bot/tokens", token).await;
        Some(Gitea { bot: made["sha1"].as_str().expect("a token").to_owned(), ..gitea })
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

    /// Somebody more, who may do nothing in particular.
    pub async fn person(&self, name: &str) {
        let mail = format!("{name}@example.org");
        let person =
            json!({"username": name, "password": PASSWORD, "email": mail, "must_change_password": false});
        self.ask("acme", Method::POST, "admin/users", person).await;
    }

    /// A program with which people sign in by OpenID Connect; its name there, and its secret.
    pub async fn program(&self, back: &str) -> (String, String) {
        let program = json!({"name": "ci", "redirect_uris": [back], "confidential_client": true});
        let made = self.ask("acme", Method::POST, "user/applications/oauth2", program).await;
        let word = |name: &str| made[name].as_str().expect("a word").to_owned();
        (word("client_id"), word("client_secret"))
    }

    /// What somebody does with a browser who is sent to it to sign in: says who they are and agrees. Answers where they are
    /// sent back to.
    pub async fn agree(&self, person: &str, address: &str) -> String {
        let mut browser = Browser::default();
        let page = browser.get(&format!("{}/user/login", self.url)).await;
        let fields = [("user_name", person), ("password", PASSWORD)];
        let answer = browser.send(&format!("{}/user/login", self.url), &page, &fields).await;
        assert!(answer.is_some(), "{person} cannot sign in");
        let page = browser.get(address).await;
        let back =
            browser.send(&format!("{}/login/oauth/grant", self.url), &page, &[("granted", "true")]).await;
        back.expect("they are sent back")
    }

    /// A pull request for `acme/dots`; its number. What was just pushed to a fork is known to it a moment later: until then
    /// there is no such branch.
    pub async fn propose(&self, person: &str, proposal: &Value) -> i64 {
        let address = format!("{}/api/v1/repos/acme/dots/pulls", self.url);
        let number = Cell::new(None);
        crate::eventually("the pull request is made", || async {
            let request = self.client.post(&address).basic_auth(person, Some(PASSWORD)).json(proposal);
            let made = request.send().await.expect("an answer");
            let said: Value = made.json().await.unwrap_or_default();
            number.set(said["number"].as_i64());
            number.get().is_some()
        })
        .await;
        number.get().expect("a number")
    }

    /// Where somebody pushes to.
    pub fn clone_url(&self, person: &str, repository: &str) -> String {
        self.url.replace("http://", &format!("http://{person}:{PASSWORD}@")) + &format!("/{repository}.git")
    }

    /// The repository `acme/dots` with a webhook to this address.
    pub async fn repository(&self, webhook: &str, secret: &str) {
        self.ask("acme", Method::POST, "user/repos", json!({"name": "dots", "default_branch": "main"})).await;
        let bot = "repos/acme/dots/collaborators/bot";
        self.ask("acme", Method::PUT, bot, json!({"permission": "admin"})).await;
        let events =
            ["push", "delete", "pull_request", "pull_request_sync", "issue_comment", "pull_request_comment"];
        let config = json!({"url": webhook, "content_type": "json", "secret": secret});
        let hook = json!({"type": "gitea", "active": true, "events": events, "config": config});
        self.ask("acme", Method::POST, "repos/acme/dots/hooks", hook).await;
    }
}

/// What all of this process begin with, for it takes long to make: tables, and the user `acme` with a token.
struct Beginning {
    /// Nobody is connected to it.
    database: Database,
    token: String,
}

impl Beginning {
    async fn make(place: &Path) -> Beginning {
        let database = Server::shared().empty_database().await;
        database.server().execute("CREATE ROLE gitea LOGIN SUPERUSER PASSWORD 'gitea'").await;
        let guard = furnished(place, &database, free_port());
        let program = || program(place, guard.directory());
        run(program().arg("migrate"));
        let (name, mail) = ("acme", "acme@example.org");
        let create = ["admin", "user", "create", "--username", name, "--password", PASSWORD, "--email", mail];
        run(program().args(create).args(["--must-change-password=false", "--admin"]));
        let generate =
            ["admin", "user", "generate-access-token", "--username", name, "--token-name", "tests"];
        let said = run(program().args(generate).args(["--scopes", "all", "--raw"]));
        // Before it, it says again that it should not run as root.
        Beginning { database, token: said.lines().last().unwrap_or_default().to_owned() }
    }
}

/// A directory with settings.
fn furnished(place: &Path, database: &Database, port: u16) -> Guard {
    let guard = Guard::new("gitea-");
    let settings = settings(&guard, place, database, port);
    fs::write(guard.directory().join("app.ini"), settings).expect("write the settings");
    guard
}

/// Somebody with a browser: cookies, and forms with all their fields.
struct Browser {
    client: Client,
    cookies: BTreeMap<String, String>,
}

impl Default for Browser {
    fn default() -> Self {
        let client = Client::builder().redirect(Policy::none()).build().expect("a client");
        Self { client, cookies: BTreeMap::new() }
    }
}

impl Browser {
    async fn get(&mut self, address: &str) -> String {
        let response = self.ask(self.client.get(address)).await;
        let (status, text) = (response.status(), response.text().await.expect("a text"));
        assert!(status.is_success(), "{address}: {status}: {text}");
        text
    }

    /// Sends the form of a page with more fields; answers where that leads.
    async fn send(&mut self, address: &str, page: &str, more: &[(&str, &str)]) -> Option<String> {
        let mut fields = hidden(page);
        fields.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let escape = |word: &str| word.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
        let pairs: Vec<String> =
            fields.iter().map(|(name, value)| format!("{name}={}", escape(value))).collect();
        let request = self.client.post(address).header("sec-fetch-site", "same-origin").body(pairs.join("&"));
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let response = self.ask(request).await;
        let to = response.headers().get("location")?;
        Some(to.to_str().expect("an address").to_owned())
    }

    async fn ask(&mut self, request: RequestBuilder) -> Response {
        let cookies: Vec<String> =
            self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let response = request.header("cookie", cookies.join("; ")).send().await.expect("an answer");
        for cookie in response.headers().get_all("set-cookie") {
            let pair = cookie.to_str().expect("text").split(';').next().unwrap_or_default();
            let (name, value) = pair.split_once('=').expect("a cookie");
            self.cookies.insert(name.to_owned(), value.to_owned());
        }
        response
    }
}

/// The hidden fields of a page's forms.
fn hidden(page: &str) -> Vec<(String, String)> {
    let word = |tag: &str, name: &str| {
        let (_, rest) = tag.split_once(&format!("{name}=\""))?;
        Some(rest.split('"').next()?.replace("&#43;", "+").replace("&amp;", "&"))
    };
    let tags = page.split("<input").skip(1).filter_map(|rest| rest.split('>').next());
    let hidden = tags.filter(|tag| tag.contains("type=\"hidden\""));
    hidden.filter_map(|tag| Some((word(tag, "name")?, word(tag, " value")?))).collect()
}

fn settings(guard: &Guard, place: &Path, database: &Database, port: u16) -> String {
    let (work, place) = (guard.directory().display(), place.display());
    let sockets = database.server().sockets().display();
    let user = std::env::var("USER").unwrap_or_else(|_| "root".to_owned());
    format!(
        "RUN_USER = {user}\nWORK_PATH = {work}\n
[database]\nDB_TYPE = postgres\nHOST = {sockets}:{}\nNAME = {}\nUSER = gitea\nPASSWD = gitea\nSSL_MODE = disable\n
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

/// What a command prints; it must go well.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {said}{errors}");
    said.into_owned()
}
