//! Where projects' code is, which commits their branches are at, and pushes: one evaluation of a commit on a branch, the newest
//! instead of those before it.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row};

use crate::evaluations::tell;
use crate::mirror::Resource;
use crate::{Db, Result};

/// Where a project's code is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectSource {
    /// Who keeps it.
    pub forge: Forge,
    /// What git clones from.
    pub url: String,
    /// The branch that is built; None: the repository's default.
    pub branch: Option<String>,
    /// What is built of it; none: what the source offers by default.
    pub attrs: Vec<String>,
    /// How often new commits are looked for.
    pub poll_interval: Duration,
    /// Whose pull requests are built.
    pub pull_requests: PullRequests,
    /// The name of the secret by which evaluators read it.
    pub credential: Option<String>,
}

/// Who keeps a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forge {
    /// github.com, or a GitHub of one's own.
    GitHub {
        /// Its address.
        instance: String,
        /// A person or an organisation.
        owner: String,
        /// The repository's name.
        repo: String,
    },
    /// An instance of Gitea or Forgejo.
    Gitea {
        /// Its address.
        instance: String,
        /// A person or an organisation.
        owner: String,
        /// The repository's name.
        repo: String,
    },
    /// Nobody that is known: it is only polled.
    Git,
}

/// Whose pull requests are built without a person's consent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PullRequests {
    /// Of those who may push.
    #[default]
    Collaborators,
    /// Everybody's.
    All,
    /// Nobody's.
    None,
}

impl PullRequests {
    /// As the database has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Collaborators => "Collaborators",
            Self::All => "All",
            Self::None => "None",
        }
    }
}

impl ProjectSource {
    /// How often new commits are looked for where nothing else is said.
    pub const POLL_INTERVAL: Duration = Duration::from_secs(300);

    /// Any repository at its default branch, with the defaults.
    pub fn git(url: impl Into<String>) -> Self {
        Self {
            forge: Forge::Git,
            url: url.into(),
            branch: None,
            attrs: Vec::new(),
            poll_interval: Self::POLL_INTERVAL,
            pull_requests: PullRequests::default(),
            credential: None,
        }
    }

    /// Kind, instance, owner and repository.
    fn columns(&self) -> (&'static str, Option<&str>, Option<&str>, Option<&str>) {
        match &self.forge {
            Forge::GitHub { instance, owner, repo } => ("github", Some(instance), Some(owner), Some(repo)),
            Forge::Gitea { instance, owner, repo } => ("gitea", Some(instance), Some(owner), Some(repo)),
            Forge::Git => ("git", None, None, None),
        }
    }
}

const COLUMNS: &str = "SELECT p.name AS project, s.kind, s.url, s.instance, s.owner, s.repo, s.branch, s.attrs, extract(epoch FROM s.poll_interval)::float8 AS poll_interval,
  s.pull_requests, s.credential, coalesce(s.poll_error, c.error) AS error
  FROM ci.project_source s JOIN ci.project p ON p.id = s.project_id LEFT JOIN ci.comparison c ON c.project_id = s.project_id";

/// Where a project's code is, and why the last look there, or at what its forge says of it, saw nothing.
pub async fn source(db: &Db, project: &str) -> Result<Option<(ProjectSource, Option<String>)>> {
    let text = format!("{COLUMNS} WHERE p.name = $1 AND p.deleted_at IS NULL");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text)).bind(project)).await?;
    rows.first().map(|row| Ok((read(row)?, row.try_get("error")?))).transpose()
}

/// The same of all projects, by name.
pub async fn sources(db: &Db) -> Result<HashMap<String, (ProjectSource, Option<String>)>> {
    let text = format!("{COLUMNS} WHERE p.deleted_at IS NULL");
    let rows = db.rows(sqlx::query(sqlx::AssertSqlSafe(text))).await?;
    rows.iter().map(|row| Ok((row.try_get("project")?, (read(row)?, row.try_get("error")?)))).collect()
}

fn read(row: &PgRow) -> Result<ProjectSource> {
    let word =
        |name: &str| Ok::<String, crate::Error>(row.try_get::<Option<String>, _>(name)?.unwrap_or_default());
    let forge = match row.try_get("kind")? {
        "github" => Forge::GitHub { instance: word("instance")?, owner: word("owner")?, repo: word("repo")? },
        "gitea" => Forge::Gitea { instance: word("instance")?, owner: word("owner")?, repo: word("repo")? },
        _ => Forge::Git,
    };
    Ok(ProjectSource {
        forge,
        url: row.try_get("url")?,
        branch: row.try_get("branch")?,
        attrs: row.try_get("attrs")?,
        poll_interval: Duration::try_from_secs_f64(row.try_get("poll_interval")?).unwrap_or_default(),
        pull_requests: match row.try_get("pull_requests")? {
            "All" => PullRequests::All,
            "None" => PullRequests::None,
            _ => PullRequests::Collaborators,
        },
        credential: row.try_get("credential")?,
    })
}

/// People say where a project's code is; None: nowhere, it is evaluated by hand only.
pub async fn put_source(db: &Db, project: &str, source: Option<&ProjectSource>) -> Result<()> {
    let (kind, instance, owner, repo) = source.map(ProjectSource::columns).unwrap_or_default();
    let query = sqlx::query(
        "SELECT ci.put_source($1, $2, $3, $4, $5, $6, $7, $8, make_interval(secs => $9), $10, $11)",
    )
    .bind(project)
    .bind(kind)
    .bind(source.map(|source| &source.url))
    .bind(instance)
    .bind(owner)
    .bind(repo)
    .bind(source.and_then(|source| source.branch.as_deref()))
    .bind(source.map(|source| source.attrs.as_slice()))
    .bind(source.map(|source| source.poll_interval.as_secs_f64()))
    .bind(source.map(|source| source.pull_requests.as_str()))
    .bind(source.and_then(|source| source.credential.as_deref()));
    db.row(query).await?;
    Ok(())
}

/// Keeps it as a Project says, once that generation is mirrored. False: another word stands.
pub async fn mirror_source(
    db: &Db,
    leader: i64,
    resource: Resource<'_>,
    project: &str,
    source: &ProjectSource,
) -> Result<bool> {
    let (kind, instance, owner, repo) = source.columns();
    let query = sqlx::query(
        "SELECT ci.mirror_source($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, make_interval(secs => $12), $13, $14)",
    )
    .bind(leader)
    .bind(resource.uid)
    .bind(resource.generation)
    .bind(project)
    .bind(kind)
    .bind(&source.url)
    .bind(instance)
    .bind(owner)
    .bind(repo)
    .bind(source.branch.as_deref())
    .bind(&source.attrs)
    .bind(source.poll_interval.as_secs_f64())
    .bind(source.pull_requests.as_str())
    .bind(source.credential.as_deref());
    db.value(query).await
}

/// A branch, or a pull request, is at a commit now.
#[derive(Debug, Clone, Copy)]
pub struct Push<'a> {
    /// Whose.
    pub project: &'a str,
    /// What git clones from.
    pub source: &'a str,
    /// The branch; of a pull request, whatever names it alone.
    pub branch: &'a str,
    /// The commit.
    pub commit: &'a str,
    /// A change from outside.
    pub untrusted: bool,
    /// Which attributes; none: what the source offers by default.
    pub attrs: &'a [String],
    /// The number of the pull request.
    pub pull_request: Option<i32>,
}

/// Answers the evaluation of that commit: the one that is there, or a new one instead of older unfinished ones of the branch. None: the
/// pull request from outside has another head by now.
pub async fn push(db: &Db, push: &Push<'_>) -> Result<Option<i64>> {
    let query = sqlx::query("SELECT ci.push($1, $2, $3, $4, $5, $6, $7)")
        .bind(push.project)
        .bind(push.source)
        .bind(push.branch)
        .bind(push.commit)
        .bind(i16::from(push.untrusted))
        .bind(push.attrs)
        .bind(push.pull_request);
    pushed(db, query).await
}

/// The same of a trusted branch that went on from the head `known`. None: another push of it came since that was read.
pub async fn push_after(db: &Db, push: &Push<'_>, known: Option<&str>) -> Result<Option<i64>> {
    let query = sqlx::query("SELECT ci.push_after($1, $2, $3, $4, $5, $6)")
        .bind(push.project)
        .bind(push.source)
        .bind(push.branch)
        .bind(push.commit)
        .bind(push.attrs)
        .bind(known);
    pushed(db, query).await
}

async fn pushed(db: &Db, query: Query<'_, Postgres, PgArguments>) -> Result<Option<i64>> {
    let evaluation: Option<i64> = db.value(query).await?;
    if let Some(evaluation) = evaluation {
        tell(db, evaluation).await;
    }
    Ok(evaluation)
}

/// The commit at which a branch was seen last.
pub async fn head(db: &Db, project: &str, branch: &str) -> Result<Option<String>> {
    let query = sqlx::query(
        "SELECT h.commit_id FROM ci.head h JOIN ci.project p ON p.id = h.project_id WHERE p.name = $1 AND h.branch = $2",
    );
    let rows = db.rows(query.bind(project).bind(branch)).await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?)
}

/// A repository to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Poll {
    /// Whose,
    pub project_id: i32,
    /// by name.
    pub project: String,
    /// What git is asked.
    pub url: String,
    /// Which branch; None: the repository's default.
    pub branch: Option<String>,
    /// The name of the secret by which it is read.
    pub credential: Option<String>,
}

/// The next repository to look at, if it is time for one: nobody else's for two minutes.
pub async fn claim_poll(db: &Db) -> Result<Option<Poll>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.claim_poll()")).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Poll {
        project_id: row.try_get("project_id")?,
        project: row.try_get("project")?,
        url: row.try_get("url")?,
        branch: row.try_get("branch")?,
        credential: row.try_get("credential")?,
    }))
}

/// What a look has seen: a branch and its commit, or why not. Answers the evaluation of a commit that is new.
pub async fn polled(
    db: &Db,
    poll: &Poll,
    seen: std::result::Result<(&str, &str), &str>,
) -> Result<Option<i64>> {
    let (branch, commit) = seen.ok().unzip();
    let query = sqlx::query("SELECT ci.polled($1, $2, $3, $4, $5)").bind(poll.project_id).bind(&poll.url);
    let evaluation: Option<i64> = db.value(query.bind(branch).bind(commit).bind(seen.err())).await?;
    if let Some(evaluation) = evaluation {
        tell(db, evaluation).await;
    }
    Ok(evaluation)
}

/// What an evaluator has to know of the project beside its evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvaluationSource {
    /// What git clones from.
    pub url: String,
    /// The branch whose word counts; None: the repository's default.
    pub branch: Option<String>,
    /// The name of the secret by which it is read.
    pub credential: Option<String>,
    /// The number of the pull request that is evaluated.
    pub pull_request: Option<i32>,
}

/// Where the code of an evaluation's project is, if that was ever said.
pub async fn evaluation_source(db: &Db, evaluation: i64) -> Result<Option<EvaluationSource>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.evaluation_source($1)").bind(evaluation)).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(EvaluationSource {
        url: row.try_get("url")?,
        branch: row.try_get("branch")?,
        credential: row.try_get("credential")?,
        pull_request: row.try_get("pull_request")?,
    }))
}

/// How long the source itself wants to be kept, at most as long as its project's are.
pub async fn wish_retention(db: &Db, evaluation: i64, attempt: i32, retention: Duration) -> Result<()> {
    let query = sqlx::query("SELECT ci.wish_retention($1, $2, make_interval(secs => $3))");
    db.row(query.bind(evaluation).bind(attempt).bind(retention.as_secs_f64())).await?;
    Ok(())
}

/// Says of which tree an evaluation is. Answers what a complete evaluation of the same tree found, each attribute with its
/// derivation, if there is one and this one is a push.
pub async fn same_tree(
    db: &Db,
    evaluation: i64,
    attempt: i32,
    tree: &str,
) -> Result<Option<Vec<(String, String)>>> {
    let query = sqlx::query("SELECT ci.same_tree($1, $2, $3)").bind(evaluation).bind(attempt).bind(tree);
    let Some(before): Option<i64> = db.value(query).await? else { return Ok(None) };
    let query =
        sqlx::query("SELECT attr, drv_path FROM ci.found_before($1, $2)").bind(evaluation).bind(before);
    let found = db.rows(query).await?;
    let found = found.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    found.collect::<Result<_>>().map(Some)
}
