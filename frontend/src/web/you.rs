//! `/you`: the tokens of somebody of a forge, for the command line and for programs of theirs.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use harmonia_queue::people;
use harmonia_service::problem::Problem;
use maud::{Markup, html};

use super::Web;
use super::frame::{Page, Trouble, csrf};
use super::parts::{new_secret, table};
use super::visitor::{LOOK, Looking, Ordered, Visitor};
use crate::forge::Member;

/// How long a token lasts.
const LIFETIME: Duration = Duration::from_secs(30 * 86_400);

type Signed = Ordered<LOOK>;

/// The page.
pub async fn show(Looking(visitor): Looking, State(web): State<Arc<Web>>) -> Result<Response, Trouble> {
    page(&web, &visitor, None).await
}

/// Makes a token and shows its secret.
pub async fn create_token(State(web): State<Arc<Web>>, Ordered(sent): Signed) -> Result<Response, Trouble> {
    let member = member(&sent.visitor)?;
    let name = full_name(member, sent.require("name")?);
    let secret = people::create_member_token(&*web.db().await, &name, member.who(), LIFETIME).await?;
    page(&web, &sent.visitor, Some((&name, &secret))).await
}

/// From now on it allows nothing.
pub async fn revoke_token(State(web): State<Arc<Web>>, Ordered(sent): Signed) -> Result<Redirect, Trouble> {
    let (member, name) = (member(&sent.visitor)?, sent.require("name")?);
    if !people::revoke_member_token(&*web.db().await, name, member.who()).await? {
        return Err(Problem::not_found(format!("you have no token {name}")).into());
    }
    Ok(Redirect::to("/you"))
}

fn member(visitor: &Visitor) -> Result<&Member, Problem> {
    let sentence = "tokens of one's own are for people who sign in with a forge: others are made by an admin";
    visitor.member().ok_or_else(|| Problem::new(StatusCode::FORBIDDEN, sentence))
}

/// Names of tokens are everybody's, so that theirs says whose it is.
fn full_name(member: &Member, name: &str) -> String {
    let host = member.instance.split("://").last().unwrap_or_default();
    format!("{}@{host} {name}", member.login)
}

async fn page(web: &Web, visitor: &Visitor, made: Option<(&str, &str)>) -> Result<Response, Trouble> {
    let member = member(visitor)?;
    let tokens = people::member_tokens(&*web.db().await, member.who()).await?;
    let content = html! {
        h1 { (member.login) }
        p { "You are who " (member.instance) " says you are, and may start and stop what is built of the repositories that you may push to." }
        section {
            h2 { "Your tokens" }
            p.legend { "For the command line and the API. A token may do what you may, for 30 days." }
            @if let Some((name, secret)) = made { (new_secret(name, secret)) }
            (rows(&tokens, visitor))
            form.row method="post" action="/you/tokens" {
                (csrf(visitor))
                input type="text" name="name" required maxlength="100" placeholder="new token" aria-label="Name of a new token";
                button type="submit" { "Make token" }
            }
        }
    };
    let page =
        Page { title: &member.login, place: "", visitor, again: None, stale: false, content, rest: html! {} };
    Ok(page.into_response())
}

fn rows(tokens: &[(String, String)], visitor: &Visitor) -> Markup {
    table(
        "Your tokens",
        html! {
            thead { tr { th { "Token" } th { "Expires" } th { "Revoke" } } }
            tbody {
                @for (name, expires_at) in tokens {
                    tr {
                        td { (name) } td { (expires_at) }
                        td { form.act method="post" action="/you/tokens/revoke" {
                            (csrf(visitor))
                            input type="hidden" name="name" value=(name);
                            button.danger type="submit" aria-label=(format!("Revoke {name}")) { "Revoke" }
                        } }
                    }
                }
            }
        },
    )
}
