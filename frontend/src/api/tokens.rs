//! `/api/tokens`

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use harmonia_queue::{Db, people};
use harmonia_service::api::{Changed, NewToken, Secret, Token};
use harmonia_service::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use super::ask::{Admin, Body, Name, Query};
use super::openapi::{Objections, Refusals};
use super::{Api, words};

/// All tokens, without their secrets
#[utoipa::path(get, path = "/tokens", operation_id = "list_tokens", tag = "tokens",
    responses((status = 200, description = "By name", body = Vec<Token>), Refusals))]
pub async fn list(_: Admin, State(api): State<Arc<Api>>) -> Result<Json<Vec<Token>>, Problem> {
    Ok(Json(people::list_tokens(&*api.db().await).await?.into_iter().map(shown).collect()))
}

/// Make a token; its secret is shown this once
#[utoipa::path(post, path = "/tokens", operation_id = "create_token", tag = "tokens", request_body = NewToken,
    responses((status = 201, description = "Its secret", body = Secret), Objections))]
pub async fn create(
    _: Admin,
    State(api): State<Arc<Api>>,
    Body(new): Body<NewToken>,
) -> Result<impl IntoResponse, Problem> {
    let secret = make(&*api.db().await, &new).await?;
    Ok((StatusCode::CREATED, Json(Secret { secret })))
}

/// Makes one; answers its secret.
pub async fn make(db: &Db, new: &NewToken) -> Result<String, Problem> {
    words::name("a token", &new.name)?;
    let scope = new.scope.parse().map_err(|error: harmonia_queue::Error| Problem::from(error))?;
    let expires_in = new
        .expires_in
        .as_deref()
        .map(|text| words::time("expires_in", text, Duration::from_secs(1)))
        .transpose()?;
    Ok(people::create_token(db, &new.name, scope, expires_in).await?)
}

/// Revoke a token; the cache and whoever only looks may be let in for five seconds more
#[utoipa::path(delete, path = "/tokens/{name}", operation_id = "revoke_token", tag = "tokens",
    params(("name" = String, Path, description = "Its name", pattern = r"^[^\x00]+$")),
    responses((status = 200, description = "It allows nothing any more", body = Changed), Objections))]
pub async fn revoke(
    _: Admin,
    State(api): State<Arc<Api>>,
    Name(name): Name,
) -> Result<Json<Changed>, Problem> {
    people::revoke_token(&*api.db().await, &name).await?;
    Ok(Json(Changed { changed: 1 }))
}

/// Which token.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Its name
    #[param(pattern = r"^[^\x00]*$")]
    name: String,
}

/// Revoke a token, as `/api/tokens/{name}` does
#[utoipa::path(delete, path = "/tokens", operation_id = "revoke_token_by_name", tag = "tokens", params(Which),
    responses((status = 200, description = "It allows nothing any more", body = Changed), Objections))]
pub async fn revoke_by_name(
    admin: Admin,
    api: State<Arc<Api>>,
    Query(which): Query<Which>,
) -> Result<Json<Changed>, Problem> {
    revoke(admin, api, Name(which.name)).await
}

fn shown(found: people::Token) -> Token {
    Token {
        name: found.name,
        scope: found.scope.as_str().to_owned(),
        created_at: found.created_at,
        expires_at: found.expires_at,
        expired: found.expired,
    }
}
