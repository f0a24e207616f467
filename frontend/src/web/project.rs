//! `/projects/{name}`: its branches and its evaluations.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::evaluations::{self, Filter};
use harmonia_queue::{pages, projects};
use harmonia_service::problem::Problem;
use harmonia_service::quantity::Span;
use maud::html;
use serde::Deserialize;

use super::Web;
use super::ask::{Asked, Named};
use super::frame::{Page, Trouble};
use super::parts::{badge, evaluations as rows, further, number, project_address};
use super::visitor::Looking;
use crate::api::page;
use crate::escape::escape;

const LISTED: i64 = 30;

/// Which part of it.
#[derive(Deserialize)]
pub struct Part {
    branch: Option<String>,
    after: Option<String>,
}

/// The page.
pub async fn show(
    Looking(visitor): Looking,
    State(web): State<Arc<Web>>,
    Named(name): Named,
    Asked(part): Asked<Part>,
) -> Result<Response, Trouble> {
    let version = web.live.version();
    let before = page::number(part.after.as_deref())?;
    let db = web.db().await;
    let found = projects::get(&db, &name).await?;
    let project = found.ok_or_else(|| Problem::not_found(format!("there is no project {name}")))?;
    let branches = pages::branches(&db, &name).await?;
    let pinned = pages::pinned(&db, &name, LISTED).await?;
    let filter = Filter { project: Some(&name), branch: part.branch.as_deref(), before };
    let ids =
        page::cut(evaluations::numbers(&db, &filter, LISTED + 1).await?, LISTED, i64::to_string, |id| id);
    drop(db);
    let heads: Vec<i64> = branches.iter().map(|(_, latest)| *latest).collect();
    let heads = web.evaluations(&heads, version).await?;
    let list = web.evaluations(&ids.items, version).await?;
    let pinned = web.evaluations(&pinned, version).await?;
    let here = project_address(&name);
    let branch =
        part.branch.as_deref().map(|branch| format!("branch={}&", escape(branch))).unwrap_or_default();
    let again = match &part.after {
        Some(after) => format!("{here}?{branch}after={}", escape(after)),
        None => format!("{here}?{branch}"),
    };
    let content = html! {
        h1 { (name) @if project.paused { " " span.badge.warn { "paused" } } }
        dl.figures {
            div { dt { "Running" } dd { (number(project.running)) @if let Some(most) = project.max_concurrent { "/" (most) } } }
            div { dt { "Ready" } dd { (number(project.ready)) } }
            div { dt { "Shares" } dd { (project.shares) } }
            div { dt { "Kept for" } dd { (Span(project.retention)) } }
        }
        section {
            h2 { "Branches" }
            ul.branches {
                @for evaluation in &heads {
                    @let branch = evaluation.branch.as_deref();
                    li {
                        @match branch {
                            Some(name) => a href=(format!("{here}?branch={}", escape(name))) aria-current=[(part.branch.as_deref() == branch).then_some("true")] { (name) },
                            None => span { "no branch" },
                        }
                        " " (badge(evaluation.status().as_str())) " " a href=(format!("/evals/{}", evaluation.id)) { "evaluation " (evaluation.id) }
                    }
                }
            }
        }
        @if !pinned.is_empty() {
            section {
                h2 { "Pinned" }
                (rows(&pinned, false))
                p.legend { "These, and all they built, are kept for good." }
            }
        }
        section {
            h2 { @match &part.branch { Some(branch) => { "Evaluations of " (branch) }, None => "Evaluations" } }
            @if part.branch.is_some() { p { a href=(here) { "Those of all branches" } } }
            (rows(&list, false))
            (further(ids.next.map(|next| format!("{here}?{branch}after={next}"))))
        }
    };
    let rest = html! {};
    let page =
        Page { title: &name, place: "", visitor: &visitor, again: Some(&again), stale: false, content, rest };
    Ok(page.into_response())
}
