//! OpenID Connect. What a provider signs is checked with the keys that it publishes; only RS256 and ES256 are known.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use harmonia_service::settings::{Settings, SettingsError};
use reqwest::Client;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::Mutex;

use super::provider::{Attempt, Home, Name, People, Somebody, Us, ask, away, client, fields, form, refused};
use super::session::now;
use crate::escape::escape;

/// So long a provider's addresses are kept. Its keys are asked for each time: few people sign in at once.
const KEPT: Duration = Duration::from_secs(3600);
/// Clocks may differ by this many seconds.
const SKEW: u64 = 60;

/// A provider, and what we are to it.
pub struct Oidc {
    issuer: String,
    us: Us,
    /// It is a forge.
    home: Option<Home>,
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
    /// Who the token was made for, if it is good for others too.
    azp: Option<String>,
    email: Option<String>,
    /// Some say it as a text.
    #[serde(default)]
    email_verified: Value,
    preferred_username: Option<String>,
}

impl Oidc {
    /// As set; none if it is not.
    pub fn new(settings: &Settings, back: &str, people: &People) -> Result<Option<Self>, SettingsError> {
        let Some(issuer) = settings.get("oidc_issuer") else { return Ok(None) };
        let us = Us {
            id: settings.require("oidc_client_id")?.to_owned(),
            secret: settings.secret("oidc_client_secret")?,
            back: back.to_owned(),
            people: people.clone(),
        };
        Ok(Some(Self::of(issuer, us, None)))
    }

    /// A forge that says who its people are.
    pub fn at_home(issuer: &str, us: Us, home: Home) -> Self {
        Self::of(issuer, us, Some(home))
    }

    fn of(issuer: &str, us: Us, home: Option<Home>) -> Self {
        let issuer = issuer.trim_end_matches('/').to_owned();
        Self { issuer, us, home, client: client(), known: Mutex::default() }
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
            ("client_id", &self.us.id),
            ("redirect_uri", &self.us.back),
            ("scope", "openid email profile"),
            ("state", &attempt.state),
            ("nonce", &attempt.nonce),
            ("code_challenge", &attempt.challenge()),
            ("code_challenge_method", "S256"),
        ]);
        Ok(format!("{begin}{join}{fields}"))
    }

    /// Who came back with this code.
    pub async fn redeem(&self, attempt: &Attempt, code: &str) -> Result<Somebody, Problem> {
        let provider = self.provider().await?;
        let mut sent = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", &self.us.back),
            ("code_verifier", &attempt.verifier),
        ];
        let request = self.client.post(&provider.token_endpoint);
        let request = match &self.us.secret {
            Some(secret) => {
                let secret = secret.read().map_err(|error| away(&error))?;
                request.basic_auth(escape(&self.us.id), Some(escape(&secret)))
            }
            None => {
                sent.push(("client_id", &self.us.id));
                request
            }
        };
        let tokens: Tokens = ask(form(request, &sent)).await?;
        let keys: Keys = ask(self.client.get(&provider.jwks_uri)).await?;
        let claims = verified(&tokens.id_token, &keys.keys).map_err(refused)?;
        check(&claims, &provider.issuer, &self.us.id, &attempt.nonce, now()).map_err(refused)?;
        match &self.home {
            Some(home) => {
                let login = claims.preferred_username.filter(|login| !login.is_empty());
                Ok(home.somebody(login.ok_or_else(|| refused("names nobody"))?, &self.us.people))
            }
            None => Ok(somebody(claims, &self.us.people)),
        }
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

/// What a token says, if one of these keys signed it.
fn verified(token: &str, keys: &[Key]) -> Result<Claims, &'static str> {
    let claims = signed(token, keys).ok_or("is not signed by its keys")?;
    serde_json::from_slice(&claims).map_err(|error| {
        tracing::warn!(%error, "the provider of sign-in signed something else than OpenID Connect has");
        "cannot be read; the log of the frontend says why"
    })
}

fn signed(token: &str, keys: &[Key]) -> Option<Vec<u8>> {
    let (signed, signature) = token.rsplit_once('.')?;
    let (header, claims) = signed.split_once('.')?;
    let header: Header = serde_json::from_slice(&decode(header)?).ok()?;
    let signature = decode(signature)?;
    let fits = |key: &&Key| header.kid.is_none() || key.kid == header.kid;
    keys.iter().filter(fits).find(|key| key.signed(&header.alg, signed.as_bytes(), &signature).is_some())?;
    decode(claims)
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

/// What is signed is not yet for us, now, and for this sign-in. A token for several has to say that it was made for us.
fn check(claims: &Claims, issuer: &str, client: &str, nonce: &str, now: u64) -> Result<(), &'static str> {
    let ours = match &claims.aud {
        Value::String(audience) => audience == client,
        Value::Array(audiences) => {
            let alone = audiences.len() == 1;
            audiences.iter().any(|audience| audience == client) && (alone || claims.azp.is_some())
        }
        _ => false,
    };
    let ours = ours && claims.azp.as_deref().is_none_or(|party| party == client);
    match () {
        () if claims.iss != issuer => Err("is somebody else's"),
        () if !ours => Err("is meant for somebody else"),
        () if claims.exp + SKEW <= now => Err("has expired"),
        () if claims.nonce.as_deref() != Some(nonce) => Err("belongs to another sign-in"),
        () => Ok(()),
    }
}

/// Known by the subject, or by an address that the provider has checked. Whoever it signs in may look, unless it is said who may.
fn somebody(claims: Claims, people: &People) -> Somebody {
    let Claims { sub, email, email_verified, preferred_username, .. } = claims;
    let verified = email_verified == Value::Bool(true) || email_verified == "true";
    let checked = email.as_deref().filter(|_| verified);
    let names = [Some(Name::Subject(&sub)), checked.map(Name::Address)];
    let listed = people.scope(&names.into_iter().flatten().collect::<Vec<_>>());
    let scope = listed.or(people.readers.is_empty().then_some(Scope::Read));
    Somebody { name: email.or(preferred_username).unwrap_or(sub), scope, member: None }
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
        assert!(verified(&token(&other, &good, &claims()), &[key(&ours)]).is_err());
        assert!(verified(&token(&ours, &json!({"alg": "none"}), &claims()), &[key(&ours)]).is_err());
        assert!(verified(&token(&ours, &json!({"alg": "RS256"}), &claims()), &[key(&ours)]).is_err());
        let (begin, signature) = signed.rsplit_once('.').unwrap();
        let header = begin.split_once('.').unwrap().0;
        let mut changed = claims();
        changed["sub"] = json!("1");
        let forged = format!("{header}.{}.{signature}", URL_SAFE_NO_PAD.encode(changed.to_string()));
        for forged in [forged.as_str(), begin, "", "..", "a.b.c"] {
            assert!(verified(forged, &[key(&ours)]).is_err(), "{forged}");
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
        assert!(with("azp", json!("us")).is_ok());
        for (field, value) in [
            ("iss", json!("https://other")),
            ("aud", json!("them")),
            ("aud", json!(["us", "them"])),
            ("aud", json!([])),
            ("azp", json!("them")),
            ("exp", json!(30)),
            ("nonce", json!("m")),
        ] {
            assert!(with(field, value.clone()).is_err(), "{field} {value}");
        }
    }

    #[test]
    fn what_is_for_several_has_to_be_made_for_us() {
        let with = |audiences: Value, party: Value| {
            let mut claims = claims();
            (claims["aud"], claims["azp"]) = (audiences, party);
            check(&serde_json::from_value(claims).unwrap(), "https://id", "us", "n", 99).is_ok()
        };
        let both = || json!(["project", "us"]);
        assert!(with(both(), json!("us")));
        assert!(!with(both(), Value::Null) && !with(both(), json!("project")));
        assert!(!with(json!(["project", "them"]), json!("us")));
    }

    #[test]
    fn a_claim_of_another_type_is_no_wrong_signature() {
        let pair = pair();
        let mut said = claims();
        let read =
            |said: &Value| verified(&token(&pair, &json!({"alg": "ES256", "kid": "a"}), said), &[key(&pair)]);
        for (value, scope) in
            [(json!("true"), Scope::Admin), (json!("false"), Scope::Read), (json!(1), Scope::Read)]
        {
            said["email_verified"] = value.clone();
            let people = People { admins: vec!["ada@x".to_owned()], ..People::default() };
            assert_eq!(somebody(read(&said).unwrap(), &people).scope, Some(scope), "{value}");
        }
        said["exp"] = json!("soon");
        assert!(read(&said).unwrap_err().contains("cannot be read"));
    }

    #[test]
    fn an_address_that_nobody_checked_makes_no_admin() {
        let (admins, operators) = (vec!["ada@x".to_owned()], vec!["7".to_owned()]);
        let people = People { admins, operators, ..People::default() };
        let mut claims: Claims = serde_json::from_value(claims()).unwrap();
        let scope = |claims: &Claims| somebody(claims.clone(), &people).scope;
        assert_eq!(scope(&claims), Some(Scope::Admin));
        claims.email_verified = Value::Bool(false);
        assert_eq!(scope(&claims), Some(Scope::Operate));
        claims.sub = "8".to_owned();
        assert_eq!(scope(&claims), Some(Scope::Read));
    }
}
