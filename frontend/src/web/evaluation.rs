//! `/evals/{id}`: its attributes by state, what is new against the one before, what it waits for, and its graph.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::evaluations::{self, Evaluation};
use harmonia_queue::pages::{self, Attribute, Changes, Graph, Group, Layer, Step};
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use maud::{Markup, html};
use serde::Deserialize;

use super::Web;
use super::ask::{Asked, Numbered};
use super::frame::{Page, Trouble};
use super::parts::{
    badge, build_link, button, further, number, project_link, seconds, shares, since, source, tone, words,
};
use super::picture;
use super::visitor::{Looking, Visitor};
use crate::escape::escape;
use crate::member::Target;

/// Attributes of each kind on the page, and on each further one.
const LISTED: i64 = 50;
/// What needs somebody comes first.
const ORDER: &[&str] =
    &["broken", "failed", "dep_failed", "cancelled", "running", "waiting", "succeeded", "cached"];

/// What is known of an evaluation.
pub struct Detail {
    evaluation: Evaluation,
    groups: Vec<Group>,
    layers: Vec<Layer>,
    graph: Option<Graph>,
    path: Vec<Step>,
    previous: Option<(i64, Changes)>,
}

async fn find(web: Arc<Web>, id: i64) -> Result<Detail, Problem> {
    let db = web.db().await;
    let found = evaluations::get(&db, id).await?;
    let evaluation = found.ok_or_else(|| Problem::not_found(format!("there is no evaluation {id}")))?;
    let all: i64 = shares(&evaluation.builds).iter().map(|(_, count)| count).sum();
    let graph = if all <= picture::DRAWN { Some(pages::graph(&db, id, picture::DRAWN).await?) } else { None };
    let previous = match pages::previous(&db, id).await? {
        Some(previous) => Some((previous, pages::changes(&db, id, previous).await?)),
        None => None,
    };
    let mut groups = pages::groups(&db, id, LISTED).await?;
    groups.sort_by_key(|group| ORDER.iter().position(|state| *state == group.state));
    Ok(Detail {
        evaluation,
        groups,
        layers: pages::layers(&db, id).await?,
        graph,
        path: pages::critical_path(&db, id).await?,
        previous,
    })
}

/// Which part of it.
#[derive(Deserialize)]
pub struct Part {
    /// Only attributes in this state,
    state: Option<String>,
    /// after this one.
    after: Option<String>,
}

/// The page.
pub async fn show(
    Looking(visitor): Looking,
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
    Asked(part): Asked<Part>,
) -> Result<Response, Trouble> {
    let version = web.live.version();
    let told = web.details.get(id, version, || find(web.clone(), id)).await?;
    let detail = &told.value;
    let here = format!("/evals/{id}");
    let allowed = web.offers(&visitor, Target::Evaluation(id)).await;
    let (content, again) = match &part.state {
        Some(state) => {
            let after = part.after.as_deref().unwrap_or_default();
            let found = pages::group(&*web.db().await, id, state, after, LISTED + 1).await?;
            let again = format!("{here}?state={}&after={}", escape(state), escape(after));
            (some(detail, state, found), again)
        }
        None => (whole(detail, &visitor, allowed), here),
    };
    let (title, rest) = (format!("Evaluation {id}"), html! {});
    let page = Page {
        title: &title,
        place: "",
        visitor: &visitor,
        again: Some(&again),
        stale: told.stale,
        content,
        rest,
    };
    Ok(page.into_response())
}

fn head(evaluation: &Evaluation) -> Markup {
    html! {
        p.crumbs {
            (project_link(&evaluation.project))
            @if let Some(branch) = &evaluation.branch {
                " / " a href=(format!("{}?branch={}", super::parts::project_address(&evaluation.project), escape(branch))) { (branch) }
            }
        }
        h1 { "Evaluation " (evaluation.id) " " (badge(evaluation.status().as_str())) }
        p { (source(evaluation)) " · asked for " (since(&evaluation.created_at)) }
    }
}

fn whole(detail: &Detail, visitor: &Visitor, allowed: bool) -> Markup {
    let evaluation = &detail.evaluation;
    let counts = shares(&evaluation.builds);
    html! {
        (head(evaluation))
        @if allowed { (actions(evaluation, visitor)) }
        @if let Some(error) = &evaluation.error { section { h2 { "Why it ended" } pre.words { (error) } } }
        section {
            h2 { "Builds" }
            (picture::progress(&counts))
            p.legend {
                @for (state, count) in counts.iter().filter(|(_, count)| *count > 0) {
                    span class=(format!("key {}", tone(state))) { (number(*count)) " " (words(state)) } " "
                }
            }
        }
        (news(detail.previous.as_ref()))
        section { h2 { "Attributes" }
            @for group in &detail.groups { (kind(evaluation.id, group)) }
            @if detail.groups.is_empty() { p { "It has none yet." } }
        }
        (timeline(&detail.path))
        @if !detail.layers.is_empty() {
            section {
                h2 { "Dependency graph" }
                @match &detail.graph {
                    Some(graph) => (picture::graph(graph)),
                    None => {
                        (picture::layers(&detail.layers))
                        p.legend { "Builds by depth, left those that need no other build; heights are logarithmic." }
                    }
                }
            }
        }
    }
}

fn actions(evaluation: &Evaluation, visitor: &Visitor) -> Markup {
    let place = |verb: &str| format!("/evals/{}/{verb}", evaluation.id);
    html! {
        div.actions {
            @if !evaluation.status().is_final() { (button(visitor, &place("cancel"), "Cancel", "Cancel this evaluation", "danger")) }
            @if evaluation.builds.failed > 0 { (button(visitor, &place("rebuild-failed"), "Rebuild what failed", "Rebuild what failed", "plain")) }
            (button(visitor, &place("re-evaluate"), "Evaluate again", "Evaluate again", "plain"))
            @if visitor.may(Scope::Operate) {
                @if evaluation.pinned { (button(visitor, &place("unpin"), "Unpin", "Unpin it: it goes when its time is over", "plain")) }
                @else { (button(visitor, &place("pin"), "Pin", "Pin it: it is kept for good, with all it built", "plain")) }
            }
        }
    }
}

fn news(previous: Option<&(i64, Changes)>) -> Markup {
    let Some((previous, changes)) = previous else { return html! {} };
    html! {
        section {
            h2 { "Against " a href=(format!("/evals/{previous}")) { "evaluation " (previous) } }
            @if changes.failing.is_empty() && changes.fixed.is_empty() { p { "Nothing fails that did not, and nothing is fixed." } }
            @for (title, tone, list) in [("Newly failing", "bad", &changes.failing), ("Newly fixed", "good", &changes.fixed)] {
                @if !list.is_empty() {
                    h3 { span class=(format!("badge {tone}")) { (title) " " (list.len()) } }
                    (names(list))
                }
            }
        }
    }
}

fn kind(evaluation: i64, group: &Group) -> Markup {
    let open = !matches!(group.state.as_str(), "succeeded" | "cached");
    html! {
        details id=(format!("group-{}", group.state)) open[open] {
            summary { (badge(&group.state)) " " (number(group.all)) }
            (names(&group.first))
            @if group.all > LISTED {
                (further(group.first.last().map(|last| next_page(evaluation, &group.state, &last.name))))
            }
        }
    }
}

fn next_page(evaluation: i64, state: &str, after: &str) -> String {
    format!("/evals/{evaluation}?state={}&after={}", escape(state), escape(after))
}

fn names(list: &[Attribute]) -> Markup {
    html! {
        ul.attributes {
            @for attribute in list {
                li {
                    @match attribute.build {
                        Some(build) => a href=(format!("/builds/{build}")) { (attribute.name) },
                        None => span { (attribute.name) },
                    }
                    @if let Some(error) = &attribute.error { pre.words { (error) } }
                }
            }
        }
    }
}

/// A further page of one kind.
fn some(detail: &Detail, state: &str, mut found: Vec<Attribute>) -> Markup {
    let room = usize::try_from(LISTED).unwrap_or(0);
    let more = found.len() > room;
    found.truncate(room);
    let next = found.last().filter(|_| more).map(|last| next_page(detail.evaluation.id, state, &last.name));
    html! {
        (head(&detail.evaluation))
        p { a href=(format!("/evals/{}", detail.evaluation.id)) { "The whole evaluation" } }
        section { h2 { "Attributes: " (words(state)) } (names(&found)) (further(next)) }
    }
}

fn timeline(path: &[Step]) -> Markup {
    let all = path.iter().map(|step| step.ended).fold(0.0, f64::max);
    let from = std::iter::once(0.0).chain(path.iter().map(|step| step.ended));
    html! {
        @if !path.is_empty() {
            section {
                h2 { "What it waited for" }
                ol.timeline {
                    @for (step, from) in path.iter().zip(from) {
                        li {
                            span.name { (build_link(step.id, &step.drv_path)) }
                            span.where { @if let Some(node) = &step.node { (node) } }
                            (picture::span(step, from, all))
                            span.time { (seconds((step.ended - step.claimed).max(0.0))) }
                        }
                    }
                }
                p.legend { "From the first build to the last, each the input that came last: " (seconds(all)) " in all. Thin: nobody had claimed it yet." }
            }
        }
    }
}
