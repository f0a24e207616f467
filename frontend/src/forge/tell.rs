//! The outbox: takes commits that are due, looks at their evaluations, and tells forges what they were not told yet.
//!
//! A commit is one frontend's for a minute. What was told is written down at once after the forge's answer: who dies between
//! the two makes the next one say that one status once more, and nothing else is said twice.

use std::convert::Infallible;
use std::time::Duration;

use futures::future::join_all;
use harmonia_queue::evaluations::{self, Evaluation};
use harmonia_queue::forges::{self, Report};
use harmonia_service::sentence::sentence;
use thiserror::Error;

use super::call::ForgeError;
use super::words::{First, Status, is_over, statuses, waiting};
use super::{Forges, Known};
use crate::escape::escape;

/// How often the outbox is looked into.
const EVERY: Duration = Duration::from_secs(1);
/// The same commit is looked at so often: changes in between are told as one.
const DEBOUNCE: Duration = Duration::from_secs(5);
/// All that is said of a commit under one lease; two answers fit in. The lease is 60 s long.
const PATIENCE: Duration = Duration::from_secs(30);
/// What failed may be mended by the evaluation of another commit, and nobody tells. After a day hardly anybody waits for that.
const FAILED: Duration = Duration::from_secs(600);
/// The longest pause after failures.
const LONGEST: Duration = Duration::from_secs(3600);

/// Why a forge was not told.
#[derive(Debug, Error)]
enum TellError {
    #[error(transparent)]
    Forge(#[from] ForgeError),
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
    #[error("the forge took longer than {} s", PATIENCE.as_secs())]
    Slow,
    #[error("somebody else tells it")]
    Lost,
}

/// For ever, each forge by itself: one that does not answer holds up no other.
pub async fn run(forges: &Forges) -> Infallible {
    join_all(forges.known.values().map(|known| follow(forges, known))).await;
    std::future::pending().await
}

/// One request at a time, as forges want it: so that whoever dies leaves one answer at most that nobody wrote down.
async fn follow(forges: &Forges, known: &Known) -> Infallible {
    let instance = [known.instance.clone()];
    loop {
        match forges::due_reports(&forges.db, &instance, 1).await.map(|mut due| due.pop()) {
            Ok(Some(report)) => {
                settle(forges, known, report).await;
                continue;
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(error = sentence(&error), "the outbox cannot be looked into"),
        }
        tokio::time::sleep(EVERY.mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

/// Tells what there is to tell of a commit, and says when to look again.
async fn settle(forges: &Forges, known: &Known, report: Report) {
    let told = match tokio::time::timeout(PATIENCE, tell(forges, known, &report)).await {
        Ok(told) => told,
        Err(_) => Err(TellError::Slow),
    };
    let ended = match told {
        Ok(next) => forges::end_report(&forges.db, &report, next, None).await,
        Err(TellError::Lost) => return,
        Err(error) => {
            if let TellError::Forge(ForgeError::Limited(wait)) = error {
                forges.counts.report(&known.name, "limited");
                let _ = forges::pause(&forges.db, &known.instance, wait).await;
            } else {
                forges.counts.report(&known.name, "failed");
            }
            let why = sentence(&error);
            let (commit, repository) = (&report.commit, &report.repository);
            tracing::warn!(
                forge = known.name,
                ?repository,
                commit,
                error = why,
                "a status could not be told"
            );
            forges::end_report(&forges.db, &report, Some(back_off(report.failures)), Some(&why)).await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error = sentence(&error), "a commit is not given back; its lease ends");
    }
}

/// Answers when to look again.
async fn tell(forges: &Forges, known: &Known, report: &Report) -> Result<Option<Duration>, TellError> {
    let project = report.shared.then_some(report.name.as_str());
    let Some(id) = report.evaluation else {
        let page = format!("{}/projects/{}", forges.url, escape(&report.name));
        tell_both(forges, known, report, waiting(project), &page).await?;
        return Ok(None);
    };
    let Some(evaluation) = evaluations::get(&forges.db, id).await? else { return Ok(None) };
    let both = statuses(project, &evaluation, &first(forges, &evaluation).await?);
    tell_both(forges, known, report, both, &format!("{}/evals/{id}", forges.url)).await?;
    Ok(match is_over(&evaluation) {
        None => Some(DEBOUNCE),
        Some(false) if !report.is_old => Some(FAILED),
        Some(_) => None,
    })
}

/// What the forge was not told yet, of the evaluation and of its builds.
async fn tell_both(
    forges: &Forges,
    known: &Known,
    report: &Report,
    both: [Status; 2],
    page: &str,
) -> Result<(), TellError> {
    let [eval, build] = both;
    for (status, before, is_build) in [(eval, &report.told_eval, false), (build, &report.told_build, true)] {
        let words = status.words(report.evaluation);
        if before.as_ref() != Some(&words) {
            say(forges, known, report, &status, page).await?;
            if !forges::told(&forges.db, report, is_build, &words).await? {
                return Err(TellError::Lost);
            }
        }
    }
    Ok(())
}

async fn say(
    forges: &Forges,
    known: &Known,
    report: &Report,
    status: &Status,
    page: &str,
) -> Result<(), TellError> {
    known.forge.report(&report.repository, &report.commit, status, page).await?;
    forges.counts.report(&known.name, "told");
    Ok(())
}

/// Only what failed is asked for the name of the first.
async fn first(forges: &Forges, evaluation: &Evaluation) -> Result<First, TellError> {
    let (id, over) = (evaluation.id, is_over(evaluation).is_some());
    let error = match evaluation.attribute_errors {
        0 => None,
        _ => forges::first_error(&forges.db, id).await?,
    };
    let failure = match evaluation.builds.failed {
        1.. if over => forges::first_failure(&forges.db, id).await?,
        _ => None,
    };
    Ok(First { error, failure })
}

/// 5 s, 10 s, 20 s, … an hour; not all at once.
fn back_off(failures: i32) -> Duration {
    let doubled = DEBOUNCE.saturating_mul(1 << failures.clamp(0, 10));
    doubled.min(LONGEST).mul_f64(rand::random_range(0.8..1.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_longer_each_time_but_not_for_ever() {
        let seconds: Vec<u64> = [0, 3, 9, 10, 1000, i32::MAX].map(|n| back_off(n).as_secs()).into();
        for (found, expected) in seconds.iter().zip([5, 40, 2560, 3600, 3600, 3600]) {
            assert!((expected * 7 / 10..=expected * 13 / 10).contains(found), "{seconds:?}");
        }
    }
}
