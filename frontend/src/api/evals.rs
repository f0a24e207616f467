//! `/api/evals`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use harmonia_queue::evaluations::{self, Filter, Request, Status};
use harmonia_queue::{Db, people};
use harmonia_service::api::{
    Attribute, BuildCounts, Changed, Evaluation, EvaluationDetail, EvaluationStatus, NewEvaluation, Page,
};
use harmonia_service::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use super::ask::{Acting, Body, Number, Operator, Query, Reader};
use super::openapi::{Objections, Refusals};
use super::{Api, page, words};
use crate::member::Target;

/// Why a person's cancelled evaluation ended.
const BY_HAND: &str = "cancelled by hand";

/// Which evaluations.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Of this project
    #[param(pattern = r"^[^\x00]*$")]
    project: Option<String>,
    /// Of this branch
    #[param(pattern = r"^[^\x00]*$")]
    branch: Option<String>,
    /// Where to go on: what `next` of the page before said
    #[param(pattern = "^[1-9][0-9]{0,17}$")]
    after: Option<String>,
    /// How many, at most; 50 without it
    #[param(minimum = 1, maximum = 200)]
    limit: Option<i64>,
}

/// Evaluations, the newest first
#[utoipa::path(get, path = "/evals", operation_id = "list_evaluations", tag = "evaluations", params(Which),
    responses((status = 200, description = "A page of them", body = Page<Evaluation>), Refusals))]
pub async fn list(
    _: Reader,
    State(api): State<Arc<Api>>,
    Query(which): Query<Which>,
) -> Result<Json<Page<Evaluation>>, Problem> {
    let limit = page::limit(which.limit)?;
    let before = page::number(which.after.as_deref())?;
    let filter = Filter { project: which.project.as_deref(), branch: which.branch.as_deref(), before };
    let found = evaluations::list(&*api.db().await, &filter, limit + 1).await?;
    Ok(Json(page::cut(found, limit, |evaluation| evaluation.id.to_string(), shown)))
}

/// Queue an evaluation
#[utoipa::path(post, path = "/evals", operation_id = "queue_evaluation", tag = "evaluations", request_body = NewEvaluation,
    responses((status = 201, description = "Queued", body = Evaluation, headers(("Location" = String))), Objections))]
pub async fn create(
    _: Operator,
    State(api): State<Arc<Api>>,
    Body(new): Body<NewEvaluation>,
) -> Result<impl IntoResponse, Problem> {
    words::source(&new)?;
    let request = Request {
        project: &new.project,
        source: &new.source,
        branch: new.branch.as_deref(),
        attrs: &new.attrs,
        ..Request::default()
    };
    let db = api.db().await;
    made(&db, evaluations::queue(&db, &request).await?).await
}

/// Which attributes of an evaluation.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Part {
    /// Only those that could not be evaluated, or whose build failed, was not tried or was cancelled
    #[serde(default)]
    #[param(required = false)]
    failed: bool,
    /// Where to go on: what `next` of the page before said
    #[param(pattern = r"^[^\x00]*$")]
    after: Option<String>,
    /// How many, at most; 50 without it
    #[param(minimum = 1, maximum = 200)]
    limit: Option<i64>,
}

/// An evaluation, with a page of its attributes
#[utoipa::path(get, path = "/evals/{id}", operation_id = "show_evaluation", tag = "evaluations",
    params(("id" = i64, Path, description = "Its number", minimum = 1), Part),
    responses((status = 200, description = "The evaluation", body = EvaluationDetail), Refusals))]
pub async fn get(
    _: Reader,
    State(api): State<Arc<Api>>,
    Number(id): Number,
    Query(part): Query<Part>,
) -> Result<Json<EvaluationDetail>, Problem> {
    let limit = page::limit(part.limit)?;
    let db = api.db().await;
    let evaluation = shown(known(&db, id).await?);
    let after = part.after.as_deref().unwrap_or_default();
    let found = evaluations::attributes(&db, id, after, part.failed, limit + 1).await?;
    let attribute_page = page::cut(found, limit, |attribute| attribute.name.clone(), shown_attribute);
    Ok(Json(EvaluationDetail { evaluation, attribute_page }))
}

/// Cancel an evaluation, and the builds that nobody else wants
#[utoipa::path(post, path = "/evals/{id}/cancel", operation_id = "cancel_evaluation", tag = "evaluations",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "Cancelled; 0: it had ended", body = Changed), Objections))]
pub async fn cancel(
    acting: Acting,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    acting.on(&api, Target::Evaluation(id)).await?;
    Ok(Json(Changed { changed: end(&*api.db().await, id).await?.into() }))
}

/// A person's no to an evaluation. False: it had ended.
pub async fn end(db: &Db, id: i64) -> Result<bool, Problem> {
    if known(db, id).await?.status().is_final() {
        return Ok(false);
    }
    let ended = people::end_evaluation(db, id, people::Ending::Cancelled, Some(BY_HAND)).await?;
    evaluations::tell(db, id).await;
    Ok(ended)
}

/// Evaluate the same once more: a push at its commit, any other source as it is now
#[utoipa::path(post, path = "/evals/{id}/re-evaluate", operation_id = "re_evaluate", tag = "evaluations",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 201, description = "Another one, queued", body = Evaluation, headers(("Location" = String))), Objections))]
pub async fn re_evaluate(
    acting: Acting,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<impl IntoResponse, Problem> {
    acting.on(&api, Target::Evaluation(id)).await?;
    let db = api.db().await;
    made(&db, evaluations::repeat(&db, id).await?).await
}

/// Build what failed once more, first in line
#[utoipa::path(post, path = "/evals/{id}/rebuild-failed", operation_id = "rebuild_failed", tag = "evaluations",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "How many builds", body = Changed), Objections))]
pub async fn rebuild_failed(
    acting: Acting,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    acting.on(&api, Target::Evaluation(id)).await?;
    Ok(Json(Changed { changed: evaluations::rebuild_failed(&*api.db().await, id).await? }))
}

/// Keep an evaluation, and all it built, for good
#[utoipa::path(post, path = "/evals/{id}/pin", operation_id = "pin_evaluation", tag = "evaluations",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "Pinned; 0: it was already", body = Changed), Objections))]
pub async fn pin(
    _: Operator,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    Ok(Json(Changed { changed: evaluations::pin(&*api.db().await, id, true).await?.into() }))
}

/// Let an evaluation go when its project's retention is over
#[utoipa::path(delete, path = "/evals/{id}/pin", operation_id = "unpin_evaluation", tag = "evaluations",
    params(("id" = i64, Path, description = "Its number", minimum = 1)),
    responses((status = 200, description = "Not pinned any more; 0: it was not", body = Changed), Objections))]
pub async fn unpin(
    _: Operator,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    Ok(Json(Changed { changed: evaluations::pin(&*api.db().await, id, false).await?.into() }))
}

async fn made(db: &Db, id: i64) -> Result<impl IntoResponse + use<>, Problem> {
    let evaluation = shown(known(db, id).await?);
    Ok((StatusCode::CREATED, [(header::LOCATION, format!("/api/evals/{id}"))], Json(evaluation)))
}

async fn known(db: &Db, id: i64) -> Result<evaluations::Evaluation, Problem> {
    let found = evaluations::get(db, id).await?;
    found.ok_or_else(|| Problem::not_found(format!("there is no evaluation {id}")))
}

fn shown(found: evaluations::Evaluation) -> Evaluation {
    let status = match found.status() {
        Status::Queued => EvaluationStatus::Queued,
        Status::Evaluating => EvaluationStatus::Evaluating,
        Status::Building => EvaluationStatus::Building,
        Status::Succeeded => EvaluationStatus::Succeeded,
        Status::Failed => EvaluationStatus::Failed,
        Status::Cancelled => EvaluationStatus::Cancelled,
    };
    Evaluation {
        id: found.id,
        project: found.project,
        source: found.source,
        branch: found.branch,
        commit: found.commit,
        attrs: found.attrs,
        untrusted: found.untrusted,
        status,
        error: found.error,
        created_at: found.created_at,
        started_at: found.started_at,
        ended_at: found.ended_at,
        pinned: found.pinned,
        builds: BuildCounts {
            waiting: found.builds.waiting,
            running: found.builds.running,
            succeeded: found.builds.succeeded,
            cached: found.builds.cached,
            failed: found.builds.failed,
            dep_failed: found.builds.dep_failed,
            cancelled: found.builds.cancelled,
        },
        attributes: found.attributes,
        attribute_errors: found.attribute_errors,
    }
}

fn shown_attribute(found: evaluations::Attribute) -> Attribute {
    Attribute { name: found.name, build: found.build, state: found.state, error: found.error }
}
