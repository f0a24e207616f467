//! A forge that says what it is told to say, and counts what it hears. A real one hides what it was told twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use harmonia_queue::branches::{self, Forge, ProjectSource, PullRequests};
use harmonia_tests::farm::Farm;
use ring::hmac;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The secret that webhooks are signed with.
pub const SECRET: &str = "between us";
/// The forge's name in the settings.
pub const NAME: &str = "code";

/// A status that was reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    pub commit: String,
    pub context: String,
    pub state: String,
    pub description: String,
    pub page: String,
}

/// When those who report are to be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The request has not done anything yet.
    Before,
    /// It is done and not answered.
    Between,
    /// It is answered.
    After,
}

/// An answer that refuses what is asked of a path.
pub struct Refusal {
    /// A word between two slashes of the path.
    pub of: &'static str,
    pub status: u16,
    pub header: (&'static str, &'static str),
}

/// Where in the stream of requests somebody wants to be called.
pub struct Plan {
    pub left: usize,
    pub step: Step,
    pub reached: oneshot::Sender<()>,
    pub go: oneshot::Receiver<()>,
}

/// What it knows and has heard.
#[derive(Default)]
pub struct Memory {
    pub told: Vec<Told>,
    pub writers: BTreeSet<String>,
    pub pulls: BTreeMap<i32, Value>,
    pub branches: Vec<(String, String)>,
    /// Of these one that the list of branches leaves out.
    pub unlisted: String,
    /// Instead of the next answers to those who ask for such a path: others ask for theirs meanwhile.
    pub refusals: Vec<Refusal>,
    pub requests: usize,
    pub tokens: usize,
    /// How long it thinks about who may push.
    pub thinks: Duration,
    /// Whoever signs in with the code `good`.
    pub person: String,
    pub plan: Option<Plan>,
}

/// The server; it stops when it is dropped.
pub struct Recorder {
    pub url: String,
    memory: Arc<Mutex<Memory>>,
    secrets: TempDir,
    task: JoinHandle<()>,
}

impl Recorder {
    pub async fn start() -> Recorder {
        let memory = Arc::new(Mutex::new(Memory::default()));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(answer).with_state(memory.clone());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let secrets = tempfile::tempdir().unwrap();
        for (file, text) in [("webhook", SECRET), ("token", "t0ken")] {
            std::fs::write(secrets.path().join(file), text).unwrap();
        }
        Recorder { url, memory, secrets, task }
    }

    pub fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap()
    }

    /// The setting `forges` with it as a Gitea.
    pub fn gitea(&self) -> String {
        let file = |name: &str| self.file(name).display().to_string();
        json!([{"name": NAME, "type": "gitea", "url": self.url, "token_file": file("token"),
                "webhook_secret_file": file("webhook")}])
        .to_string()
    }

    /// The same with it as GitHub, with which people sign in too.
    pub fn github(&self) -> String {
        let key = concat!(env!("CARGO_MANIFEST_DIR"), "/data/github-app-key.pem");
        let file = |name: &str| self.file(name).display().to_string();
        json!([{"name": NAME, "type": "github", "url": self.url, "app_id": 7, "private_key_file": key,
                "webhook_secret_file": file("webhook"), "client_id": "us", "client_secret_file": file("token")}])
        .to_string()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.secrets.path().join(name)
    }

    /// The project `main` is this repository of it.
    pub async fn adopt(&self, farm: &Farm, pull_requests: PullRequests) {
        let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
        let forge = Forge::Gitea { instance: self.url.clone(), owner, repo };
        adopt(farm, "main", forge, pull_requests).await;
    }
}

/// A project is this repository.
pub async fn adopt(farm: &Farm, project: &str, forge: Forge, pull_requests: PullRequests) {
    let source =
        ProjectSource { forge, pull_requests, ..ProjectSource::git("https://code.example.org/acme/dots") };
    branches::put_source(&farm.frontend, project, Some(&source)).await.unwrap();
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The signature of a body, in hexadecimal digits.
pub fn sign(secret: &str, body: &[u8]) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    hmac::sign(&key, body).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn answer(
    State(memory): State<Arc<Mutex<Memory>>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let plan = {
        let mut memory = memory.lock().unwrap();
        memory.requests += 1;
        let refused = |refusal: &Refusal| uri.path().split('/').any(|word| word == refusal.of);
        if let Some(place) = memory.refusals.iter().position(refused) {
            let Refusal { status, header, .. } = memory.refusals.remove(place);
            return (StatusCode::from_u16(status).unwrap(), [header], "not now").into_response();
        }
        match &mut memory.plan {
            Some(plan) if plan.left > 1 => {
                plan.left -= 1;
                None
            }
            plan => plan.take(),
        }
    };
    let thinks = memory.lock().unwrap().thinks;
    if uri.path().contains("/collaborators/") {
        tokio::time::sleep(thinks).await;
    }
    let Some(Plan { step, reached, go, .. }) = plan else {
        return say(&memory, &method, &uri, &headers, &body);
    };
    match step {
        Step::Before => {
            let _ = (reached.send(()), go.await);
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        }
        Step::Between => {
            let said = say(&memory, &method, &uri, &headers, &body);
            let _ = (reached.send(()), go.await);
            said
        }
        Step::After => {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..10))).await;
                reached.send(())
            });
            say(&memory, &method, &uri, &headers, &body)
        }
    }
}

fn say(memory: &Mutex<Memory>, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Response {
    let mut memory = memory.lock().unwrap();
    let path = uri.path().trim_start_matches("/api/v1");
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    if (method.as_str(), path) == ("POST", "/login/oauth/access_token") {
        return redeem(&String::from_utf8_lossy(body));
    }
    assert!(headers.contains_key("authorization"), "{path}");
    let id = |outside: bool| if outside { 2 } else { 1 };
    let branch =
        |(name, commit): &(String, String)| json!({"name": name, "commit": {"id": commit, "sha": commit}});
    let said = match (method.as_str(), &parts[..]) {
        ("POST", ["repos", "acme", "dots", "statuses", commit]) => {
            let said: Value = serde_json::from_slice(body).unwrap();
            let word = |name: &str| said[name].as_str().unwrap().to_owned();
            memory.told.push(Told {
                commit: (*commit).to_owned(),
                context: word("context"),
                state: word("state"),
                description: word("description"),
                page: word("target_url"),
            });
            return (StatusCode::CREATED, axum::Json(said)).into_response();
        }
        ("GET", ["repos", "acme", "dots", "collaborators", person, "permission"]) => {
            json!({"permission": if memory.writers.contains(*person) { "write" } else { "read" }})
        }
        ("GET", ["repos", "acme", "dots", "pulls", number]) => {
            let pull = memory.pulls.get(&number.parse().unwrap()).cloned().unwrap_or_default();
            let side = |id, branch: Value| json!({"ref": branch, "sha": pull["head"], "repo_id": id, "repo": {"id": id}});
            let (outside, branch) =
                (pull["inside"] != true, pull.get("ref").cloned().unwrap_or(json!("topic")));
            json!({"state": pull["state"], "head": side(id(outside), branch), "base": side(id(false), json!("main"))})
        }
        ("GET", ["user"]) => {
            assert_eq!(headers["authorization"], "Bearer of a person");
            json!({"login": memory.person, "id": 7})
        }
        ("GET", ["repos", "acme", "dots"]) => json!({"default_branch": "main"}),
        ("GET", ["repos", "acme", "dots", "branches", name]) => {
            let found = memory.branches.iter().find(|branch| branch.0 == *name);
            let Some(found) = found else { return StatusCode::NOT_FOUND.into_response() };
            branch(found)
        }
        // However many are asked for, two on a page.
        ("GET", ["repos", "acme", "dots", "branches"]) => {
            let listed: Vec<_> =
                memory.branches.iter().filter(|branch| branch.0 != memory.unlisted).collect();
            let asked =
                uri.query().unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("page="));
            let page = asked.and_then(|page| page.parse::<usize>().ok()).unwrap();
            listed.chunks(2).nth(page - 1).unwrap_or_default().iter().copied().map(branch).collect()
        }
        ("GET", ["repos", "acme", "dots", "installation"]) => json!({"id": 5}),
        ("POST", ["app", "installations", "5", "access_tokens"]) => {
            memory.tokens += 1;
            json!({"token": "of an installation"})
        }
        _ => return StatusCode::NOT_FOUND.into_response(),
    };
    axum::Json(said).into_response()
}

/// As GitHub does: what is wrong is said with 200.
fn redeem(form: &str) -> Response {
    let fields: BTreeMap<&str, &str> = form.split('&').filter_map(|pair| pair.split_once('=')).collect();
    assert_eq!((fields["client_id"], fields["client_secret"]), ("us", "t0ken"));
    assert!(
        fields["code_verifier"].len() >= 43 && fields["redirect_uri"].contains("%2Fsign-in%2Fcode%2Fback")
    );
    let said = match fields["code"] {
        "good" => json!({"access_token": "of a person", "token_type": "bearer", "scope": ""}),
        _ => json!({"error": "bad_verification_code"}),
    };
    axum::Json(said).into_response()
}
