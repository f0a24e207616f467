//! `/api/builds`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use harmonia_queue::builds::{self, Filter, Found};
use harmonia_queue::{Db, people};
use harmonia_service::api::{Attempt, Build, BuildDetail, Changed, Output, Page, Reason};
use harmonia_service::problem::Problem;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::ask::{Acting, Number, Query, Reader};
use super::openapi::{Objections, Refusals};
use super::{Api, page};
use crate::member::Target;

/// Which builds.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Wanted by this evaluation
    evaluation: Option<i64>,
    /// As far as this
    #[param(inline)]
    state: Option<Stage>,
    /// The one that somebody means by a build's number, a `.drv` path, an output path, or an attribute of the latest
    /// evaluation (its last words are enough where only one ends like that). Nothing else but `project` is looked at then
    #[param(pattern = r"^[^\x00]*$")]
    target: Option<String>,
    /// Wanted by this project; with `target`, where to look for an attribute
    #[param(pattern = r"^[^\x00]*$")]
    project: Option<String>,
    /// Where to go on: what `next` of the page before said
    #[param(pattern = "^[1-9][0-9]{0,17}$")]
    after: Option<String>,
    /// How many, at most; 50 without it
    #[param(minimum = 1, maximum = 200)]
    limit: Option<i64>,
}

/// How far a build is.
#[derive(Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Stage {
    Blocked,
    Ready,
    Building,
    Uploading,
    Publishing,
    Succeeded,
    Cached,
    Failed,
    DepFailed,
    Cancelled,
}

/// Builds, those that were asked for last first
#[utoipa::path(get, path = "/builds", operation_id = "list_builds", tag = "builds", params(Which), responses(
    (status = 200, description = "A page of them", body = Page<Build>),
    (status = 409, description = "Several attributes end like `target`", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The attribute could not be evaluated; in Nix's words", body = Problem,
     content_type = "application/problem+json"),
    Refusals))]
pub async fn list(
    _: Reader,
    State(api): State<Arc<Api>>,
    Query(which): Query<Which>,
) -> Result<Json<Page<Build>>, Problem> {
    let limit = page::limit(which.limit)?;
    let before = page::number(which.after.as_deref())?;
    let db = api.db().await;
    if let Some(target) = &which.target {
        let build = meant(&db, target, which.project.as_deref()).await?;
        return Ok(Json(Page { items: vec![shown(build)], next: None }));
    }
    let filter = Filter {
        evaluation: which.evaluation,
        state: which.state.map(Stage::as_str),
        project: which.project.as_deref(),
        before,
    };
    let found = builds::list(&db, &filter, limit + 1).await?;
    Ok(Json(page::cut(found, limit, |build| build.id.to_string(), shown)))
}

/// A build with its outputs and attempts
#[utoipa::path(get, path = "/builds/{id}", operation_id = "show_build", tag = "builds",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "The build", body = BuildDetail), Refusals))]
pub async fn get(
    _: Reader,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<BuildDetail>, Problem> {
    let db = api.db().await;
    let build = shown(known(&db, id).await?);
    let outputs = builds::outputs(&db, id).await?.into_iter();
    let attempts = builds::attempts(&db, id).await?.into_iter();
    Ok(Json(BuildDetail {
        build,
        outputs: outputs.map(|output| Output { name: output.name, path: output.path }).collect(),
        attempts: attempts.map(shown_attempt).collect(),
    }))
}

/// Why a build is not running, or has ended as it has; the most telling reason first
#[utoipa::path(get, path = "/builds/{id}/why", operation_id = "why", tag = "builds",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "One reason at least", body = Vec<Reason>), Refusals))]
pub async fn why(
    _: Reader,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Vec<Reason>>, Problem> {
    let reasons = people::why(&*api.db().await, id).await?.into_iter();
    Ok(Json(reasons.map(|(code, sentence)| Reason { code, sentence }).collect()))
}

/// Build what failed or was cancelled once more, first in line
#[utoipa::path(post, path = "/builds/{id}/rebuild", operation_id = "rebuild", tag = "builds",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "0: there is nothing to rebuild", body = Changed), Objections))]
pub async fn rebuild(
    acting: Acting,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    acting.on(&api, Target::Rebuild(id)).await?;
    Ok(Json(Changed { changed: people::rebuild(&*api.db().await, id).await?.into() }))
}

/// Cancel a build; a running one is stopped by its builder
#[utoipa::path(post, path = "/builds/{id}/cancel", operation_id = "cancel_build", tag = "builds",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "0: it had ended", body = Changed), Objections))]
pub async fn cancel(
    acting: Acting,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    acting.on(&api, Target::Cancel(id)).await?;
    let db = api.db().await;
    known(&db, id).await?;
    Ok(Json(Changed { changed: people::cancel(&db, id).await?.into() }))
}

/// A build by its number.
pub async fn known(db: &Db, id: i64) -> Result<builds::Build, Problem> {
    let found = builds::get(db, id).await?;
    found.ok_or_else(|| Problem::not_found(format!("there is no build {id}")))
}

async fn meant(db: &Db, target: &str, project: Option<&str>) -> Result<builds::Build, Problem> {
    match builds::find(db, target, project).await? {
        Found::Build(id) => known(db, id).await,
        Found::Error(words) => Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, words)),
        Found::Several(names) => Err(Problem::conflict(format!(
            "several attributes end in {target}: {}: say which",
            names.join(", ")
        ))),
        Found::Nothing => Err(Problem::not_found(format!(
            "there is no build {target}: give a build's number, a .drv path, an output path, or an attribute of the latest evaluation"
        ))),
    }
}

/// As the API shows it.
pub fn shown(found: builds::Build) -> Build {
    Build {
        id: found.id,
        name: found.name().to_owned(),
        drv_path: found.drv_path,
        system: found.system,
        features: found.features,
        state: found.state,
        node: found.node,
        attempt: found.attempt,
        running_for: found.running_for,
        failure: found.failure,
        error: found.error,
        root: found.root,
        created_at: found.created_at,
        ended_at: found.ended_at,
    }
}

fn shown_attempt(found: builds::Attempt) -> Attempt {
    Attempt {
        id: found.id,
        node: found.node,
        started_at: found.started_at,
        ended_at: found.ended_at,
        seconds: found.seconds,
        outcome: found.outcome,
        message: found.message,
    }
}

impl Stage {
    fn as_str(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Ready => "ready",
            Self::Building => "building",
            Self::Uploading => "uploading",
            Self::Publishing => "publishing",
            Self::Succeeded => "succeeded",
            Self::Cached => "cached",
            Self::Failed => "failed",
            Self::DepFailed => "dep_failed",
            Self::Cancelled => "cancelled",
        }
    }
}
