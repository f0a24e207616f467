//! Evaluations: waiting for an evaluator, claimed by one, and as people see them.

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::listen::{Channel, notify};
use crate::{Db, Result};

/// An evaluation that somebody asks for.
#[derive(Debug, Clone, Default)]
pub struct Request<'a> {
    /// Whose.
    pub project: &'a str,
    /// A directory, a git URL, a flake reference.
    pub source: &'a str,
    /// The branch it belongs to.
    pub branch: Option<&'a str>,
    /// Which commit, if that is known.
    pub commit: Option<&'a str>,
    /// A change from outside.
    pub untrusted: bool,
    /// Which attributes; none: what the source offers by default.
    pub attrs: &'a [String],
}

/// Puts an evaluation into the queue. Answers its number.
pub async fn queue(db: &Db, request: &Request<'_>) -> Result<i64> {
    let query = sqlx::query("SELECT ci.create_evaluation($1, $2, $3, $4, $5, $6, true)")
        .bind(request.project)
        .bind(request.source)
        .bind(request.branch)
        .bind(request.commit)
        .bind(i16::from(request.untrusted))
        .bind(request.attrs);
    let evaluation: i64 = db.value(query).await?;
    tell(db, evaluation).await;
    Ok(evaluation)
}

/// Puts the same into the queue once more: what was pushed, at its commit; anything else, as its source is now. Answers its number.
pub async fn repeat(db: &Db, id: i64) -> Result<i64> {
    let evaluation: i64 = db.value(sqlx::query("SELECT ci.repeat_evaluation($1)").bind(id)).await?;
    tell(db, evaluation).await;
    Ok(evaluation)
}

/// Whoever evaluates or looks hears of it now instead of at its next look.
pub async fn tell(db: &Db, evaluation: i64) {
    if let Err(error) = notify(db, Channel::Evaluation, &evaluation.to_string()).await {
        tracing::debug!(%error, "no hint was sent; everybody polls");
    }
}

/// An evaluation to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// Its number.
    pub id: i64,
    /// How often it was begun. Every word about it carries this.
    pub attempt: i32,
    /// Whose.
    pub project: String,
    /// What to evaluate.
    pub source: String,
    /// Its branch.
    pub branch: Option<String>,
    /// Its commit, if that is known.
    pub commit: Option<String>,
    /// A change from outside.
    pub untrusted: bool,
    /// Which attributes; none: what the source offers by default.
    pub attrs: Vec<String>,
}

/// Takes the next evaluation, for a minute: [`keep`] makes it longer.
pub async fn claim(db: &Db, evaluator: &str) -> Result<Option<Claimed>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.claim_evaluation($1)").bind(evaluator)).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Claimed {
        id: row.try_get("id")?,
        attempt: row.try_get("attempt")?,
        project: row.try_get("project")?,
        source: row.try_get("source")?,
        branch: row.try_get("branch")?,
        commit: row.try_get("commit_id")?,
        untrusted: row.try_get::<i16, _>("tier")? != 0,
        attrs: row.try_get("attrs")?,
    }))
}

/// Says that it goes on, and which commit it is. False: it was cancelled, or is somebody else's: stop.
pub async fn keep(db: &Db, evaluation: i64, attempt: i32, commit: Option<&str>) -> Result<bool> {
    let query = sqlx::query("SELECT ci.keep_evaluation($1, $2, $3)");
    db.value(query.bind(evaluation).bind(attempt).bind(commit)).await
}

/// Everything that this evaluator had claimed is anybody's again; `kindly` without costing an attempt.
pub async fn release(db: &Db, evaluator: &str, kindly: bool) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.release_evaluations($1, $2)").bind(evaluator).bind(kindly)).await
}

/// An evaluation as people see it. Moments are in UTC, as RFC 3339 writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evaluation {
    /// Its number.
    pub id: i64,
    /// Whose.
    pub project: String,
    /// What is evaluated.
    pub source: String,
    /// Its branch.
    pub branch: Option<String>,
    /// Its commit, once that is known.
    pub commit: Option<String>,
    /// The attributes that were asked for; none: the source's default.
    pub attrs: Vec<String>,
    /// A change from outside.
    pub untrusted: bool,
    /// How far the evaluation itself is.
    pub stage: Stage,
    /// Why it was aborted or cancelled.
    pub error: Option<String>,
    /// When it was asked for,
    pub created_at: String,
    /// was begun for the last time,
    pub started_at: Option<String>,
    /// and was evaluated, or ended otherwise.
    pub ended_at: Option<String>,
    /// It is kept for good.
    pub pinned: bool,
    /// Its builds.
    pub builds: Counts,
    /// How many attributes it has,
    pub attributes: i64,
    /// and how many of them could not be evaluated.
    pub attribute_errors: i64,
}

/// How far an evaluation is, its builds apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It waits for an evaluator.
    Queued,
    /// An evaluator is at it.
    Evaluating,
    /// Its graph is known.
    Complete,
    /// It could not be evaluated.
    Aborted,
    /// A person or a newer push ended it.
    Cancelled,
}

/// Builds by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Waiting for inputs, for a retry or for a builder.
    pub waiting: i64,
    /// On a builder.
    pub running: i64,
    /// Built and published.
    pub succeeded: i64,
    /// Somebody else had them.
    pub cached: i64,
    /// Failed,
    pub failed: i64,
    /// or not tried, because of one that failed.
    pub dep_failed: i64,
    /// Ended by a person.
    pub cancelled: i64,
}

/// In one word, what has become of an evaluation and its builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It waits for an evaluator.
    Queued,
    /// An evaluator is at it; builds may have begun.
    Evaluating,
    /// Its graph is known, builds are left.
    Building,
    /// All is built.
    Succeeded,
    /// Something could not be evaluated or built.
    Failed,
    /// Ended by a person or a newer push.
    Cancelled,
}

impl Status {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Evaluating => "evaluating",
            Self::Building => "building",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether nothing more will come of it by itself.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

impl Evaluation {
    /// What has become of it.
    pub fn status(&self) -> Status {
        let builds = &self.builds;
        match self.stage {
            Stage::Queued => Status::Queued,
            Stage::Evaluating => Status::Evaluating,
            Stage::Aborted => Status::Failed,
            Stage::Cancelled => Status::Cancelled,
            Stage::Complete if builds.waiting + builds.running > 0 => Status::Building,
            Stage::Complete
                if builds.failed + builds.dep_failed + builds.cancelled + self.attribute_errors > 0 =>
            {
                Status::Failed
            }
            Stage::Complete => Status::Succeeded,
        }
    }
}

/// Which evaluations, newest first.
#[derive(Debug, Clone, Default)]
pub struct Filter<'a> {
    /// Of this project.
    pub project: Option<&'a str>,
    /// Of this branch.
    pub branch: Option<&'a str>,
    /// Older than this one.
    pub before: Option<i64>,
}

const COLUMNS: &str = "e.id, p.name AS project, e.source, e.branch, e.commit_id, e.attrs, e.tier, e.state::text AS state, e.error, e.pinned,
    ci.moment(e.created_at) AS created_at, ci.moment(e.started_at) AS started_at, ci.moment(e.ended_at) AS ended_at,
    b.waiting, b.running, b.succeeded, b.cached, b.failed, b.dep_failed, b.cancelled, a.attributes, a.attribute_errors
  FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id
  CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE j.state = 'open' AND r.job_id IS NULL) AS waiting, count(r.job_id) AS running,
      count(*) FILTER (WHERE j.state = 'succeeded') AS succeeded, count(*) FILTER (WHERE j.state = 'cached') AS cached,
      count(*) FILTER (WHERE j.state = 'failed') AS failed, count(*) FILTER (WHERE j.state = 'dep_failed') AS dep_failed,
      count(*) FILTER (WHERE j.state = 'cancelled') AS cancelled
    FROM ci.want w JOIN ci.job j ON j.id = w.job_id LEFT JOIN ci.running r ON r.job_id = w.job_id WHERE w.evaluation_id = e.id) b
  CROSS JOIN LATERAL (SELECT count(*) AS attributes, count(error) AS attribute_errors FROM ci.evaluation_attr t WHERE t.evaluation_id = e.id) a";

/// One evaluation.
pub async fn get(db: &Db, id: i64) -> Result<Option<Evaluation>> {
    let text = format!("SELECT {COLUMNS} WHERE e.id = $1");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(id)).await?;
    rows.first().map(read).transpose()
}

/// Evaluations, the newest first.
pub async fn list(db: &Db, filter: &Filter<'_>, limit: i64) -> Result<Vec<Evaluation>> {
    // Those of the page first: what is counted for each is not counted for the others.
    of(db, &numbers(db, filter, limit).await?).await
}

/// Only their numbers.
pub async fn numbers(db: &Db, filter: &Filter<'_>, limit: i64) -> Result<Vec<i64>> {
    let query = sqlx::query(
        "SELECT e.id FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id
         WHERE ($1::text IS NULL OR p.name = $1) AND ($2::text IS NULL OR e.branch = $2) AND ($3::bigint IS NULL OR e.id < $3)
         ORDER BY e.id DESC LIMIT $4",
    );
    db.column(query.bind(filter.project).bind(filter.branch).bind(filter.before).bind(limit)).await
}

/// The evaluations with these numbers, the newest first.
pub async fn of(db: &Db, ids: &[i64]) -> Result<Vec<Evaluation>> {
    let text = format!("SELECT {COLUMNS} WHERE e.id = ANY ($1) ORDER BY e.id DESC");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(ids)).await?;
    rows.iter().map(read).collect()
}

fn read(row: &PgRow) -> Result<Evaluation> {
    Ok(Evaluation {
        id: row.try_get("id")?,
        project: row.try_get("project")?,
        source: row.try_get("source")?,
        branch: row.try_get("branch")?,
        commit: row.try_get("commit_id")?,
        attrs: row.try_get("attrs")?,
        untrusted: row.try_get::<i16, _>("tier")? != 0,
        stage: match row.try_get("state")? {
            "queued" => Stage::Queued,
            "evaluating" => Stage::Evaluating,
            "complete" => Stage::Complete,
            "aborted" => Stage::Aborted,
            _ => Stage::Cancelled,
        },
        error: row.try_get("error")?,
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        ended_at: row.try_get("ended_at")?,
        pinned: row.try_get("pinned")?,
        builds: Counts {
            waiting: row.try_get("waiting")?,
            running: row.try_get("running")?,
            succeeded: row.try_get("succeeded")?,
            cached: row.try_get("cached")?,
            failed: row.try_get("failed")?,
            dep_failed: row.try_get("dep_failed")?,
            cancelled: row.try_get("cancelled")?,
        },
        attributes: row.try_get("attributes")?,
        attribute_errors: row.try_get("attribute_errors")?,
    })
}

/// An attribute of an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attribute {
    /// Its path.
    pub name: String,
    /// Its build,
    pub build: Option<i64>,
    /// how far that is,
    pub state: Option<String>,
    /// or Nix's own words.
    pub error: Option<String>,
}

/// The attributes of an evaluation by name, from the one after `after` on; `failed`: only those that could not be evaluated, or
/// that are not built and will not be by themselves.
pub async fn attributes(db: &Db, id: i64, after: &str, failed: bool, limit: i64) -> Result<Vec<Attribute>> {
    let query = sqlx::query(
        "SELECT a.attr, a.job_id, ci.state_of(j), a.error FROM ci.evaluation_attr a LEFT JOIN ci.job j ON j.id = a.job_id
         WHERE a.evaluation_id = $1 AND a.attr > $2 AND (NOT $3 OR a.error IS NOT NULL OR j.state IN ('failed', 'dep_failed', 'cancelled'))
         ORDER BY a.attr LIMIT $4",
    );
    let rows = db.rows(query.bind(id).bind(after).bind(failed).bind(limit)).await?;
    rows.iter()
        .map(|row| {
            Ok(Attribute {
                name: row.try_get(0)?,
                build: row.try_get(1)?,
                state: row.try_get(2)?,
                error: row.try_get(3)?,
            })
        })
        .collect()
}

/// Builds of an evaluation that failed are tried again, first in line. Answers how many.
pub async fn rebuild_failed(db: &Db, id: i64) -> Result<i64> {
    let rebuilt = db.value(sqlx::query("SELECT ci.rebuild_failed($1)").bind(id)).await?;
    crate::forges::look_again(db, &[id]).await;
    Ok(rebuilt)
}

/// An evaluation is kept for good, or no longer. False: that was so before.
pub async fn pin(db: &Db, id: i64, pinned: bool) -> Result<bool> {
    let changed = db.value(sqlx::query("SELECT ci.pin($1, $2)").bind(id).bind(pinned)).await?;
    if changed {
        tell(db, id).await;
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(stage: Stage, builds: Counts, attribute_errors: i64) -> Evaluation {
        Evaluation {
            id: 1,
            project: "default".to_owned(),
            source: "/src".to_owned(),
            branch: None,
            commit: None,
            attrs: Vec::new(),
            untrusted: false,
            stage,
            error: None,
            created_at: String::new(),
            started_at: None,
            ended_at: None,
            pinned: false,
            builds,
            attributes: 3,
            attribute_errors,
        }
    }

    #[test]
    fn it_is_building_while_anything_is_open() {
        let builds = Counts { failed: 1, waiting: 1, ..Counts::default() };
        assert_eq!(evaluation(Stage::Complete, builds, 0).status(), Status::Building);
    }

    #[test]
    fn one_failure_of_any_kind_fails_it() {
        for builds in [
            Counts { failed: 1, ..Counts::default() },
            Counts { dep_failed: 1, ..Counts::default() },
            Counts { cancelled: 1, ..Counts::default() },
        ] {
            assert_eq!(evaluation(Stage::Complete, builds, 0).status(), Status::Failed);
        }
        assert_eq!(evaluation(Stage::Complete, Counts::default(), 1).status(), Status::Failed);
    }

    #[test]
    fn what_is_built_or_was_there_succeeds() {
        let builds = Counts { succeeded: 3, cached: 2, ..Counts::default() };
        assert_eq!(evaluation(Stage::Complete, builds, 0).status(), Status::Succeeded);
    }

    #[test]
    fn what_could_not_be_evaluated_failed_whatever_was_built() {
        let builds = Counts { waiting: 3, ..Counts::default() };
        assert_eq!(evaluation(Stage::Aborted, builds, 0).status(), Status::Failed);
    }
}
