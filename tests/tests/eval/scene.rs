//! A press with an evaluator, and a directory to evaluate.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use harmonia_queue::evaluations::Evaluation;
use harmonia_service::settings::Settings;
use harmonia_tests::desk::RunningEvaluator;
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::press::{Press, RunningSigner};
use harmonia_tests::s3::{S3, Server};
use tempfile::TempDir;

/// Derivations that are only evaluated.
pub const MAKE: &str = r#"let make = name: derivation {
  inherit name; system = "x86_64-linux"; builder = "/bin/sh"; args = [ "-c" "echo ${name} >$out" ];
}; in "#;

/// A billion turns, in no memory.
pub const ENDLESS: &str = "(let l = builtins.genList (x: x) 100000; in \
                           builtins.foldl' (a: _: builtins.foldl' (b: _: b) a l) 0 l)";

pub struct Scene {
    pub press: Press,
    _signer: RunningSigner,
    pub nix: Arc<Nix>,
    pub evaluator: RunningEvaluator,
    pub directory: TempDir,
}

pub fn unchanged(settings: Settings) -> Settings {
    settings
}

impl Scene {
    pub async fn start(version: Version) -> Scene {
        Scene::with(version, unchanged).await
    }

    pub async fn with(version: Version, more: impl FnOnce(Settings) -> Settings) -> Scene {
        let press = Press::with(S3::start_public(Server::InProcess).await).await;
        let signer = press.start_signer().await;
        let nix = Arc::new(Nix::start(version));
        let evaluator = RunningEvaluator::start(&press, Arc::clone(&nix), "one", more).await;
        Scene { press, _signer: signer, nix, evaluator, directory: tempfile::tempdir().unwrap() }
    }

    /// Writes a file of the directory; `make` is known in what is Nix and no flake.
    pub fn write(&self, name: &str, text: &str) {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let make = if name.ends_with(".nix") && name != "flake.nix" { MAKE } else { "" };
        fs::write(path, format!("{make}{text}\n")).unwrap();
    }

    pub fn path(&self) -> &str {
        self.directory.path().to_str().unwrap()
    }

    /// The directory becomes a repository with all its files committed; answers the commit.
    pub fn commit(&self) -> String {
        git(self.directory.path(), &["init", "--quiet", "--initial-branch=main"]);
        git(self.directory.path(), &["add", "--all"]);
        git(self.directory.path(), &["commit", "--quiet", "--allow-empty", "--message", "x"]);
        git(self.directory.path(), &["rev-parse", "HEAD"])
    }

    pub fn git(&self, arguments: &[&str]) -> String {
        git(self.directory.path(), arguments)
    }

    pub async fn evaluate(&self, source: &str, attrs: &[&str]) -> Evaluation {
        let id = self.press.ask(source, attrs).await;
        self.press.evaluated(id).await
    }

    /// The error of an evaluation that fails as a whole.
    pub async fn refused(&self, source: &str) -> String {
        let evaluation = self.evaluate(source, &[]).await;
        self.press.farm.assert_sound().await;
        evaluation.error.unwrap_or_else(|| panic!("it succeeds"))
    }

    /// The names of attributes that became builds.
    pub async fn built(&self, evaluation: &Evaluation) -> Vec<String> {
        assert_eq!(evaluation.error, None);
        let attributes = self.press.attributes(evaluation.id).await;
        let failed: Vec<_> = attributes.iter().filter(|(_, error)| error.is_some()).collect();
        assert!(failed.is_empty(), "{failed:?}");
        attributes.into_keys().collect()
    }

    /// Derivations that the queue knows.
    pub async fn jobs(&self) -> Vec<String> {
        let query = sqlx::query_scalar("SELECT drv_path FROM ci.job ORDER BY drv_path");
        query.fetch_all(&self.press.farm.database.admin()).await.unwrap()
    }

    /// Where the evaluator's source is while it works.
    pub fn workplaces(&self) -> Vec<PathBuf> {
        let work = fs::read_dir(self.evaluator.state().join("work")).unwrap();
        work.map(|entry| entry.unwrap().path()).collect()
    }
}

pub fn git(directory: &Path, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .current_dir(directory)
        .args(["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "safe.directory=*"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
