//! A builder says that its outputs are stored: look, prove, accept, publish.

use std::collections::HashMap;

use futures::FutureExt;
use harmonia_nix::Sha256;
use harmonia_nix::store_path;
use harmonia_queue::Fence;
use harmonia_queue::signer::{self, Holder, LiveClaim, Verdict};
use harmonia_service::bucket::{Checksum, Stored, Written};
use harmonia_service::layout;
use harmonia_service::protocol::{BuildResult, Outcome, Output, StoredFile, Token};
use harmonia_service::sentence::sentence;

use crate::publish::BUSY;
use crate::slots::fence;
use crate::traced::Traced;
use crate::{Signer, SignerError, side_by_side};

impl Signer {
    /// What became of each result, in their order.
    pub(crate) async fn complete(
        &self,
        token: &Token,
        results: Vec<BuildResult>,
    ) -> Result<Vec<Outcome>, SignerError> {
        let Token::Builder { session, secret } = token else {
            let reason = "results come from a builder".to_owned();
            return Ok(vec![Outcome::Refused { reason }; results.len()]);
        };
        let claims = self.claims_of(token, results.iter().map(|result| result.claim)).await?;
        let claims = &claims;
        let traced = Traced::begin(&self.tracer, claims, &results);
        let look = results.iter().map(|result| match claims.get(&fence(result.claim)) {
            Some(live) => self.check(live, result).boxed(),
            None => std::future::ready(Err(Outcome::Stale)).boxed(),
        });
        let mut checked = traced.during("check", side_by_side(look)).await;
        traced.during("prove", self.prove_results(claims, &results, &mut checked)).await?;

        // One transaction takes the records of all that hold.
        let holds = |result: &BuildResult| Holder {
            session: *session,
            secret: secret.clone(),
            fence: fence(result.claim),
        };
        let good: Vec<(Holder, Vec<signer::Output>)> = results
            .iter()
            .zip(&checked)
            .filter_map(|(result, checked)| Some((holds(result), checked.as_ref().ok()?.clone())))
            .collect();
        let verdicts = match good.is_empty() {
            true => Vec::new(),
            false => traced.during("accept", signer::accept(&self.db, &good)).await?,
        };
        let verdicts: HashMap<Fence, Verdict> =
            good.iter().map(|(holder, _)| holder.fence).zip(verdicts).collect();

        let taken = |verdict: &Verdict| matches!(verdict, Verdict::Accepted | Verdict::Adopted);
        let jobs: Vec<i64> =
            verdicts.iter().filter(|(_, verdict)| taken(verdict)).map(|(fence, _)| fence.job).collect();
        let mut published = match jobs.is_empty() {
            true => HashMap::new(),
            false => {
                let accepted = signer::accepted(&self.db, &jobs).await?;
                traced.during("write", self.publish(accepted)).await.into_iter().collect()
            }
        };
        let outcomes = results.iter().zip(checked).map(|(result, checked)| match checked {
            Err(outcome) => outcome,
            Ok(_) => {
                let fence = fence(result.claim);
                outcome(verdicts.get(&fence).copied(), published.remove(&fence))
            }
        });
        let outcomes: Vec<Outcome> = outcomes.collect();
        traced.end(&outcomes);
        Ok(outcomes)
    }

    /// Whether the bucket has what the builder says.
    async fn check(&self, live: &LiveClaim, result: &BuildResult) -> Result<Vec<signer::Output>, Outcome> {
        let mut outputs = Vec::with_capacity(result.outputs.len());
        for output in &result.outputs {
            outputs.push(self.check_output(live, result.claim.job, output).await?);
        }
        Ok(outputs)
    }

    async fn check_output(
        &self,
        live: &LiveClaim,
        job: i64,
        output: &Output,
    ) -> Result<signer::Output, Outcome> {
        let refused = |reason: String| Outcome::Refused { reason };
        let later = |error: &dyn std::error::Error| Outcome::Later { reason: sentence(error) };
        if !live
            .outputs
            .iter()
            .any(|(name, path)| *name == output.name && path.as_ref().is_none_or(|path| *path == output.path))
        {
            return Err(refused(format!(
                "{} is not the output {} of {}",
                output.path, output.name, live.drv_path
            )));
        }
        let path = store_path::parse(&output.path).map_err(|error| refused(error.to_string()))?;
        let key = layout::nar(&path, &output.nar_hash);
        if let Some(upload) = &output.file.upload {
            let parts: Vec<(String, Sha256)> =
                upload.parts.iter().map(|part| (part.etag.clone(), part.sha256)).collect();
            match self.bucket.complete_parts(&key, &upload.id, &parts).await {
                Ok(Written::New) => {}
                Ok(Written::Exists) => {
                    self.bucket.abort_parts(&key, &upload.id).await.map_err(|error| later(&error))?;
                }
                // Completed by a request whose answer was lost, or never begun: what is stored decides.
                Err(error) if !error.is_transient() => {}
                Err(error) => return Err(later(&error)),
            }
        }
        let stored = self.bucket.head(&key).await.map_err(|error| later(&error))?;
        let again = || Outcome::Again { reason: format!("{key} is not stored, or not as said") };
        let stored = stored.ok_or_else(again)?;
        let mut file = (output.file.bytes.sha256.0.to_vec(), output.file.bytes.size);
        if !is_said(&stored, &output.file) {
            let recorded = self.recorded_file(&output.path, output.nar_hash, Some(job), &stored).await;
            file = recorded.map_err(|error| later(&error))?.ok_or_else(again)?;
        }
        Ok(signer::Output {
            name: output.name.clone(),
            path: output.path.clone(),
            nar_hash: output.nar_hash.0.to_vec(),
            nar_size: i64::try_from(output.nar_size)
                .map_err(|_| refused("a NAR that large cannot be".into()))?,
            references: output.references.clone(),
            file_hash: file.0,
            file_size: i64::try_from(file.1).map_err(|_| refused("a file that large cannot be".into()))?,
            content_address: output.ca.clone(),
            made_by: None,
        })
    }
}

/// Whether the object is what the builder said it sent, as the server saw it.
fn is_said(stored: &Stored, file: &StoredFile) -> bool {
    let checksum = match &file.upload {
        None => Checksum::Whole(file.bytes.sha256),
        Some(upload) => Checksum::of_parts(&upload.parts.iter().map(|part| part.sha256).collect::<Vec<_>>()),
    };
    stored.size == file.bytes.size && stored.checksum == checksum
}

fn outcome(verdict: Option<Verdict>, published: Option<Result<(), SignerError>>) -> Outcome {
    match (verdict, published) {
        (Some(Verdict::Accepted), Some(Ok(()))) => Outcome::Published,
        (Some(Verdict::Adopted), Some(Ok(()))) => Outcome::Adopted,
        (Some(Verdict::Accepted | Verdict::Adopted), Some(Err(error))) => {
            Outcome::Later { reason: sentence(&error) }
        }
        // Accepted, and another signer has finished it since.
        (Some(Verdict::Accepted), None) => Outcome::Published,
        (Some(Verdict::Adopted), None) => Outcome::Adopted,
        (Some(Verdict::Incomplete), _) => Outcome::Refused {
            reason: "an output is missing, foreign, or not where the derivation says".into(),
        },
        (Some(Verdict::Conflict), _) => Outcome::Refused {
            reason: "some outputs are published with other contents and some not at all: \
                     publishing these would mix two builds"
                .into(),
        },
        (Some(Verdict::Busy), _) => Outcome::Later { reason: BUSY.into() },
        (Some(Verdict::Stale) | None, _) => Outcome::Stale,
    }
}
