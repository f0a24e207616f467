//! Gitea and Forgejo, with a token.

use async_trait::async_trait;
use axum::http::{HeaderMap, StatusCode};
use harmonia_queue::forges::Repository;
use harmonia_service::secret::{Secret, SecretError};
use reqwest::{Method, RequestBuilder};
use serde::Deserialize;
use serde_json::Value;

use super::alike::{Project, known, list, may_push};
use super::call::{ForgeError, Http, ask, ask_dated, send};
use super::payload::{self, Event, Unreadable, is_outside};
use super::words::Status;
use super::{Forge, Heads, PullRequest, signature};

/// Branches on a page: as many as Gitea gives unless it is told otherwise.
const PAGE: usize = 50;
/// More branches than this are not looked at.
const PAGES: usize = 100;

/// An instance.
pub struct Gitea {
    http: Http,
    token: Secret,
    webhook_secret: Secret,
}

#[derive(Deserialize)]
struct Branch {
    name: String,
    commit: Commit,
}

#[derive(Deserialize)]
struct Commit {
    id: String,
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
    repo_id: i64,
}

impl Gitea {
    /// Who may report statuses has this token.
    pub fn new(http: Http, token: Secret, webhook_secret: Secret) -> Self {
        Self { http, token, webhook_secret }
    }

    fn request(
        &self,
        method: Method,
        repository: &Repository,
        path: &[&str],
        page: &[(&str, usize)],
    ) -> Result<RequestBuilder, ForgeError> {
        let root = ["api", "v1", "repos", repository.owner.as_str(), repository.name.as_str()];
        let request = self.http.request(method, &[&root[..], path].concat(), page);
        Ok(request.header("authorization", format!("token {}", self.token.read()?)))
    }

    /// Each with its commit.
    async fn branches(
        &self,
        repository: &Repository,
        page: usize,
    ) -> Result<Vec<(String, String)>, ForgeError> {
        let page = [("page", page), ("limit", PAGE)];
        let request = self.request(Method::GET, repository, &["branches"], &page)?;
        // A repository without a commit has none, which some versions say as null.
        let found: Vec<Branch> = ask::<Option<_>>(request).await?.unwrap_or_default();
        Ok(found.into_iter().map(|branch| (branch.name, branch.commit.id)).collect())
    }
}

#[async_trait]
impl Forge for Gitea {
    fn verify(&self, headers: &HeaderMap, body: &[u8]) -> Result<bool, SecretError> {
        signature::fits(&self.webhook_secret, body, word(headers, "x-gitea-signature"))
    }

    fn parse(&self, headers: &HeaderMap, body: &[u8]) -> Result<Option<Event>, Unreadable> {
        payload::parse(word(headers, "x-gitea-event"), body)
    }

    fn delivery(&self, headers: &HeaderMap) -> Option<String> {
        word(headers, "x-gitea-delivery").map(str::to_owned)
    }

    async fn report(
        &self,
        repository: &Repository,
        commit: &str,
        status: &Status,
        page: &str,
    ) -> Result<(), ForgeError> {
        let request = self.request(Method::POST, repository, &["statuses", commit], &[])?;
        send(request.json(&status.document(page))).await
    }

    async fn may_write(&self, repository: &Repository, person: &str) -> Result<bool, ForgeError> {
        let path = ["collaborators", person, "permission"];
        match may_push(ask(self.request(Method::GET, repository, &path, &[])?).await) {
            Err(ForgeError::Refused { status: StatusCode::FORBIDDEN, .. }) => Err(ForgeError::Discreet),
            may => may,
        }
    }

    async fn pull_request(&self, repository: &Repository, number: i32) -> Result<PullRequest, ForgeError> {
        let path = ["pulls", &number.to_string()];
        let asked = ask_dated(self.request(Method::GET, repository, &path, &[])?).await?;
        let (Proposal { state, head, base }, as_of) = asked;
        let outside = is_outside(Some(head.repo_id), Some(base.repo_id), &head.reference);
        Ok(PullRequest { head: head.sha, open: state == "open", outside, as_of })
    }

    async fn head(&self, repository: &Repository, branch: &str) -> Result<Option<String>, ForgeError> {
        let request = self.request(Method::GET, repository, &["branches", branch], &[])?;
        Ok(known(ask::<Branch>(request).await)?.map(|branch| branch.commit.id))
    }

    async fn heads(&self, repository: &Repository) -> Result<Heads, ForgeError> {
        let Project { default_branch } = ask(self.request(Method::GET, repository, &[], &[])?).await?;
        let (branches, whole) = list(PAGES, |page| self.branches(repository, page)).await?;
        Ok(Heads { default: default_branch, branches, whole })
    }
}

/// A header's text.
pub fn word<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

impl Status {
    /// As both forges want it.
    pub fn document(&self, page: &str) -> Value {
        serde_json::json!({
            "state": self.state.as_str(),
            "context": self.context,
            "description": self.description,
            "target_url": page,
        })
    }
}
