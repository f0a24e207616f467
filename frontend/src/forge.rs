//! The forges: what they tell by webhooks becomes evaluations, and they are told what came of those.
//!
//! A forge is whoever keeps a [`Forge`]: two do, GitHub as an App and Gitea or Forgejo with a token. What both have in common
//! is in [`payload`] and [`call`]; what is done with their words, in [`webhook`], [`tell`] and [`compare`].

mod act;
mod alike;
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
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use futures::future::join_all;
use harmonia_queue::Db;
use harmonia_queue::branches::Forge as Keeper;
use harmonia_queue::forges::Repository;
use harmonia_queue::people::Who;
use harmonia_service::secret::SecretError;
use harmonia_service::sentence::sentence;
use harmonia_service::settings::{Settings, SettingsError};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use call::ForgeError;
pub use config::{Client, Door, OIDC};
pub use count::ForgeCounts;

use config::{Configured, Kind};
use payload::{Event, Unreadable};
use words::Status;

use crate::remember::Memory;

/// Connections to the database: one each for the outbox and for comparing, the others for webhooks.
pub const CONNECTIONS: u32 = webhook::AT_ONCE as u32 + 2;

/// What a forge can do.
#[async_trait]
pub trait Forge: Send + Sync {
    /// Whether the forge itself sent this, by the secret that it shares with us.
    fn verify(&self, headers: &HeaderMap, body: &[u8]) -> Result<bool, SecretError>;

    /// What it says has happened, if it matters.
    fn parse(&self, headers: &HeaderMap, body: &[u8]) -> Result<Option<Event>, Unreadable>;

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

    /// Where one branch is now; None: there is no such branch.
    async fn head(&self, repository: &Repository, branch: &str) -> Result<Option<String>, ForgeError>;

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
    /// It comes from another repository, or is no branch of its own.
    pub outside: bool,
    /// What the forge's clock showed when it said so.
    pub as_of: Option<Timestamp>,
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

/// How long it is remembered who may push where, for what is only shown: who acts is asked for again.
const REMEMBERED: Duration = Duration::from_secs(60);
/// And that somebody may push nowhere.
const ESTRANGED: Duration = Duration::from_secs(300);
/// So many answers.
const MOST: usize = 10_000;
/// Questions at once about one person.
const AT_ONCE: usize = 8;

/// A forge as it is configured.
pub struct Known {
    /// As its webhooks are addressed.
    pub name: String,
    kind: Kind,
    /// As projects have it.
    pub instance: String,
    /// By which people sign in with it.
    pub client: Option<Client>,
    forge: Box<dyn Forge>,
}

/// Somebody, as a forge knows them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Member {
    /// The forge.
    pub instance: String,
    /// What it calls them.
    pub login: String,
}

/// All forges that are configured.
pub struct Forges {
    known: BTreeMap<String, Arc<Known>>,
    db: Db,
    /// Where people reach this frontend.
    url: String,
    counts: ForgeCounts,
    writers: Mutex<Memory<(Member, Repository), bool>>,
    strangers: Mutex<Memory<Member, ()>>,
}

impl Member {
    /// As the queue knows them.
    pub fn who(&self) -> Who<'_> {
        Who { instance: &self.instance, login: &self.login }
    }
}

impl Known {
    /// Whether a pull request is there, and neither merged nor closed.
    async fn is_open(&self, repository: &Repository, number: i32) -> Result<bool, ForgeError> {
        match self.forge.pull_request(repository, number).await {
            Err(ForgeError::Refused { status: StatusCode::NOT_FOUND, .. }) => Ok(false),
            found => Ok(found?.open),
        }
    }

    /// The repository that git clones from this address, as projects have it, if it is one of its own.
    fn keeper(&self, url: &str) -> Option<Keeper> {
        let Repository { owner, name: repo } = repository(&self.instance, url)?;
        let instance = self.instance.clone();
        Some(match self.kind {
            Kind::GitHub => Keeper::GitHub { instance, owner, repo },
            Kind::Gitea | Kind::Forgejo => Keeper::Gitea { instance, owner, repo },
        })
    }
}

/// What an address names below that of a forge.
fn repository(instance: &str, url: &str) -> Option<Repository> {
    let (host, path) = url.split_at_checked(instance.len())?;
    let path = path.strip_prefix('/')?.trim_end_matches('/');
    let (owner, name) = path.strip_suffix(".git").unwrap_or(path).split_once('/')?;
    let fits =
        host.eq_ignore_ascii_case(instance) && !owner.is_empty() && !name.is_empty() && !name.contains('/');
    fits.then(|| Repository { owner: owner.to_owned(), name: name.to_owned() })
}

impl Forges {
    /// As the settings have them; often none. `url` is where people reach this frontend.
    pub fn new(settings: &Settings, db: Db, url: &str, counts: ForgeCounts) -> Result<Self, SettingsError> {
        let mut known = BTreeMap::new();
        for Configured { name, kind, instance, forge, client } in config::read(settings)? {
            known.insert(name.clone(), Arc::new(Known { name, kind, instance, forge, client }));
        }
        let writers = Mutex::new(Memory::new(Instant::now(), REMEMBERED, MOST));
        let strangers = Mutex::new(Memory::new(Instant::now(), ESTRANGED, MOST));
        Ok(Self { known, db, url: url.to_owned(), counts, writers, strangers })
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Known> {
        self.known.values().map(Arc::as_ref)
    }

    /// Who keeps what git clones from this address: a forge that we know, or nobody in particular.
    pub fn keeper(&self, url: &str) -> Keeper {
        self.all().find_map(|known| known.keeper(url)).unwrap_or(Keeper::Git)
    }

    /// Whether somebody may push to a repository of their forge. `by_memory`: what was so a minute ago is good enough.
    pub async fn may_write(
        &self,
        member: &Member,
        repository: &Repository,
        by_memory: bool,
    ) -> Result<bool, ForgeError> {
        let Some(known) = self.of(&member.instance) else { return Ok(false) };
        let key = (member.clone(), repository.clone());
        let asked = Instant::now();
        let writers = || self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        if by_memory && let Some(may) = writers().get(asked, &key) {
            return Ok(may);
        }
        let may = known.forge.may_write(repository, &member.login).await?;
        writers().insert(asked, key, may, 1);
        Ok(may)
    }

    /// Whether somebody may push to one of these repositories of their forge. One that cannot be asked about hides no other, and
    /// one that is not there is nobody's. Whoever may push to none is not asked about again soon: it takes many questions.
    pub async fn may_push_to_any(
        &self,
        member: &Member,
        repositories: &[Repository],
    ) -> Result<bool, ForgeError> {
        let asked = Instant::now();
        let strangers = || self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        if strangers().get(asked, member).is_some() {
            return Ok(false);
        }
        let mut missing = None;
        for some in repositories.chunks(AT_ONCE) {
            let questions = some.iter().map(|repository| self.may_write(member, repository, true));
            for answer in join_all(questions).await {
                match answer {
                    Ok(true) => return Ok(true),
                    Ok(false) => {}
                    Err(error) if error.is_lasting() => {
                        tracing::info!(error = sentence(&error), "of a repository nobody knows who may push");
                    }
                    Err(error) => missing = Some(error),
                }
            }
        }
        if let Some(error) = missing {
            return Err(error);
        }
        strangers().insert(asked, member.clone(), (), 1);
        Ok(false)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_two_words_below_its_forge() {
        let found = |url: &str| {
            repository("https://code.example.org", url).map(|at| format!("{} {}", at.owner, at.name))
        };
        for url in [
            "https://code.example.org/acme/Dots",
            "https://Code.example.org/acme/Dots.git",
            "https://code.example.org/acme/Dots/",
        ] {
            assert_eq!(found(url).as_deref(), Some("acme Dots"), "{url}");
        }
        for url in [
            "https://code.example.org",
            "https://code.example.org/acme",
            "https://code.example.org/acme/dots/tree",
            "https://code.example.org.evil.example/acme/dots",
            "https://other.example.org/acme/dots",
            "",
        ] {
            assert_eq!(found(url), None, "{url}");
        }
    }
}
