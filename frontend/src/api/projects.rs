//! `/api/projects`

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use harmonia_queue::branches::{self, ProjectSource, PullRequests};
use harmonia_queue::{Db, people, projects};
use harmonia_service::api::{Changed, GitChange, GitSource, Project, ProjectChange, Trust};
use harmonia_service::problem::Problem;
use harmonia_service::quantity::Span;

use crate::escape::escape;
use crate::forge::Forges;

use super::ask::{Admin, Body, Name, Reader};
use super::openapi::{Objections, Refusals};
use super::{Api, words};

/// Evaluations are kept for an hour at least: whoever looks shall find them.
const LEAST: Duration = Duration::from_secs(3600);
/// Repositories are not asked more often than this.
const MOST_OFTEN: Duration = Duration::from_secs(10);

/// All projects, by name
#[utoipa::path(get, path = "/projects", operation_id = "list_projects", tag = "projects",
    responses((status = 200, description = "The projects", body = Vec<Project>), Refusals))]
pub async fn list(_: Reader, State(api): State<Arc<Api>>) -> Result<Json<Vec<Project>>, Problem> {
    let db = api.db().await;
    let mut sources = branches::sources(&db).await?;
    let shown = |project: projects::Project| {
        let source = sources.remove(&project.name);
        shown(project, source)
    };
    Ok(Json(projects::list(&db).await?.into_iter().map(shown).collect()))
}

/// Make a project
#[utoipa::path(post, path = "/projects", operation_id = "add_project", tag = "projects", request_body = ProjectChange,
    responses((status = 201, description = "The project", body = Project, headers(("Location" = String))), Objections))]
pub async fn add(
    _: Admin,
    State(api): State<Arc<Api>>,
    Body(change): Body<ProjectChange>,
) -> Result<impl IntoResponse, Problem> {
    let name = change
        .name
        .clone()
        .ok_or_else(|| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "a project needs a `name`"))?;
    let project = make(&*api.db().await, &api.forges, &name, &change).await?;
    Ok((StatusCode::CREATED, [(header::LOCATION, location(&name))], Json(project)))
}

/// A project that is not there yet.
pub async fn make(db: &Db, forges: &Forges, name: &str, change: &ProjectChange) -> Result<Project, Problem> {
    words::name("a project", name)?;
    if projects::get(db, name).await?.is_some() {
        return Err(Problem::conflict(format!(
            "there is a project {name} already: PATCH /api/projects/{name} changes it"
        )));
    }
    let source = change.git.as_ref().map(|git| followed(None, git.as_ref())).transpose()?;
    put(db, forges, changed(people::Project::new(name), change)?, source).await
}

/// Change a project; what is left out stays as it is
#[utoipa::path(patch, path = "/projects/{name}", operation_id = "change_project", tag = "projects", request_body = ProjectChange,
    params(("name" = String, Path, description = "Its name", pattern = r"^[^\x00]+$")),
    responses((status = 200, description = "As it is now", body = Project), Objections))]
pub async fn change(
    _: Admin,
    State(api): State<Arc<Api>>,
    Name(name): Name,
    Body(change): Body<ProjectChange>,
) -> Result<Json<Project>, Problem> {
    Ok(Json(alter(&*api.db().await, &api.forges, &name, &change).await?))
}

/// What is not said stays.
pub async fn alter(db: &Db, forges: &Forges, name: &str, change: &ProjectChange) -> Result<Project, Problem> {
    if change.name.as_ref().is_some_and(|other| *other != name) {
        return Err(Problem::bad_request("a project keeps its name: make another, and remove this one"));
    }
    let project = projects::get(db, name).await?.ok_or_else(|| unknown(name))?;
    let project = people::Project {
        name,
        shares: project.shares,
        max_concurrent: project.max_concurrent,
        pools: project.pools,
        untrusted_pools: project.untrusted_pools,
        paused: project.paused,
        retention: project.retention,
    };
    let source = match &change.git {
        Some(git) => {
            let before = branches::source(db, name).await?.map(|(source, _)| source);
            Some(followed(before, git.as_ref())?)
        }
        None => None,
    };
    put(db, forges, changed(project, change)?, source).await
}

/// Cancel a project's evaluations and hide it; its history stays
#[utoipa::path(delete, path = "/projects/{name}", operation_id = "remove_project", tag = "projects",
    params(("name" = String, Path, description = "Its name", pattern = r"^[^\x00]+$")),
    responses((status = 200, description = "It is gone", body = Changed), Objections))]
pub async fn remove(
    _: Admin,
    State(api): State<Arc<Api>>,
    Name(name): Name,
) -> Result<Json<Changed>, Problem> {
    match people::remove_project(&*api.db().await, &name).await? {
        true => Ok(Json(Changed { changed: 1 })),
        false => Err(unknown(&name)),
    }
}

fn changed<'a>(
    mut project: people::Project<'a>,
    change: &ProjectChange,
) -> Result<people::Project<'a>, Problem> {
    if let Some(shares) = change.shares {
        project.shares = within("shares", shares, 1, 1_000_000)?;
    }
    if let Some(most) = change.max_concurrent {
        project.max_concurrent = most.map(|most| within("max_concurrent", most, 0, 10_000)).transpose()?;
    }
    if let Some(pools) = &change.pools {
        project.pools = pools.clone();
    }
    if let Some(pools) = &change.untrusted_pools {
        project.untrusted_pools = pools.clone();
    }
    if let Some(paused) = change.paused {
        project.paused = paused;
    }
    if let Some(retention) = &change.retention {
        project.retention = words::time("retention", retention, LEAST)?;
    }
    Ok(project)
}

fn within(what: &str, number: i32, least: i32, most: i32) -> Result<i32, Problem> {
    if (least..=most).contains(&number) {
        return Ok(number);
    }
    Err(Problem::bad_request(format!("{what} is {number}: give {least} to {most}")))
}

/// The repository to follow from now on; None: none.
fn followed(
    before: Option<ProjectSource>,
    change: Option<&GitChange>,
) -> Result<Option<ProjectSource>, Problem> {
    let Some(change) = change else { return Ok(None) };
    if let Some(url) = &change.url {
        words::url(url)?;
    }
    let mut source = match (before, &change.url) {
        (Some(before), Some(url)) if before.url == *url => before,
        (Some(before), None) => before,
        (_, Some(url)) => ProjectSource::git(url),
        (None, None) => {
            return Err(Problem::bad_request("`git` needs a `url`: the project follows no repository yet"));
        }
    };
    if let Some(branch) = &change.r#ref {
        branch.as_deref().map(words::branch).transpose()?;
        source.branch.clone_from(branch);
    }
    if let Some(poll) = &change.poll {
        source.poll_interval = words::time("poll", poll, MOST_OFTEN)?;
    }
    if let Some(attrs) = &change.attrs {
        words::attrs(attrs)?;
        source.attrs.clone_from(attrs);
    }
    if let Some(credential) = &change.credential {
        credential.as_deref().map(words::credential).transpose()?;
        source.credential.clone_from(credential);
    }
    if let Some(trust) = change.pull_requests {
        source.pull_requests = match trust {
            Trust::Collaborators => PullRequests::Collaborators,
            Trust::All => PullRequests::All,
            Trust::None => PullRequests::None,
        };
    }
    Ok(Some(source))
}

async fn put(
    db: &Db,
    forges: &Forges,
    project: people::Project<'_>,
    source: Option<Option<ProjectSource>>,
) -> Result<Project, Problem> {
    people::put_project(db, &project).await?;
    if let Some(source) = source {
        let source = source.map(|source| ProjectSource { forge: forges.keeper(&source.url), ..source });
        branches::put_source(db, project.name, source.as_ref()).await?;
    }
    let source = branches::source(db, project.name).await?;
    let found = projects::get(db, project.name).await?;
    found.map(|found| shown(found, source)).ok_or_else(|| unknown(project.name))
}

fn unknown(name: &str) -> Problem {
    Problem::not_found(format!("there is no project {name}"))
}

fn location(name: &str) -> String {
    format!("/api/projects/{}", escape(name))
}

fn shown(found: projects::Project, source: Option<(ProjectSource, Option<String>)>) -> Project {
    let git = source.map(|(source, error)| GitSource {
        url: source.url,
        r#ref: source.branch,
        poll: Span(source.poll_interval).to_string(),
        attrs: source.attrs,
        credential: source.credential,
        pull_requests: match source.pull_requests {
            PullRequests::Collaborators => Trust::Collaborators,
            PullRequests::All => Trust::All,
            PullRequests::None => Trust::None,
        },
        error,
    });
    Project {
        name: found.name,
        shares: found.shares,
        max_concurrent: found.max_concurrent,
        pools: found.pools,
        untrusted_pools: found.untrusted_pools,
        paused: found.paused,
        retention: Span(found.retention).to_string(),
        git,
        used: found.used,
        ready: found.ready,
        running: found.running,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_stays_and_null_takes_a_limit_away() {
        let project = people::Project {
            max_concurrent: Some(3),
            pools: Some(vec!["x86".to_owned()]),
            ..people::Project::new("main")
        };
        let change =
            ProjectChange { max_concurrent: Some(None), paused: Some(true), ..ProjectChange::default() };
        let project = changed(project, &change).unwrap();
        assert_eq!((project.max_concurrent, project.paused, project.shares), (None, true, 100));
        assert_eq!(project.pools, Some(vec!["x86".to_owned()]));
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        for change in [
            ProjectChange { shares: Some(0), ..ProjectChange::default() },
            ProjectChange { max_concurrent: Some(Some(-1)), ..ProjectChange::default() },
            ProjectChange { retention: Some("1s".to_owned()), ..ProjectChange::default() },
        ] {
            assert!(changed(people::Project::new("main"), &change).is_err(), "{change:?}");
        }
    }

    #[test]
    fn another_repository_begins_with_the_defaults_and_the_same_keeps_what_is_left_out() {
        let before = ProjectSource { branch: Some("next".to_owned()), ..ProjectSource::git("https://a/b") };
        let poll = GitChange { poll: Some("1m".to_owned()), ..GitChange::default() };
        let changed = followed(Some(before.clone()), Some(&poll)).unwrap().unwrap();
        assert_eq!(
            (changed.branch.as_deref(), changed.poll_interval),
            (Some("next"), Duration::from_secs(60))
        );
        let other = GitChange { url: Some("https://c/d".to_owned()), ..GitChange::default() };
        assert_eq!(followed(Some(before), Some(&other)).unwrap(), Some(ProjectSource::git("https://c/d")));
        assert_eq!(followed(None, None).unwrap(), None);
    }

    #[test]
    fn a_repository_that_cannot_be_is_refused() {
        let url = |url: &str| GitChange { url: Some(url.to_owned()), ..GitChange::default() };
        for change in [
            GitChange::default(),
            url("ext::sh"),
            url("https://me:secret@host/x"),
            GitChange { poll: Some("1s".to_owned()), ..url("https://a/b") },
            GitChange { r#ref: Some(Some("-x".to_owned())), ..url("https://a/b") },
            GitChange { credential: Some(Some("../x".to_owned())), ..url("https://a/b") },
        ] {
            assert!(followed(None, Some(&change)).is_err(), "{change:?}");
        }
    }

    #[test]
    fn an_address_has_its_name_escaped() {
        assert_eq!(location("acme/my dots"), "/api/projects/acme%2Fmy%20dots");
    }
}
