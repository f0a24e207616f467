//! The forges: what they tell by webhooks becomes evaluations, and they are told what came of those.
//!
//! A forge is whoever keeps a [`Forge`]: two do, GitHub as an App and Gitea or Forgejo with a token. What both have in common
//! is in [`payload`] and [`call`]; what is done with their words, in [`webhook`], [`tell`] and [`compare`].

mod act;
mod call;
mod compare;
mod config;
mod count;
mod gitea;
mod github;
mod payload;
mod signature;
mod tell;
mod webhook;
mod words;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::http::HeaderMap;
use harmonia_queue::Db;
use harmonia_queue::forges::Repository;
use harmonia_service::secret::SecretError;
use harmonia_service::settings::{Settings, SettingsError};

pub use count::ForgeCounts;

use call::ForgeError;
use config::Configured;
use payload::{Event, Unreadable};
use words::Status;

/// Connections to the database: one each for the outbox and for comparing, the others for webhooks.
pub const CONNECTIONS: u32 = webhook::AT_ONCE as u32 + 2;

/// What a forge can do.
#[async_trait]
pub trait Forge: Send + Sync {
    /// Whether the forge itself sent this, by the secret that it shares with us.
    fn verify(&self, headers: &HeaderMap, body: &[u8]) -> Result<bool, SecretError>;

    /// What it says has happened.
    fn parse(&self, headers: &HeaderMap, body: &[u8]) -> Result<Event, Unreadable>;

    /// What the forge calls this delivery.
    fn delivery(&self, headers: &HeaderMap) -> Option<String>;

    /// Tells it what has become of a commit.
    async fn report(
        &self,
        repository: &Repository,
        commit: &str,
        status: &Status,
        page: &str,
    ) -> Result<(), ForgeError>;

    /// Whether somebody may push to a repository.
    async fn may_write(&self, repository: &Repository, person: &str) -> Result<bool, ForgeError>;

    /// A pull request as it is now.
    async fn pull_request(&self, repository: &Repository, number: i32) -> Result<PullRequest, ForgeError>;

    /// Where the branches of a repository are now.
    async fn heads(&self, repository: &Repository) -> Result<Heads, ForgeError>;
}

/// A pull request as its forge shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullRequest {
    /// The commit that would be merged.
    pub head: String,
    /// It is neither merged nor closed.
    pub open: bool,
    /// It comes from another repository.
    pub outside: bool,
}

/// The branches of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// The one that people see first.
    pub default: String,
    /// Each with its commit.
    pub branches: Vec<(String, String)>,
    /// These are all.
    pub whole: bool,
}

/// A forge as it is configured.
pub struct Known {
    name: String,
    instance: String,
    forge: Box<dyn Forge>,
}

/// All forges that are configured.
pub struct Forges {
    known: BTreeMap<String, Arc<Known>>,
    db: Db,
    /// Where people see an evaluation, but for its number.
    pages: String,
    counts: ForgeCounts,
}

impl Forges {
    /// As the settings have them; often none. `url` is where people reach this frontend.
    pub fn new(settings: &Settings, db: Db, url: &str, counts: ForgeCounts) -> Result<Self, SettingsError> {
        let mut known = BTreeMap::new();
        for Configured { name, instance, forge } in config::read(settings)? {
            known.insert(name.clone(), Arc::new(Known { name, instance, forge }));
        }
        Ok(Self { known, db, pages: format!("{url}/evals/"), counts })
    }

    /// Where they send their webhooks.
    pub fn routes(self: &Arc<Self>) -> Router {
        webhook::routes(self.clone())
    }

    /// Tells them what they should hear, and finds what they did not tell.
    pub async fn speak(&self) -> Infallible {
        if self.known.is_empty() {
            return std::future::pending().await;
        }
        tokio::join!(tell::run(self), compare::run(self)).0
    }

    fn instances(&self) -> Vec<String> {
        self.known.values().map(|known| known.instance.clone()).collect()
    }

    fn of(&self, instance: &str) -> Option<&Arc<Known>> {
        self.known.values().find(|known| known.instance == instance)
    }
}
