//! `/api/public-keys`: the keys that sign the cache. Public, whoever may read it.

use axum::Json;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use harmonia_service::problem::Problem;
use harmonia_service::settings::{Settings, SettingsError};
use serde::Serialize;
use utoipa::ToSchema;

use crate::find::Finder;

/// Signers keep their public keys here, one a line.
const OBJECT: &str = "public-keys";
const NONE: &str =
    "the public keys are not known: start a signer, which writes them to the bucket, or set public_keys";

/// A public key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct PublicKey {
    /// Its name
    name: String,
    /// 32 bytes of Ed25519, in base64
    key: String,
}

impl PublicKey {
    /// As a `nix.conf` has it.
    fn line(&self) -> String {
        format!("{}:{}", self.name, self.key)
    }

    /// Reads `name:base64`.
    fn parse(text: &str) -> Option<Self> {
        let (name, key) = text.split_once(':')?;
        let good = !name.is_empty() && STANDARD.decode(key).is_ok_and(|bytes| bytes.len() == 32);
        good.then(|| Self { name: name.to_owned(), key: key.to_owned() })
    }
}

/// Where the keys are known from.
#[derive(Clone)]
pub struct PublicKeys {
    set: Option<Vec<PublicKey>>,
    finder: Finder,
}

impl PublicKeys {
    /// As set, or as the signers say.
    pub fn new(settings: &Settings, finder: Finder) -> Result<Self, SettingsError> {
        Ok(Self { set: settings.get("public_keys").map(parse_setting).transpose()?, finder })
    }

    /// The keys as a `nix.conf` has them, if they are known.
    pub async fn lines(&self) -> Vec<String> {
        let keys = self.list().await.unwrap_or_default();
        keys.iter().map(PublicKey::line).collect()
    }

    /// JSON, or the lines that a `nix.conf` takes for who asks for text.
    pub async fn answer(&self, headers: &HeaderMap) -> Response {
        match self.list().await {
            Ok(keys) if wants_text(headers) => {
                keys.iter().map(|key| key.line() + "\n").collect::<String>().into_response()
            }
            Ok(keys) => Json(keys).into_response(),
            Err(problem) => problem.into_response(),
        }
    }

    async fn list(&self) -> Result<Vec<PublicKey>, Problem> {
        if let Some(keys) = &self.set {
            return Ok(keys.clone());
        }
        let object = self.finder.find(OBJECT).await?.ok_or_else(|| Problem::unavailable(NONE))?;
        let text = String::from_utf8_lossy(&object.bytes);
        let keys: Vec<_> = text.split_whitespace().filter_map(PublicKey::parse).collect();
        if keys.is_empty() { Err(Problem::unavailable(NONE)) } else { Ok(keys) }
    }
}

fn parse_setting(text: &str) -> Result<Vec<PublicKey>, SettingsError> {
    let words = text.split([' ', ',', '\n', '\t']).filter(|word| !word.is_empty());
    let keys = words.map(|word| {
        PublicKey::parse(word).ok_or_else(|| SettingsError::Invalid {
            key: "public_keys",
            value: word.to_owned(),
            why: "is no public key: write name:base64, as `harmonia-ci key public` does".to_owned(),
        })
    });
    keys.collect()
}

fn wants_text(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    accept.contains("text/plain") && !accept.contains("application/json")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_separated_by_spaces_or_commas() {
        let key = STANDARD.encode([7; 32]);
        let keys = parse_setting(&format!("one-1:{key}, two-1:{key}")).unwrap();
        assert_eq!(keys.iter().map(|key| key.name.as_str()).collect::<Vec<_>>(), ["one-1", "two-1"]);
    }

    #[test]
    fn what_is_no_public_key_is_named() {
        for text in ["one", "one:", ":AAAA", "one:AAAA", &format!("one:{}", STANDARD.encode([7; 64]))] {
            assert!(parse_setting(text).unwrap_err().to_string().contains(text), "{text}");
        }
    }
}
