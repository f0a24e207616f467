//! Secrets that we make: passwords of logins, URLs with them, and tokens of the cache for Nix.

use std::fmt::Write;

use rand::RngExt;
use rand::distr::Alphanumeric;
use reqwest::Url;
use thiserror::Error;

/// Of a password.
const LETTERS: usize = 32;

/// The database's URL is none. It is not repeated: it holds a password.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the database's URL cannot be used: write postgres://user:password@host:port/name")]
pub struct NoUrl;

/// A password that needs no escaping anywhere.
pub fn password() -> String {
    rand::rng().sample_iter(Alphanumeric).take(LETTERS).map(char::from).collect()
}

/// The same database as `base`'s, under another login.
pub fn url_of(base: &str, login: &str, password: &str) -> Result<String, NoUrl> {
    let mut url = Url::parse(base).map_err(|_| NoUrl)?;
    let set = url.set_username(login).and_then(|()| url.set_password(Some(password)));
    set.map_err(|()| NoUrl)?;
    Ok(url.into())
}

/// What Nix sends to the cache behind `frontend`, with a read token.
pub fn netrc(frontend: &str, token: &str) -> String {
    let host = Url::parse(frontend).ok().and_then(|url| url.host_str().map(str::to_owned));
    let mut netrc = String::new();
    // A String takes every write.
    let _ = writeln!(netrc, "machine {} login nix password {token}", host.unwrap_or_default());
    netrc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_differ_and_need_no_escaping() {
        let (one, other) = (password(), password());
        assert_ne!(one, other);
        assert!(one.len() == LETTERS && one.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{one}");
    }

    #[test]
    fn only_the_login_differs() {
        let base = "postgres://admin:s%40cret@db.example:6432/ci?sslmode=require";
        let expected = "postgres://pool_ci_x86:abc@db.example:6432/ci?sslmode=require";
        assert_eq!(url_of(base, "pool_ci_x86", "abc").as_deref(), Ok(expected));
    }

    #[test]
    fn what_is_no_url_is_not_repeated() {
        assert_eq!(url_of("secret", "a", "b"), Err(NoUrl));
        assert!(!NoUrl.to_string().contains("secret"));
    }

    #[test]
    fn the_cache_is_known_by_its_host() {
        let netrc = netrc("http://harmonia-ci-frontend.ci.svc:80", "t0ken");
        assert_eq!(netrc, "machine harmonia-ci-frontend.ci.svc login nix password t0ken\n");
    }
}
