//! From derivations that were found to the queue's graph: their closure is read from the store, sources go to the cache before
//! the derivations that need them go to the queue. What cannot be published fails the attributes above it, and no others.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use harmonia_builder::roots::{Hold, Roots};
use harmonia_builder::store::{Store, StoreError};
use harmonia_builder::upload::{LocalSource, UploadError, Uploader};
use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::Db;
use harmonia_queue::ingest::{Attr, Ingest, Node, record_paths};
use harmonia_queue::resolver::Resolver;
use harmonia_service::sentence::sentence;
use thiserror::Error;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};

use crate::evaluate::Found;
use crate::file;
use crate::run::Evaluator;
use crate::substituters::Substituters;

/// Attributes that are looked at together, at most.
const TOGETHER: usize = 2_000;
/// How long those that follow the first gather: every batch costs some transactions, which compete with Nix for the processor.
const GATHER: Duration = Duration::from_millis(200);
/// The queue takes no longer text.
const LONGEST_TEXT: u64 = 4 << 20;

/// Why a graph is not written.
#[derive(Debug, Error)]
pub enum GraphError {
    /// The local store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Signers, or the bucket.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// The queue.
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
    /// The process ends.
    #[error("the evaluator is stopping")]
    Stopping,
}

/// A graph that is being written.
pub struct Graph {
    ingest: Ingest,
    uploader: Uploader,
    store: Arc<Store>,
    roots: Arc<Roots>,
    resolver: Arc<Resolver>,
    substituters: Arc<Substituters>,
    db: Db,
    known: Known,
}

/// What was looked at so far.
#[derive(Default)]
struct Known {
    attrs: BTreeMap<String, String>,
    holds: Vec<Hold>,
    derivations: HashSet<String>,
    sources: HashSet<String>,
    /// Paths that nobody can build with, and why.
    bad: HashMap<String, String>,
}

impl Graph {
    /// An empty one.
    pub fn new(evaluator: &Evaluator, ingest: Ingest, uploader: Uploader) -> Self {
        Self {
            ingest,
            uploader,
            store: Arc::clone(&evaluator.store),
            roots: Arc::clone(&evaluator.roots),
            resolver: Arc::clone(&evaluator.resolver),
            substituters: Arc::clone(&evaluator.substituters),
            db: evaluator.db.clone(),
            known: Known::default(),
        }
    }

    /// Writes whatever is found, while more is being found.
    pub async fn write(mut self, mut found: UnboundedReceiver<Found>) -> Result<Self, GraphError> {
        let mut patience = Duration::ZERO;
        while let Some(first) = found.recv().await {
            self.add(gather(first, &mut found, patience).await).await?;
            self.resolver.nudge();
            patience = GATHER;
        }
        Ok(self)
    }

    /// Whether the queue has all of what was found before, texts and sources: then there is nothing to look for.
    pub async fn takes(&mut self, found: Vec<(String, String)>) -> Result<bool, GraphError> {
        let unknown = self.ingest.want_known(found.iter().map(|(_, drv)| drv.clone()).collect()).await?;
        if unknown.is_empty() {
            self.known.attrs.extend(found);
        }
        Ok(unknown.is_empty())
    }

    /// All is found. Each attribute is a derivation or an error. Answers how many of either there are.
    pub async fn complete(self, errors: BTreeMap<String, String>) -> Result<(usize, usize), GraphError> {
        let Known { attrs, bad, holds, .. } = self.known;
        let good = attrs.into_iter().filter(|(name, _)| !errors.contains_key(name)).map(|(name, drv)| {
            let error = bad.get(&drv).cloned();
            Attr { name, drv_path: Some(drv).filter(|_| error.is_none()), error }
        });
        let all: Vec<Attr> = good
            .chain(errors.iter().map(|(name, error)| Attr {
                name: name.clone(),
                drv_path: None,
                error: Some(error.clone()),
            }))
            .collect();
        let failed = all.iter().filter(|attr| attr.error.is_some()).count();
        self.ingest.complete(&all).await?;
        self.resolver.nudge();
        drop(holds);
        Ok((all.len() - failed, failed))
    }

    async fn add(&mut self, found: Vec<Found>) -> Result<(), GraphError> {
        let tops: Vec<StorePath> =
            found.iter().filter_map(|found| store_path::parse(&found.drv).ok()).collect();
        self.known.holds.push(self.roots.hold(tops).await?);
        // Most of an evaluation is what the last one was: of that nothing is read.
        let unknown = self.ingest.want_known(found.iter().map(|found| found.drv.clone()).collect()).await?;
        let nodes = self.read_closure(unknown).await?;
        self.known.attrs.extend(found.into_iter().map(|found| (found.attr, found.drv)));
        self.publish_sources(&nodes).await?;
        let good = self.known.without_bad(nodes);
        self.take_what_others_built(&good).await?;
        Ok(self.ingest.add(good).await?)
    }

    /// What a path is is known before anybody could build it.
    async fn take_what_others_built(&self, nodes: &[Node]) -> Result<(), GraphError> {
        let outputs = nodes.iter().flat_map(|node| &node.outputs).filter_map(|(_, path)| path.clone());
        let known = self.substituters.look_up(outputs.collect()).await;
        if !known.is_empty() {
            record_paths(&self.db, &known).await?;
            self.substituters.recorded(&known);
        }
        Ok(())
    }

    /// Derivations that were not read before, and all below them.
    async fn read_closure(&mut self, tops: Vec<String>) -> Result<Vec<Node>, GraphError> {
        let store = Arc::clone(&self.store);
        let mut seen = std::mem::take(&mut self.known.derivations);
        let read = spawn_blocking(move || {
            let (mut nodes, mut bad, mut todo) = (Vec::new(), Vec::new(), tops);
            while let Some(drv) = todo.pop() {
                if !seen.insert(drv.clone()) {
                    continue;
                }
                match read(&store, &drv) {
                    Ok(node) => {
                        todo.extend(node.inputs.iter().filter(|input| !seen.contains(*input)).cloned());
                        nodes.push(node);
                    }
                    Err(reason) => bad.push((drv, reason)),
                }
            }
            (seen, nodes, bad)
        });
        let (seen, nodes, bad) = read.await.map_err(|_| GraphError::Stopping)?;
        self.known.derivations = seen;
        self.known.bad.extend(bad);
        Ok(nodes)
    }

    /// Sources that were not seen before, and what they refer to.
    async fn publish_sources(&mut self, nodes: &[Node]) -> Result<(), GraphError> {
        let mut sources = Vec::new();
        let mut todo: Vec<String> = nodes.iter().flat_map(|node| &node.sources).cloned().collect();
        loop {
            todo.retain(|path| self.known.sources.insert(path.clone()));
            let paths: Vec<StorePath> = todo.iter().filter_map(|path| store_path::parse(path).ok()).collect();
            if paths.is_empty() {
                break;
            }
            let infos = self.store.infos(paths).await?;
            todo =
                infos.iter().flat_map(|(_, info)| info.references.iter().map(StorePath::to_string)).collect();
            sources.extend(infos.into_iter().map(|(path, info)| LocalSource {
                real_path: self.store.real_path(&path),
                path: path.to_string(),
                nar_hash: info.nar_hash,
                nar_size: info.nar_size,
                references: info.references.iter().map(StorePath::to_string).collect(),
                is_text: info.ca.as_deref().is_some_and(follows_from_bytes),
            }));
        }
        for (path, reason) in self.uploader.publish_sources(&sources).await? {
            let why = format!("it needs {path}, which cannot be published: {reason}");
            self.known.bad.insert(path, why);
        }
        Ok(())
    }
}

impl Known {
    /// Those that nothing bad is below; the others are bad from now on.
    fn without_bad(&mut self, mut nodes: Vec<Node>) -> Vec<Node> {
        while !self.bad.is_empty() {
            let before = nodes.len();
            nodes.retain(|node| {
                let why =
                    node.sources.iter().chain(&node.inputs).find_map(|path| self.bad.get(path)).cloned();
                why.is_none_or(|why| self.bad.insert(node.drv_path.clone(), why).is_some())
            });
            if nodes.len() == before {
                break;
            }
        }
        nodes
    }
}

async fn gather(first: Found, found: &mut UnboundedReceiver<Found>, patience: Duration) -> Vec<Found> {
    let until = Instant::now() + patience;
    let mut batch = vec![first];
    while batch.len() < TOGETHER
        && let Ok(Some(next)) = timeout_at(until, found.recv()).await
    {
        batch.push(next);
    }
    batch
}

/// A content address as Nix writes it: `text:…` and `fixed:sha256:…`, but not `fixed:r:sha256:…`.
fn follows_from_bytes(ca: &str) -> bool {
    ca.starts_with("text:") || ca.starts_with("fixed:sha")
}

fn read(store: &Store, drv: &str) -> Result<Node, String> {
    let path = store_path::parse(drv).map_err(|error| sentence(&error))?;
    // Anybody can have anything put into the store under such a name.
    let text = file::read(&store.real_path(&path), LONGEST_TEXT).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("{drv} is not in the evaluator's store: evaluate again"),
        _ => format!("{drv} cannot be read: {error}"),
    })?;
    Node::parse(drv, text).map_err(|error| sentence(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(drv_path: &str, inputs: &[&str], sources: &[&str]) -> Node {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Node {
            drv_path: drv_path.to_owned(),
            inputs: owned(inputs),
            sources: owned(sources),
            ..Node::default()
        }
    }

    #[test]
    fn what_cannot_be_published_fails_what_is_above_it_and_no_more() {
        let mut known = Known::default();
        known.bad.insert("source".to_owned(), "why".to_owned());
        let nodes = vec![
            node("top", &["middle"], &[]),
            node("middle", &["below"], &[]),
            node("below", &[], &["source"]),
            node("other", &[], &[]),
        ];
        let good: Vec<String> = known.without_bad(nodes).into_iter().map(|node| node.drv_path).collect();
        assert_eq!(good, ["other"]);
        assert_eq!(known.bad.get("top").map(String::as_str), Some("why"));
    }

    #[test]
    fn some_paths_follow_from_bytes() {
        assert!(follows_from_bytes("text:sha256:x") && follows_from_bytes("fixed:sha256:x"));
        assert!(!follows_from_bytes("fixed:r:sha256:x"));
    }
}
