//! What forges tell us by webhooks, and what they are told: which projects a repository has, pull requests from outside, the
//! outbox of statuses, and pushes that nobody told us of.
//!
//! A forge is known by its instance: `https://github.com`, or the address of another without a slash at its end.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::branches::PullRequests;
use crate::{Db, Result};

/// A repository of a forge.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Repository {
    /// A person or an organisation.
    pub owner: String,
    /// Its name.
    pub name: String,
}

/// A project whose code is in a repository of a forge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Follower {
    /// Its number.
    pub id: i32,
    /// Its name.
    pub name: String,
    /// What git clones from.
    pub url: String,
    /// Only this branch is built. None: all are.
    pub branch: Option<String>,
    /// What is built; none: what the source offers by default.
    pub attrs: Vec<String>,
    /// Whose pull requests are built without a person's consent.
    pub pull_requests: PullRequests,
}

/// Where a project's code is: a repository of a forge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The forge.
    pub instance: String,
    /// The repository.
    pub repository: Repository,
}

/// Where the code of an evaluation's project is; in no forge: none.
pub async fn place_of_evaluation(db: &Db, evaluation: i64) -> Result<Vec<Option<Place>>> {
    let query = sqlx::query(
        "SELECT ci.instance_of(s), s.owner, s.repo FROM ci.evaluation e LEFT JOIN ci.project_source s ON s.project_id = e.project_id WHERE e.id = $1",
    );
    places(db, query.bind(evaluation)).await
}

/// The same of every project that wants a build: of each, or of so many that nobody has them all.
pub async fn places_of_build(db: &Db, build: i64) -> Result<Vec<Option<Place>>> {
    let query = sqlx::query(
        "SELECT DISTINCT ci.instance_of(s), s.owner, s.repo FROM ci.want w
         JOIN ci.evaluation e ON e.id = w.evaluation_id AND e.state IN ('evaluating', 'complete')
         LEFT JOIN ci.project_source s ON s.project_id = e.project_id WHERE w.job_id = $1 ORDER BY 1 NULLS FIRST, 2, 3 LIMIT 50",
    );
    places(db, query.bind(build)).await
}

async fn places(
    db: &Db,
    query: sqlx::query::Query<'_, sqlx::Postgres, sqlx::postgres::PgArguments>,
) -> Result<Vec<Option<Place>>> {
    let rows = db.rows(query).await?;
    rows.iter()
        .map(|row| {
            let (instance, owner, name) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            let found: (Option<String>, Option<String>, Option<String>) = (instance, owner, name);
            Ok(match found {
                (Some(instance), Some(owner), Some(name)) => {
                    Some(Place { instance, repository: Repository { owner, name } })
                }
                _ => None,
            })
        })
        .collect()
}

/// The projects of a repository. Forges do not tell upper from lower case.
pub async fn followers(db: &Db, instance: &str, repository: &Repository) -> Result<Vec<Follower>> {
    let query = sqlx::query(
        "SELECT p.id, p.name, s.url, s.branch, s.attrs, s.pull_requests
         FROM ci.project_source s JOIN ci.project p ON p.id = s.project_id
         WHERE ci.instance_of(s) = $1 AND lower(s.owner) = lower($2) AND lower(s.repo) = lower($3) AND p.deleted_at IS NULL
         ORDER BY p.id",
    );
    let rows = db.rows(query.bind(instance).bind(&repository.owner).bind(&repository.name)).await?;
    rows.iter().map(follower).collect()
}

fn follower(row: &PgRow) -> Result<Follower> {
    Ok(Follower {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        url: row.try_get("url")?,
        branch: row.try_get("branch")?,
        attrs: row.try_get("attrs")?,
        pull_requests: match row.try_get("pull_requests")? {
            "All" => PullRequests::All,
            "None" => PullRequests::None,
            _ => PullRequests::Collaborators,
        },
    })
}

/// The repositories of a forge that projects have, those of the newest projects first.
pub async fn repositories(db: &Db, instance: &str, limit: i64) -> Result<Vec<Repository>> {
    let query = sqlx::query(
        "SELECT s.owner, s.repo FROM ci.project_source s JOIN ci.project p ON p.id = s.project_id
         WHERE ci.instance_of(s) = $1 AND p.deleted_at IS NULL GROUP BY 1, 2 ORDER BY max(p.id) DESC LIMIT $2",
    );
    let rows = db.rows(query.bind(instance).bind(limit)).await?;
    rows.iter().map(|row| Ok(Repository { owner: row.try_get(0)?, name: row.try_get(1)? })).collect()
}

/// Whether something with one of these keys was dealt with before.
pub async fn delivered(db: &Db, forge: &str, keys: &[String]) -> Result<bool> {
    let query = sqlx::query("SELECT EXISTS (SELECT FROM ci.delivery WHERE forge = $1 AND key = ANY ($2))")
        .bind(forge);
    db.value(query.bind(keys)).await
}

/// It was dealt with.
pub async fn keep_delivery(db: &Db, forge: &str, keys: &[String]) -> Result<()> {
    db.row(sqlx::query("SELECT ci.keep_delivery($1, $2)").bind(forge).bind(keys)).await.map(drop)
}

/// Forgets deliveries that no forge makes again.
pub async fn prune_deliveries(db: &Db) -> Result<()> {
    db.row(sqlx::query("SELECT ci.prune_deliveries()")).await.map(drop)
}

/// A branch is gone; `known`: only if that is still its head. Answers how many evaluations were cancelled.
pub async fn end_branch(
    db: &Db,
    project: i32,
    branch: &str,
    reason: &str,
    known: Option<&str>,
) -> Result<i64> {
    let query = sqlx::query("SELECT ci.end_branch($1, $2, $3, $4)").bind(project).bind(branch);
    db.value(query.bind(reason).bind(known)).await
}

/// What names a pull request from outside as a branch: the ref under which forges keep it in the repository that it is for.
pub fn pull_request_ref(number: i32) -> String {
    format!("refs/pull/{number}/head")
}

/// The head of a pull request from outside; a new one takes the consent for the old one with it.
pub async fn see_pull_request(db: &Db, project: i32, number: i32, commit: &str) -> Result<()> {
    let query = sqlx::query("SELECT ci.see_pull_request($1, $2, $3, $4)").bind(project).bind(number);
    db.row(query.bind(pull_request_ref(number)).bind(commit)).await.map(drop)
}

/// A comment that lets the head of a pull request be built.
#[derive(Debug, Clone, Copy)]
pub struct Consent<'a> {
    /// The head that was seen.
    pub commit: &'a str,
    /// The comment's number, which forges count upwards.
    pub comment: i64,
    /// Whose it is.
    pub by: &'a str,
    /// When it was written, in seconds of the database's clock; None: it names the whole commit.
    pub written: Option<f64>,
}

/// Lets one head be built. False: it is not the head that is known, or was not when the comment was written, or the comment was used
/// before.
pub async fn allow_pull_request(db: &Db, project: i32, number: i32, consent: &Consent<'_>) -> Result<bool> {
    let query =
        sqlx::query("SELECT ci.allow_pull_request($1, $2, $3, $4, $5, to_timestamp($6))").bind(project);
    let query = query.bind(number).bind(consent.commit).bind(consent.comment).bind(consent.by);
    db.value(query.bind(consent.written)).await
}

/// The head of a pull request, as far as we were told.
pub async fn pull_request_head(db: &Db, project: i32, number: i32) -> Result<Option<String>> {
    let query = sqlx::query("SELECT commit_id FROM ci.pull_request WHERE project_id = $1 AND number = $2");
    Ok(db.column(query.bind(project).bind(number)).await?.pop())
}

/// What the database's clock shows, in seconds since 1970: that of a forge may be another.
pub async fn now(db: &Db) -> Result<f64> {
    db.value(sqlx::query("SELECT extract(epoch FROM ci.clock())::float8")).await
}

/// A head of a pull request waits for a collaborator: its forge shall hear so.
pub async fn wait_for_consent(db: &Db, project: i32, commit: &str) -> Result<()> {
    db.row(sqlx::query("SELECT ci.wait_for_consent($1, $2)").bind(project).bind(commit)).await.map(drop)
}

/// Open ones that nobody has seen for a day, a few at a time: they may have been closed without a word.
pub async fn doubtful_pull_requests(db: &Db, project: i32) -> Result<Vec<i32>> {
    let query = sqlx::query(
        "SELECT number FROM ci.pull_request WHERE project_id = $1 AND seen_at < ci.clock() - interval '1 day'
         ORDER BY seen_at LIMIT 10",
    );
    let rows = db.rows(query.bind(project)).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// One of them is.
pub async fn still_open(db: &Db, project: i32, number: i32) -> Result<()> {
    let query = sqlx::query("SELECT ci.still_open($1, $2)").bind(project).bind(number);
    db.row(query).await.map(drop)
}

/// It is closed. Answers how many evaluations were cancelled.
pub async fn close_pull_request(db: &Db, project: i32, number: i32) -> Result<i64> {
    let query = sqlx::query("SELECT ci.close_pull_request($1, $2, $3)").bind(project).bind(number);
    db.value(query.bind(pull_request_ref(number))).await
}

/// A commit about which its forge may have to be told something, for a minute and no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Whose.
    pub project: i32,
    /// Which.
    pub commit: String,
    /// The newest evaluation of it; none: it waits for somebody's consent.
    pub evaluation: Option<i64>,
    /// Goes with every word about it; that of whose minute is over changes nothing.
    pub turn: i64,
    /// How many reasons to look there were.
    pub asked: i64,
    /// How often in a row the forge could not be told.
    pub failures: i32,
    /// The forge.
    pub instance: String,
    /// The repository.
    pub repository: Repository,
    /// What the forge was told of the evaluation,
    pub told_eval: Option<String>,
    /// and of the builds.
    pub told_build: Option<String>,
    /// The name of the project.
    pub name: String,
    /// Another project has the same repository.
    pub shared: bool,
    /// It was evaluated more than a day ago.
    pub is_old: bool,
}

/// Takes up to `limit` commits of these forges that are due.
pub async fn due_reports(db: &Db, instances: &[String], limit: i32) -> Result<Vec<Report>> {
    let query = sqlx::query("SELECT * FROM ci.due_reports($1, $2)").bind(instances).bind(limit);
    let rows = db.rows(query).await?;
    rows.iter()
        .map(|row| {
            Ok(Report {
                project: row.try_get("project_id")?,
                commit: row.try_get("commit_id")?,
                evaluation: row.try_get("evaluation_id")?,
                turn: row.try_get("turn")?,
                asked: row.try_get("asked")?,
                failures: row.try_get("failures")?,
                instance: row.try_get("instance")?,
                repository: Repository { owner: row.try_get("owner")?, name: row.try_get("repo")? },
                told_eval: row.try_get("told_eval")?,
                told_build: row.try_get("told_build")?,
                name: row.try_get("project")?,
                shared: row.try_get("shared")?,
                is_old: row.try_get("is_old")?,
            })
        })
        .collect()
}

/// The first build of an evaluation that failed by itself, by its derivation.
pub async fn first_failure(db: &Db, evaluation: i64) -> Result<Option<String>> {
    let query = sqlx::query(
        "SELECT j.drv_path FROM ci.want w JOIN ci.job j ON j.id = w.job_id
         WHERE w.evaluation_id = $1 AND j.state = 'failed' ORDER BY j.id LIMIT 1",
    );
    Ok(db.column(query.bind(evaluation)).await?.pop())
}

/// The first attribute that could not be evaluated.
pub async fn first_error(db: &Db, evaluation: i64) -> Result<Option<String>> {
    let query = sqlx::query(
        "SELECT attr FROM ci.evaluation_attr WHERE evaluation_id = $1 AND error IS NOT NULL ORDER BY attr LIMIT 1",
    );
    Ok(db.column(query.bind(evaluation)).await?.pop())
}

/// The forge has been told this, of the builds or of the evaluation. False: somebody else has the commit by now.
pub async fn told(db: &Db, report: &Report, build: bool, words: &str) -> Result<bool> {
    let query = sqlx::query("SELECT ci.told($1, $2, $3, $4, $5)").bind(report.project).bind(&report.commit);
    db.value(query.bind(report.turn).bind(build).bind(words)).await
}

/// Gives a commit back, to be looked at again after `next`, or never. `error`: why the forge was not told.
pub async fn end_report(
    db: &Db,
    report: &Report,
    next: Option<Duration>,
    error: Option<&str>,
) -> Result<bool> {
    let query = sqlx::query("SELECT ci.end_report($1, $2, $3, $4, make_interval(secs => $5), $6)")
        .bind(report.project)
        .bind(&report.commit)
        .bind(report.turn)
        .bind(report.asked);
    db.value(query.bind(next.map(|next| next.as_secs_f64())).bind(error)).await
}

/// The forge is left in peace for so long.
pub async fn pause(db: &Db, instance: &str, wait: Duration) -> Result<()> {
    let query = sqlx::query("SELECT ci.pause_forge($1, make_interval(secs => $2))").bind(instance);
    db.row(query.bind(wait.as_secs_f64())).await.map(drop)
}

/// What had ended is built again: its forges shall hear of it. Whoever polls would find it ten minutes later.
pub(crate) async fn look_again(db: &Db, evaluations: &[i64]) {
    if let Err(error) = db.row(sqlx::query("SELECT ci.look_again($1)").bind(evaluations)).await {
        tracing::debug!(%error, "its forge hears of it later");
    }
}

/// The same for every evaluation that wants this build.
pub(crate) async fn look_again_at(db: &Db, job: i64) {
    let query = sqlx::query("SELECT evaluation_id FROM ci.want WHERE job_id = $1").bind(job);
    if let Ok(evaluations) = db.column::<i64>(query).await {
        look_again(db, &evaluations).await;
    }
}

/// A project whose heads are to be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// The project's number,
    pub id: i32,
    /// and its name.
    pub project: String,
    /// The forge.
    pub instance: String,
    /// The repository.
    pub repository: Repository,
    /// What git clones from.
    pub url: String,
    /// Only this branch is built. None: all are.
    pub branch: Option<String>,
    /// What is built.
    pub attrs: Vec<String>,
    /// It was never done before.
    pub first: bool,
}

/// Takes a project whose heads are to be compared, for `every`.
pub async fn due_comparison(db: &Db, instances: &[String], every: Duration) -> Result<Option<Comparison>> {
    let query = sqlx::query("SELECT * FROM ci.due_comparison($1, make_interval(secs => $2))").bind(instances);
    let rows = db.rows(query.bind(every.as_secs_f64())).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Comparison {
        id: row.try_get("project_id")?,
        project: row.try_get("project")?,
        instance: row.try_get("instance")?,
        repository: Repository { owner: row.try_get("owner")?, name: row.try_get("repo")? },
        url: row.try_get("url")?,
        branch: row.try_get("branch")?,
        attrs: row.try_get("attrs")?,
        first: row.try_get("first")?,
    }))
}

/// A frontend begins: all that was not compared within the last minute is due.
pub async fn compare_soon(db: &Db, every: Duration) -> Result<()> {
    let query = sqlx::query("SELECT ci.compare_soon(make_interval(secs => $1))");
    db.row(query.bind(every.as_secs_f64())).await.map(drop)
}

/// All heads of a project have been compared.
pub async fn compared(db: &Db, project: i32) -> Result<()> {
    db.row(sqlx::query("SELECT ci.compared($1)").bind(project)).await.map(drop)
}

/// They could not be, and why.
pub async fn not_compared(db: &Db, project: i32, error: &str) -> Result<()> {
    db.row(sqlx::query("SELECT ci.not_compared($1, $2)").bind(project).bind(error)).await.map(drop)
}

/// The heads of a project's branches, as far as we know.
pub async fn heads(db: &Db, project: i32) -> Result<BTreeMap<String, String>> {
    let query = sqlx::query("SELECT branch, commit_id FROM ci.head WHERE project_id = $1").bind(project);
    let rows = db.rows(query).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Branches that were there before the project: not built until somebody pushes to them.
pub async fn see_heads(db: &Db, project: i32, heads: &[(String, String)]) -> Result<()> {
    let (branches, commits): (Vec<&str>, Vec<&str>) =
        heads.iter().map(|(branch, commit)| (branch.as_str(), commit.as_str())).unzip();
    let query = sqlx::query("SELECT ci.see_heads($1, $2, $3)").bind(project).bind(branches).bind(commits);
    db.row(query).await.map(drop)
}
