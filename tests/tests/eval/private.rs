//! Private repositories and private inputs of flakes, on a real Gitea that asks for a password.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use harmonia_queue::branches::{self, ProjectSource};
use harmonia_tests::gitea::Gitea;
use harmonia_tests::nixes::Version;
use harmonia_tests::skip;
use reqwest::Method;
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::scene::Scene;

const CREDENTIAL: &str = "reader";

/// A forge whose private repositories only a token opens, and a project whose credential has it.
struct Private {
    gitea: Gitea,
    scene: Scene,
    _credentials: TempDir,
}

impl Private {
    /// None: there is no Gitea on this machine.
    async fn new(version: Version) -> Option<Private> {
        let Some(gitea) = Gitea::start().await else {
            skip("there is no Gitea here; `./dev test eval` makes it");
            return None;
        };
        let credentials = tempfile::tempdir().unwrap();
        let netrc = format!("machine 127.0.0.1 login acme password {}\n", gitea.token);
        fs::write(credentials.path().join(CREDENTIAL), netrc).unwrap();
        let directory = credentials.path().display().to_string();
        // Gitea is on this machine, where evaluations may not go unless it is said.
        let more = |settings: harmonia_service::settings::Settings| {
            settings.with("credentials_dir", directory).with("eval_networks", "127.0.0.0/8")
        };
        let scene = Scene::with(version, more).await;
        Some(Private { gitea, scene, _credentials: credentials })
    }

    /// The directory, committed and pushed to a private repository of that name; answers its URL.
    async fn push(&self, name: &str) -> String {
        let repository = json!({"name": name, "private": true, "default_branch": "main"});
        self.gitea.ask("acme", Method::POST, "user/repos", repository).await;
        self.scene.commit();
        let url = self.gitea.clone_url("acme", &format!("acme/{name}"));
        self.scene.git(&["push", "--quiet", &url, "HEAD:refs/heads/main"]);
        format!("{}/acme/{name}.git", self.gitea.url)
    }

    /// The project's code is there; it is looked at when a test asks, not before.
    async fn follows(&self, url: &str, credential: Option<&str>) {
        let credential = credential.map(str::to_owned);
        let poll_interval = Duration::from_secs(86_400);
        let source = ProjectSource { credential, poll_interval, ..ProjectSource::git(url) };
        branches::put_source(&self.scene.press.farm.frontend, "main", Some(&source)).await.unwrap();
    }

    /// Writes `flake.lock` of a directory, as its author would.
    fn lock(&self, directory: &str) {
        let home = self.scene.nix.root().join("home/.netrc");
        fs::write(&home, format!("machine 127.0.0.1 login acme password {}\n", self.gitea.token)).unwrap();
        let features = ["--extra-experimental-features", "nix-command flakes"];
        let path = format!("path:{}{directory}", self.scene.path());
        self.scene.nix.run("nix", &[&features[..], &["flake", "lock", &path]].concat());
        fs::remove_file(home).unwrap();
    }
}

/// What a flake takes from another repository.
fn flake(input: &str) -> String {
    format!(
        r#"{{
  inputs.library = {{ url = "git+{input}?ref=main"; flake = false; }};
  outputs = {{ self, library }}: {{
    checks.x86_64-linux.unit = derivation {{
      name = builtins.readFile "${{library}}/name"; system = "x86_64-linux"; builder = "/bin/sh";
    }};
  }};
}}"#
    )
}

#[tokio::test]
async fn a_private_repository_and_its_private_input_are_read_by_the_projects_credential_alone() {
    for version in Version::ALL {
        let Some(private) = Private::new(version).await else { return };
        let scene = &private.scene;
        fs::write(scene.directory.path().join("name"), "library").unwrap();
        let library = private.push("library").await;
        scene.write("flake.nix", &flake(&library));
        private.lock("");
        let url = private.push("dots").await;

        private.follows(&url, None).await;
        let error = scene.refused(&url).await;
        assert!(error.contains(&format!("{url} cannot be fetched")), "{version:?}: {error}");
        private.follows(&url, Some("missing")).await;
        let error = scene.refused(&url).await;
        assert!(error.contains("credential missing is not there"), "{version:?}: {error}");

        private.follows(&url, Some(CREDENTIAL)).await;
        let evaluation = scene.evaluate(&url, &[]).await;
        assert_eq!(scene.built(&evaluation).await, ["checks.x86_64-linux.unit"], "{version:?}");
        assert!(scene.jobs().await.iter().any(|job| job.ends_with("-library.drv")), "{version:?}");
    }
}

#[tokio::test]
async fn a_private_flake_that_only_nix_fetches_is_read_with_its_private_input() {
    for version in Version::ALL {
        let Some(private) = Private::new(version).await else { return };
        let scene = &private.scene;
        fs::write(scene.directory.path().join("name"), "library").unwrap();
        let library = private.push("library").await;
        scene.write("sub/flake.nix", &flake(&library));
        let text = fs::read_to_string(scene.directory.path().join("sub/flake.nix")).unwrap();
        fs::write(scene.directory.path().join("sub/flake.nix"), text.replace(crate::scene::MAKE, ""))
            .unwrap();
        private.lock("/sub");
        let url = private.push("dots").await;
        private.follows(&url, Some(CREDENTIAL)).await;
        // An old Nix takes every repository's default branch for `master`.
        let evaluation = scene.evaluate(&format!("git+{url}?ref=main&dir=sub"), &[]).await;
        assert_eq!(scene.built(&evaluation).await, ["checks.x86_64-linux.unit"], "{version:?}");
        assert!(evaluation.commit.is_some());
    }
}

/// All files below a directory that a text is in.
fn with_text(directory: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            found.extend(with_text(&path, text));
        } else if kind.is_file()
            && String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).contains(text)
        {
            found.push(path);
        }
    }
    found
}

#[tokio::test]
async fn a_flake_finds_no_credential_wherever_it_looks() {
    for version in Version::ALL {
        let Some(private) = Private::new(version).await else { return };
        let scene = &private.scene;
        scene.write("flake.nix", "{ outputs = _: { checks = { }; }; }");
        let url = private.push("dots").await;
        private.follows(&url, Some(CREDENTIAL)).await;
        let last = scene.evaluate(&url, &[]).await.id;

        // Where it would be, and what is in it, so that it may be read purely. The push may be found by a look, too.
        let next = last + 1..last + 5;
        let work = scene.evaluator.state().join("work");
        let homes: Vec<_> = next.clone().map(|id| format!("{}/{id}/home", work.display())).collect();
        let guess = scene.nix.root().join("guess");
        fs::write(&guess, format!("machine 127.0.0.1 login acme password {}\n", private.gitea.token))
            .unwrap();
        let features = ["--extra-experimental-features", "nix-command flakes"];
        let hash = ["hash", "path", guess.to_str().unwrap()];
        let hash = scene.nix.run("nix", &[&features[..], &hash].concat());
        let tree = |path: &str, hash: &str| {
            format!(
                "builtins.readFile (builtins.fetchTree {{ type = \"path\"; path = \"{path}\"; narHash = \"{hash}\"; }})"
            )
        };
        let file = |path: &str| {
            let hash = "0".repeat(52);
            format!(
                "builtins.readFile (builtins.fetchurl {{ url = \"file://{path}\"; sha256 = \"{hash}\"; }})"
            )
        };
        let other = "sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
        let below = |home: &String| {
            [
                tree(&format!("{home}/.netrc"), &hash),
                tree(home, other),
                file(&format!("{home}/.netrc")),
                file(&format!("{home}/.config/nix/nix.conf")),
            ]
        };
        let places: Vec<_> = [
            tree("/proc/self/cwd/home/.netrc", &hash),
            tree("/proc/self/environ", other),
            file("/proc/self/environ"),
        ]
        .into_iter()
        .chain(homes.iter().flat_map(below))
        .collect();
        let attempts: String = places
            .iter()
            .enumerate()
            .map(|(n, place)| {
                format!("r{n} = derivation {{ name = \"r\"; text = {place}; system = \"x86_64-linux\"; builder = \"/bin/sh\"; }};")
            })
            .collect();
        scene.write(
            "flake.nix",
            &format!("{{ outputs = _: {{ checks.x86_64-linux = {{ {attempts} }}; }}; }}"),
        );
        scene.commit();
        let push = private.gitea.clone_url("acme", "acme/dots");
        scene.git(&["push", "--quiet", &push, "HEAD:refs/heads/main"]);
        let evaluation = scene.evaluate(&url, &[]).await;
        assert!(evaluation.error.is_none() && next.contains(&evaluation.id), "{version:?}: {evaluation:?}");
        let attributes = scene.press.attributes(evaluation.id).await;
        assert_eq!(attributes.len(), places.len());
        assert!(attributes.values().all(Option::is_some), "{version:?}: {attributes:?}");
        let token = private.gitea.token.as_str();
        assert!(!attributes.values().flatten().any(|error| error.contains(token)), "{version:?}");
        let store = scene.nix.real("/nix/store");
        assert_eq!(with_text(&store, token), Vec::<PathBuf>::new(), "{version:?}");
        assert!(!with_text(&store, "checks").is_empty(), "the store is looked at");
    }
}

#[tokio::test]
async fn what_can_read_files_has_no_credential_to_read() {
    let Some(private) = Private::new(Version::Old).await else { return };
    let scene = &private.scene;
    let netrc = "/. + builtins.getEnv \"HOME\" + \"/.netrc\"";
    let config = "builtins.getEnv \"NIX_CONFIG\"";
    scene.write(
        "default.nix",
        &format!("{{ a = make (if builtins.pathExists ({netrc}) || {config} != \"\" then \"there\" else \"gone\"); }}"),
    );
    let url = private.push("dots").await;
    private.follows(&url, Some(CREDENTIAL)).await;
    let evaluation = scene.evaluate(&url, &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["a"]);
    assert!(scene.jobs().await[0].ends_with("-gone.drv"));
}

/// What a host was shown: for each request whether it had a password.
type Shown = Arc<Mutex<Vec<bool>>>;

/// A host that asks everybody for a password.
async fn curious(State(shown): State<Shown>, headers: HeaderMap) -> Response {
    shown.lock().unwrap().push(headers.contains_key(header::AUTHORIZATION));
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Basic realm=\"x\"")]).into_response()
}

#[tokio::test]
async fn another_host_that_asks_for_a_password_is_not_shown_it() {
    for version in Version::ALL {
        let Some(private) = Private::new(version).await else { return };
        let scene = &private.scene;
        let shown = Shown::default();
        let routes = Router::new().fallback(curious).with_state(Arc::clone(&shown));
        // The same machine by another address: to git and Nix another host.
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let elsewhere = format!("http://{}/x.git", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let asked = || std::mem::take(&mut *shown.lock().unwrap());

        private.follows(&elsewhere, Some(CREDENTIAL)).await;
        let error = scene.refused(&elsewhere).await;
        assert!(error.contains("cannot be fetched") && !error.contains(&private.gitea.token), "{error}");
        let seen = asked();
        assert!(!seen.is_empty() && !seen.contains(&true), "{version:?}: a repository, {seen:?}");

        scene.write("flake.nix", &flake(&elsewhere));
        let url = private.push("dots").await;
        private.follows(&url, Some(CREDENTIAL)).await;
        let error = scene.refused(&url).await;
        assert!(!error.contains(&private.gitea.token), "{error}");
        let seen = asked();
        assert!(!seen.is_empty() && !seen.contains(&true), "{version:?}: an input, {seen:?}");
    }
}
