//! Unpublishing: a path, or all that a node built.

use std::collections::{BTreeSet, HashSet};

use futures::FutureExt;
use harmonia_nix::store_path;
use harmonia_queue::{signer, sweep};
use harmonia_service::layout;

use crate::{Signer, SignerError, side_by_side};

impl Signer {
    /// Removes narinfos, listings and realisations, forgets the records and reopens whoever makes the paths, with all their outputs.
    /// Answers the paths.
    ///
    /// First the narinfos: were the records first, a new build would find the old narinfo and could not publish. A crash in
    /// between leaves records without narinfos, which builders report as missing. NARs stay, for downloads under way; the
    /// next build of the path replaces them.
    pub async fn forget(&self, paths: &[String], built_by: Option<&str>) -> Result<Vec<String>, SignerError> {
        let nodes = match built_by {
            Some(name) => {
                let nodes = signer::nodes_named(&self.db, name).await?;
                if nodes.is_empty() {
                    let sentence = format!("there is no node {name}: write its name, or pool/name");
                    return Err(harmonia_queue::Error::NotFound(sentence).into());
                }
                nodes.into_iter().map(Some).collect()
            }
            None => vec![None],
        };
        // Also what is not on record.
        self.take_back(paths).await?;
        let mut forgotten = BTreeSet::new();
        for node in nodes {
            // Exactly what was taken back is forgotten. What was published meanwhile comes next.
            loop {
                let going = signer::to_forget(&self.db, paths, node).await?;
                if going.is_empty() {
                    break;
                }
                self.take_back(&going).await?;
                forgotten.extend(signer::forget(&self.db, &going, None).await?);
            }
        }
        self.resolver.nudge();
        self.remove_unrecorded(paths.iter().chain(&forgotten)).await?;
        Ok(forgotten.into_iter().collect())
    }

    /// Clients find these paths no more, nor what says that they are outputs of anything.
    pub(crate) async fn take_back(&self, paths: &[String]) -> Result<(), SignerError> {
        self.remove(paths.iter()).await?;
        self.unrealise(paths).await
    }

    /// What a signer was just writing, from a record that it had read before.
    async fn remove_unrecorded(&self, paths: impl Iterator<Item = &String>) -> Result<(), SignerError> {
        let paths: Vec<String> = paths.cloned().collect();
        let known: HashSet<String> = sweep::known_paths(&self.db, &paths).await?.into_iter().collect();
        self.remove(paths.iter().filter(|path| !known.contains(*path))).await
    }

    async fn remove(&self, paths: impl Iterator<Item = &String>) -> Result<(), SignerError> {
        let parsed: Vec<_> = paths.map(|path| store_path::parse(path)).collect::<Result<_, _>>()?;
        let keys = parsed.iter().flat_map(|path| [layout::narinfo(path), layout::listing(path)]);
        let removed = keys.map(|key| async move { self.bucket.delete(&key).await }.boxed());
        Ok(side_by_side(removed).await.into_iter().collect::<Result<_, _>>()?)
    }
}
