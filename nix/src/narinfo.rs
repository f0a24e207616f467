//! What a binary cache says about one store path: written and signed here, and read back.

use std::collections::BTreeSet;

use nix_derivation::{CAHash, StorePath};
use nix_derivation::{NixHash, StoreDir};
use nix_narinfo::{Compression, NixSignature};
pub use nix_narinfo::{MAX_NARINFO_SIZE, NarInfo, ParseError};
use thiserror::Error;

use crate::Sha256;
use crate::key::{PublicKey, SecretKey};

/// What is left for signatures, of some hundred bytes each, and for the name of the derivation.
const ROOM_FOR_SIGNATURES: usize = 4096;

/// All that is said about a path, before it is signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The path.
    pub path: StorePath,
    /// Hash of its NAR.
    pub nar_hash: Sha256,
    /// Bytes of its NAR.
    pub nar_size: u64,
    /// The paths it refers to, itself too if it does.
    pub references: BTreeSet<StorePath>,
    /// What made it.
    pub deriver: Option<StorePath>,
    /// Its content address, if its path follows from one.
    pub ca: Option<CAHash>,
    /// Where the NAR is, compressed with zstd, from the root of the cache.
    pub url: String,
    /// Hash of the compressed NAR.
    pub file_hash: Sha256,
    /// Bytes of the compressed NAR.
    pub file_size: u64,
}

/// Why there is no narinfo.
#[derive(Debug, Error)]
pub enum NarInfoError {
    /// A value that cannot be written.
    #[error("no narinfo can be written for {path}")]
    Build {
        /// The path.
        path: StorePath,
        /// Why.
        source: nix_narinfo::BuildError,
    },
    /// A signature that cannot be written.
    #[error("the signature of {path} cannot be written")]
    Signature {
        /// The path.
        path: StorePath,
        /// Why.
        source: nix_narinfo::SignatureError,
    },
    /// Clients would refuse it.
    #[error(
        "the narinfo of {path} would have {size} bytes, more than the {MAX_NARINFO_SIZE} that clients read"
    )]
    TooLarge {
        /// The path.
        path: StorePath,
        /// How many it would have.
        size: usize,
    },
}

/// The name of a path's narinfo in a cache.
pub fn object_name(path: &StorePath) -> String {
    format!("{}.narinfo", crate::store_path::hash_part(path))
}

/// Whether clients would read a record's narinfo, by however many keys it is signed, today's and those to come.
pub fn check_size(record: &Record) -> Result<(), NarInfoError> {
    let text = write(record, &[])?;
    fits(record, text.len() + ROOM_FOR_SIGNATURES)
}

fn fits(record: &Record, size: usize) -> Result<(), NarInfoError> {
    if size > MAX_NARINFO_SIZE {
        return Err(NarInfoError::TooLarge { path: record.path.clone(), size });
    }
    Ok(())
}

/// Writes a narinfo with the signature of every key, in their order.
pub fn write(record: &Record, keys: &[SecretKey]) -> Result<String, NarInfoError> {
    let builder = NarInfo::builder(
        record.path.clone(),
        record.url.clone(),
        NixHash::Sha256(record.nar_hash.0),
        record.nar_size,
    )
    .compression(Compression::Zstd)
    .references(record.references.iter().cloned())
    .deriver(record.deriver.clone())
    .content_address(record.ca.clone())
    .file_hash(Some(NixHash::Sha256(record.file_hash.0)))
    .file_size(Some(record.file_size));
    let build = |builder: nix_narinfo::NarInfoBuilder| {
        builder.build().map_err(|source| NarInfoError::Build { path: record.path.clone(), source })
    };

    let fingerprint = build(builder.clone())?.fingerprint(&StoreDir::default());
    let signatures: Vec<NixSignature> = keys
        .iter()
        .map(|key| key.sign(fingerprint.as_bytes()).parse())
        .collect::<Result<_, _>>()
        .map_err(|source| NarInfoError::Signature { path: record.path.clone(), source })?;
    let bytes = build(builder.signatures(signatures))?.to_canonical_bytes();
    fits(record, bytes.len())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads a narinfo of anybody's.
pub fn parse(text: &[u8]) -> Result<NarInfo, ParseError> {
    NarInfo::parse_in(&StoreDir::default(), text)
}

/// Whether one of the keys signed it.
pub fn is_signed_by(info: &NarInfo, keys: &[PublicKey]) -> bool {
    info.has_valid_signature(&StoreDir::default(), keys)
}

#[cfg(test)]
mod tests {
    use proptest::collection::btree_set;
    use proptest::prelude::*;

    use super::*;
    use crate::store_path;

    /// Of `nix-store --generate-binary-cache-key test-1`.
    const SECRET: &str =
        "test-1:5zIz2GMuFnGLEXs/wYGadS7RUxF0qQhonGLiydhtMxN2ZB1SAHAJOz8lXVLJ/cqLfe6ote6IrclNwfcQnDuz4g==";

    /// Written by Nix 2.8: `nix copy --to 'file:///…?secret-key=…&compression=zstd'` with that key.
    const BY_NIX: &str = "\
StorePath: /nix/store/xnkgc17s7mk220bmaq36xi4sqxbik1qs-ref
URL: nar/0pliy2irhwp4h1aal5ym4xrg235yf31ynmafd8dr68qljm1x59qp.nar.zst
Compression: zstd
FileHash: sha256:0pliy2irhwp4h1aal5ym4xrg235yf31ynmafd8dr68qljm1x59qp
FileSize: 131
NarHash: sha256:0znya20x7dw21aa41qkp77ffczc5nfshcv7ifjf4p5dgv0h3ddrk
NarSize: 168
References: q3laishhmk84vl44j1973qpzkyhmr90c-text
Sig: test-1:3ze3FxbLHX5uO3Sle6f9osK31p9TAyjdS0obDis6nAlzkUICswEmXaRIbKKE9KbYr4JLDXqa59x+QJ+oEpowCg==
CA: text:sha256:0izmi1n9pnvphrivlkdh68pbqgcany1617ybr9i8llwdxnwlf95d
";

    fn record() -> Record {
        Record {
            path: store_path::parse("/nix/store/xnkgc17s7mk220bmaq36xi4sqxbik1qs-ref").unwrap(),
            nar_hash: "sha256:0znya20x7dw21aa41qkp77ffczc5nfshcv7ifjf4p5dgv0h3ddrk".parse().unwrap(),
            nar_size: 168,
            references: [store_path::parse("/nix/store/q3laishhmk84vl44j1973qpzkyhmr90c-text").unwrap()]
                .into(),
            deriver: None,
            ca: Some("text:sha256:0izmi1n9pnvphrivlkdh68pbqgcany1617ybr9i8llwdxnwlf95d".parse().unwrap()),
            url: "nar/0pliy2irhwp4h1aal5ym4xrg235yf31ynmafd8dr68qljm1x59qp.nar.zst".to_owned(),
            file_hash: "sha256:0pliy2irhwp4h1aal5ym4xrg235yf31ynmafd8dr68qljm1x59qp".parse().unwrap(),
            file_size: 131,
        }
    }

    fn key() -> SecretKey {
        SecretKey::parse(SECRET).unwrap()
    }

    #[test]
    fn the_same_record_gives_the_same_text_as_nix_writes() {
        assert_eq!(write(&record(), &[key()]).unwrap(), BY_NIX);
    }

    #[test]
    fn every_key_signs() {
        let keys = [key(), SecretKey::generate("next-1").unwrap()];
        let info = parse(write(&record(), &keys).unwrap().as_bytes()).unwrap();
        for key in &keys {
            assert!(is_signed_by(&info, &[key.public()]), "{key:?}");
        }
    }

    #[test]
    fn a_changed_word_breaks_the_signature() {
        for (word, other) in [("NarSize: 168", "NarSize: 169"), ("0znya20", "1znya20"), ("-text", "-texts")] {
            let info = parse(BY_NIX.replace(word, other).as_bytes()).unwrap();
            assert!(!is_signed_by(&info, &[key().public()]), "{word}");
        }
    }

    #[test]
    fn another_key_of_the_same_name_did_not_sign() {
        let info = parse(BY_NIX.as_bytes()).unwrap();
        assert!(!is_signed_by(&info, &[SecretKey::generate("test-1").unwrap().public()]));
    }

    #[test]
    fn the_object_is_named_by_the_hash_part() {
        assert_eq!(object_name(&record().path), "xnkgc17s7mk220bmaq36xi4sqxbik1qs.narinfo");
    }

    #[test]
    fn what_would_break_the_lines_is_refused() {
        let record = Record { url: "nar/x\nSig: y".to_owned(), ..record() };
        assert!(matches!(write(&record, &[key()]), Err(NarInfoError::Build { .. })));
    }

    #[test]
    fn more_than_clients_read_is_refused() {
        let path = |n: u32| store_path::parse(&format!("/nix/store/{n:032}-{}", "x".repeat(200))).unwrap();
        let record = Record { references: (0..5000).map(path).collect(), ..record() };
        assert!(matches!(write(&record, &[key()]), Err(NarInfoError::TooLarge { .. })));
        assert!(matches!(check_size(&record), Err(NarInfoError::TooLarge { .. })));
    }

    #[test]
    fn what_is_small_enough_is_so_with_any_keys() {
        let path = |n: usize| store_path::parse(&format!("/nix/store/{n:032}-{}", "x".repeat(200))).unwrap();
        let with = |count| Record { references: (0..count).map(path).collect(), ..record() };
        let counts: Vec<usize> = (4000..5000).collect();
        let most = with(3999 + counts.partition_point(|count| check_size(&with(*count)).is_ok()));
        assert!(most.references.len() > 4000 && most.references.len() < 5000);
        let keys: Vec<SecretKey> =
            (0..8).map(|n| SecretKey::generate(&format!("ci.example.org-{n}")).unwrap()).collect();
        let deriver = Some(store_path::parse(&format!("/nix/store/{}-x.drv", "0".repeat(32))).unwrap());
        assert!(write(&Record { deriver, ..most }, &keys).is_ok());
    }

    fn paths() -> impl Strategy<Value = StorePath> {
        (any::<[u8; 20]>(), "[a-zA-Z0-9+_?=-][a-zA-Z0-9+._?=-]{0,40}")
            .prop_map(|(digest, name)| StorePath::from_parts(digest, &name).unwrap())
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            path in paths(),
            nar_hash in any::<[u8; 32]>(),
            nar_size in 1..u64::MAX,
            references in btree_set(paths(), 0..5),
            deriver in proptest::option::of(paths()),
            file_hash in any::<[u8; 32]>(),
            file_size in any::<u64>(),
        ) {
            let (nar_hash, file_hash) = (Sha256(nar_hash), Sha256(file_hash));
            let url = format!("nar/{}.nar.zst", nar_hash.nix32());
            let record =
                Record { path, nar_hash, nar_size, references, deriver, ca: None, url, file_hash, file_size };
            let info = parse(write(&record, &[key()]).unwrap().as_bytes()).unwrap();
            prop_assert!(is_signed_by(&info, &[key().public()]));
            prop_assert_eq!(info.store_path(), &record.path);
            prop_assert_eq!(info.references(), &record.references);
            prop_assert_eq!(info.deriver(), record.deriver.as_ref());
            prop_assert_eq!(info.nar_size(), record.nar_size);
            prop_assert_eq!(info.file_size(), Some(record.file_size));
            prop_assert_eq!(info.compression(), &Compression::Zstd);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
        }
    }
}
