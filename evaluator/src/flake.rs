//! Flakes: what a reference means at this moment. What is evaluated is that, purely.

use std::ops::ControlFlow;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::child::{self, Bounds, ChildError, Heard};
use crate::nix::Workplace;
use crate::words::{Words, nix_error};

/// Why a reference means nothing.
#[derive(Debug, Error)]
pub enum FlakeError {
    /// Nix says so.
    #[error("the flake {reference} cannot be fetched\n{words}")]
    Fetch {
        /// The reference.
        reference: String,
        /// What Nix said.
        words: String,
    },
    /// Its answer is not understood.
    #[error("Nix says something about the flake {reference} that is not understood")]
    Answer {
        /// The reference.
        reference: String,
        /// Why not.
        source: serde_json::Error,
    },
    /// Nix did not come to its end.
    #[error("nix, fetching the flake {reference}: {source}")]
    Child {
        /// The reference.
        reference: String,
        /// Why.
        source: ChildError,
    },
}

/// A flake that does not change any more.
#[derive(Debug, PartialEq, Eq)]
pub struct Locked {
    /// How Nix finds it.
    pub reference: String,
    /// Its commit, if it is one.
    pub commit: Option<String>,
    /// How places in it are shown, up to their paths.
    pub shown_as: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    url: String,
    path: String,
    locked: Lock,
    revision: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Lock {
    rev: Option<String>,
    nar_hash: Option<String>,
    last_modified: Option<u64>,
    dir: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Fetched {
    store_path: PathBuf,
}

/// What was fetched a moment ago is what is meant a moment later, whatever this machine's own settings say.
const STEADY: [&str; 3] = ["--option", "tarball-ttl", "86400"];

/// Says what a reference means. This reads what the flake says of its inputs, and fetches those that are not locked.
pub async fn lock(place: &Workplace, reference: &str, bounds: Bounds) -> Result<Locked, FlakeError> {
    let metadata = &["flake", "metadata", "--json", "--no-write-lock-file"];
    ask(place, metadata, reference, bounds).await.map(locked)
}

/// Has Nix fetch a flake, and read nothing of it. Answers the directory of its `flake.nix`, without the store's root. A [`lock`] that
/// follows finds it in Nix's caches.
pub async fn fetch(place: &Workplace, reference: &str, bounds: Bounds) -> Result<PathBuf, FlakeError> {
    let nowhere = place.no_registry().display().to_string();
    let mut verb = vec!["flake", "prefetch", "--json"];
    if !reference.starts_with("flake:") {
        // It is no name for which the world's registry were to be asked, which an old Nix does all the same.
        verb.extend(["--option", "flake-registry", &nowhere]);
    }
    let Fetched { store_path } = ask(place, &verb, reference, bounds).await?;
    let query = reference.split_once('?').map_or("", |(_, query)| query);
    let directory = query.split('&').find_map(|pair| pair.strip_prefix("dir="));
    let directory = directory.unwrap_or_default().replace("%2F", "/").replace("%2f", "/");
    Ok(store_path.join(directory.trim_start_matches('/')))
}

async fn ask<A: DeserializeOwned>(
    place: &Workplace,
    verb: &[&str],
    reference: &str,
    bounds: Bounds,
) -> Result<A, FlakeError> {
    let mut command = place.nix("nix");
    command.args(verb).args(STEADY).arg(reference);
    let mut words = Words::default();
    let ended = child::run(command, b"", bounds, Heard::Errors, |line| {
        words.push(line);
        ControlFlow::Continue(())
    });
    let reference = reference.to_owned();
    match ended.await {
        Ok(ended) if ended.success => {
            serde_json::from_slice(&ended.rest).map_err(|source| FlakeError::Answer { reference, source })
        }
        Ok(_) => Err(FlakeError::Fetch { reference, words: nix_error(&words, &[]) }),
        Err(source) => Err(FlakeError::Child { reference, source }),
    }
}

/// What has no commit is what Nix has just put into the store.
fn locked(metadata: Metadata) -> Locked {
    let Metadata { url, path, locked, revision } = metadata;
    let shown_as = vec![format!("«{url}»/"), format!("{path}/")];
    let reference = match (&locked.rev, &locked.nar_hash) {
        (None, Some(hash)) => {
            let hash = hash.replace('+', "%2B").replace('/', "%2F").replace('=', "%3D");
            let dir = locked.dir.map(|dir| format!("&dir={dir}")).unwrap_or_default();
            format!(
                "path:{path}?lastModified={}&narHash={hash}{dir}",
                locked.last_modified.unwrap_or_default()
            )
        }
        _ => url,
    };
    Locked { reference, commit: revision, shown_as }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_found_by_its_name() {
        let metadata = r#"{"url":"git+file:///x?rev=1b","path":"/nix/store/x-source","revision":"1b","locked":{"rev":"1b","narHash":"sha256-a="}}"#;
        let locked = locked(serde_json::from_str(metadata).unwrap());
        assert_eq!(
            (locked.reference.as_str(), locked.commit.as_deref()),
            ("git+file:///x?rev=1b", Some("1b"))
        );
    }

    #[test]
    fn what_has_no_commit_is_found_in_the_store() {
        let metadata = r#"{"url":"git+file:///x","path":"/nix/store/x-source","locked":{"narHash":"sha256-a+/=","lastModified":7}}"#;
        let locked = locked(serde_json::from_str(metadata).unwrap());
        assert_eq!(locked.reference, "path:/nix/store/x-source?lastModified=7&narHash=sha256-a%2B%2F%3D");
    }
}
