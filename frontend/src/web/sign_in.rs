//! `/sign-in` and `/sign-out`: by a token, by a link that works once, or by somebody else's word.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{AppendHeaders, IntoResponse, Redirect, Response};
use harmonia_queue::people::Scope;
use harmonia_queue::{forges, pages};
use harmonia_service::problem::Problem;
use maud::html;
use serde::Deserialize;

use super::Web;
use super::ask::{Asked, Named};
use super::frame::{Page, Trouble};
use super::provider::{Attempt, Provider, Somebody};
use super::session::{LIFETIME, Session, cookie, cookie_name, find_cookie};
use super::visitor::{LOOK, Ordered, Sent, Visitor};
use crate::escape::escape;
use crate::forge::Member;
use crate::member::may_push_to_any;

/// What waits for a provider's answer.
const PENDING: &str = "harmonia-ci-pending";
/// How long.
const PATIENCE: Duration = Duration::from_secs(600);
/// So many repositories a forge is asked about whoever signs in with it and is not listed.
const ASKED: i64 = 100;
/// The longest secret worth a question.
const LONGEST: usize = 256;

impl Web {
    /// Whether people come by HTTPS, so that cookies travel by nothing else.
    pub fn is_secure(&self) -> bool {
        self.url.starts_with("https://")
    }

    async fn let_in(&self, session: &Session, to: &str) -> Result<Response, Trouble> {
        let text =
            serde_json::to_string(session).map_err(|_| Problem::bad_request("this name cannot be kept"))?;
        let sealed = self.keys.seal().await?.close("session", &text);
        let secure = self.is_secure();
        let cookies = [
            (header::SET_COOKIE, cookie(cookie_name(secure), &sealed, secure, LIFETIME)),
            (header::SET_COOKIE, cookie(PENDING, "", secure, Duration::ZERO)),
        ];
        Ok((AppendHeaders(cookies), Redirect::to(local(to))).into_response())
    }

    /// What somebody may do who is listed nowhere.
    async fn unlisted(&self, member: Option<&Member>) -> Result<Option<Scope>, Problem> {
        let looks = self.admission.is_open()
            || match member {
                Some(member) => {
                    let repositories =
                        forges::repositories(&*self.db().await, &member.instance, ASKED).await?;
                    may_push_to_any(&self.forges, member, &repositories).await?
                }
                None => false,
            };
        Ok(looks.then_some(Scope::Read))
    }

    fn provider(&self, name: &str) -> Result<&Provider, Problem> {
        let found = self.providers.iter().find(|(known, _)| known == name);
        let nobody =
            || Problem::not_found(format!("nobody called {name} says who people are: sign in with a token"));
        found.map(|(_, provider)| provider).ok_or_else(nobody)
    }
}

/// Only a page of ours.
fn local(to: &str) -> &str {
    let strange = to.starts_with("//") || to.contains('\\') || to.chars().any(char::is_control);
    if to.starts_with('/') && !strange { to } else { "/" }
}

/// Where to go afterwards, and by which link.
#[derive(Deserialize)]
pub struct Asking {
    #[serde(default)]
    to: String,
    once: Option<String>,
}

/// The page.
pub async fn ask(
    State(web): State<Arc<Web>>,
    headers: HeaderMap,
    Asked(asking): Asked<Asking>,
) -> Result<Response, Trouble> {
    let visitor = Visitor::of(&web, &headers).await?;
    let to = local(&asking.to);
    let rest = html! {
        h1 { "Sign in" }
        @if let Some(once) = &asking.once {
            form.sign method="post" action="/sign-in/once" {
                input type="hidden" name="once" value=(once);
                p { "This link signs you in once." }
                button type="submit" { "Sign in on this machine" }
            }
        } @else {
            @for (name, provider) in &web.providers {
                p { a.button href=(format!("/sign-in/{name}?to={}", escape(to))) { "Sign in with " (provider.name()) } }
            }
            form.sign method="post" action="/sign-in" {
                input type="hidden" name="to" value=(to);
                // Whoever keeps passwords for people wants a name to each.
                input type="text" name="username" value="harmonia-ci" autocomplete="username" aria-label="Name" readonly hidden;
                label { "Token" input type="password" name="token" required autocomplete="current-password" maxlength="256"; }
                p.legend { code { "harmonia-ci token create NAME --scope operate" } " makes one." }
                button type="submit" { "Sign in" }
            }
        }
    };
    let content = html! {};
    let page =
        Page { title: "Sign in", place: "", visitor: &visitor, again: None, stale: false, content, rest };
    Ok(page.into_response())
}

/// By a token, for as long as it is one.
pub async fn by_token(State(web): State<Arc<Web>>, sent: Sent) -> Result<Response, Trouble> {
    let secret = sent.require("token")?;
    let found = if secret.len() > LONGEST { None } else { pages::token_of(&*web.db().await, secret).await? };
    let Some((id, name, scope)) = found else {
        let sentence = "this token does not exist, has expired or was revoked";
        return Err(Problem::new(StatusCode::FORBIDDEN, sentence).into());
    };
    web.let_in(&Session::new(&name, Some(id), scope), sent.get("to").unwrap_or("/")).await
}

/// By a link that `harmonia-ci up` printed.
pub async fn by_invitation(State(web): State<Arc<Web>>, sent: Sent) -> Result<Response, Trouble> {
    let secret = sent.require("once")?;
    let Some(scope) = pages::accept_invitation(&*web.db().await, secret).await? else {
        let sentence = "this link was used already, or is too old: sign in with a token";
        return Err(Problem::new(StatusCode::FORBIDDEN, sentence).into());
    };
    web.let_in(&Session::new("you", None, scope), "/").await
}

/// To the provider.
pub async fn to_provider(
    State(web): State<Arc<Web>>,
    Named(name): Named,
    Asked(asking): Asked<Asking>,
) -> Result<Response, Trouble> {
    let attempt = Attempt::new(&name, local(&asking.to));
    let address = web.provider(&name)?.address(&attempt).await?;
    let text =
        serde_json::to_string(&attempt).map_err(|_| Problem::bad_request("this address cannot be kept"))?;
    let sealed = web.keys.seal().await?.close("attempt", &text);
    let kept = cookie(PENDING, &sealed, web.is_secure(), PATIENCE);
    Ok(([(header::SET_COOKIE, kept)], Redirect::to(&address)).into_response())
}

/// What a provider sends people back with.
#[derive(Deserialize)]
pub struct Answer {
    code: Option<String>,
    state: Option<String>,
    error: Option<String>,
    error_description: Option<String>,
}

/// From the provider.
pub async fn from_provider(
    State(web): State<Arc<Web>>,
    headers: HeaderMap,
    Named(name): Named,
    Asked(answer): Asked<Answer>,
) -> Result<Response, Trouble> {
    let provider = web.provider(&name)?;
    let refused = |sentence: String| Trouble::from(Problem::new(StatusCode::FORBIDDEN, sentence));
    if let Some(error) = answer.error {
        let words = answer.error_description.unwrap_or_default();
        return Err(refused(format!("{} did not let you in: {error} {words}", provider.name())));
    }
    let seal = web.keys.seal().await?;
    let kept = find_cookie(&headers, PENDING).and_then(|sealed| seal.open("attempt", sealed));
    let attempt = kept.and_then(|text| serde_json::from_str::<Attempt>(&text).ok());
    let (Some(attempt), Some(code), Some(state)) = (attempt, answer.code, answer.state) else {
        return Err(refused(
            "this sign-in was not begun in this browser, or too long ago: begin again".to_owned(),
        ));
    };
    if !attempt.is(&name, &state) {
        return Err(refused("this answer belongs to another sign-in: begin again".to_owned()));
    }
    let Somebody { name, scope, member } = provider.redeem(&attempt, &code).await?;
    let scope = match scope {
        Some(scope) => Some(scope),
        None => web.unlisted(member.as_ref()).await?,
    };
    let Some(scope) = scope else {
        return Err(refused(format!(
            "{} says that you are {name}, who is not listed here and may push to no repository that is built here: \
             ask whoever keeps this farm to add you to `readers`",
            provider.name()
        )));
    };
    web.let_in(&Session::new(&name, None, scope).of(member), &attempt.to).await
}

/// Nobody any more.
pub async fn out(State(web): State<Arc<Web>>, _: Ordered<LOOK>) -> Result<Response, Trouble> {
    let secure = web.is_secure();
    let gone = cookie(cookie_name(secure), "", secure, Duration::ZERO);
    Ok(([(header::SET_COOKIE, gone)], Redirect::to("/")).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_sent_elsewhere() {
        assert_eq!(local("/builds/7?x=1"), "/builds/7?x=1");
        for to in
            ["", "//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)", "/a\nb"]
        {
            assert_eq!(local(to), "/", "{to}");
        }
    }
}
