//! How an App signs in: with a word that it signs itself it gets a token for one repository, good for an hour.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use harmonia_queue::forges::Repository;
use harmonia_service::secret::Secret;
use reqwest::{Method, RequestBuilder};
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use tokio::sync::Mutex as Turn;

use crate::forge::call::{ForgeError, Http, ask};

/// GitHub's clock may be behind ours,
const BEFORE: u64 = 60;
/// and it takes no word that is good for more than ten minutes.
const AFTER: u64 = 9 * 60;
/// A token lasts an hour: another is asked for before it ends.
const TOKEN: Duration = Duration::from_secs(50 * 60);
/// Tokens in memory.
const MOST: usize = 10_000;
/// What an App may do, a token need not: these are all that are used.
const PERMISSIONS: [(&str, &str); 4] =
    [("contents", "read"), ("metadata", "read"), ("pull_requests", "read"), ("statuses", "write")];

/// A GitHub App.
pub struct App {
    id: u64,
    key: Secret,
    http: Http,
    tokens: Mutex<HashMap<Repository, Arc<Turn<Kept>>>>,
}

/// A token, and until when it is used.
type Kept = Option<(String, Instant)>;

#[derive(Deserialize)]
struct Installation {
    id: u64,
}

#[derive(Deserialize)]
struct Token {
    token: String,
}

impl App {
    /// Its number and its private key.
    pub fn new(id: u64, key: Secret, http: Http) -> Self {
        Self { id, key, http, tokens: Mutex::default() }
    }

    /// A request without any right.
    pub fn request(&self, method: Method, path: &[&str], page: &[(&str, usize)]) -> RequestBuilder {
        let request = self.http.request(method, path, page);
        // Its documentation wants the first, its description knows the second only.
        let accept = "application/vnd.github+json, application/json;q=0.9";
        request.header("accept", accept).header("x-github-api-version", "2022-11-28")
    }

    /// The right to speak with one repository. Whoever comes while another asks for the same waits and gets it, and nobody else does.
    pub async fn token(&self, repository: &Repository) -> Result<String, ForgeError> {
        let turn = self.turn(repository);
        let mut kept = turn.lock().await;
        let now = Instant::now();
        if let Some((token, until)) = kept.as_ref()
            && *until > now
        {
            return Ok(token.clone());
        }
        let word = word(self.id, &self.key.read()?, unix_now())?;
        let Repository { owner, name } = repository;
        let found =
            self.request(Method::GET, &["repos", owner, name, "installation"], &[]).bearer_auth(&word);
        let Installation { id } = ask(found).await?;
        let path = ["app", "installations", &id.to_string(), "access_tokens"];
        let permissions: HashMap<_, _> = PERMISSIONS.into();
        let limits = serde_json::json!({"repositories": [name], "permissions": permissions});
        let made = self.request(Method::POST, &path, &[]).bearer_auth(&word).json(&limits);
        let Token { token } = ask(made).await?;
        *kept = Some((token.clone(), now + TOKEN));
        Ok(token)
    }

    /// Where the token of a repository is. If too many are known, those that nobody uses are forgotten, the good ones too.
    fn turn(&self, repository: &Repository) -> Arc<Turn<Kept>> {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() >= MOST && !tokens.contains_key(repository) {
            tokens.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        tokens.entry(repository.clone()).or_default().clone()
    }
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A JSON Web Token, signed by RS256.
fn word(app: u64, key: &str, now: u64) -> Result<String, ForgeError> {
    let key = match PrivateKeyDer::from_pem_slice(key.as_bytes()) {
        Ok(PrivateKeyDer::Pkcs1(der)) => RsaKeyPair::from_der(der.secret_pkcs1_der()),
        Ok(PrivateKeyDer::Pkcs8(der)) => RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()),
        _ => return Err(ForgeError::Key),
    };
    let key = key.map_err(|_| ForgeError::Key)?;
    let claims = serde_json::json!({"iat": now - BEFORE, "exp": now + AFTER, "iss": app.to_string()});
    let header = URL_SAFE_NO_PAD.encode(r#"{"alg":"RS256","typ":"JWT"}"#);
    let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature)
        .map_err(|_| ForgeError::Key)?;
    Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ring::signature::{KeyPair, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};

    use super::*;

    /// Made for this test, and good for nothing else.
    const KEY: &str = include_str!("../../../../tests/data/github-app-key.pem");

    #[test]
    fn a_word_is_signed_with_the_key_and_soon_over() {
        let word = word(7, KEY, 1000).unwrap();
        let (signed, signature) = word.rsplit_once('.').unwrap();
        let PrivateKeyDer::Pkcs1(der) = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).unwrap() else {
            panic!()
        };
        let key = RsaKeyPair::from_der(der.secret_pkcs1_der()).unwrap();
        let public = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key.public_key().as_ref());
        public.verify(signed.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).unwrap()).unwrap();
        let claims = URL_SAFE_NO_PAD.decode(signed.split_once('.').unwrap().1).unwrap();
        let claims: serde_json::Value = serde_json::from_slice(&claims).unwrap();
        assert_eq!(claims, serde_json::json!({"iat": 940, "exp": 1540, "iss": "7"}));
    }

    #[test]
    fn what_is_no_key_says_so_and_shows_nothing() {
        for key in
            ["", "hunter2", "-----BEGIN RSA PRIVATE KEY-----\naHVudGVyMg==\n-----END RSA PRIVATE KEY-----"]
        {
            let error = word(7, key, 1000).unwrap_err();
            assert!(matches!(error, ForgeError::Key) && !error.to_string().contains("hunter2"));
        }
    }
}
