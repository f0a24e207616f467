//! A real Gitea: pushes by git, its own webhooks, statuses as its people see them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use harmonia_queue::branches::{Forge, PullRequests};
use harmonia_queue::evaluations::{self, Evaluation, Filter};
use harmonia_tests::farm::Farm;
use harmonia_tests::gitea::{Gitea, run};
use harmonia_tests::{eventually, skip};
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::desk::Desk;
use super::recorder::adopt;

const SECRET: &str = "of a webhook";

/// A forge with the repository `acme/dots`, a frontend that follows it, and a working copy.
struct Town {
    gitea: Gitea,
    desk: Desk,
    copy: TempDir,
    _secrets: TempDir,
}

impl Town {
    /// None: there is no Gitea on this machine.
    async fn new() -> Option<Town> {
        let Some(gitea) = Gitea::start().await else {
            skip("there is no Gitea here; `./dev test api` makes it");
            return None;
        };
        let secrets = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(secrets.path().join(name), text).unwrap();
            secrets.path().join(name)
        };
        let forges = json!([{"name": "code", "type": "gitea", "url": gitea.url, "token_file": file("token", &gitea.bot),
                             "webhook_secret_file": file("webhook", SECRET)}]);
        let desk = Desk::with(Farm::new().await, &[("forges", &forges.to_string())]).await;
        gitea.repository(&format!("{}/webhook/code", desk.url), SECRET).await;
        let (owner, repo) = ("acme".to_owned(), "dots".to_owned());
        let forge = Forge::Gitea { instance: gitea.url.clone(), owner, repo };
        adopt(&desk.farm, "main", forge, PullRequests::Collaborators).await;
        let copy = tempfile::tempdir().unwrap();
        git(copy.path(), &["init", "--quiet", "--initial-branch=main"]);
        Some(Town { gitea, desk, copy, _secrets: secrets })
    }

    /// Commits something new and pushes it; answers the commit.
    fn push(&self, person: &str, repository: &str, branch: &str) -> String {
        let message = format!("{branch} {}", rand::random::<u32>());
        git(self.copy.path(), &["commit", "--quiet", "--allow-empty", "--message", &message]);
        let url = self.gitea.clone_url(person, repository);
        git(self.copy.path(), &["push", "--quiet", &url, &format!("HEAD:refs/heads/{branch}")]);
        git(self.copy.path(), &["rev-parse", "HEAD"]).trim().to_owned()
    }

    async fn evaluation_of(&self, commit: &str) -> Option<Evaluation> {
        let all = evaluations::list(&self.desk.farm.frontend, &Filter::default(), 100).await.unwrap();
        all.into_iter().find(|evaluation| evaluation.commit.as_deref() == Some(commit))
    }

    async fn evaluated(&self, commit: &str) -> Evaluation {
        eventually("the push is evaluated", || async { self.evaluation_of(commit).await.is_some() }).await;
        self.evaluation_of(commit).await.unwrap()
    }

    /// All that Gitea was told, oldest first: context, state, description.
    async fn statuses(&self, commit: &str) -> Vec<[String; 3]> {
        let path = format!("repos/acme/dots/commits/{commit}/statuses?limit=50&sort=oldest");
        let all = self.gitea.ask("acme", Method::GET, &path, Value::Null).await;
        let word = |status: &Value, name: &str| status[name].as_str().unwrap().to_owned();
        let statuses = all.as_array().unwrap().iter();
        statuses.map(|status| ["context", "status", "description"].map(|name| word(status, name))).collect()
    }

    async fn is_told(&self, commit: &str, context: &str, state: &str) -> bool {
        let context = format!("harmonia-ci/{context}");
        self.statuses(commit).await.iter().any(|told| told[0] == context && told[1] == state)
    }
}

fn git(directory: &Path, arguments: &[&str]) -> String {
    let identity = ["-c", "user.name=ann", "-c", "user.email=ann@example.org"];
    let mut command = Command::new("git");
    command.current_dir(directory).args(identity).args(arguments).env("GIT_CONFIG_GLOBAL", "/dev/null");
    run(command.env("GIT_TERMINAL_PROMPT", "0"))
}

async fn complete(farm: &Farm, evaluation: i64) {
    while evaluations::claim(&farm.evaluator, "one").await.unwrap().is_some() {}
    farm.value::<Option<String>>(
        "SELECT nullif(ci.complete_evaluation($1, '{}', '{}', '{}', '{}', '{}')::text, '')",
        evaluation,
    )
    .await;
}

#[tokio::test]
async fn a_push_is_evaluated_and_its_end_is_seen_in_gitea_though_a_frontend_dies() {
    let Some(mut town) = Town::new().await else { return };
    let commit = town.push("acme", "acme/dots", "main");
    let evaluation = town.evaluated(&commit).await;
    assert_eq!((evaluation.branch.as_deref(), evaluation.untrusted), (Some("main"), false));
    eventually("it is told to wait", || town.is_told(&commit, "nix-build", "pending")).await;
    town.desk.kill().await;
    complete(&town.desk.farm, evaluation.id).await;
    let another = town.desk.another().await;
    eventually("the end is told", || town.is_told(&commit, "nix-build", "success")).await;
    assert!(town.is_told(&commit, "nix-eval", "success").await);
    another.abort();
    let told = town.statuses(&commit).await;
    let builds: Vec<_> = told.iter().filter(|told| told[0] == "harmonia-ci/nix-build").collect();
    assert_eq!(
        builds.len(),
        2,
        "each state once, and once more if it died before it wrote that down: {told:?}"
    );
}

#[tokio::test]
async fn a_pull_request_of_a_fork_waits_is_allowed_and_evaluated_in_its_tier() {
    let Some(town) = Town::new().await else { return };
    town.gitea.person("eve").await;
    town.push("acme", "acme/dots", "main");
    town.gitea.ask("eve", Method::POST, "repos/acme/dots/forks", json!({})).await;
    let commit = town.push("eve", "eve/dots", "topic");
    let proposal = json!({"head": "eve:topic", "base": "main", "title": "a change"});
    let number = town.gitea.propose("eve", &proposal).await;
    eventually("it waits", || async {
        town.statuses(&commit).await.iter().any(|told| told[2].contains("waits for a collaborator"))
    })
    .await;
    assert!(town.evaluation_of(&commit).await.is_none());
    // An evaluator finds it in the repository that it is for.
    let url = town.gitea.clone_url("acme", "acme/dots");
    let branch = format!("refs/pull/{number}/head");
    assert!(git(town.copy.path(), &["ls-remote", &url, &branch]).starts_with(&commit));
    let elsewhere = tempfile::tempdir().unwrap();
    git(elsewhere.path(), &["init", "--quiet", "--bare", "."]);
    let refspec = format!("+{commit}:refs/heads/fetched");
    git(elsewhere.path(), &["fetch", "--quiet", "--no-tags", "--depth=1", "--", &url, &refspec]);
    assert_eq!(git(elsewhere.path(), &["rev-parse", "fetched"]).trim(), commit);

    // Gitea tells whole seconds: in the same one nobody knows whether the head was there before the comment.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let comment = json!({"body": "/ci run"});
    let comments = format!("repos/acme/dots/issues/{number}/comments");
    town.gitea.ask("acme", Method::POST, &comments, comment).await;
    let evaluation = town.evaluated(&commit).await;
    assert_eq!((evaluation.branch.as_deref(), evaluation.untrusted), (Some(branch.as_str()), true));
    complete(&town.desk.farm, evaluation.id).await;
    eventually("its end is told", || town.is_told(&commit, "nix-build", "success")).await;
}

#[tokio::test]
async fn a_change_that_is_pushed_without_a_branch_is_from_outside() {
    let Some(town) = Town::new().await else { return };
    town.gitea.person("eve").await;
    let main = town.push("acme", "acme/dots", "main");
    // Nothing can be proposed before Gitea has taken note of that.
    town.evaluated(&main).await;
    git(town.copy.path(), &["commit", "--quiet", "--allow-empty", "--message", "a change"]);
    let commit = git(town.copy.path(), &["rev-parse", "HEAD"]).trim().to_owned();
    // It takes no right but to look.
    let url = town.gitea.clone_url("eve", "acme/dots");
    git(town.copy.path(), &["push", "--quiet", &url, "HEAD:refs/for/main", "-o", "topic=change"]);
    eventually("it waits", || async {
        town.statuses(&commit).await.iter().any(|told| told[2].contains("waits for a collaborator"))
    })
    .await;
    assert!(town.evaluation_of(&commit).await.is_none());
}
