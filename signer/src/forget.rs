//! Unpublishing: a path, or all that a node built.

use futures::FutureExt;
use harmonia_nix::store_path;
use harmonia_queue::signer;
use harmonia_service::layout;

use crate::{Signer, SignerError, side_by_side};

impl Signer {
    /// Removes narinfos, listings and realisations, forgets the records and reopens whoever makes the paths. Answers the paths.
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
        let mut forgotten = Vec::new();
        for node in nodes {
            let going = signer::to_forget(&self.db, paths, node).await?;
            self.remove(paths.iter().chain(&going)).await?;
            self.unrealise(&[paths, &going].concat()).await?;
            forgotten.extend(signer::forget(&self.db, paths, node).await?);
        }
        self.resolver.nudge();
        Ok(forgotten)
    }

    async fn remove(&self, paths: impl Iterator<Item = &String>) -> Result<(), SignerError> {
        let parsed: Vec<_> = paths.map(|path| store_path::parse(path)).collect::<Result<_, _>>()?;
        let keys = parsed.iter().flat_map(|path| [layout::narinfo(path), layout::listing(path)]);
        let removed = keys.map(|key| async move { self.bucket.delete(&key).await }.boxed());
        Ok(side_by_side(removed).await.into_iter().collect::<Result<_, _>>()?)
    }
}
