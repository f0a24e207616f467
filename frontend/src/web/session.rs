//! Who is signed in, in a cookie that nobody but a frontend can write. Every frontend has the same key, from the database.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use harmonia_queue::people::Scope;
use harmonia_queue::{Db, pages};
use harmonia_service::problem::Problem;
use ring::hmac;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::forge::Member;

/// Whoever signed in longer ago does so again.
pub const LIFETIME: Duration = Duration::from_secs(86_400);
/// Another key in the database counts after this.
const KEPT: Duration = Duration::from_secs(60);
/// A cookie that only this host can set, where the connection is safe.
const SAFE: &str = "__Host-harmonia-ci";
const PLAIN: &str = "harmonia-ci";

/// Somebody who is signed in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// What to call them.
    pub name: String,
    /// By this token, which may be revoked; none: by somebody's word at sign-in.
    pub token: Option<i32>,
    /// What they may do, at most.
    pub scope: String,
    /// Who they are at a forge, which says what they may do in its projects.
    #[serde(default)]
    pub member: Option<Member>,
    /// Seconds since 1970.
    until: u64,
    /// No other session has it: forms are bound to it.
    nonce: String,
}

impl Session {
    /// From now on.
    pub fn new(name: &str, token: Option<i32>, scope: Scope) -> Self {
        let (name, scope) = (name.to_owned(), scope.as_str().to_owned());
        Self { name, token, scope, member: None, until: now() + LIFETIME.as_secs(), nonce: random() }
    }

    /// That of somebody of a forge, if they are one.
    pub fn of(self, member: Option<Member>) -> Self {
        Self { member, ..self }
    }

    /// Whether that was too long ago.
    pub fn is_over(&self, now: u64) -> bool {
        self.until <= now
    }

    /// For a form of theirs. Each time another one: a page that is compressed tells nothing about it.
    pub fn csrf(&self, seal: &Seal) -> String {
        seal.close("csrf", &format!("{}:{}", random(), self.nonce))
    }

    /// Whether a form is theirs.
    pub fn owns(&self, seal: &Seal, csrf: &str) -> bool {
        let opened = seal.open("csrf", csrf);
        opened.is_some_and(|text| text.split_once(':').is_some_and(|(_, nonce)| nonce == self.nonce))
    }
}

/// Signs, and knows what it has signed.
#[derive(Clone)]
pub struct Seal(hmac::Key);

impl Seal {
    /// With this key.
    pub fn new(secret: &str) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()))
    }

    /// A text for one purpose, and none other.
    pub fn close(&self, purpose: &str, text: &str) -> String {
        let text = URL_SAFE_NO_PAD.encode(text);
        let tag = hmac::sign(&self.0, format!("{purpose}.{text}").as_bytes());
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(tag))
    }

    /// The text, if it was closed for that purpose.
    pub fn open(&self, purpose: &str, closed: &str) -> Option<String> {
        let (text, tag) = closed.split_once('.')?;
        let tag = URL_SAFE_NO_PAD.decode(tag).ok()?;
        hmac::verify(&self.0, format!("{purpose}.{text}").as_bytes(), &tag).ok()?;
        String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()
    }
}

/// The key, as the database has it.
pub struct Keys {
    db: Db,
    known: Mutex<Option<(Instant, Seal)>>,
}

impl Keys {
    /// Asked for when it is needed.
    pub fn new(db: Db) -> Self {
        Self { db, known: Mutex::default() }
    }

    /// What signs at the moment.
    pub async fn seal(&self) -> Result<Seal, Problem> {
        let mut known = self.known.lock().await;
        if let Some((at, seal)) = known.as_ref()
            && at.elapsed() < KEPT
        {
            return Ok(seal.clone());
        }
        let seal = Seal::new(&pages::key(&self.db).await?);
        *known = Some((Instant::now(), seal.clone()));
        Ok(seal)
    }
}

/// A cookie to be set; for no time: to be removed.
pub fn cookie(name: &str, value: &str, secure: bool, lifetime: Duration) -> String {
    let secure = if secure { "; Secure" } else { "" };
    format!("{name}={value}; Path=/; HttpOnly; SameSite=Lax; Max-Age={}{secure}", lifetime.as_secs())
}

/// What the session's cookie is called.
pub fn cookie_name(secure: bool) -> &'static str {
    if secure { SAFE } else { PLAIN }
}

/// A cookie of a request.
pub fn find_cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let values = headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(';'))
        .find_map(|pair| pair.trim().split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value))
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A word that nobody guesses.
pub fn random() -> String {
    URL_SAFE_NO_PAD.encode(rand::random::<[u8; 24]>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_or_is_for_something_else_is_not_opened() {
        let seal = Seal::new("key");
        let closed = seal.close("session", "ada");
        assert_eq!(seal.open("session", &closed).as_deref(), Some("ada"));
        assert_eq!(seal.open("csrf", &closed), None);
        assert_eq!(Seal::new("other").open("session", &closed), None);
        let (text, tag) = closed.split_once('.').unwrap();
        for forged in [
            format!("{}.{tag}", URL_SAFE_NO_PAD.encode("eve")),
            format!("{text}."),
            text.to_owned(),
            format!("{text}.{}", URL_SAFE_NO_PAD.encode([0; 32])),
            String::new(),
            ".".to_owned(),
        ] {
            assert_eq!(seal.open("session", &forged), None, "{forged}");
        }
    }

    #[test]
    fn a_form_is_its_session_s_alone() {
        let seal = Seal::new("key");
        let (mine, other) =
            (Session::new("ada", None, Scope::Admin), Session::new("eve", None, Scope::Admin));
        let csrf = mine.csrf(&seal);
        assert!(mine.owns(&seal, &csrf) && !other.owns(&seal, &csrf));
        assert_ne!(csrf, mine.csrf(&seal));
    }

    #[test]
    fn a_day_later_it_is_over() {
        let session = Session::new("ada", None, Scope::Read);
        assert!(!session.is_over(now()) && session.is_over(now() + 86_401));
    }

    #[test]
    fn cookies_are_told_apart() {
        let mut headers = HeaderMap::new();
        headers.insert(header::COOKIE, "a=1; harmonia-ci=x.y; b=2".parse().unwrap());
        assert_eq!(find_cookie(&headers, "harmonia-ci"), Some("x.y"));
        assert_eq!(find_cookie(&headers, "harmonia"), None);
    }
}
