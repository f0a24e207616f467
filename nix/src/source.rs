//! Sources: store paths that no derivation makes, because they follow from what they hold.

use std::collections::BTreeSet;

use nix_derivation::{CAHash, NixHash, StorePath, store_path};
use thiserror::Error;

use crate::Sha256;

/// Why a path is not the source it is said to be.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The path follows from something else.
    #[error("{path} does not follow from its NAR hash {nar_hash}, its references and its name")]
    Nar {
        /// The path.
        path: StorePath,
        /// The hash it was said to have.
        nar_hash: Sha256,
    },
    /// Such a path follows from its bytes with its own hash taken out of them.
    #[error(
        "{path} refers to itself: whether it follows from its contents cannot be said without reading them"
    )]
    SelfReference {
        /// The path.
        path: StorePath,
    },
    /// The path follows from something else.
    #[error("{path} does not follow from the contents of the file, its references and its name")]
    Contents {
        /// The path.
        path: StorePath,
    },
    /// The contents are those of another NAR.
    #[error("the NAR of {path} is said to have the hash {said}, but its contents give {actual}")]
    NarHash {
        /// The path.
        path: StorePath,
        /// The hash it was said to have.
        said: Sha256,
        /// The hash it has.
        actual: Sha256,
    },
}

/// Proves that a source's path follows from its NAR hash, its references and its name, and says its content address.
/// That is how `builtins.path`, `nix-store --add` and all fetchers name what they add.
///
/// A reference to itself is part of the name as Nix makes it. The NAR hash then has to be the one without the path's own
/// hash in the bytes, so this holds only for a path that says it refers to itself and does not.
pub fn prove_nar(
    path: &StorePath,
    nar_hash: Sha256,
    references: &BTreeSet<StorePath>,
) -> Result<CAHash, SourceError> {
    let ca = CAHash::Nar(NixHash::Sha256(nar_hash.0));
    if follows(path, &ca, references) {
        Ok(ca)
    } else if references.contains(path) {
        Err(SourceError::SelfReference { path: path.clone() })
    } else {
        Err(SourceError::Nar { path: path.clone(), nar_hash })
    }
}

/// Proves that a file's path follows from its contents, its references and its name, as `builtins.toFile` (text) and
/// `builtins.fetchurl` (a flat hash, without references) name what they add, and that this is the file in the NAR. Says
/// its content address.
pub fn prove_file(
    path: &StorePath,
    contents: &[u8],
    nar_hash: Sha256,
    references: &BTreeSet<StorePath>,
) -> Result<CAHash, SourceError> {
    let (actual, _) = nar_of_file(contents);
    if actual != nar_hash {
        return Err(SourceError::NarHash { path: path.clone(), said: nar_hash, actual });
    }
    let hash = Sha256::of(contents).0;
    [CAHash::Text(hash), CAHash::Flat(NixHash::Sha256(hash))]
        .into_iter()
        .find(|ca| follows(path, ca, references))
        .ok_or_else(|| SourceError::Contents { path: path.clone() })
}

/// Hash and size of the NAR of a file that is not executable.
pub fn nar_of_file(contents: &[u8]) -> (Sha256, u64) {
    let (size, hash) = nix_archive::nar::hash_regular(contents, false).into_parts();
    (Sha256(hash), size)
}

/// Whether a path is what a content address, references and its name give.
pub(crate) fn follows(path: &StorePath, ca: &CAHash, references: &BTreeSet<StorePath>) -> bool {
    let others = references.iter().filter(|reference| *reference != path);
    store_path::build_ca_path(path.name(), ca, others, references.contains(path))
        .is_ok_and(|actual| actual == *path)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Paths as Nix 2.8 and 2.34 made them, both the same.

    /// `nix-store --add srcdir`, a directory with one file.
    const DIRECTORY: (&str, &str) = (
        "/nix/store/d9ss8h6050zszkfan5pyf7jj77m5x8vg-srcdir",
        "sha256:18l2zj8v9v7ywhnxhbvn50dldj0h6nzfi1nii2xd79nkj6ivx2cm",
    );
    /// The NAR of a file with the contents `hello\n`.
    const HELLO_NAR: &str = "sha256:04zwf782yjwnh3q6hz5izfd6jyip8kgw6g6yj43fiqhbyhdd0dqw";
    /// `nix-store --add-fixed sha256 hello.txt` with it.
    const FLAT: &str = "/nix/store/gy454w1cxaq731grqwylhzf4pp9r5izh-hello.txt";
    /// `nix-store --add-fixed --recursive sha256 hello.txt` with it.
    const RECURSIVE: &str = "/nix/store/i9pmrzmpshapij2kin22pff6fc2adavx-hello.txt";
    /// `builtins.toFile "text" "hello\n"`.
    const TEXT: &str = "/nix/store/q3laishhmk84vl44j1973qpzkyhmr90c-text";
    /// `builtins.toFile "ref" "see ${text}\n"`.
    const REFERRING: (&str, &str) = (
        "/nix/store/xnkgc17s7mk220bmaq36xi4sqxbik1qs-ref",
        "sha256:0znya20x7dw21aa41qkp77ffczc5nfshcv7ifjf4p5dgv0h3ddrk",
    );

    fn path(text: &str) -> StorePath {
        text.parse().unwrap()
    }

    fn hash(text: &str) -> Sha256 {
        text.parse().unwrap()
    }

    fn none() -> BTreeSet<StorePath> {
        BTreeSet::new()
    }

    #[test]
    fn a_directory_follows_from_its_nar() {
        let ca = prove_nar(&path(DIRECTORY.0), hash(DIRECTORY.1), &none()).unwrap();
        assert_eq!(ca.to_nix_string(), format!("fixed:r:{}", DIRECTORY.1));
    }

    #[test]
    fn a_file_added_as_it_is_follows_from_its_nar() {
        assert!(prove_nar(&path(RECURSIVE), hash(HELLO_NAR), &none()).is_ok());
    }

    #[test]
    fn the_nar_of_a_file_is_that_of_nix() {
        assert_eq!(nar_of_file(b"hello\n"), (hash(HELLO_NAR), 120));
    }

    #[test]
    fn a_text_follows_from_its_contents() {
        let ca = prove_file(&path(TEXT), b"hello\n", hash(HELLO_NAR), &none()).unwrap();
        assert_eq!(ca.to_nix_string(), "text:sha256:00xyyr3fi8l6hb839bv3f7yb86yjv7xi1cgh1xnhipym4asvb4aq");
    }

    #[test]
    fn a_text_with_references_needs_them() {
        let contents = format!("see {TEXT}\n");
        let prove =
            |references| prove_file(&path(REFERRING.0), contents.as_bytes(), hash(REFERRING.1), &references);
        assert!(prove([path(TEXT)].into()).is_ok());
        assert!(matches!(prove(none()), Err(SourceError::Contents { .. })));
    }

    #[test]
    fn a_flat_file_follows_from_its_contents() {
        let ca = prove_file(&path(FLAT), b"hello\n", hash(HELLO_NAR), &none()).unwrap();
        assert!(matches!(ca, CAHash::Flat(_)));
    }

    #[test]
    fn contents_of_another_nar_are_refused() {
        let proof = prove_file(&path(TEXT), b"hello\n", hash(DIRECTORY.1), &none());
        assert!(matches!(proof, Err(SourceError::NarHash { .. })));
    }

    #[test]
    fn another_hash_another_name_or_more_references_are_refused() {
        let (source, nar) = (path(DIRECTORY.0), hash(DIRECTORY.1));
        let renamed = StorePath::from_parts(*source.digest(), "other").unwrap();
        assert!(matches!(prove_nar(&source, hash(HELLO_NAR), &none()), Err(SourceError::Nar { .. })));
        assert!(matches!(prove_nar(&renamed, nar, &none()), Err(SourceError::Nar { .. })));
        assert!(matches!(prove_nar(&source, nar, &[path(TEXT)].into()), Err(SourceError::Nar { .. })));
    }

    #[test]
    fn a_reference_to_itself_is_part_of_the_name() {
        let nar = hash(DIRECTORY.1);
        let ca = CAHash::Nar(NixHash::Sha256(nar.0));
        let own = store_path::build_ca_path("own", &ca, [&path(TEXT)], true).unwrap();
        assert!(prove_nar(&own, nar, &[path(TEXT), own.clone()].into()).is_ok());
        assert!(matches!(prove_nar(&own, nar, &[path(TEXT)].into()), Err(SourceError::Nar { .. })));
    }

    #[test]
    fn a_path_that_is_in_its_own_bytes_is_refused_with_that_reason() {
        let source = path(DIRECTORY.0);
        let proof = prove_nar(&source, hash(DIRECTORY.1), &[source.clone()].into());
        assert!(matches!(proof, Err(SourceError::SelfReference { .. })));
    }

    proptest! {
        #[test]
        fn what_is_made_of_contents_is_proven_by_them(contents in proptest::collection::vec(any::<u8>(), 0..300)) {
            let made = store_path::build_text_path("x", &contents, std::iter::empty()).unwrap();
            prop_assert!(prove_file(&made, &contents, nar_of_file(&contents).0, &none()).is_ok());
        }
    }
}
