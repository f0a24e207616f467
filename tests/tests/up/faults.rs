//! A whole evaluation, while everything that can be killed is killed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::machine::{self, Machine, errors, signal};

const BUILDS: usize = 200;
/// All of it, on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(600);

/// A repository of so many derivations in chains of ten, whose last one needs all the others.
fn repository() -> TempDir {
    machine::repository(&format!(
        r#"let
  link = n: derivation (make "link-${{toString n}}" (
    if n < {chains} then "echo ${{toString n}} >$out"
    else "read -r below <${{builtins.elemAt links (n - {chains})}}; echo \"$below ${{toString n}}\" >$out"));
  links = builtins.genList link {links};
in {{ all = derivation (make "all" "for file in ${{toString links}}; do read -r line <$file; echo \"$line\"; done >$out"); }}"#,
        chains = BUILDS / 10,
        links = BUILDS - 1,
    ))
}

/// What `all` holds.
fn expected() -> String {
    let chains = BUILDS / 10;
    let line = |n: usize| {
        let links: Vec<String> = (0..=n / chains).map(|k| (n % chains + k * chains).to_string()).collect();
        links.join(" ") + "\n"
    };
    (0..BUILDS - 1).map(line).collect()
}

impl Machine {
    /// How many builds of the first evaluation are done; none if nobody answers.
    fn built(&self) -> Option<i64> {
        let (status, _) = self.verb(&["status", "1", "-o", "json"]);
        let status: serde_json::Value = serde_json::from_str(&status).ok()?;
        status["builds"]["succeeded"].as_i64()
    }

    /// Waits until so many builds are done, or all that there will be.
    async fn progress(&self, builds: i64, wait: &mut Child) {
        let begin = Instant::now();
        while self.built().is_none_or(|built| built < builds) && wait.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < PATIENCE, "{builds} builds are not done in time:\n{}", self.printed());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What `all` is in a store of its own that trusts this farm's key.
    fn fetched(&self, repository: &Path) -> String {
        let store = tempfile::tempdir().unwrap();
        let key = self.data().join("secrets/signing-key");
        let key = self.does(&["key", "public", key.to_str().unwrap()]);
        let nix = |program: &str, words: &[&str]| {
            let mut command = Command::new(program);
            command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", store.path());
            command.env("NIX_REMOTE", format!("local?root={}", store.path().display()));
            command.env("NIX_CONF_DIR", store.path()).args(words);
            text(command.output().unwrap())
        };
        let drv = nix("nix-instantiate", &[repository.to_str().unwrap(), "--attr", "all"]);
        let path = nix("nix-store", &["--query", "--outputs", &drv]);
        let cache = format!("http://{}/cache", self.listen);
        let options =
            ["--max-jobs", "0", "--option", "substituters", &cache, "--option", "build-users-group", ""];
        let trusts = ["--option", "trusted-public-keys", key.trim()];
        nix("nix-store", &[&["--realise", &path], &options[..], &trusts[..]].concat());
        let file: PathBuf = store.path().join(path.trim_start_matches('/'));
        let contents = std::fs::read_to_string(file).unwrap();
        // Store paths are read-only, and their directory would stay.
        let _ = Command::new("chmod").args(["-R", "u+w"]).arg(store.path()).status();
        contents
    }
}

fn text(output: Output) -> String {
    assert!(output.status.success(), "{}", errors(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_killed_an_evaluation_ends_with_the_same_outputs() {
    let (machine, repository) = (Machine::new(), repository());
    let _up = machine.up().await;
    let source = repository.path().to_str().unwrap();
    let mut wait = machine.bare("eval").args([source, "--wait"]).stdout(Stdio::null()).spawn().unwrap();
    let parts = ["evaluator", "signer", "builder", "frontend", "s3", "nix", "postgres"];
    for (part, done) in parts.into_iter().zip((0..).step_by(BUILDS / 10)) {
        machine.progress(done, &mut wait).await;
        if let Some((pid, _)) = machine.part(part) {
            signal(pid, "KILL");
        }
    }
    machine.progress(i64::MAX, &mut wait).await;
    assert!(wait.wait().unwrap().success(), "{}", machine.printed());
    assert_eq!(machine.fetched(repository.path()), expected());
    let url = machine.data().join("secrets/frontend-database-url");
    machine.does(&["audit", "--database-file", url.to_str().unwrap()]);
}
