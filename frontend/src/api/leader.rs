//! `/api/leader`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use harmonia_queue::leader::{self, Office};
use harmonia_service::api::Leader;
use harmonia_service::problem::Problem;

use super::Api;
use super::ask::Reader;
use super::openapi::Refusals;

/// Who leads the janitors
#[utoipa::path(get, path = "/leader", operation_id = "show_leader", tag = "leader",
    responses((status = 200, description = "As far as can be told", body = Leader), Refusals))]
pub async fn show(_: Reader, State(api): State<Arc<Api>>) -> Result<Json<Leader>, Problem> {
    let found = leader::current(&*api.db().await, Office::Janitor).await?;
    Ok(Json(Leader { url: found.url, generation: found.generation, since: found.since, held: found.held }))
}
