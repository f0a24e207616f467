use harmonia_crds::Project;
use harmonia_crds::conditions::{READY, SYNCED, reason};
use harmonia_crds::project::{LastEvaluation, ProjectStatus};
use harmonia_queue::Error;
use harmonia_queue::mirror::ProjectCounts;
use harmonia_service::sentence::sentence;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::credentials::CredentialError;
use crate::conditions::{Finding, Truth, merge};
use crate::events::News;

/// How the mirror went.
#[derive(Debug)]
pub enum Outcome {
    /// The queue knows it.
    Done,
    /// It is to be left alone.
    Disabled,
    /// There is no database to ask.
    Away,
    /// The queue said no, or broke off.
    Failed(Error),
}

/// The conditions, as they are now.
pub fn findings(
    project: &Project,
    synced: &Outcome,
    counts: Option<&ProjectCounts>,
    unusable: Option<&CredentialError>,
) -> Vec<Finding> {
    let both = |truth, reason: &'static str, message: String| {
        vec![
            Finding::new(SYNCED, truth, reason, message.clone()),
            Finding::new(READY, truth, reason, message),
        ]
    };
    match synced {
        Outcome::Done => {
            vec![
                Finding::new(SYNCED, Truth::True, reason::SYNCED, "the queue knows the project"),
                unusable.map_or_else(|| ready(project, counts), unreadable),
            ]
        }
        Outcome::Disabled => {
            let message = "changes are not acted upon while ci.harmonia.dev/reconcile is disabled";
            vec![Finding::new(READY, Truth::False, reason::PAUSED, message)]
        }
        Outcome::Away => {
            both(Truth::Unknown, reason::DATABASE_UNREACHABLE, "the database cannot be reached".to_owned())
        }
        Outcome::Failed(error) => {
            let (truth, reason) = match error {
                Error::WrongState(_) => (Truth::False, reason::NAME_TAKEN),
                error if error.is_transient() => (Truth::Unknown, reason::DATABASE_UNREACHABLE),
                Error::NotLeader(_) => (Truth::Unknown, reason::DATABASE_UNREACHABLE),
                _ => (Truth::False, reason::INVALID_SPEC),
            };
            both(truth, reason, sentence(error))
        }
    }
}

/// Its code cannot be read.
fn unreadable(error: &CredentialError) -> Finding {
    let reason = match error {
        CredentialError::Missing(_) => reason::SECRET_MISSING,
        CredentialError::NoKey(_) | CredentialError::Form { .. } | CredentialError::Api { .. } => {
            reason::INVALID_SECRET
        }
    };
    Finding::new(READY, Truth::False, reason, sentence(error))
}

fn ready(project: &Project, counts: Option<&ProjectCounts>) -> Finding {
    let missing = counts.map(|counts| counts.missing_pools.join(", ")).unwrap_or_default();
    if !missing.is_empty() {
        let message = format!("waits for a BuilderPool that does not exist: {missing}");
        return Finding::new(READY, Truth::False, reason::UNKNOWN_POOL, message);
    }
    if project.spec.paused {
        return Finding::new(
            READY,
            Truth::True,
            reason::PAUSED,
            "nothing is evaluated or built while spec.paused is true",
        );
    }
    Finding::new(READY, Truth::True, reason::SYNCED, "what is pushed is evaluated and built")
}

/// The status that follows on the one that it has. Numbers that nobody could ask for stay as they were.
pub fn status(
    project: &Project,
    found: &[Finding],
    counts: Option<&ProjectCounts>,
    now: Timestamp,
) -> ProjectStatus {
    let before = project.status.clone().unwrap_or_default();
    let generation = project.metadata.generation;
    let conditions = merge(&before.conditions, found, generation, now);
    let Some(counts) = counts else {
        return ProjectStatus { observed_generation: generation, conditions, ..before };
    };
    ProjectStatus {
        last_evaluation: counts.last.as_ref().map(|last| LastEvaluation {
            id: last.id,
            commit: last.commit.clone(),
            status: last.status.clone(),
            time: Time(last.time.parse().unwrap_or_default()),
        }),
        queued: Some(whole(counts.queued)),
        running: Some(whole(counts.running)),
        used_share: Some(percent(counts.used_share)),
        observed_generation: generation,
        conditions,
    }
}

fn whole(number: i64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn percent(share: f64) -> i32 {
    (share.clamp(0.0, 1.0) * 100.0).round() as i32
}

/// What is told about a condition that has changed.
pub fn event(finding: &Finding) -> News {
    News {
        warning: finding.truth == Truth::False,
        reason: finding.reason,
        action: finding.kind,
        note: finding.message.clone(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use harmonia_queue::mirror;
    use serde_json::json;

    use super::*;
    use crate::project::counts::tests::counts;
    use crate::project::validate::tests::project;

    fn told(found: &[Finding], kind: &str) -> (Truth, &'static str) {
        let finding = found.iter().find(|finding| finding.kind == kind).unwrap();
        (finding.truth, finding.reason)
    }

    #[test]
    fn what_the_queue_knows_is_synced_and_ready() {
        let found = findings(&project(json!({})), &Outcome::Done, Some(&counts("ci/dotfiles", 0)), None);
        assert_eq!(told(&found, SYNCED), (Truth::True, "Synced"));
        assert_eq!(told(&found, READY), (Truth::True, "Synced"));
    }

    #[test]
    fn a_pool_that_does_not_exist_is_named_and_waited_for() {
        let counts = ProjectCounts { missing_pools: vec!["ci/x86".to_owned()], ..counts("ci/dotfiles", 0) };
        let found = findings(&project(json!({})), &Outcome::Done, Some(&counts), None);
        assert_eq!(told(&found, SYNCED), (Truth::True, "Synced"));
        assert_eq!(told(&found, READY), (Truth::False, "UnknownPool"));
        assert!(found[1].message.contains("ci/x86"), "{}", found[1].message);
    }

    #[test]
    fn a_secret_that_is_missing_is_named_and_waited_for() {
        let missing = CredentialError::Missing("reader".to_owned());
        let found = findings(&project(json!({})), &Outcome::Done, None, Some(&missing));
        assert_eq!(told(&found, SYNCED), (Truth::True, "Synced"));
        assert_eq!(told(&found, READY), (Truth::False, "SecretMissing"));
        assert!(found[1].message.contains("no Secret reader"), "{}", found[1].message);
    }

    #[test]
    fn a_paused_project_is_ready_and_says_so() {
        let found = findings(&project(json!({"paused": true})), &Outcome::Done, None, None);
        assert_eq!(told(&found, READY), (Truth::True, "Paused"));
    }

    #[test]
    fn a_name_that_people_took_is_told_in_their_words() {
        let refused = Outcome::Failed(Error::WrongState("there is a project ci/dotfiles".to_owned()));
        let found = findings(&project(json!({})), &refused, None, None);
        assert_eq!(told(&found, SYNCED), (Truth::False, "NameTaken"));
        assert_eq!(found[1].message, "there is a project ci/dotfiles");
    }

    #[test]
    fn a_database_that_is_away_is_nobodys_fault() {
        let found = findings(&project(json!({})), &Outcome::Away, None, None);
        assert_eq!(told(&found, READY), (Truth::Unknown, "DatabaseUnreachable"));
    }

    #[test]
    fn numbers_that_nobody_could_ask_for_stay() {
        let mut project = project(json!({}));
        project.status = Some(ProjectStatus { queued: Some(7), ..ProjectStatus::default() });
        let status = status(&project, &[], None, Timestamp::UNIX_EPOCH);
        assert_eq!((status.queued, status.observed_generation), (Some(7), Some(2)));
    }

    #[test]
    fn the_newest_evaluation_is_shown() {
        let last = mirror::LastEvaluation {
            id: 7,
            commit: Some("abc".to_owned()),
            status: "building".to_owned(),
            time: "2026-01-01T00:00:00Z".to_owned(),
        };
        let counts = ProjectCounts { last: Some(last), used_share: 0.125, ..counts("ci/dotfiles", 3) };
        let status = status(&project(json!({})), &[], Some(&counts), Timestamp::UNIX_EPOCH);
        let shown = status.last_evaluation.unwrap();
        assert_eq!(
            (shown.id, shown.status.as_str(), shown.time.0.to_string().as_str()),
            (7, "building", "2026-01-01T00:00:00Z")
        );
        assert_eq!((status.queued, status.used_share), (Some(3), Some(13)));
    }
}
