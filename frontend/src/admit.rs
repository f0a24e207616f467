//! Who may read the cache and use the API.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use harmonia_nix::Sha256;
use harmonia_queue::Db;
use harmonia_queue::people::{self, Scope};
use harmonia_service::problem::Problem;
use tokio::sync::Semaphore;

use crate::forge::Member;
use crate::remember::Memory;
use harmonia_service::sentence::sentence;

/// A revoked or expired token may read on for less than this. A client asks for hundreds of narinfos in one go: within
/// this time they cost the database one or two questions instead of one each.
const LIFETIME: Duration = Duration::from_secs(5);
/// Tokens in memory, good ones and refused ones apart: whoever tries many drives out no good one. 100 bytes each.
const MOST: usize = 20_000;
/// Questions to the database at once, so that no flood of wrong tokens takes more of it than this.
pub const ASKING: usize = 4;
/// A database that does not answer by then is away.
const PATIENCE: Duration = Duration::from_secs(3);
/// The longest secret worth a question; ours have 64 digits.
const LONGEST: usize = 256;

const NO_TOKEN: &str =
    "the cache is private: give a read token as the password of any user, as Nix does with its netrc";
const NO_API_TOKEN: &str = "give a token as `Authorization: Bearer …`: `harmonia-ci token create` makes one";
const WRONG_TOKEN: &str = "this token does not exist, has expired or was revoked";

/// Lets people in, as far as their tokens allow.
pub struct Admission {
    db: Db,
    anonymous: bool,
    good: Mutex<Tokens<Scope>>,
    refused: Mutex<Tokens<()>>,
    asking: Semaphore,
}

/// Tokens by the hash of their secret: no secret stays longer than the request.
type Tokens<T> = Memory<Sha256, T>;

impl Admission {
    /// With or without tokens.
    pub fn new(db: Db, anonymous: bool) -> Self {
        let (good, refused) = (Mutex::new(memory()), Mutex::new(memory()));
        Self { db, anonymous, good, refused, asking: Semaphore::new(ASKING) }
    }

    /// Whether whoever only looks needs no token.
    pub fn is_open(&self) -> bool {
        self.anonymous
    }

    /// Lets a reader of the cache in. Fails closed: who cannot be checked does not come in. A token of any scope reads.
    pub async fn admit(&self, headers: &HeaderMap) -> Result<(), Problem> {
        if self.anonymous {
            return Ok(());
        }
        let secret = secret(headers).ok_or_else(|| Problem::unauthorized(NO_TOKEN))?;
        self.check(&secret, true).await.map(drop)
    }

    /// Lets somebody do what takes this scope. Whoever shows a token is judged by it, even where reading takes none.
    pub async fn require(&self, headers: &HeaderMap, needed: Scope) -> Result<(), Problem> {
        let held = match secret(headers) {
            // What changes something is not let through by memory: a revoked token changes nothing more.
            Some(secret) => self.check(&secret, needed == Scope::Read).await?,
            None if self.anonymous && !headers.contains_key(header::AUTHORIZATION) => Scope::Read,
            None => return Err(Problem::unauthorized(NO_API_TOKEN)),
        };
        if held < needed { Err(forbidden(held, needed)) } else { Ok(()) }
    }

    /// Whose token it is, if it is somebody's of a forge. What they may do there is not remembered.
    pub async fn member(&self, headers: &HeaderMap) -> Result<Option<Member>, Problem> {
        let Some(secret) = secret(headers) else { return Ok(None) };
        let asked = async {
            let _turn = self.asking.acquire().await;
            people::token_member(&self.db, &secret).await
        };
        match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(found)) => Ok(found.map(|(instance, login)| Member { instance, login })),
            Ok(Err(error)) => Err(unknown(&sentence(&error))),
            Err(_) => Err(unknown("no answer in time")),
        }
    }

    /// What a secret allows.
    async fn check(&self, secret: &str, by_memory: bool) -> Result<Scope, Problem> {
        let hash = Sha256::of(secret);
        if let Some(verdict) = self.remembered(&hash, by_memory) {
            return verdict;
        }
        match tokio::time::timeout(PATIENCE, self.ask(secret, hash, by_memory)).await {
            Ok(verdict) => verdict,
            Err(_) => Err(unknown("no answer in time")),
        }
    }

    async fn ask(&self, secret: &str, hash: Sha256, by_memory: bool) -> Result<Scope, Problem> {
        let _turn = self.asking.acquire().await;
        // Whoever waited for a turn may find that another request asked the same.
        if let Some(verdict) = self.remembered(&hash, by_memory) {
            return verdict;
        }
        let asked = Instant::now();
        match people::token_scope(&self.db, secret).await {
            Ok(Some((_, scope))) => {
                lock(&self.good).insert(asked, hash, scope, 1);
                Ok(scope)
            }
            Ok(None) => {
                lock(&self.refused).insert(asked, hash, (), 1);
                Err(Problem::unauthorized(WRONG_TOKEN))
            }
            Err(error) => Err(unknown(&sentence(&error))),
        }
    }

    fn remembered(&self, hash: &Sha256, good_too: bool) -> Option<Result<Scope, Problem>> {
        let now = Instant::now();
        if good_too && let Some(scope) = lock(&self.good).get(now, hash) {
            return Some(Ok(scope));
        }
        lock(&self.refused).get(now, hash).map(|()| Err(Problem::unauthorized(WRONG_TOKEN)))
    }
}

fn memory<T: Clone>() -> Tokens<T> {
    Memory::new(Instant::now(), LIFETIME, MOST)
}

fn forbidden(held: Scope, needed: Scope) -> Problem {
    let (held, needed) = (held.as_str(), needed.as_str());
    Problem::new(
        StatusCode::FORBIDDEN,
        format!("this takes a token with the scope {needed}, and yours has {held}"),
    )
}

fn lock<T>(tokens: &Mutex<Tokens<T>>) -> MutexGuard<'_, Tokens<T>> {
    tokens.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(error: &str) -> Problem {
    tracing::warn!(error, "a token could not be checked");
    Problem::unavailable(
        "the token cannot be checked, for the database does not answer: try again in a moment",
    )
}

/// The password of HTTP Basic, or what follows `Bearer`; nothing that cannot be a token.
fn secret(headers: &HeaderMap) -> Option<String> {
    let (scheme, word) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let word = word.trim();
    let secret = match scheme.to_ascii_lowercase().as_str() {
        "bearer" => word.to_owned(),
        "basic" => {
            let text = String::from_utf8(STANDARD.decode(word).ok()?).ok()?;
            text.split_once(':')?.1.to_owned()
        }
        _ => return None,
    };
    let fits = (1..=LONGEST).contains(&secret.len()) && secret.bytes().all(|byte| byte.is_ascii_graphic());
    fits.then_some(secret)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(value: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, value.parse().unwrap());
        secret(&headers)
    }

    fn basic(text: &[u8]) -> Option<String> {
        read(&format!("Basic {}", STANDARD.encode(text)))
    }

    #[test]
    fn the_password_of_any_user_is_the_token() {
        assert_eq!(basic(b"nix:s3cret").as_deref(), Some("s3cret"));
        assert_eq!(basic(b":s3cret").as_deref(), Some("s3cret"));
        assert_eq!(basic(b"nix:with:colon").as_deref(), Some("with:colon"));
    }

    #[test]
    fn a_bearer_is_one_too_and_schemes_have_no_case() {
        assert_eq!(read("Bearer s3cret").as_deref(), Some("s3cret"));
        assert_eq!(read("bearer  s3cret").as_deref(), Some("s3cret"));
    }

    #[test]
    fn what_cannot_be_a_token_is_none() {
        assert_eq!(secret(&HeaderMap::new()), None);
        for value in ["", "Basic", "Basic !", "Bearer", "Bearer ", "Bearer a b", "Digest s3cret", "s3cret"] {
            assert_eq!(read(value), None, "{value}");
        }
        for text in [&b""[..], b"nix", b"nix:", b"nix:\0", b"nix:\xff", b"nix:a\nb", &[b':'; 1000]] {
            assert_eq!(basic(text), None, "{text:?}");
        }
    }
}
