//! Sources, from evaluators: paths that follow from what they hold.

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt;
use harmonia_nix::source;
use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::signer::{self, Output};
use harmonia_service::layout;
use harmonia_service::protocol::{Outcome, Source, StoredSource, Token};
use harmonia_service::sentence::sentence;

use crate::publish::record;
use crate::slots::is;
use crate::{Signer, SignerError, side_by_side};

impl Signer {
    /// Signs sources that are in the bucket.
    pub(crate) async fn sources(
        &self,
        token: &Token,
        sources: Vec<StoredSource>,
    ) -> Result<Vec<Outcome>, SignerError> {
        let Token::Evaluation { id, secret } = token else {
            let reason = "sources come from an evaluation that is being written".to_owned();
            return Ok(vec![Outcome::Refused { reason }; sources.len()]);
        };
        let checked = side_by_side(sources.iter().map(|source| self.check_source(source).boxed())).await;
        let good: Vec<Output> = checked.iter().filter_map(|checked| checked.as_ref().ok()).cloned().collect();
        let recorded = match good.is_empty() {
            true => Vec::new(),
            false => signer::accept_sources(&self.db, *id, secret, &good).await?,
        };
        let outcomes = checked.into_iter().map(|checked| match checked {
            Ok(source) => match recorded.iter().find(|known| known.path == source.path) {
                Some(known) => self.publish_source(source, known).boxed(),
                None => std::future::ready(Outcome::Stale).boxed(),
            },
            Err(outcome) => std::future::ready(outcome).boxed(),
        });
        Ok(side_by_side(outcomes).await)
    }

    async fn check_source(&self, stored: &StoredSource) -> Result<Output, Outcome> {
        let (path, ca) = prove(&stored.source).map_err(|reason| Outcome::Refused { reason })?;
        let key = layout::nar(&path, &stored.source.nar_hash);
        let later = |error: &dyn std::error::Error| Outcome::Later { reason: sentence(error) };
        let again = || Outcome::Again { reason: format!("{key} is not stored, or not as said") };
        let there = self.bucket.head(&key).await.map_err(|error| later(&error))?.ok_or_else(again)?;
        let mut file = (stored.file.sha256.0.to_vec(), stored.file.size);
        if !is(&there, stored.file) {
            let Source { path, nar_hash, .. } = &stored.source;
            let recorded = self.recorded_file(path, *nar_hash, None, &there).await;
            file = recorded.map_err(|error| later(&error))?.ok_or_else(again)?;
        }
        Ok(Output {
            name: String::new(),
            path: stored.source.path.clone(),
            nar_hash: stored.source.nar_hash.0.to_vec(),
            nar_size: i64::try_from(stored.source.nar_size).unwrap_or(i64::MAX),
            references: stored.source.references.clone(),
            file_hash: file.0,
            file_size: i64::try_from(file.1).unwrap_or(i64::MAX),
            content_address: Some(ca),
            made_by: None,
        })
    }

    async fn publish_source(&self, source: Output, known: &Output) -> Outcome {
        let known = Output { content_address: source.content_address, ..known.clone() };
        let written = async { self.write_narinfo(&record(&known, None)?).await };
        match written.await {
            Ok(()) => Outcome::Published,
            Err(error) => Outcome::Later { reason: sentence(&error) },
        }
    }
}

/// The path and its content address, if the one follows from the other.
pub(crate) fn prove(said: &Source) -> Result<(StorePath, String), String> {
    let path = store_path::parse(&said.path).map_err(|error| sentence(&error))?;
    let references: BTreeSet<StorePath> = said
        .references
        .iter()
        .map(|reference| store_path::parse(reference))
        .collect::<Result<_, _>>()
        .map_err(|error| sentence(&error))?;
    let proven = match &said.text {
        None => source::prove_nar(&path, said.nar_hash, &references),
        Some(text) => {
            let contents = STANDARD.decode(text).map_err(|_| format!("the text of {path} is not base64"))?;
            source::prove_file(&path, &contents, said.nar_hash, &references)
        }
    };
    let ca = proven.map_err(|error| sentence(&error))?;
    Ok((path, ca.to_nix_string()))
}
