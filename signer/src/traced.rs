//! The signer's part of a build's trace: what it does about a result, within what the builder calls publishing.

use std::collections::HashMap;

use harmonia_queue::Fence;
use harmonia_queue::signer::LiveClaim;
use harmonia_service::protocol::{BuildResult, Outcome};
use harmonia_service::trace::{Open, PUBLISH, Tracer};

use crate::count::word;
use crate::slots::fence;

/// An open span for each result of a request. Those that nobody claims have no derivation, hence no trace.
pub struct Traced(Vec<Option<Open>>);

impl Traced {
    pub fn begin(tracer: &Tracer, claims: &HashMap<Fence, LiveClaim>, results: &[BuildResult]) -> Self {
        let open = |result: &BuildResult| {
            let live = claims.get(&fence(result.claim))?;
            let trace = tracer.attempt(result.claim.job, result.claim.attempt, &live.drv_path);
            Some(trace.within(PUBLISH, "sign"))
        };
        Self(results.iter().map(open).collect())
    }

    /// Does a step that all of them share.
    pub async fn during<T>(&self, step: &'static str, work: impl Future<Output = T>) -> T {
        let _steps: Vec<Open> = self.0.iter().flatten().map(|open| open.part(step)).collect();
        work.await
    }

    /// What became of each.
    pub fn end(self, outcomes: &[Outcome]) {
        for (open, outcome) in self.0.into_iter().zip(outcomes) {
            let Some(mut open) = open else { continue };
            open.say("harmonia_ci.outcome", word(outcome));
            if let Outcome::Again { reason } | Outcome::Refused { reason } | Outcome::Later { reason } =
                outcome
            {
                open.fail(reason);
            }
        }
    }
}
