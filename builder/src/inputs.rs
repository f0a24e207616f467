//! What a build reads must be what the cache has: every path of the inputs' closure is there, and is the one that was
//! published. Hashes are looked up in the store's database, never computed.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use harmonia_nix::daemon::{self, ActivityKind, Connection, Field, Message, Quiet};
use harmonia_nix::store_path;
use harmonia_nix::{Sha256, StorePath};
use harmonia_queue::builder::Session;
use thiserror::Error;
use tokio::time::{Instant, sleep};

use crate::persist::persist;
use crate::roots::{Hold, Roots};
use crate::store::{Store, StoreError};
use crate::witness::{NO_ROOM, NO_SPACE};

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
        /// The queue says that the cache has it. Otherwise it is still to be built.
        published: bool,
        /// What Nix says.
        reason: String,
    },
    /// A substituter cannot be reached, or what it has is not believed here.
    #[error("the input {path} cannot be fetched: {reason}")]
    Network {
        /// The path.
        path: StorePath,
        /// What Nix says.
        reason: String,
    },
    /// There is no room for it.
    #[error(
        "the disk of this node's Nix store is full, so that the input {path} cannot be fetched: {reason}"
    )]
    DiskFull {
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

impl InputError {
    /// The same with what the queue knows of the path.
    fn known_by(self, closure: &Closure) -> Self {
        match self {
            Self::Missing { path, reason, .. } => {
                let published = matches!(closure.get(&path), Some(Some(_)));
                Self::Missing { path, published, reason }
            }
            error => error,
        }
    }
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
        fetch(store, left.fetch).await.map_err(|error| error.known_by(&closure))?;
        left = plan(&closure, &store.hashes(paths).await?);
    }
    if let Some(path) = left.replace.into_iter().next() {
        let reason =
            "a substituter has it with other contents than were recorded, or it was built here since";
        return Err(InputError::Held { path, reason: reason.to_owned() });
    }
    match left.fetch.into_iter().next() {
        Some(path) => {
            let reason = "it was fetched and is gone".to_owned();
            Err(InputError::Missing { path, published: false, reason }.known_by(&closure))
        }
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
    let left: BTreeSet<StorePath> = missing.difference(&valid).cloned().collect();
    for path in lost_first(&mut connection, left).await? {
        let mut begun = Vec::new();
        let Err(error) = ensure(&mut connection, &path, &mut begun).await else { continue };
        // What Nix began to fetch had all that it refers to: if it did not come, that is why the path did not.
        if matches!(error, InputError::Missing { .. }) {
            for other in begun.iter().filter(|other| **other != path) {
                ensure(&mut connection, other, &mut Vec::new()).await?;
            }
        }
        return Err(error);
    }
    Ok(())
}

/// What no substituter offers, and then the others. Of a path that refers to a lost one Nix says only that it does not
/// come: the lost one has to be named, or nobody would build it again.
async fn lost_first(
    connection: &mut Connection,
    paths: BTreeSet<StorePath>,
) -> Result<Vec<StorePath>, InputError> {
    if paths.len() < 2 {
        return Ok(paths.into_iter().collect());
    }
    let offered = match connection.query_substitutable_paths(&paths).await {
        Ok(offered) => offered,
        // A substituter that does not answer shows when its paths are fetched.
        Err(daemon::Error::Daemon(error)) => {
            tracing::debug!(%error, "substituters do not say what they have");
            BTreeSet::new()
        }
        Err(error) => return Err(StoreError::from(error).into()),
    };
    let (there, lost): (Vec<_>, Vec<_>) = paths.into_iter().partition(|path| offered.contains(path));
    Ok(lost.into_iter().chain(there).collect())
}

/// Fetches a path, or says why it does not come. Once more if Nix falls over its own cache.
async fn ensure(
    connection: &mut Connection,
    path: &StorePath,
    begun: &mut Vec<StorePath>,
) -> Result<(), InputError> {
    let mut tries = 1;
    loop {
        match ensure_once(connection, path, begun).await {
            Err(InputError::Network { reason, .. }) if stumbled(&reason) && tries < STUMBLES => {
                tracing::debug!(%path, reason, "fetched again");
                tries += 1;
                sleep(STUMBLE_PAUSE).await;
            }
            ended => return ended,
        }
    }
}

async fn ensure_once(
    connection: &mut Connection,
    path: &StorePath,
    begun: &mut Vec<StorePath>,
) -> Result<(), InputError> {
    let mut said = Vec::new();
    let mut listen = |message| match message {
        Message::Log(line) => said.push(daemon::plain(String::from_utf8_lossy(&line).trim())),
        Message::Start { kind: ActivityKind::Substitute, fields, .. } => begun.extend(fetched(&fields)),
        _ => {}
    };
    match connection.ensure_path(path, FETCH_LIMIT, &mut listen).await {
        Ok(()) => Ok(()),
        Err(daemon::Error::Daemon(error)) => Err(why_not(path, &error.to_string(), &said)),
        Err(error) => Err(StoreError::from(error).into()),
    }
}

/// The path that Nix begins to fetch.
fn fetched(fields: &[Field]) -> Option<StorePath> {
    match fields {
        [Field::Text(path), ..] => store_path::parse(std::str::from_utf8(path).ok()?).ok(),
        _ => None,
    }
}

/// Why a path did not come, by the error and by what Nix said before it, where the reason often is: its last words about it
/// are told. Nothing of that means that no substituter has the path.
fn why_not(path: &StorePath, error: &str, said: &[String]) -> InputError {
    let words = || said.iter().map(String::as_str).chain([error]).rev();
    let path = path.clone();
    if let Some(reason) = words().find(|words| has_no_room(words)) {
        return InputError::DiskFull { path, reason: reason.to_owned() };
    }
    let tells =
        |words: &&str| is_network(words) || is_not_believed(words) || *words == error && stumbled(words);
    match words().find(tells) {
        Some(reason) => InputError::Network { path, reason: reason.to_owned() },
        None => InputError::Missing { path, published: false, reason: error.to_owned() },
    }
}

/// Whether the store's disk is full, or its database's.
fn has_no_room(words: &str) -> bool {
    words.contains(NO_SPACE) || words.contains(NO_ROOM)
}

/// Whether a substituter has the path, but with a signature or contents that are not trusted here; older words first.
fn is_not_believed(words: &str) -> bool {
    ["valid signature", "not signed by any of the keys", "lacks a signature", "hash mismatch importing path"]
        .iter()
        .any(|sign| words.contains(sign))
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

    #[test]
    fn why_an_input_did_not_come_is_in_what_nix_said() {
        let error = "path '/nix/store/x' does not exist and cannot be created";
        let why = |said: &[&str]| {
            let said: Vec<String> = said.iter().map(|&line| line.to_owned()).collect();
            why_not(&path("x"), error, &said)
        };
        let untrusted = [
            "warning: substituter 'http://x' does not have a valid signature for path '/nix/store/x'",
            "warning: ignoring substitute for '/nix/store/x' from 'http://x', as it's not signed by any of the keys in \
             'trusted-public-keys'",
            "error: hash mismatch importing path '/nix/store/x';\n  specified: sha256:1\n  got: sha256:2",
        ];
        for line in untrusted {
            let told = matches!(why(&["copying path", line, "done"]), InputError::Network { reason, .. } if reason == line);
            assert!(told, "{line}");
        }
        for full in ["error: writing to file: No space left on device", "SQLite: database or disk is full"] {
            let told = why(&[full, "warning: unable to download 'http://x'"]);
            assert!(matches!(told, InputError::DiskFull { reason, .. } if reason == full), "{full}");
        }
        assert!(matches!(why(&["copying path"]), InputError::Missing { reason, .. } if reason == error));
    }
}
