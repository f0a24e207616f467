//! What is around every page, and pages that say what went wrong.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Redirect, Response};
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use maud::{DOCTYPE, Markup, html};

use super::assets::address;
use super::visitor::Visitor;
use crate::escape::escape;

/// Where the bar at the top leads.
const PLACES: &[(&str, &str)] = &[
    ("/", "Dashboard"),
    ("/queue", "Queue"),
    ("/nodes", "Nodes"),
    ("/findings", "Findings"),
    ("/admin", "Admin"),
];

/// Neither styles nor code come from within a page, and requests go nowhere else.
const HTMX: &str =
    r#"{"includeIndicatorStyles":false,"allowEval":false,"selfRequestsOnly":true,"historyCacheSize":0}"#;

/// A page to be.
pub struct Page<'a> {
    /// What it is about.
    pub title: &'a str,
    /// The place that it belongs to.
    pub place: &'a str,
    /// Who looks.
    pub visitor: &'a Visitor,
    /// Where to ask for its content again when something changes; none: it stays as it is.
    pub again: Option<&'a str>,
    /// What it shows may be old already.
    pub stale: bool,
    /// What changes.
    pub content: Markup,
    /// What does not, below it.
    pub rest: Markup,
}

impl IntoResponse for Page<'_> {
    fn into_response(self) -> Response {
        let body = html! {
            (bar(self.place, self.visitor))
            main #main tabindex="-1" {
                @if let Some(again) = self.again {
                    div #live hidden hx-ext="sse" sse-connect="/live" {
                        div #again hx-get=(again) hx-trigger="sse:changed, again" hx-select="#content" hx-target="#content" hx-swap="morph:outerHTML" hx-ext="morph" {}
                    }
                }
                div #content data-stale[self.stale] { (self.content) }
                (self.rest)
            }
        };
        Html(document(self.title, body).into_string()).into_response()
    }
}

fn document(title: &str, body: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="htmx-config" content=(HTMX);
                title { (title) " · harmonia-ci" }
                link rel="icon" type="image/svg+xml" href=(address("icon.svg"));
                link rel="stylesheet" href=(address("style.css"));
                @for script in ["htmx.min.js", "sse.min.js", "idiomorph-ext.min.js", "pages.js"] {
                    script defer src=(address(script)) {}
                }
            }
            body { (body) }
        }
    }
}

fn bar(place: &str, visitor: &Visitor) -> Markup {
    html! {
        a.skip href="#main" { "Skip to the page" }
        header.bar {
            a.brand href="/" { img src=(address("icon.svg")) alt="" width="20" height="20"; "harmonia-ci" }
            nav aria-label="Places" {
                @for (path, name) in PLACES {
                    @if *path != "/admin" || visitor.may(Scope::Admin) {
                        a href=(path) aria-current=[(*path == place).then_some("page")] { (name) }
                    }
                }
            }
            @if visitor.may(Scope::Read) {
                form.search action="/find" role="search" {
                    input type="search" name="q" aria-label="Find a build" placeholder="Build, attribute, path" maxlength="4096";
                    button type="submit" { "Find" }
                }
            }
            @match &visitor.session {
                Some((session, _)) => form.who method="post" action="/sign-out" {
                    @if session.member.is_some() { a href="/you" { (session.name) } } @else { span { (session.name) } }
                    (csrf(visitor))
                    button type="submit" { "Sign out" }
                },
                None => a.who href="/sign-in" { "Sign in" },
            }
        }
    }
}

/// What makes a form ours.
pub fn csrf(visitor: &Visitor) -> Markup {
    html! { input type="hidden" name="csrf" value=(visitor.csrf()); }
}

/// Why there is no page.
pub enum Trouble {
    /// Whoever wants to see this has to say who they are.
    SignIn(String),
    /// Something else.
    Problem(Problem),
}

impl From<Problem> for Trouble {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

impl From<harmonia_queue::Error> for Trouble {
    fn from(error: harmonia_queue::Error) -> Self {
        Self::Problem(error.into())
    }
}

impl IntoResponse for Trouble {
    fn into_response(self) -> Response {
        let problem = match self {
            Self::SignIn(to) => return Redirect::to(&format!("/sign-in?to={}", escape(&to))).into_response(),
            Self::Problem(problem) => problem,
        };
        let body = html! {
            header.bar { a.brand href="/" { img src=(address("icon.svg")) alt="" width="20" height="20"; "harmonia-ci" } }
            main #main {
                h1 { (problem.title()) }
                p.sentence { (problem.detail()) }
                p { a href="/" { "To the dashboard" } }
            }
        };
        let page = Html(document(problem.title(), body).into_string());
        let mut response = (problem.status(), page).into_response();
        if problem.status() == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
