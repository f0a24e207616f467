//! The API for people and programs, under `/api/`: JSON in and out, events as they happen, errors as problem documents.
//! `/api/openapi.json` describes it, generated from what is here.

mod ask;
mod builds;
mod evals;
mod events;
mod follow;
mod hub;
mod leader;
mod limits;
mod log;
mod nodes;
mod openapi;
pub mod page;
mod projects;
mod queue;
mod stream;
mod tokens;
mod utf8;
pub mod words;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::{Json, Router};
use harmonia_queue::Db;
use tokio::sync::{Semaphore, watch};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admit::Admission;
use crate::forge::Forges;
use crate::shelf::Shelf;
use crate::turn::{Turn, Turns};

pub use ask::{Name, Number, Query};
pub use builds::known as known_build;
pub use evals::end as end_evaluation;
pub use hub::Hub;
pub use log::object as log_object;
pub use nodes::{REASON as DRAINED_BY_HAND, node as node_number};
pub use projects::{alter as alter_project, make as make_project};
pub use stream::Streams;
pub use tokens::make as make_token;

/// Questions of the API to the database at once. Other connections are left to those who check tokens.
pub const ASKING: usize = 8;
/// Clients that are told what happens, at once.
const FOLLOWERS: usize = 500;

/// What answers are made of.
pub struct Api {
    admission: Arc<Admission>,
    turns: Turns,
    requests: Semaphore,
    shelf: Shelf,
    hub: Arc<Hub>,
    streams: Streams,
    forges: Arc<Forges>,
}

impl Api {
    /// Streams of events end when `closing` says so.
    pub fn new(
        admission: Arc<Admission>,
        db: Db,
        shelf: Shelf,
        hub: Arc<Hub>,
        closing: watch::Receiver<bool>,
        forges: Arc<Forges>,
    ) -> Self {
        let (turns, requests) = (Turns::new(db, ASKING), Semaphore::new(limits::REQUESTS));
        let streams = Streams::new(closing, FOLLOWERS);
        Self { admission, turns, requests, shelf, hub, streams, forges }
    }

    async fn db(&self) -> Turn<'_> {
        self.turns.take().await
    }

    /// The pages, and what is said where there is none.
    pub fn routes(self) -> Router {
        let api = Arc::new(self);
        let (router, description) = resources().split_for_parts();
        let description = axum::routing::get(|| async move { Json(description) });
        router
            .route("/api/openapi.json", description)
            .method_not_allowed_fallback(limits::wrong_method)
            .layer(DefaultBodyLimit::max(limits::BODY))
            .layer(from_fn_with_state(api.clone(), limits::keep))
            .fallback(limits::unknown)
            .with_state(api)
    }
}

/// Every route with its description. The table of contents.
fn resources() -> OpenApiRouter<Arc<Api>> {
    let api = OpenApiRouter::new()
        .routes(routes!(evals::list, evals::create))
        .routes(routes!(evals::get))
        .routes(routes!(evals::cancel))
        .routes(routes!(evals::re_evaluate))
        .routes(routes!(evals::rebuild_failed))
        .routes(routes!(evals::pin, evals::unpin))
        .routes(routes!(builds::list))
        .routes(routes!(builds::get))
        .routes(routes!(builds::why))
        .routes(routes!(log::read))
        .routes(routes!(builds::rebuild))
        .routes(routes!(builds::cancel))
        .routes(routes!(events::listen))
        .routes(routes!(nodes::list))
        .routes(routes!(nodes::drain, nodes::resume))
        .routes(routes!(queue::look))
        .routes(routes!(projects::list, projects::add))
        .routes(routes!(projects::change, projects::remove))
        .routes(routes!(tokens::list, tokens::create, tokens::revoke_by_name))
        .routes(routes!(tokens::revoke))
        .routes(routes!(leader::show));
    OpenApiRouter::with_openapi(openapi::frame()).nest("/api", api)
}
