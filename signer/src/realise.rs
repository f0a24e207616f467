//! Outputs of which only a build shows where they are: those whose paths follow from their contents, and those that
//! depend on such. Their paths are proven from the ones on record, and published as realisations.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use futures::FutureExt;
use harmonia_nix::key::PublicKey;
use harmonia_nix::proof;
use harmonia_nix::realisation::{self, Name, Realisation, There};
use harmonia_nix::resolve;
use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::signer::{self, Realised, Text};
use harmonia_service::bucket::Written;
use harmonia_service::layout;
use harmonia_service::sentence::sentence;

use crate::{Signer, SignerError, side_by_side};

/// Where the deferred outputs of a derivation may be, or why that is not known.
type Ways = Result<Vec<BTreeMap<String, StorePath>>, String>;
/// Where outputs of inputs are.
type Paths = HashMap<(StorePath, String), StorePath>;

impl Signer {
    /// Resolves derivations with what their inputs came out as. Only the texts, which are proven, and what signers
    /// accepted count; what an evaluator says about paths does not.
    pub(crate) async fn ways_of(&self, goals: Vec<String>) -> Result<HashMap<String, Ways>, SignerError> {
        if goals.is_empty() {
            return Ok(HashMap::new());
        }
        let texts = parsed(signer::texts(&self.db, &goals, true).await?)?;
        let inputs = texts.iter().flat_map(|(drv, text)| resolve::inputs(drv, text).unwrap_or_default());
        let inputs: BTreeSet<String> = inputs.map(|input| input.to_string()).collect();
        let paths = self.paths_of(inputs.into_iter().collect()).await?;
        let ways = texts.iter().map(|(drv, text)| {
            let path =
                |input: &StorePath, output: &str| paths.get(&(input.clone(), output.to_owned())).cloned();
            let ways = resolve::deferred_paths(drv, text, path).map_err(|error| sentence(&error));
            (drv.to_string(), ways)
        });
        let unknown = goals.into_iter().map(|drv| (drv, Err("its text is not known".to_owned())));
        Ok(unknown.collect::<Vec<_>>().into_iter().chain(ways).collect())
    }

    async fn paths_of(&self, drvs: Vec<String>) -> Result<Paths, SignerError> {
        let mut paths = Paths::new();
        for Realised { drv_path, output, path } in signer::realised(&self.db, &drvs).await? {
            paths.insert((store_path::parse(&drv_path)?, output), store_path::parse(&path)?);
        }
        for (drv, text) in parsed(signer::texts(&self.db, &drvs, true).await?)? {
            for (output, path) in proof::named_outputs(&drv, &text).unwrap_or_default() {
                if let Some(path) = path {
                    paths.insert((drv.clone(), output), path);
                }
            }
        }
        Ok(paths)
    }

    /// Says what outputs came out as, unless that is said already.
    pub(crate) async fn realise(&self, outputs: &[Realised]) -> Result<(), SignerError> {
        let written =
            self.named(outputs).await?.into_iter().map(|(drv, realisation)| {
                async move { self.write_realisation(drv, &realisation).await }.boxed()
            });
        side_by_side(written).await.into_iter().collect()
    }

    async fn write_realisation(&self, drv: String, realisation: &Realisation) -> Result<(), SignerError> {
        let keys = self.keys();
        let (key, text) = (realisation.object_name(), realisation.write(&keys));
        if self.bucket.put_new(&key, text.clone(), layout::REALISATION).await? == Written::New {
            return Ok(());
        }
        let there = self.bucket.get(&key, realisation::LARGEST).await?.unwrap_or_default();
        let public: Vec<PublicKey> = keys.iter().map(|key| key.public()).collect();
        match realisation.compare(&there, &public) {
            There::Same => Ok(()),
            There::Unsigned => Ok(self.bucket.put(&key, text, layout::REALISATION).await?),
            There::Other => Err(SignerError::OtherRealisation { drv }),
        }
    }

    /// Writes what is said of these paths with today's keys.
    pub(crate) async fn realise_again(&self, paths: &[String]) -> Result<(), SignerError> {
        let keys = self.keys();
        for (_, realisation) in self.named(&signer::realised_at(&self.db, paths).await?).await? {
            let key = realisation.object_name();
            // Accepted but not yet published: whoever publishes it signs it.
            if self.bucket.head(&key).await?.is_some() {
                self.bucket.put(&key, realisation.write(&keys), layout::REALISATION).await?;
            }
        }
        Ok(())
    }

    /// Takes back that these paths, and what was made with them, are outputs of anything.
    pub(crate) async fn unrealise(&self, paths: &[String]) -> Result<(), SignerError> {
        let named = self.named(&signer::realised_at(&self.db, paths).await?).await?;
        let removed = named.iter().map(|(_, realisation)| {
            async move { self.bucket.delete(&realisation.object_name()).await }.boxed()
        });
        Ok(side_by_side(removed).await.into_iter().collect::<Result<_, _>>()?)
    }

    /// Outputs under every name that clients look for, each with its derivation.
    async fn named(&self, outputs: &[Realised]) -> Result<Vec<(String, Realisation)>, SignerError> {
        let goals: BTreeSet<String> = outputs.iter().map(|output| output.drv_path.clone()).collect();
        let verdicts = self.prove_all(goals).await?;
        let mut named = Vec::new();
        for Realised { drv_path, output, path } in outputs {
            let unproven =
                |reason: &str| SignerError::Unproven { drv: drv_path.clone(), reason: reason.to_owned() };
            let verdict = verdicts.get(drv_path).ok_or_else(|| unproven("it is not known"))?;
            let proven = verdict.as_ref().map_err(|reason| unproven(reason))?;
            let by_hash = proven.realised_as.iter().map(|hash| Name::Hash(*hash));
            for name in by_hash.chain([Name::Derivation(store_path::parse(drv_path)?)]) {
                let (output, path) = (output.clone(), store_path::parse(path)?);
                named.push((drv_path.clone(), Realisation { name, output, path }));
            }
        }
        Ok(named)
    }
}

fn parsed(texts: Vec<Text>) -> Result<Vec<(StorePath, Vec<u8>)>, SignerError> {
    let texts = texts.into_iter().filter_map(|known| Some((known.drv_path, known.text?)));
    texts.map(|(drv, text)| Ok((store_path::parse(&drv)?, text))).collect()
}
