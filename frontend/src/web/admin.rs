//! `/admin`: projects and tokens. Nodes are drained, and builds repeated and cancelled, on their own pages.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use harmonia_queue::people::{self, Scope, Token};
use harmonia_queue::projects::{self, Project};
use harmonia_service::api::{NewToken, ProjectChange};
use harmonia_service::problem::Problem;
use maud::{Markup, html};

use super::Web;
use super::frame::{Page, Trouble, csrf};
use super::parts::{new_secret, project_link, since, table};
use super::visitor::{ADMIN, Looking, Ordered, Visitor};
use crate::api::{alter_project, make_project, make_token};

type Admin = Ordered<ADMIN>;

/// The page.
pub async fn show(Looking(visitor): Looking, State(web): State<Arc<Web>>) -> Result<Response, Trouble> {
    page(&web, &visitor, None).await
}

async fn page(web: &Web, visitor: &Visitor, secret: Option<(&str, &str)>) -> Result<Response, Trouble> {
    if !visitor.may(Scope::Admin) {
        let problem = Problem::new(
            StatusCode::FORBIDDEN,
            "this page takes the scope admin: sign in with a token that has it",
        );
        return Err(if visitor.session.is_some() {
            problem.into()
        } else {
            Trouble::SignIn("/admin".to_owned())
        });
    }
    let db = web.db().await;
    let (projects, tokens) = (projects::list(&db).await?, people::list_tokens(&db).await?);
    drop(db);
    let rest = html! {
        h1 { "Admin" }
        @if let Some((name, secret)) = secret { (new_secret(name, secret)) }
        section { h2 { "Projects" } (project_rows(&projects, visitor)) (new_project(visitor)) }
        section { h2 { "Tokens" } (token_rows(&tokens, visitor)) (new_token(visitor)) }
        section { h2 { "Nodes and builds" } p { "Nodes are drained on " a href="/nodes" { "their page" } "; builds and evaluations are repeated and cancelled on theirs." } }
    };
    let content = html! {};
    Ok(Page { title: "Admin", place: "/admin", visitor, again: None, stale: false, content, rest }
        .into_response())
}

fn project_rows(projects: &[Project], visitor: &Visitor) -> Markup {
    table(
        "Projects",
        html! {
            thead { tr { th { "Project" } th { "Shares, builds at once, state" } th { "Remove" } } }
            tbody {
                @for project in projects {
                    tr {
                        td { (project_link(&project.name)) }
                        td { form.row method="post" action="/admin/projects" {
                            (csrf(visitor))
                            input type="hidden" name="name" value=(project.name);
                            input.short type="number" name="shares" min="1" max="1000000" value=(project.shares) aria-label=(format!("Shares of {}", project.name));
                            input.short type="number" name="max_concurrent" min="0" max="10000" value=[project.max_concurrent] placeholder="no limit" aria-label=(format!("Builds of {} at once", project.name));
                            label { input type="checkbox" name="paused" checked[project.paused]; " paused" }
                            button type="submit" aria-label=(format!("Save {}", project.name)) { "Save" }
                        } }
                        td { form.act method="post" action="/admin/projects/remove" {
                            (csrf(visitor))
                            input type="hidden" name="name" value=(project.name);
                            label { input type="checkbox" name="sure" required; " sure" }
                            button.danger type="submit" aria-label=(format!("Remove {}", project.name)) { "Remove" }
                        } }
                    }
                }
            }
        },
    )
}

fn new_project(visitor: &Visitor) -> Markup {
    html! {
        form.row method="post" action="/admin/projects" {
            (csrf(visitor))
            input type="hidden" name="new" value="true";
            input type="text" name="name" required maxlength="200" placeholder="new project" aria-label="Name of a new project";
            input.short type="number" name="shares" min="1" max="1000000" value="100" aria-label="Its shares";
            button type="submit" { "Add project" }
        }
    }
}

fn token_rows(tokens: &[Token], visitor: &Visitor) -> Markup {
    table(
        "Tokens",
        html! {
            thead { tr { th { "Token" } th { "Scope" } th { "Made" } th { "Expires" } th { "Revoke" } } }
            tbody {
                @for token in tokens {
                    tr {
                        td { (token.name) } td { (token.scope.as_str()) } td { (since(&token.created_at)) }
                        td { @match &token.expires_at { Some(moment) => { (moment) @if token.expired { " (expired)" } }, None => "never" } }
                        td { form.act method="post" action="/admin/tokens/revoke" {
                            (csrf(visitor))
                            input type="hidden" name="name" value=(token.name);
                            button.danger type="submit" aria-label=(format!("Revoke {}", token.name)) { "Revoke" }
                        } }
                    }
                }
            }
        },
    )
}

fn new_token(visitor: &Visitor) -> Markup {
    html! {
        form.row method="post" action="/admin/tokens" {
            (csrf(visitor))
            input type="text" name="name" required maxlength="200" placeholder="new token" aria-label="Name of a new token";
            select name="scope" aria-label="What it allows" {
                @for scope in [Scope::Read, Scope::Operate, Scope::Admin] { option value=(scope.as_str()) { (scope.as_str()) } }
            }
            input.short type="text" name="expires_in" placeholder="30d" pattern="[1-9][0-9]{0,3}[smhdw]" aria-label="How long it lasts, such as 30d; empty: until it is revoked";
            button type="submit" { "Make token" }
        }
    }
}

/// Makes a project, or changes one.
pub async fn put_project(State(web): State<Arc<Web>>, Ordered(sent): Admin) -> Result<Redirect, Trouble> {
    let name = sent.require("name")?;
    let number = |field: &str| match sent.get(field) {
        None => Ok(None),
        Some(word) => word
            .parse::<i32>()
            .map(Some)
            .map_err(|_| Problem::bad_request(format!("{field} is {word:?}, which is no number"))),
    };
    let change = ProjectChange {
        shares: number("shares")?,
        max_concurrent: Some(number("max_concurrent")?),
        paused: Some(sent.get("paused").is_some()),
        ..ProjectChange::default()
    };
    let db = web.db().await;
    match sent.get("new") {
        Some(_) => make_project(&db, &web.forges, name, &change).await?,
        None => alter_project(&db, &web.forges, name, &change).await?,
    };
    web.changed();
    Ok(Redirect::to("/admin"))
}

/// Takes one away; its history stays.
pub async fn remove_project(State(web): State<Arc<Web>>, Ordered(sent): Admin) -> Result<Redirect, Trouble> {
    let (name, _) = (sent.require("name")?, sent.require("sure")?);
    if !people::remove_project(&*web.db().await, name).await? {
        return Err(Problem::not_found(format!("there is no project {name}")).into());
    }
    web.changed();
    Ok(Redirect::to("/admin"))
}

/// Makes a token and shows its secret.
pub async fn create_token(State(web): State<Arc<Web>>, Ordered(sent): Admin) -> Result<Response, Trouble> {
    let new = NewToken {
        name: sent.require("name")?.to_owned(),
        scope: sent.require("scope")?.to_owned(),
        expires_in: sent.get("expires_in").map(str::to_owned),
    };
    let secret = make_token(&*web.db().await, &new).await?;
    page(&web, &sent.visitor, Some((&new.name, &secret))).await
}

/// From now on it allows nothing.
pub async fn revoke_token(State(web): State<Arc<Web>>, Ordered(sent): Admin) -> Result<Redirect, Trouble> {
    people::revoke_token(&*web.db().await, sent.require("name")?).await?;
    Ok(Redirect::to("/admin"))
}
