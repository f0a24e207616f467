//! SHA-256, the only hash that NARs and files have here.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix_derivation::nixbase32;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Digest;
use thiserror::Error;

/// A SHA-256 digest. Written as `sha256-` and base64; read in that form, as `sha256:` with nix32 or hexadecimal digits,
/// or as bare hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sha256(pub [u8; 32]);

/// Not a SHA-256 digest in any form that Nix writes.
#[derive(Debug, Error)]
#[error("{0:?} is no SHA-256: write sha256-<base64> or sha256:<nix32>")]
pub struct HashError(String);

impl Sha256 {
    /// Hashes bytes.
    pub fn of(bytes: impl AsRef<[u8]>) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }

    /// As in narinfos and in the names of objects.
    pub fn nix32(&self) -> String {
        nixbase32::encode(&self.0)
    }

    /// As in S3's checksum headers.
    pub fn base64(&self) -> String {
        STANDARD.encode(self.0)
    }

    /// As in the local store's database.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<&[u8]> for Sha256 {
    type Error = HashError;

    fn try_from(bytes: &[u8]) -> Result<Self, HashError> {
        bytes.try_into().map(Self).map_err(|_| HashError(format!("{} bytes", bytes.len())))
    }
}

impl FromStr for Sha256 {
    type Err = HashError;

    fn from_str(text: &str) -> Result<Self, HashError> {
        let digest = match text.strip_prefix("sha256-") {
            Some(base64) => STANDARD.decode(base64).ok(),
            None => digits(text.strip_prefix("sha256:").unwrap_or(text)),
        };
        digest
            .and_then(|digest| digest.try_into().ok())
            .map(Self)
            .ok_or_else(|| HashError(text.chars().take(80).collect()))
    }
}

/// 64 hexadecimal digits or 52 of nix32.
fn digits(text: &str) -> Option<Vec<u8>> {
    match text.len() {
        52 => nixbase32::decode(text.as_bytes()).ok(),
        // Numbers may have a sign, digests may not.
        64 if text.bytes().all(|byte| byte.is_ascii_hexdigit()) => text
            .as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect(),
        _ => None,
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256-{}", self.base64())
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Sha256 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sha256 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_back() {
        let hash = Sha256::of(b"abc");
        for text in [
            hash.to_string(),
            format!("sha256:{}", hash.nix32()),
            format!("sha256:{}", hash.hex()),
            hash.hex(),
        ] {
            assert_eq!(text.parse::<Sha256>().ok(), Some(hash), "{text}");
        }
    }

    #[test]
    fn a_sign_is_no_digit() {
        assert!("+0".repeat(32).parse::<Sha256>().is_err());
    }

    #[test]
    fn anything_else_is_refused_with_its_beginning() {
        for text in
            ["", "sha256-", "sha256:e", "md5:900150983cd24fb0d6963f7d28e17f72", "sha256-*", &"é".repeat(32)]
        {
            assert!(text.parse::<Sha256>().is_err(), "{text}");
        }
    }
}
