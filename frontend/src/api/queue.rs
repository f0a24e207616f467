//! `/api/queue`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use harmonia_queue::{builds, order};
use harmonia_service::api::{Queue, Ready};
use harmonia_service::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use super::ask::{Query, Reader};
use super::builds::shown;
use super::openapi::Refusals;
use super::{Api, page};

/// How much of the queue.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Part {
    /// How many of those that run and of those that come next, at most; 50 without it
    #[param(minimum = 1, maximum = 200)]
    limit: Option<i64>,
}

/// The queue: numbers, what runs, and what comes next if nothing else does
#[utoipa::path(get, path = "/queue", operation_id = "look_at_queue", tag = "queue", params(Part),
    responses((status = 200, description = "The queue", body = Queue), Refusals))]
pub async fn look(
    _: Reader,
    State(api): State<Arc<Api>>,
    Query(part): Query<Part>,
) -> Result<Json<Queue>, Problem> {
    let limit = page::limit(part.limit)?;
    let db = api.db().await;
    let line = order::look(&db, limit).await?;
    let now = builds::running(&db, limit).await?;
    Ok(Json(Queue {
        blocked: line.blocked,
        ready: line.ready,
        running: line.running,
        now: now.into_iter().map(shown).collect(),
        next: line.next.into_iter().map(in_line).collect(),
    }))
}

fn in_line(found: order::Ready) -> Ready {
    Ready {
        id: found.id,
        name: builds::name_of(&found.drv_path).to_owned(),
        drv_path: found.drv_path,
        project: found.project,
        evaluation: found.evaluation,
        manual: found.manual,
        height: found.height,
        waited: found.waited,
    }
}
