//! Looks at the repositories of projects, so that a push is found that nobody told of. Evaluators take turns: the queue gives each
//! look to one of them.

use std::time::Duration;

use harmonia_queue::branches::{self, Poll};
use harmonia_service::sentence::sentence;
use tokio::time::{Instant, sleep};

use crate::child::Bounds;
use crate::credentials::Credential;
use crate::git;
use crate::nix::Workplace;
use crate::run::Evaluator;
use crate::source::{Source, SourceError};

/// How often the queue is asked whether it is time for a look.
const ASK: Duration = Duration::from_secs(5);
/// Less than the two minutes for which nobody else looks.
const PATIENCE: Duration = Duration::from_secs(60);
/// git needs little to list a branch.
const MEMORY: u64 = 1 << 30;

impl Evaluator {
    /// One look after the other, for ever.
    pub(crate) async fn poll(&self) {
        loop {
            match branches::claim_poll(&self.db).await {
                Ok(Some(poll)) => self.look(&poll).await,
                Ok(None) => sleep(ASK).await,
                Err(error) => {
                    tracing::debug!(error = sentence(&error), "no repository can be looked at");
                    sleep(ASK).await;
                }
            }
        }
    }

    async fn look(&self, poll: &Poll) {
        let seen = self.head(poll).await;
        if let Err(error) = &seen {
            tracing::info!(project = poll.project, error, "the repository cannot be looked at");
        }
        let seen =
            seen.as_ref().map(|(branch, commit)| (branch.as_str(), commit.as_str())).map_err(String::as_str);
        match branches::polled(&self.db, poll, seen).await {
            Ok(Some(evaluation)) => tracing::info!(project = poll.project, evaluation, "a push was found"),
            Ok(None) => {}
            Err(error) => tracing::warn!(
                project = poll.project,
                error = sentence(&error),
                "what was seen cannot be said"
            ),
        }
    }

    async fn head(&self, poll: &Poll) -> Result<(String, String), String> {
        let source = Source::parse(&poll.url, None).map_err(|error| error.to_string())?;
        let local = source.local_path();
        if local.is_some() && !self.config.local_sources {
            return Err(SourceError::Local(poll.url.clone()).to_string());
        }
        let name = format!("poll-{}", poll.project_id);
        // Its own user: an evaluation's children are of another.
        let worker = self.config.workers;
        let made = Workplace::make(&self.config, &self.sandbox, &name, worker, local.as_deref());
        let mut place = made.map_err(|error| format!("the evaluator has no place to work: {error}"))?;
        if let Some(name) = &poll.credential {
            let credential = Credential::load(self.config.credentials.as_deref(), name);
            let lent = place.lend(credential.map_err(|error| error.to_string())?);
            lent.map_err(|error| format!("the credential cannot be lent: {error}"))?;
        }
        let bounds = Bounds { until: Instant::now() + PATIENCE, memory: MEMORY };
        let head =
            git::head(&place, &poll.url, poll.branch.as_deref(), self.config.local_sources, bounds).await;
        head.map_err(|error| error.to_string())
    }
}
