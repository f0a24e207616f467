//! `/api/nodes`

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use harmonia_queue::{nodes, people};
use harmonia_service::api::{Changed, Drain, Node};
use harmonia_service::problem::Problem;

use super::ask::{Body, Number, Operator, Reader};
use super::openapi::{Objections, Refusals};
use super::{Api, words};

/// The reason that people give: one of them, whoever asks, so that it is taken back by whoever asks.
pub const REASON: &str = "by hand";

/// The builders that live, or drain
#[utoipa::path(get, path = "/nodes", operation_id = "list_nodes", tag = "nodes",
    responses((status = 200, description = "By pool and name", body = Vec<Node>), Refusals))]
pub async fn list(_: Reader, State(api): State<Arc<Api>>) -> Result<Json<Vec<Node>>, Problem> {
    Ok(Json(nodes::list(&*api.db().await).await?.into_iter().map(shown).collect()))
}

/// Let a builder finish what it has and claim nothing more; it keeps running
#[utoipa::path(post, path = "/nodes/{id}/drain", operation_id = "drain_node", tag = "nodes", request_body = Option<Drain>,
    params(("id" = i32, Path, description = "The builder's number", minimum = 1)),
    responses((status = 200, description = "It drains", body = Changed), Objections))]
pub async fn drain(
    _: Operator,
    State(api): State<Arc<Api>>,
    Number(id): Number,
    Body(drain): Body<Option<Drain>>,
) -> Result<Json<Changed>, Problem> {
    let drain = drain.unwrap_or_default();
    let deadline =
        drain.deadline.as_deref().map(|text| words::time("deadline", text, Duration::ZERO)).transpose()?;
    let within = if drain.now { Some(Duration::ZERO) } else { deadline };
    people::drain(&*api.db().await, node(id)?, REASON, within).await?;
    Ok(Json(Changed { changed: 1 }))
}

/// Let a builder claim again, unless it drains for another reason
#[utoipa::path(delete, path = "/nodes/{id}/drain", operation_id = "resume_node", tag = "nodes",
    params(("id" = i32, Path, description = "The builder's number", minimum = 1)),
    responses((status = 200, description = "0: it was not drained by hand", body = Changed), Objections))]
pub async fn resume(
    _: Operator,
    State(api): State<Arc<Api>>,
    Number(id): Number,
) -> Result<Json<Changed>, Problem> {
    let resumed = people::resume(&*api.db().await, node(id)?, REASON).await?;
    Ok(Json(Changed { changed: resumed.into() }))
}

pub fn node(id: i64) -> Result<i32, Problem> {
    i32::try_from(id).map_err(|_| Problem::not_found(format!("there is no node {id}")))
}

fn shown(found: nodes::Node) -> Node {
    Node {
        state: found.state().to_owned(),
        id: found.id,
        name: found.name,
        pool: found.pool,
        slots: found.slots,
        building: found.building,
        uploading: found.uploading,
        speed: found.speed,
        drains: found.drains.into_iter().map(|drain| drain.reason).collect(),
        kube_node: found.kube_node,
        version: found.version,
        seen_seconds_ago: found.seen.map(|seen| seen.as_secs()),
    }
}
