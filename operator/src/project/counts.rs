//! What the queue knows of projects, asked for all of them at once.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use futures::{Stream, StreamExt, stream};
use harmonia_crds::Project;
use harmonia_queue::Db;
use harmonia_queue::mirror::{ProjectCounts, project_counts};
use kube::runtime::reflector::ObjectRef;
use tokio::sync::broadcast;

use crate::scope::Scope;

/// Who hears late of so many changes misses some: the next look, or the next resync, finds them.
const BACKLOG: usize = 4096;

type Known = BTreeMap<String, ProjectCounts>;

/// The newest numbers, by the queue's name of a project.
pub struct Counted {
    known: Mutex<Known>,
    changed: broadcast::Sender<String>,
}

impl Default for Counted {
    fn default() -> Self {
        Self { known: Mutex::default(), changed: broadcast::channel(BACKLOG).0 }
    }
}

impl Counted {
    /// Of one project.
    pub fn get(&self, name: &str) -> Option<ProjectCounts> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Asks now, and tells who has changed.
    pub async fn ask(&self, db: &Db) -> harmonia_queue::Result<()> {
        let counts = project_counts(db).await?;
        let new: Known = counts.into_iter().map(|counts| (counts.name.clone(), counts)).collect();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for name in changes(&known, &new) {
            // Nobody may be listening.
            let _ = self.changed.send(name.to_owned());
        }
        *known = new;
        Ok(())
    }

    /// Projects that the queue has and that no Project keeps any more: it was let go while the database was away, for one. As
    /// the queue's name and the uid that kept it.
    pub fn orphans(&self, exists: impl Fn(&str, &str) -> bool) -> Vec<(String, String)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = |name: &str| name.split_once('/').is_none_or(|(namespace, name)| exists(namespace, name));
        let orphans = known.values().filter(|counts| !kept(&counts.name));
        orphans.map(|counts| (counts.name.clone(), counts.uid.clone())).collect()
    }

    /// Projects there whose numbers have changed.
    pub fn changes(&self, scope: Scope) -> impl Stream<Item = ObjectRef<Project>> + Send + use<> {
        let heard = stream::unfold(self.changed.subscribe(), |mut heard| async move {
            loop {
                match heard.recv().await {
                    Ok(name) => return Some((name, heard)),
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return None,
                }
            }
        });
        heard.filter_map(move |name| std::future::ready(reference(&name, &scope)))
    }
}

fn changes<'a>(old: &'a Known, new: &'a Known) -> impl Iterator<Item = &'a str> {
    new.iter().filter(|(name, counts)| old.get(*name) != Some(counts)).map(|(name, _)| name.as_str())
}

fn reference(name: &str, scope: &Scope) -> Option<ObjectRef<Project>> {
    let (namespace, name) = name.split_once('/')?;
    scope.has(namespace).then(|| ObjectRef::new(name).within(namespace))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;

    /// A project that has done nothing yet.
    pub fn counts(name: &str, queued: i64) -> ProjectCounts {
        ProjectCounts {
            name: name.to_owned(),
            uid: "one".to_owned(),
            queued,
            running: 0,
            used_share: 0.0,
            missing_pools: Vec::new(),
            last: None,
        }
    }

    fn known(counts: &[ProjectCounts]) -> Known {
        counts.iter().map(|counts| (counts.name.clone(), counts.clone())).collect()
    }

    #[test]
    fn only_what_has_changed_is_looked_at() {
        let old = known(&[counts("ci/a", 1), counts("ci/b", 1), counts("ci/gone", 1)]);
        let new = known(&[counts("ci/a", 1), counts("ci/b", 2), counts("ci/new", 0)]);
        assert_eq!(changes(&old, &new).collect::<Vec<_>>(), ["ci/b", "ci/new"]);
    }

    #[test]
    fn what_no_project_keeps_is_an_orphan() {
        let counted = Counted::default();
        *counted.known.lock().unwrap() = known(&[counts("ci/a", 0), counts("ci/b", 0)]);
        assert_eq!(counted.orphans(|_, name| name == "a"), [("ci/b".to_owned(), "one".to_owned())]);
    }

    #[test]
    fn a_project_is_found_in_its_namespace_only() {
        let found = reference("ci/a", &Scope::All).map(|found| (found.namespace, found.name));
        assert_eq!(found, Some((Some("ci".to_owned()), "a".to_owned())));
        assert!(reference("ci/a", &Scope::Namespace("ci".to_owned())).is_some());
        assert!(reference("ci/a", &Scope::Namespace("other".to_owned())).is_none());
        assert!(reference("by-hand", &Scope::All).is_none());
    }
}
