//! `/builds/{id}`: how far a build is and why, what it needs, what it makes, and its log.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::builds::{self, Attempt, Build, Output};
use harmonia_queue::pages::{self, NEIGHBOURS, Side, Vertex, Want};
use harmonia_queue::people;
use maud::{Markup, PreEscaped, html};
use serde::Deserialize;

use super::Web;
use super::ask::{Asked, Numbered};
use super::frame::{Page, Trouble};
use super::log::{END, Part, Window, tools};
use super::parts::{badge, build_link, button, number, project_link, seconds, since, table, tone, up_to};
use super::visitor::{Looking, Visitor};
use super::watch;
use crate::api::known_build;
use crate::member::Target;

/// Neighbours that are listed.
const LISTED: i64 = 40;

/// Which part of it.
#[derive(Deserialize)]
pub struct Which {
    /// Without the log, which is followed by itself.
    #[serde(default)]
    head: bool,
}

/// The page.
pub async fn show(
    Looking(visitor): Looking,
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
    Asked(which): Asked<Which>,
) -> Result<Response, Trouble> {
    web.live.version();
    let db = web.db().await;
    let build = known_build(&db, id).await?;
    let root = match build.root {
        Some(root) => builds::get(&db, root).await?,
        None => None,
    };
    let seen = Seen {
        why: people::why(&db, id).await?.into_iter().map(|(_, sentence)| sentence).collect(),
        outputs: builds::outputs(&db, id).await?,
        attempts: builds::attempts(&db, id).await?,
        inputs: pages::neighbours(&db, id, Side::Inputs, LISTED).await?,
        dependents: pages::neighbours(&db, id, Side::Dependents, LISTED).await?,
        wants: pages::wants(&db, id, 8).await?,
        build,
        root,
    };
    drop(db);
    let target = if seen.build.is_open() { Target::Cancel(id) } else { Target::Rebuild(id) };
    let allowed = web.offers(&visitor, target).await;
    let content = seen.head(&visitor, allowed, &web).await;
    let rest = if which.head {
        html! {}
    } else {
        log(&web, &seen.build, &seen.attempts).await?
    };
    let (title, again) = (seen.build.name().to_owned(), format!("/builds/{id}?head=true"));
    let page = Page {
        title: &title,
        place: "",
        visitor: &visitor,
        again: Some(&again),
        stale: false,
        content,
        rest,
    };
    Ok(page.into_response())
}

struct Seen {
    build: Build,
    root: Option<Build>,
    why: Vec<String>,
    outputs: Vec<Output>,
    attempts: Vec<Attempt>,
    inputs: (Vec<Vertex>, i64),
    dependents: (Vec<Vertex>, i64),
    wants: Vec<Want>,
}

impl Seen {
    async fn head(&self, visitor: &Visitor, allowed: bool, web: &Web) -> Markup {
        let build = &self.build;
        html! {
            p.crumbs { "Build " (build.id) }
            h1 { (build.name()) " " (badge(&build.state)) }
            p.path { code { (build.drv_path) } " · " (build.system)
                @for feature in &build.features { " " span.badge.idle { (feature) } } }
            @if allowed { (actions(build, visitor)) }
            section {
                h2 { @if build.is_open() && build.node.is_none() { "Why it is not running" } @else { "How it is" } }
                ul.why { @for sentence in &self.why { li { (sentence) } } }
                @if let Some(root) = &self.root {
                    p { "The root of it: " (build_link(root.id, &root.drv_path)) " " (badge(&root.state))
                        @if let Some(error) = &root.error { ": " (error) } }
                }
            }
            div.columns {
                section { h2 { "Attempts" } (attempts(build.id, &self.attempts)) }
                section { h2 { "Outputs" } (outputs(&self.outputs)) @if is_there(build) { (fetch(&self.outputs, web).await) } }
            }
            div.columns {
                section { h2 { "Needs " (up_to(self.inputs.1, NEIGHBOURS)) } (near(&self.inputs.0, self.inputs.1)) }
                section { h2 { "Needed by " (up_to(self.dependents.1, NEIGHBOURS)) } (near(&self.dependents.0, self.dependents.1)) }
            }
            span #log-of data-log=(log_of(build, &self.attempts)) hidden {}
            section { h2 { "Wanted by" } (wants(&self.wants)) }
        }
    }
}

fn is_there(build: &Build) -> bool {
    matches!(build.state.as_str(), "succeeded" | "cached")
}

fn actions(build: &Build, visitor: &Visitor) -> Markup {
    let place = |verb: &str| format!("/builds/{}/{verb}", build.id);
    html! {
        div.actions {
            @if build.is_open() { (button(visitor, &place("cancel"), "Cancel", "Cancel this build", "danger")) }
            @if matches!(build.state.as_str(), "failed" | "cancelled") { (button(visitor, &place("rebuild"), "Rebuild", "Rebuild it, first in line", "plain")) }
        }
    }
}

fn attempts(build: i64, attempts: &[Attempt]) -> Markup {
    table(
        "Attempts",
        html! {
            thead { tr { th { "Attempt" } th { "Node" } th { "Outcome" } th { "Began" } th.number { "Took" } } }
            tbody {
                @for attempt in attempts {
                    tr {
                        td { @if attempt.outcome.is_some() { a href=(format!("/builds/{build}/log?attempt={}", attempt.id)) { (attempt.id) } } @else { (attempt.id) } }
                        td { (attempt.node.as_deref().unwrap_or("–")) }
                        td { (badge(outcome(attempt))) @if let Some(message) = &attempt.message { " " span.message { (message) } } }
                        td { (since(&attempt.started_at)) }
                        td.number { (seconds(attempt.seconds)) }
                    }
                } @if attempts.is_empty() { tr { td colspan="5" { "It was not tried." } } }
            }
        },
    )
}

fn outcome(attempt: &Attempt) -> &str {
    match attempt.outcome.as_deref() {
        None => "running",
        Some(outcome @ ("succeeded" | "cancelled" | "interrupted")) => outcome,
        Some(_) => "failed",
    }
}

fn outputs(outputs: &[Output]) -> Markup {
    html! {
        dl.outputs {
            @for output in outputs {
                div { dt { (output.name) } dd { @match &output.path { Some(path) => code { (path) }, None => "known when it is built" } } }
            }
        }
    }
}

/// The command that fetches what was built.
async fn fetch(outputs: &[Output], web: &Web) -> Markup {
    let paths: Vec<&str> = outputs.iter().filter_map(|output| output.path.as_deref()).collect();
    let keys = web.public_keys.lines().await.join(" ");
    let command = format!(
        "nix-store --realise {} \\\n  --option extra-substituters {}/cache \\\n  --option extra-trusted-public-keys '{keys}'",
        paths.join(" "),
        web.url
    );
    html! { @if !paths.is_empty() { h3 { "Fetch it" } pre.words.command tabindex="0" { (command) } } }
}

fn near(list: &[Vertex], all: i64) -> Markup {
    html! {
        ul.near {
            @for vertex in list {
                li { span class=(format!("dot {}", tone(&vertex.state))) {} (build_link(vertex.id, &vertex.drv_path)) " " span.faint { (super::parts::words(&vertex.state)) } }
            } @if list.is_empty() { li { "Nothing." } }
        }
        @if all > list.len() as i64 { p.faint { "and " (up_to(all - list.len() as i64, NEIGHBOURS - LISTED)) " more" } }
    }
}

fn wants(wants: &[Want]) -> Markup {
    html! {
        ul.near {
            @for want in wants {
                li {
                    a href=(format!("/evals/{}", want.evaluation)) { "evaluation " (want.evaluation) }
                    " of " (project_link(&want.project))
                    @if let Some(branch) = &want.branch { ", branch " (branch) }
                    @if let Some(attribute) = &want.attribute { ", as " code { (attribute) } }
                }
            } @if wants.is_empty() { li { "No evaluation wants it any more." } }
        }
    }
}

/// Which log the page should show: when this is another one than it does, it asks for that.
fn log_of(build: &Build, attempts: &[Attempt]) -> String {
    match attempts.last() {
        Some(last) if !build.is_open() => last.id.to_string(),
        _ if build.is_open() => "live".to_owned(),
        _ => "none".to_owned(),
    }
}

/// The end of its log: followed while it is open, read from the archive afterwards. All else on the page does not need the archive.
async fn log(web: &Web, build: &Build, attempts: &[Attempt]) -> Result<Markup, Trouble> {
    let content = if build.is_open() {
        being_written(build.id, watch::now(web, build).await?)
    } else {
        match web.archived(build, attempts, None, &Part::End(END)).await {
            Ok(Some((attempt, window))) => end_of(build.id, attempt, window),
            Ok(None) => html! { p { "There is none." } },
            Err(problem) => html! { p { "The log cannot be read now: " (problem.detail()) } },
        }
    };
    Ok(html! { section #log data-log=(log_of(build, attempts)) { h2 { "Log" } (content) } })
}

fn being_written(id: i64, begun: String) -> Markup {
    html! {
        p.legend { label { input #follow type="checkbox" checked; " Follow" } " · " span #log-state { "as it is written" } }
        div hx-ext="sse" sse-connect=(format!("/builds/{id}/log/live")) sse-close="end" {
            div hidden sse-swap="whole" hx-target="#lines" hx-swap="innerHTML" {}
            div hidden sse-swap="lines" hx-target="#lines" hx-swap="beforeend" {}
            div.log.live #lines role="log" aria-label="Log" tabindex="0" { (PreEscaped(begun)) }
        }
    }
}

fn end_of(id: i64, attempt: i64, mut window: Window) -> Markup {
    let wanted = window.lines.len();
    let painted = window.paint_lines(&Part::End(END));
    html! {
        (tools(id, attempt, None))
        p.legend {
            "The last " (number(window.lines.len() as i64)) " of " (number(window.all as i64)) " lines of attempt " (attempt)
            " · " a href=(format!("/builds/{id}/log?attempt={attempt}")) { "more of it" }
            " · " a href=(format!("/api/builds/{id}/log?attempt={attempt}")) { "plain text" }
        }
        @if window.lines.len() < wanted {
            p { "The lines before them are too long for this page: " a href=(format!("/builds/{id}/log?attempt={attempt}&line=1")) { "the whole log" } " has them." }
        }
        div.log role="region" aria-label="Log" tabindex="0" { (painted) }
    }
}
