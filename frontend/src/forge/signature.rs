//! Whether a webhook was signed with the secret that a forge shares with us.

use harmonia_service::secret::{Secret, SecretError};
use ring::hmac;

/// Compares in constant time. No signature, or an empty secret, fits nothing.
pub fn fits(secret: &Secret, body: &[u8], signature: Option<&str>) -> Result<bool, SecretError> {
    let secret = secret.read()?;
    let Some(tag) = signature.and_then(bytes).filter(|_| !secret.is_empty()) else { return Ok(false) };
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    Ok(hmac::verify(&key, body, &tag).is_ok())
}

fn bytes(digits: &str) -> Option<Vec<u8>> {
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    (0..64).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The example of GitHub's own documentation.
    const SIGNATURE: &str = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";

    fn check(secret: &str, body: &str, signature: Option<&str>) -> bool {
        fits(&Secret::Value(secret.to_owned()), body.as_bytes(), signature).unwrap()
    }

    #[test]
    fn the_one_of_the_documentation_fits() {
        assert!(check("It's a Secret to Everybody", "Hello, World!", Some(SIGNATURE)));
    }

    #[test]
    fn anything_else_does_not() {
        let secret = "It's a Secret to Everybody";
        assert!(!check(secret, "Hello, World?", Some(SIGNATURE)));
        assert!(!check("another", "Hello, World!", Some(SIGNATURE)));
        assert!(!check("", "Hello, World!", Some(SIGNATURE)));
        for signature in
            [None, Some(""), Some(&SIGNATURE[1..]), Some(&"é".repeat(32)), Some(&"+1".repeat(32))]
        {
            assert!(!check(secret, "Hello, World!", signature), "{signature:?}");
        }
    }
}
