use harmonia_nix::Sha256;
use harmonia_nix::key::{PublicKey, SecretKey};
use harmonia_nix::proof::InputHash;
use harmonia_nix::store_path::{self, hash_part};

use crate::key::Key;
use crate::protocol::Token;

/// Single words: store paths, hashes, keys, tokens, and what is asked of a cache. What is read is what is written.
pub fn read(input: &[u8]) {
    if let Some(hash) = InputHash::from_bytes(input) {
        assert_eq!(InputHash::from_bytes(&hash.to_bytes()), Some(hash));
    }
    let Ok(text) = std::str::from_utf8(input) else { return };
    match store_path::parse(text) {
        Ok(path) => {
            assert_eq!(path.to_string(), text);
            assert_eq!(hash_part(&path).len(), 32);
        }
        Err(error) => assert!(error.to_string().len() < 5000),
    }
    if let Ok(hash) = text.parse::<Sha256>() {
        let forms = [hash.to_string(), format!("sha256:{}", hash.nix32()), hash.nix32(), hash.hex()];
        let hex = text.to_ascii_lowercase();
        let hex = hex.strip_prefix("sha256:").unwrap_or(&hex);
        assert!(forms.iter().any(|form| form == text || form == hex), "{text} is not {hash}");
    }
    if let Ok(key) = SecretKey::parse(text) {
        // A seed alone is written with its public half.
        let whole = key.to_text();
        let again = SecretKey::parse(&whole).map(|again| again.public());
        assert_eq!(again.ok(), Some(key.public()), "{text}");
        assert_eq!(PublicKey::parse(&key.public_text()).ok(), Some(key.public()));
    }
    PublicKey::parse(text).ok();
    if let Ok(token) = text.parse::<Token>() {
        assert_eq!(token.to_text().parse(), Ok(token));
    }
    if let Some(key) = Key::parse(text) {
        assert!(key.object.bytes().all(|byte| byte.is_ascii_graphic()), "{key:?}");
        assert!(key.object.split('/').all(|part| !["", ".", ".."].contains(&part)), "{key:?}");
        assert_eq!(Key::parse(&key.object), Some(key));
    }
}
