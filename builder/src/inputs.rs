//! What a build reads must be what the cache has: every path of the inputs' closure is there, and is the one that was
//! published. Hashes are looked up in the store's database, never computed.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use harmonia_nix::daemon::{self, Connection, Message, Quiet};
use harmonia_nix::store_path;
use harmonia_nix::{Sha256, StorePath};
use harmonia_queue::builder::Session;
use thiserror::Error;
use tokio::time::{Instant, sleep};

use crate::persist::persist;
use crate::roots::{Hold, Roots};
use crate::store::{Store, StoreError};

/// Paths that the queue is asked about at a time.
const AT_ONCE: usize = 4096;
/// How long fetching inputs may take.
const FETCH_LIMIT: Duration = Duration::from_secs(3600);
/// How often a path is fetched if Nix falls over its own cache, and the pause between.
const STUMBLES: u32 = 5;
const STUMBLE_PAUSE: Duration = Duration::from_millis(100);
/// How long a copy that has to go is waited for while something holds it, and how often it is looked at.
const HELD_LIMIT: Duration = Duration::from_secs(120);
const HELD_PAUSE: Duration = Duration::from_secs(1);
/// How long deleting some paths may take: the daemon looks for what holds them first.
const DELETE_LIMIT: Duration = Duration::from_secs(600);

/// The closure of some inputs, with the hash that each path must have, where one is known.
pub type Closure = HashMap<StorePath, Option<Sha256>>;

/// What is to be done about the paths of a closure.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Not there.
    pub fetch: BTreeSet<StorePath>,
    /// There, but not what was published.
    pub replace: BTreeSet<StorePath>,
}

/// Why a build cannot have its inputs.
#[derive(Debug, Error)]
pub enum InputError {
    /// No substituter has it.
    #[error("no substituter has the input {path}: {reason}")]
    Missing {
        /// The path.
        path: StorePath,
        /// What Nix says.
        reason: String,
    },
    /// A substituter cannot be reached.
    #[error("the input {path} cannot be fetched: {reason}")]
    Network {
        /// The path.
        path: StorePath,
        /// What Nix says.
        reason: String,
    },
    /// Another build uses the copy that has to go.
    #[error("{path} differs from what was published and cannot be replaced here: {reason}")]
    Held {
        /// The path.
        path: StorePath,
        /// What Nix says.
        reason: String,
    },
    /// The queue names something that is no path.
    #[error("the queue names an input that is no store path")]
    Path(#[from] store_path::PathError),
    /// The queue does not speak to this session any more.
    #[error("the queue does not say what the inputs are")]
    Unheard,
    /// The local store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The decision about every path: missing ones are fetched; a local one that differs from the published one is replaced;
/// one that equals it, or that nothing is known about (the first build of it), is used as it is.
pub fn plan(closure: &Closure, local: &HashMap<StorePath, Sha256>) -> Plan {
    let mut plan = Plan::default();
    for (path, canonical) in closure {
        match (local.get(path), canonical) {
            (None, _) => plan.fetch.insert(path.clone()),
            (Some(local), Some(canonical)) if local != canonical => plan.replace.insert(path.clone()),
            (Some(_), _) => false,
        };
    }
    plan
}

/// Makes inputs ready and holds them. What differs is deleted before anything is held, for own roots would keep it; what
/// differs once they are held is another slot's.
pub async fn make_ready(
    store: &Arc<Store>,
    roots: &Arc<Roots>,
    session: &Session,
    inputs: Vec<StorePath>,
) -> Result<Hold, InputError> {
    let closure = closure_of(session, &inputs).await?;
    let paths: Vec<StorePath> = closure.keys().cloned().collect();
    let differing = plan(&closure, &store.hashes(paths.clone()).await?).replace;
    for path in differing {
        replace(store, roots, &path).await?;
    }
    let hold = roots.hold(inputs).await?;
    let mut left = plan(&closure, &store.hashes(paths.clone()).await?);
    if !left.fetch.is_empty() {
        fetch(store, left.fetch).await?;
        left = plan(&closure, &store.hashes(paths).await?);
    }
    if let Some(path) = left.replace.into_iter().next() {
        let reason =
            "a substituter has it with other contents than were recorded, or it was built here since";
        return Err(InputError::Held { path, reason: reason.to_owned() });
    }
    match left.fetch.into_iter().next() {
        Some(path) => Err(InputError::Missing { path, reason: "it was fetched and is gone".to_owned() }),
        None => Ok(hold),
    }
}

async fn closure_of(session: &Session, inputs: &[StorePath]) -> Result<Closure, InputError> {
    let mut closure = Closure::new();
    let inputs: Vec<String> = inputs.iter().map(ToString::to_string).collect();
    for some in inputs.chunks(AT_ONCE) {
        for (path, hash) in persist(|| session.closure(some)).await.ok_or(InputError::Unheard)? {
            let hash = hash.and_then(|hash| Sha256::try_from(hash.as_slice()).ok());
            closure.insert(store_path::parse(&path)?, hash);
        }
    }
    Ok(closure)
}

/// Deletes a path and what was built from it here, once nothing holds it: another slot may use it, or upload it.
pub async fn replace(store: &Store, roots: &Roots, path: &StorePath) -> Result<(), InputError> {
    tracing::warn!(%path, "the local copy is not what it should be: deleting it and what refers to it");
    let until = Instant::now() + HELD_LIMIT;
    loop {
        roots.tidy(0).await?;
        match store.daemon().delete_with_referrers(path, DELETE_LIMIT).await {
            Ok(freed) => {
                tracing::info!(%path, paths = freed.paths.len(), "deleted");
                return Ok(());
            }
            Err(error @ (daemon::Error::Alive { .. } | daemon::Error::Daemon(_))) => {
                if Instant::now() >= until {
                    return Err(InputError::Held { path: path.clone(), reason: error.to_string() });
                }
                tracing::debug!(%error, "waiting for a copy to be let go");
                sleep(HELD_PAUSE).await;
            }
            Err(error) => return Err(StoreError::from(error).into()),
        }
    }
}

/// Fetches paths, all at once; then, for its reason, the first that did not come.
async fn fetch(store: &Arc<Store>, missing: BTreeSet<StorePath>) -> Result<(), InputError> {
    let mut connection = store.connect(&store.options()).await?;
    let fetched = connection.query_valid_paths(&missing, true, FETCH_LIMIT, &mut Quiet).await;
    let valid = match fetched {
        Ok(valid) => valid,
        Err(daemon::Error::Daemon(error)) => {
            tracing::debug!(%error, "not all inputs were fetched");
            BTreeSet::new()
        }
        Err(error) => return Err(StoreError::from(error).into()),
    };
    for path in missing.difference(&valid) {
        let mut tries = 1;
        while let Err(error) = ensure(&mut connection, path).await {
            match error {
                InputError::Network { reason, .. } if stumbled(&reason) && tries < STUMBLES => {
                    tracing::debug!(%path, reason, "fetched again");
                    tries += 1;
                    sleep(STUMBLE_PAUSE).await;
                }
                error => return Err(error),
            }
        }
    }
    Ok(())
}

/// Fetches a path, or says why it does not come.
async fn ensure(connection: &mut Connection, path: &StorePath) -> Result<(), InputError> {
    let mut said = Vec::new();
    let mut listen = |message| {
        if let Message::Log(line) = message {
            said.extend_from_slice(&line);
        }
    };
    let reason = match connection.ensure_path(path, FETCH_LIMIT, &mut listen).await {
        Ok(()) => return Ok(()),
        Err(daemon::Error::Daemon(error)) => error.to_string(),
        Err(error) => return Err(StoreError::from(error).into()),
    };
    let path = path.clone();
    let asked = !is_network(&reason) && !is_network(&String::from_utf8_lossy(&said)) && !stumbled(&reason);
    Err(if asked { InputError::Missing { path, reason } } else { InputError::Network { path, reason } })
}

/// Whether Nix fell over its own cache of narinfos: two fetches that begin a new one at the same time do.
fn stumbled(words: &str) -> bool {
    words.contains("SQLite")
}

/// Whether a substituter could not be asked, as opposed to having answered that it has nothing.
fn is_network(words: &str) -> bool {
    [
        "unable to download",
        "Couldn't",
        "Could not",
        "timed out",
        "HTTP error 5",
        "HTTP error 4",
        "is disabled",
    ]
    .iter()
    .any(|sign| words.contains(sign))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn path(name: &str) -> StorePath {
        store_path::parse(&format!("/nix/store/{}-{name}", "0".repeat(32))).unwrap()
    }

    #[test]
    fn every_row_of_the_table() {
        let (ours, theirs) = (Sha256::of("ours"), Sha256::of("theirs"));
        // (canonical, local) → (fetched, replaced)
        let rows = [
            ("missing", Some(theirs), None, (true, false)),
            ("missing-and-unknown", None, None, (true, false)),
            ("first-build", None, Some(ours), (false, false)),
            ("canonical", Some(theirs), Some(theirs), (false, false)),
            ("differs", Some(theirs), Some(ours), (false, true)),
        ];
        let closure = rows.iter().map(|(name, canonical, ..)| (path(name), *canonical)).collect();
        let local = rows.iter().filter_map(|(name, _, local, _)| Some((path(name), (*local)?))).collect();
        let plan = plan(&closure, &local);
        for (name, .., expected) in rows {
            let found = (plan.fetch.contains(&path(name)), plan.replace.contains(&path(name)));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_nix_that_falls_over_its_own_cache_says_nothing_about_a_substituter() {
        assert!(stumbled("executing SQLite statement 'insert or replace into NARs(…)': constraint failed"));
        assert!(!stumbled("path '/nix/store/x' does not exist and cannot be created"));
    }

    #[test]
    fn a_substituter_that_cannot_be_asked_is_not_one_that_has_nothing() {
        assert!(is_network("warning: unable to download 'http://x': Couldn't connect to server (7)"));
        assert!(is_network("error: unable to download: HTTP error 503"));
        assert!(!is_network("error: path '/nix/store/x' does not exist and cannot be created"));
        assert!(!is_network(
            "path '/nix/store/x' is required, but there is no substituter that can build it"
        ));
    }
}
