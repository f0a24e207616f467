//! Sign-in by somebody else's word: OpenID Connect, authorization code with PKCE. What a provider signs is checked with the
//! keys that it publishes; only RS256 and ES256 are known.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use harmonia_service::secret::Secret;
use harmonia_service::settings::{Settings, SettingsError};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder};
use ring::digest::{SHA256, digest};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Mutex;

use super::session::{now, random};
use crate::escape::escape;

/// A provider that does not answer by then is away.
const PATIENCE: Duration = Duration::from_secs(10);
/// So long a provider's addresses are kept. Its keys are asked for each time: few people sign in at once.
const KEPT: Duration = Duration::from_secs(3600);
/// Clocks may differ by this many seconds.
const SKEW: u64 = 60;
/// The longest answer.
const LONGEST: usize = 256 << 10;

/// A provider, and what we are to it.
pub struct Oidc {
    issuer: String,
    client_id: String,
    client_secret: Option<Secret>,
    back: String,
    admins: Vec<String>,
    operators: Vec<String>,
    client: Client,
    known: Mutex<Option<(Instant, Provider)>>,
}

/// What a provider says of itself.
#[derive(Debug, Clone, Deserialize)]
struct Provider {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
}

/// A sign-in that was begun.
#[derive(Debug, Serialize, Deserialize)]
pub struct Attempt {
    state: String,
    nonce: String,
    verifier: String,
    /// Where to go afterwards.
    pub to: String,
}

impl Attempt {
    /// Another one.
    pub fn new(to: &str) -> Self {
        Self { state: random(), nonce: random(), verifier: random() + &random(), to: to.to_owned() }
    }

    /// Whether an answer belongs to it.
    pub fn is(&self, state: &str) -> bool {
        self.state == state
    }

    fn challenge(&self) -> String {
        URL_SAFE_NO_PAD.encode(digest(&SHA256, self.verifier.as_bytes()))
    }
}

#[derive(Deserialize)]
struct Tokens {
    id_token: String,
}

#[derive(Deserialize)]
struct Keys {
    keys: Vec<Key>,
}

/// A key, as RFC 7517 writes it.
#[derive(Debug, Clone, Default, Deserialize)]
struct Key {
    kty: String,
    kid: Option<String>,
    n: Option<String>,
    e: Option<String>,
    crv: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
}

/// Who a provider says somebody is.
#[derive(Debug, Clone, Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    aud: Value,
    exp: u64,
    nonce: Option<String>,
    email: Option<String>,
    #[serde(default)]
    email_verified: bool,
    preferred_username: Option<String>,
}

impl Oidc {
    /// As set; none if it is not.
    pub fn new(settings: &Settings, url: &str) -> Result<Option<Self>, SettingsError> {
        let Some(issuer) = settings.get("oidc_issuer") else { return Ok(None) };
        let client_id = settings.require("oidc_client_id")?.to_owned();
        let list = |text: Option<&str>| -> Vec<String> {
            let words = text.unwrap_or_default().split(',').map(str::trim);
            words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
        };
        // An error says that another provider of cryptography is installed already: that one serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().timeout(PATIENCE).redirect(Policy::none()).build();
        let client = client.map_err(|error| SettingsError::Invalid {
            key: "oidc_issuer",
            value: issuer.to_owned(),
            why: format!("cannot be asked: {error}"),
        })?;
        Ok(Some(Self {
            issuer: issuer.trim_end_matches('/').to_owned(),
            client_id,
            client_secret: settings.secret("oidc_client_secret")?,
            back: format!("{url}/sign-in/oidc/back"),
            admins: list(settings.get("admins")),
            operators: list(settings.get("operators")),
            client,
            known: Mutex::default(),
        }))
    }

    /// What people call it.
    pub fn name(&self) -> &str {
        self.issuer.split("://").last().unwrap_or_default().split('/').next().unwrap_or_default()
    }

    /// Where somebody says who they are.
    pub async fn address(&self, attempt: &Attempt) -> Result<String, Problem> {
        let begin = self.provider().await?.authorization_endpoint;
        let join = if begin.contains('?') { '&' } else { '?' };
        let fields = fields(&[
            ("response_type", "code"),
            ("client_id", &self.client_id),
            ("redirect_uri", &self.back),
            ("scope", "openid email profile"),
            ("state", &attempt.state),
            ("nonce", &attempt.nonce),
            ("code_challenge", &attempt.challenge()),
            ("code_challenge_method", "S256"),
        ]);
        Ok(format!("{begin}{join}{fields}"))
    }

    /// Who came back with this code, and what they may do.
    pub async fn redeem(&self, attempt: &Attempt, code: &str) -> Result<(String, Scope), Problem> {
        let provider = self.provider().await?;
        let mut form = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", &self.back),
            ("code_verifier", &attempt.verifier),
        ];
        let request = self.client.post(&provider.token_endpoint);
        let request = match &self.client_secret {
            Some(secret) => {
                let secret = secret.read().map_err(|error| away(&error))?;
                request.basic_auth(escape(&self.client_id), Some(escape(&secret)))
            }
            None => {
                form.push(("client_id", &self.client_id));
                request
            }
        };
        let request = request.header("content-type", "application/x-www-form-urlencoded").body(fields(&form));
        let tokens: Tokens = ask(request).await?;
        let keys: Keys = ask(self.client.get(&provider.jwks_uri)).await?;
        let claims =
            verified(&tokens.id_token, &keys.keys).ok_or_else(|| refused("is not signed by its keys"))?;
        check(&claims, &provider.issuer, &self.client_id, &attempt.nonce, now()).map_err(refused)?;
        let scope = scope(&claims, &self.admins, &self.operators);
        Ok((claims.email.or(claims.preferred_username).unwrap_or(claims.sub), scope))
    }

    async fn provider(&self) -> Result<Provider, Problem> {
        let mut known = self.known.lock().await;
        if let Some((at, provider)) = known.as_ref()
            && at.elapsed() < KEPT
        {
            return Ok(provider.clone());
        }
        let address = format!("{}/.well-known/openid-configuration", self.issuer);
        let provider: Provider = ask(self.client.get(address)).await?;
        if provider.issuer.trim_end_matches('/') != self.issuer {
            return Err(refused("calls itself something else than oidc_issuer does"));
        }
        *known = Some((Instant::now(), provider.clone()));
        Ok(provider)
    }
}

fn fields(fields: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={}", escape(value))).collect();
    pairs.join("&")
}

async fn ask<T: DeserializeOwned>(request: RequestBuilder) -> Result<T, Problem> {
    let response = request.header("accept", "application/json").send().await.map_err(|error| away(&error))?;
    let response = response.error_for_status().map_err(|error| away(&error))?;
    if response.content_length().is_some_and(|length| length > LONGEST as u64) {
        return Err(refused("says too much"));
    }
    let bytes = response.bytes().await.map_err(|error| away(&error))?;
    serde_json::from_slice(&bytes).map_err(|error| away(&error))
}

fn away(error: &dyn std::error::Error) -> Problem {
    tracing::warn!(
        error = harmonia_service::sentence::sentence(error),
        "the provider of sign-in does not answer"
    );
    Problem::unavailable(
        "the provider of sign-in does not answer as it should; the log of the frontend says why",
    )
}

fn refused(why: &str) -> Problem {
    tracing::warn!(why, "the word of the provider of sign-in was refused");
    Problem::unauthorized(format!("what the provider of sign-in says {why}"))
}

/// What a token says, if one of these keys signed it.
fn verified(token: &str, keys: &[Key]) -> Option<Claims> {
    let (signed, signature) = token.rsplit_once('.')?;
    let (header, claims) = signed.split_once('.')?;
    let header: Header = serde_json::from_slice(&decode(header)?).ok()?;
    let signature = decode(signature)?;
    let fits = |key: &&Key| header.kid.is_none() || key.kid == header.kid;
    keys.iter().filter(fits).find(|key| key.signed(&header.alg, signed.as_bytes(), &signature).is_some())?;
    serde_json::from_slice(&decode(claims)?).ok()
}

impl Key {
    fn signed(&self, alg: &str, message: &[u8], signature: &[u8]) -> Option<()> {
        match (alg, self.kty.as_str()) {
            ("RS256", "RSA") => {
                let (n, e) = (decode(self.n.as_deref()?)?, decode(self.e.as_deref()?)?);
                RsaPublicKeyComponents { n, e }.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature).ok()
            }
            ("ES256", "EC") if self.crv.as_deref() == Some("P-256") => {
                let point = [vec![4], decode(self.x.as_deref()?)?, decode(self.y.as_deref()?)?].concat();
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(message, signature).ok()
            }
            _ => None,
        }
    }
}

fn decode(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok()
}

/// What is signed is not yet for us, now, and for this sign-in.
fn check(claims: &Claims, issuer: &str, client: &str, nonce: &str, now: u64) -> Result<(), &'static str> {
    let ours = match &claims.aud {
        Value::String(audience) => audience == client,
        Value::Array(audiences) => audiences.len() == 1 && audiences[0] == client,
        _ => false,
    };
    match () {
        () if claims.iss != issuer => Err("is somebody else's"),
        () if !ours => Err("is meant for somebody else"),
        () if claims.exp + SKEW <= now => Err("has expired"),
        () if claims.nonce.as_deref() != Some(nonce) => Err("belongs to another sign-in"),
        () => Ok(()),
    }
}

/// By the subject, or by an address that the provider has checked.
fn scope(claims: &Claims, admins: &[String], operators: &[String]) -> Scope {
    let email = claims.email.as_ref().filter(|_| claims.email_verified);
    let is_in = |list: &[String]| list.iter().any(|name| *name == claims.sub || Some(name) == email);
    if is_in(admins) {
        Scope::Admin
    } else if is_in(operators) {
        Scope::Operate
    } else {
        Scope::Read
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
    use serde_json::json;

    use super::*;

    fn token(pair: &EcdsaKeyPair, header: &Value, claims: &Value) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(header), part(claims));
        let signature = pair.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn key(pair: &EcdsaKeyPair) -> Key {
        let point = pair.public_key().as_ref();
        let part = |bytes: &[u8]| Some(URL_SAFE_NO_PAD.encode(bytes));
        let (kty, crv) = ("EC".to_owned(), Some("P-256".to_owned()));
        Key {
            kty,
            crv,
            kid: Some("a".to_owned()),
            x: part(&point[1..33]),
            y: part(&point[33..]),
            ..Key::default()
        }
    }

    fn pair() -> EcdsaKeyPair {
        let random = SystemRandom::new();
        let bytes = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, bytes.as_ref(), &random).unwrap()
    }

    fn claims() -> Value {
        json!({"iss": "https://id", "sub": "7", "aud": "us", "exp": 100, "nonce": "n", "email": "ada@x", "email_verified": true})
    }

    #[test]
    fn only_what_the_key_signed_is_believed() {
        let (ours, other) = (pair(), pair());
        let good = json!({"alg": "ES256", "kid": "a"});
        let signed = token(&ours, &good, &claims());
        assert_eq!(verified(&signed, &[key(&ours)]).unwrap().sub, "7");
        assert!(verified(&token(&other, &good, &claims()), &[key(&ours)]).is_none());
        assert!(verified(&token(&ours, &json!({"alg": "none"}), &claims()), &[key(&ours)]).is_none());
        assert!(verified(&token(&ours, &json!({"alg": "RS256"}), &claims()), &[key(&ours)]).is_none());
        let (begin, signature) = signed.rsplit_once('.').unwrap();
        let header = begin.split_once('.').unwrap().0;
        let mut changed = claims();
        changed["sub"] = json!("1");
        let forged = format!("{header}.{}.{signature}", URL_SAFE_NO_PAD.encode(changed.to_string()));
        for forged in [forged.as_str(), begin, "", "..", "a.b.c"] {
            assert!(verified(forged, &[key(&ours)]).is_none(), "{forged}");
        }
    }

    #[test]
    fn what_is_for_somebody_else_or_another_time_is_refused() {
        let with = |field: &str, value: Value| {
            let mut claims = claims();
            claims[field] = value;
            let claims: Claims = serde_json::from_value(claims).unwrap();
            check(&claims, "https://id", "us", "n", 99)
        };
        assert!(with("sub", json!("7")).is_ok() && with("aud", json!(["us"])).is_ok());
        for (field, value) in [
            ("iss", json!("https://other")),
            ("aud", json!("them")),
            ("aud", json!(["us", "them"])),
            ("exp", json!(30)),
            ("nonce", json!("m")),
        ] {
            assert!(with(field, value.clone()).is_err(), "{field} {value}");
        }
    }

    #[test]
    fn an_address_that_nobody_checked_makes_no_admin() {
        let (admins, operators) = (vec!["ada@x".to_owned()], vec!["7".to_owned()]);
        let mut claims: Claims = serde_json::from_value(claims()).unwrap();
        assert_eq!(scope(&claims, &admins, &operators), Scope::Admin);
        claims.email_verified = false;
        assert_eq!(scope(&claims, &admins, &operators), Scope::Operate);
        claims.sub = "8".to_owned();
        assert_eq!(scope(&claims, &admins, &operators), Scope::Read);
    }

    #[test]
    fn the_challenge_follows_from_the_verifier() {
        let attempt = Attempt {
            verifier: "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk".to_owned(),
            ..Attempt::new("/")
        };
        assert_eq!(attempt.challenge(), "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM");
    }
}
