//! Store paths, `/nix/store/<32 digits of nix32>-<name>`. The store directory is the same everywhere: it is part of
//! every hash.

pub use nix_derivation::StorePath;
use nix_derivation::{nixbase32, store_path};
use thiserror::Error;

/// Not a store path.
#[derive(Debug, Error)]
#[error("{text:?} is no store path: write /nix/store/<hash>-<name>")]
pub struct PathError {
    text: String,
    source: store_path::Error,
}

/// Reads an absolute store path, and nothing inside of one. Names are letters, digits and `+-._?=`, at most 211 of them;
/// two dots may stand in a name, but none is `.` or `..` alone or before a dash.
pub fn parse(text: &str) -> Result<StorePath, PathError> {
    text.parse().map_err(|source| PathError { text: text.chars().take(300).collect(), source })
}

/// The 32 digits that name a path in a cache.
pub fn hash_part(path: &StorePath) -> String {
    nixbase32::encode(path.digest())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGITS: &str = "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz";

    #[test]
    fn every_name_that_nix_allows_is_read_and_written_back() {
        for name in ["a", "gtk+-2.0?x=1", "a..b", "_", "a-b.drv", &"x".repeat(211)] {
            let text = format!("/nix/store/{DIGITS}-{name}");
            assert_eq!(parse(&text).map(|path| path.to_string()).ok(), Some(text));
        }
    }

    #[test]
    fn what_could_leave_the_store_or_the_line_is_refused() {
        for text in [
            "",
            "/nix/store",
            "/nix/store/..",
            &format!("/nix/store/{DIGITS}"),
            &format!("/nix/store/{DIGITS}-"),
            &format!("/nix/store/{DIGITS}-.."),
            &format!("/nix/store/{DIGITS}-..-x"),
            &format!("/nix/store/{DIGITS}-a/b"),
            &format!("/nix/store/{DIGITS}-a b"),
            &format!("/nix/store/{DIGITS}-a\n"),
            &format!("/nix/store/{DIGITS}-é"),
            &format!("/nix/store/{DIGITS}-{}", "x".repeat(212)),
            &format!("/nix/store/{}-a", DIGITS.replace('7', "e")),
            &format!("/nix/store/{}-a", DIGITS.to_uppercase()),
            &format!("/gnu/store/{DIGITS}-a"),
            &format!("{DIGITS}-a"),
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_hash_part_is_what_follows_the_store_directory() {
        assert_eq!(hash_part(&parse(&format!("/nix/store/{DIGITS}-a")).unwrap()), DIGITS);
    }
}
