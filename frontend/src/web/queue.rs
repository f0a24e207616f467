//! `/queue`: what runs, and what comes next in the order in which it will be taken.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::builds::{self, Build};
use harmonia_queue::order::{self, Ready};
use maud::{Markup, html};

use super::Web;
use super::frame::{Page, Trouble};
use super::parts::{badge, build_link, number, project_link, running, table};
use super::visitor::Looking;

const LISTED: i64 = 100;

/// The page.
pub async fn show(Looking(visitor): Looking, State(web): State<Arc<Web>>) -> Result<Response, Trouble> {
    web.live.version();
    let db = web.db().await;
    let (now, next) = (builds::running(&db, LISTED).await?, order::next(&db, LISTED).await?);
    drop(db);
    let content = html! {
        h1 { "Queue" }
        section { h2 { "Running" } (busy(&now)) }
        section {
            h2 { "Next" }
            p.legend { "What people asked for, then the project that has used least per share; of it the oldest evaluation, and of that the build that most wait for." }
            (line(&next))
        }
    };
    let rest = html! {};
    let page = Page {
        title: "Queue",
        place: "/queue",
        visitor: &visitor,
        again: Some("/queue"),
        stale: false,
        content,
        rest,
    };
    Ok(page.into_response())
}

fn time(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn busy(builds: &[Build]) -> Markup {
    table(
        "Running",
        html! {
            thead { tr { th { "Build" } th { "State" } th { "Node" } th { "System" } th.number { "For" } } }
            tbody {
                @for build in builds {
                    tr {
                        td { (build_link(build.id, &build.drv_path)) } td { (badge(&build.state)) }
                        td { (build.node.as_deref().unwrap_or("–")) } td { (build.system) }
                        td.number { (running(time(build.running_for.unwrap_or(0.0)))) }
                    }
                } @if builds.is_empty() { tr { td colspan="5" { "Nothing runs." } } }
            }
        },
    )
}

fn line(next: &[Ready]) -> Markup {
    table(
        "Next",
        html! {
            thead { tr { th.number { "#" } th { "Build" } th { "Project" } th { "Evaluation" } th.number { "Waits for it" } th.number { "Ready for" } } }
            tbody {
                @for (index, ready) in next.iter().enumerate() {
                    tr {
                        td.number { (index + 1) }
                        td { (build_link(ready.id, &ready.drv_path)) @if ready.manual { " " span.badge.warn { "by hand" } } }
                        td { (project_link(&ready.project)) }
                        td { a href=(format!("/evals/{}", ready.evaluation)) { (ready.evaluation) } }
                        td.number title="builds in the longest chain above it" { (number(ready.height.into())) }
                        td.number { (running(time(ready.waited))) }
                    }
                } @if next.is_empty() { tr { td colspan="6" { "Nothing waits for a builder." } } }
            }
        },
    )
}
