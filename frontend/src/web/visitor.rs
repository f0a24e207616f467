//! Who looks, and who sends a form.

use std::sync::Arc;

use axum::Form;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use harmonia_queue::pages;
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;

use super::Web;
use super::frame::Trouble;
use super::session::{Seal, Session, cookie_name, find_cookie, now};
use crate::forge::Member;

/// Somebody, as far as they are known.
pub struct Visitor {
    /// Who is signed in.
    pub session: Option<(Session, Seal)>,
    /// What they may do; none: not even look.
    scope: Option<Scope>,
}

impl Visitor {
    /// By the cookie, or nobody in particular.
    pub async fn of(web: &Web, headers: &HeaderMap) -> Result<Self, Problem> {
        let anonymous = web.admission.is_open().then_some(Scope::Read);
        let Some(cookie) = find_cookie(headers, cookie_name(web.is_secure())) else {
            return Ok(Self { session: None, scope: anonymous });
        };
        let seal = web.keys.seal().await?;
        let opened = seal.open("session", cookie);
        let session = opened.and_then(|text| serde_json::from_str::<Session>(&text).ok());
        let Some(session) = session.filter(|session| !session.is_over(now())) else {
            return Ok(Self { session: None, scope: anonymous });
        };
        let scope = match session.token {
            // It may have been revoked since.
            Some(token) => pages::token_now(&*web.db().await, token).await?,
            None => session.scope.parse().ok(),
        };
        match scope {
            Some(scope) => Ok(Self { session: Some((session, seal)), scope: Some(scope) }),
            None => Ok(Self { session: None, scope: anonymous }),
        }
    }

    /// Whether they may do what takes this.
    pub fn may(&self, needed: Scope) -> bool {
        self.scope.is_some_and(|held| held >= needed)
    }

    /// Who they are at a forge.
    pub fn member(&self) -> Option<&Member> {
        self.session.as_ref().and_then(|(session, _)| session.member.as_ref())
    }

    /// What a form of theirs carries.
    pub fn csrf(&self) -> String {
        self.session.as_ref().map(|(session, seal)| session.csrf(seal)).unwrap_or_default()
    }
}

/// Somebody who may look.
pub struct Looking(pub Visitor);

impl FromRequestParts<Arc<Web>> for Looking {
    type Rejection = Trouble;

    async fn from_request_parts(parts: &mut Parts, web: &Arc<Web>) -> Result<Self, Trouble> {
        let visitor = Visitor::of(web, &parts.headers).await?;
        if visitor.may(Scope::Read) {
            return Ok(Self(visitor));
        }
        let to = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Err(Trouble::SignIn(to))
    }
}

/// A form that one of our own pages sent.
pub struct Sent {
    /// By whom, perhaps.
    pub visitor: Visitor,
    fields: Vec<(String, String)>,
}

impl Sent {
    /// A field that was filled in.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
    }

    /// A field that must be.
    pub fn require(&self, name: &str) -> Result<&str, Problem> {
        self.get(name).ok_or_else(|| Problem::bad_request(format!("the field {name} is empty: fill it in")))
    }
}

impl FromRequest<Arc<Web>> for Sent {
    type Rejection = Trouble;

    async fn from_request(request: Request, web: &Arc<Web>) -> Result<Self, Trouble> {
        if !is_ours(request.headers(), &web.url) {
            let sentence = "this form was sent by a page of another site, so nothing was done";
            return Err(Problem::new(StatusCode::FORBIDDEN, sentence).into());
        }
        let visitor = Visitor::of(web, request.headers()).await?;
        let form = Form::<Vec<(String, String)>>::from_request(request, web).await;
        let Form(fields) = form.map_err(|error| Problem::new(error.status(), error.body_text()))?;
        if fields.iter().any(|(name, value)| name.contains('\0') || value.contains('\0')) {
            return Err(Problem::bad_request("a field has a NUL character, which no text here has").into());
        }
        Ok(Self { visitor, fields })
    }
}

/// A form of somebody who is signed in and may do that.
pub struct Ordered<const NEEDED: u8>(pub Sent);

/// Whoever is signed in.
pub const LOOK: u8 = 0;
/// Starting and stopping builds.
pub const OPERATE: u8 = 1;
/// Everything.
pub const ADMIN: u8 = 2;

impl<const NEEDED: u8> FromRequest<Arc<Web>> for Ordered<NEEDED> {
    type Rejection = Trouble;

    async fn from_request(request: Request, web: &Arc<Web>) -> Result<Self, Trouble> {
        let sent = Sent::from_request(request, web).await?;
        let Some((session, seal)) = &sent.visitor.session else {
            return Err(Trouble::SignIn("/".to_owned()));
        };
        if !session.owns(seal, sent.get("csrf").unwrap_or_default()) {
            let sentence =
                "this form is not one of your session's: go back, load the page again and send it once more";
            return Err(Problem::new(StatusCode::FORBIDDEN, sentence).into());
        }
        let needed = match NEEDED {
            LOOK => Scope::Read,
            OPERATE => Scope::Operate,
            _ => Scope::Admin,
        };
        if !sent.visitor.may(needed) {
            let sentence = format!("this takes the scope {}, which you do not have", needed.as_str());
            return Err(Problem::new(StatusCode::FORBIDDEN, sentence).into());
        }
        Ok(Self(sent))
    }
}

/// Browsers say where a form comes from. Who does not say it sends none.
fn is_ours(headers: &HeaderMap, url: &str) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(origin) = text(header::ORIGIN) else { return false };
    let host = origin.split_once("://").map(|(_, host)| host);
    origin == origin_of(url) || (host.is_some() && host == text(header::HOST))
}

/// `https://ci.example.org/a` has the origin `https://ci.example.org`.
fn origin_of(url: &str) -> &str {
    let begin = url.find("://").map_or(0, |at| at + 3);
    let end = url[begin..].find('/').map_or(url.len(), |at| begin + at);
    &url[..end]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ours(origin: Option<&str>, host: &str) -> bool {
        let mut headers = HeaderMap::new();
        origin.map(|origin| headers.insert(header::ORIGIN, origin.parse().unwrap()));
        headers.insert(header::HOST, host.parse().unwrap());
        is_ours(&headers, "https://ci.example.org/")
    }

    #[test]
    fn only_our_own_pages_send_forms() {
        assert!(ours(Some("https://ci.example.org"), "inside:80"));
        assert!(ours(Some("http://127.0.0.1:7777"), "127.0.0.1:7777"));
        for origin in ["https://evil.example", "null", "", "http://127.0.0.1:7778"] {
            assert!(!ours(Some(origin), "127.0.0.1:7777"), "{origin}");
        }
        assert!(!ours(None, "127.0.0.1:7777"));
    }
}
