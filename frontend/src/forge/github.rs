//! GitHub, as an App.

mod app;

use async_trait::async_trait;
use axum::http::HeaderMap;
use harmonia_queue::forges::Repository;
use harmonia_service::secret::{Secret, SecretError};
use reqwest::{Method, RequestBuilder};
use serde::Deserialize;

pub use app::App;

use super::alike::{Project, known, list, may_push};
use super::call::{ForgeError, ask, ask_dated, send};
use super::gitea::word;
use super::payload::{self, Event, Unreadable, is_outside};
use super::words::Status;
use super::{Forge, Heads, PullRequest, signature};

/// Branches on a page, at most.
const PAGE: usize = 100;
/// More branches than this are not looked at.
const PAGES: usize = 50;

/// github.com, or a GitHub of one's own.
pub struct GitHub {
    app: App,
    webhook_secret: Secret,
}

#[derive(Deserialize)]
struct Branch {
    name: String,
    commit: Commit,
}

#[derive(Deserialize)]
struct Commit {
    sha: String,
}

#[derive(Deserialize)]
struct Proposal {
    state: String,
    head: Side,
    base: Side,
}

#[derive(Deserialize)]
struct Side {
    #[serde(rename = "ref")]
    reference: String,
    sha: String,
    repo: Option<Numbered>,
}

#[derive(Deserialize)]
struct Numbered {
    id: i64,
}

impl GitHub {
    /// The App that people install into their repositories.
    pub fn new(app: App, webhook_secret: Secret) -> Self {
        Self { app, webhook_secret }
    }

    async fn request(
        &self,
        method: Method,
        repository: &Repository,
        path: &[&str],
        page: &[(&str, usize)],
    ) -> Result<RequestBuilder, ForgeError> {
        let token = self.app.token(repository).await?;
        let root = ["repos", repository.owner.as_str(), repository.name.as_str()];
        Ok(self.app.request(method, &[&root[..], path].concat(), page).bearer_auth(token))
    }

    /// Each with its commit.
    async fn branches(
        &self,
        repository: &Repository,
        page: usize,
    ) -> Result<Vec<(String, String)>, ForgeError> {
        let page = [("page", page), ("per_page", PAGE)];
        let found: Vec<Branch> =
            ask(self.request(Method::GET, repository, &["branches"], &page).await?).await?;
        Ok(found.into_iter().map(|branch| (branch.name, branch.commit.sha)).collect())
    }
}

#[async_trait]
impl Forge for GitHub {
    fn verify(&self, headers: &HeaderMap, body: &[u8]) -> Result<bool, SecretError> {
        let signature = word(headers, "x-hub-signature-256").and_then(|text| text.strip_prefix("sha256="));
        signature::fits(&self.webhook_secret, body, signature)
    }

    fn parse(&self, headers: &HeaderMap, body: &[u8]) -> Result<Option<Event>, Unreadable> {
        payload::parse(word(headers, "x-github-event"), body)
    }

    fn delivery(&self, headers: &HeaderMap) -> Option<String> {
        word(headers, "x-github-delivery").map(str::to_owned)
    }

    async fn report(
        &self,
        repository: &Repository,
        commit: &str,
        status: &Status,
        page: &str,
    ) -> Result<(), ForgeError> {
        let request = self.request(Method::POST, repository, &["statuses", commit], &[]).await?;
        send(request.json(&status.document(page))).await
    }

    async fn may_write(&self, repository: &Repository, person: &str) -> Result<bool, ForgeError> {
        let path = ["collaborators", person, "permission"];
        may_push(ask(self.request(Method::GET, repository, &path, &[]).await?).await)
    }

    async fn pull_request(&self, repository: &Repository, number: i32) -> Result<PullRequest, ForgeError> {
        let path = ["pulls", &number.to_string()];
        let asked = ask_dated(self.request(Method::GET, repository, &path, &[]).await?).await?;
        let (Proposal { state, head, base }, as_of) = asked;
        let id = |side: &Side| side.repo.as_ref().map(|repo| repo.id);
        let outside = is_outside(id(&head), id(&base), &head.reference);
        Ok(PullRequest { head: head.sha, open: state == "open", outside, as_of })
    }

    async fn head(&self, repository: &Repository, branch: &str) -> Result<Option<String>, ForgeError> {
        let request = self.request(Method::GET, repository, &["branches", branch], &[]).await?;
        match known(ask::<Branch>(request).await) {
            // It was renamed.
            Err(ForgeError::Moved { .. }) => Ok(None),
            found => Ok(found?.map(|branch| branch.commit.sha)),
        }
    }

    async fn heads(&self, repository: &Repository) -> Result<Heads, ForgeError> {
        let Project { default_branch } = ask(self.request(Method::GET, repository, &[], &[]).await?).await?;
        let (branches, whole) = list(PAGES, |page| self.branches(repository, page)).await?;
        Ok(Heads { default: default_branch, branches, whole })
    }
}
