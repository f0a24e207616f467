use std::sync::LazyLock;

use harmonia_nix::key::{PublicKey, SecretKey};
use harmonia_nix::narinfo::{is_signed_by, object_name, parse};
use nix_derivation::StoreDir;

/// Of `nix-store --generate-binary-cache-key test-1`; it signed the narinfos of the corpus.
const SECRET: &str =
    "test-1:5zIz2GMuFnGLEXs/wYGadS7RUxF0qQhonGLiydhtMxN2ZB1SAHAJOz8lXVLJ/cqLfe6ote6IrclNwfcQnDuz4g==";

/// A narinfo of anybody's. All that is signed is read back from what is written, and the signatures hold for both or neither.
pub fn read(input: &[u8]) {
    static KEYS: LazyLock<[PublicKey; 1]> =
        LazyLock::new(|| [SecretKey::parse(SECRET).expect("a key").public()]);
    let Ok(info) = parse(input) else { return };
    object_name(info.store_path());
    let again = parse(&info.to_canonical_bytes()).expect("what was written is read");
    let store = StoreDir::default();
    assert_eq!(again.fingerprint(&store), info.fingerprint(&store));
    assert_eq!(is_signed_by(&again, &*KEYS), is_signed_by(&info, &*KEYS));
}
