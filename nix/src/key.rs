//! Ed25519 keys in Nix's own format: `name:base64`, 64 bytes for a secret key and 32 for a public one. A secret key may also be
//! its seed alone, 32 bytes: what makes it need not know how to derive the public half.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signer, SigningKey};
pub use nix_narinfo::TrustedPublicKey as PublicKey;
use thiserror::Error;
use zeroize::Zeroizing;

/// The longest name of a key, in bytes. A host name and a number are meant, and never the 88 characters of a secret.
const LONGEST_NAME: usize = 64;

/// The most bytes that are read of a key file: a name, a colon, 88 characters of base64 and a line end fit many times.
const LONGEST_FILE: u64 = 4096;

/// Why there is no key.
#[derive(Debug, Error)]
pub enum KeyError {
    /// Without a name, Nix cannot find the public key that belongs to a signature. The error does not repeat it: who
    /// mixes up the order has the secret in its place.
    #[error("the name of a key has 1 to {LONGEST_NAME} characters without spaces and colons, such as host-1")]
    Name,
    /// No colon.
    #[error("a secret key is name:base64, and there is no colon in it")]
    NoColon,
    /// Not base64.
    #[error("what follows the name {name:?} of a secret key is no base64")]
    NotBase64 {
        /// The key's name.
        name: String,
    },
    /// Neither a seed nor a pair.
    #[error("the key {name:?} holds {got} bytes instead of 64, or 32 if it is only a seed")]
    Length {
        /// The key's name.
        name: String,
        /// How many there are.
        got: usize,
    },
    /// The two halves do not belong together.
    #[error("the public half of the key {name:?} does not belong to its secret half")]
    Halves {
        /// The key's name.
        name: String,
    },
    /// There would be nothing to sign with.
    #[error("no signing key is configured")]
    None,
    /// Clients look a public key up by its name.
    #[error("two signing keys have the name {0:?}: give each key a name of its own")]
    Twice(String),
    /// A key file cannot be read.
    #[error("the signing key {} cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key file holds no key.
    #[error("the signing key {} is not usable", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<KeyError>,
    },
}

/// A key to sign with. Its secret is wiped from memory when it is dropped, and never printed.
#[derive(Clone)]
pub struct SecretKey {
    name: String,
    key: SigningKey,
}

impl SecretKey {
    /// Makes a new key.
    pub fn generate(name: &str) -> Result<Self, KeyError> {
        let mut seed = Zeroizing::new([0; 32]);
        rand::fill(seed.as_mut_slice());
        Ok(Self { name: checked_name(name)?, key: SigningKey::from_bytes(&seed) })
    }

    /// Reads Nix's text; white space around it does not matter.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let (name, encoded) = text.trim().split_once(':').ok_or(KeyError::NoColon)?;
        let name = checked_name(name)?;
        let bytes = match STANDARD.decode(encoded) {
            Ok(bytes) => Zeroizing::new(bytes),
            Err(_) => return Err(KeyError::NotBase64 { name }),
        };
        if let Ok(seed) = <&[u8; 32]>::try_from(bytes.as_slice()) {
            return Ok(Self { name, key: SigningKey::from_bytes(seed) });
        }
        let Ok(pair) = <&[u8; 64]>::try_from(bytes.as_slice()) else {
            return Err(KeyError::Length { name, got: bytes.len() });
        };
        match SigningKey::from_keypair_bytes(pair) {
            Ok(key) => Ok(Self { name, key }),
            Err(_) => Err(KeyError::Halves { name }),
        }
    }

    /// Nix's text, without a line end. It is the secret.
    pub fn to_text(&self) -> Zeroizing<String> {
        let pair = Zeroizing::new(self.key.to_keypair_bytes());
        let encoded = Zeroizing::new(STANDARD.encode(pair.as_slice()));
        Zeroizing::new(format!("{}:{}", self.name, encoded.as_str()))
    }

    /// What clients find the public key by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What clients check signatures with.
    pub fn public(&self) -> PublicKey {
        PublicKey { name: self.name.clone(), key: self.key.verifying_key() }
    }

    /// The public key as clients write it into `trusted-public-keys`.
    pub fn public_text(&self) -> String {
        format!("{}:{}", self.name, STANDARD.encode(self.key.verifying_key().as_bytes()))
    }

    /// A signature as Nix writes it, `name:base64`.
    pub fn sign(&self, fingerprint: &[u8]) -> String {
        format!("{}:{}", self.name, STANDARD.encode(self.key.sign(fingerprint).to_bytes()))
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey({}:…)", self.name)
    }
}

fn checked_name(name: &str) -> Result<String, KeyError> {
    let fits = !name.is_empty()
        && name.len() <= LONGEST_NAME
        && !name.chars().any(|letter| letter == ':' || letter.is_whitespace() || letter.is_control());
    if fits { Ok(name.to_owned()) } else { Err(KeyError::Name) }
}

/// The signing keys of some files, one in each, the newest of what they held. A directory stands for the files in it.
#[derive(Debug)]
pub struct Keys {
    places: Vec<PathBuf>,
    files: Vec<PathBuf>,
    stamps: Vec<Stamp>,
    keys: Arc<[SecretKey]>,
}

impl Keys {
    /// Reads them all.
    pub fn load(places: impl IntoIterator<Item = PathBuf>) -> Result<Self, KeyError> {
        let places: Vec<PathBuf> = places.into_iter().collect();
        let files = files_of(&places)?;
        let (stamps, keys) = read_all(&files)?;
        Ok(Self { places, files, stamps, keys })
    }

    /// What to sign with now.
    pub fn current(&self) -> Arc<[SecretKey]> {
        Arc::clone(&self.keys)
    }

    /// Reads all files again if one of them is another than before, and says whether that was so. The keys stay as
    /// they were if a file is bad; the next call tries again.
    pub fn reload_if_changed(&mut self) -> Result<bool, KeyError> {
        let files = files_of(&self.places)?;
        let unchanged = files == self.files
            && files
                .iter()
                .zip(&self.stamps)
                .all(|(file, stamp)| std::fs::metadata(file).is_ok_and(|now| Stamp::of(&now) == *stamp));
        if unchanged {
            return Ok(false);
        }
        (self.stamps, self.keys) = read_all(&files)?;
        self.files = files;
        Ok(true)
    }
}

/// What tells one version of a file from another. Mounted secrets are replaced by turning a symbolic link, which gives
/// another inode and perhaps the same size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Of a directory, those that are not hidden, by name: what is mounted from a Secret has hidden links beside its values.
fn files_of(places: &[PathBuf]) -> Result<Vec<PathBuf>, KeyError> {
    let mut files = Vec::new();
    for place in places {
        if !place.is_dir() {
            files.push(place.clone());
            continue;
        }
        let unreadable = |source| KeyError::Read { path: place.clone(), source };
        let entries = std::fs::read_dir(place).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let visible = |entry: &std::fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(b".");
        let entries = entries.map_err(unreadable)?.into_iter().filter(visible);
        let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        found.sort();
        files.extend(found);
    }
    Ok(files)
}

fn read_all(files: &[PathBuf]) -> Result<(Vec<Stamp>, Arc<[SecretKey]>), KeyError> {
    let read: Vec<(Stamp, SecretKey)> = files.iter().map(|file| read_one(file)).collect::<Result<_, _>>()?;
    let (stamps, keys): (Vec<Stamp>, Vec<SecretKey>) = read.into_iter().unzip();
    if keys.is_empty() {
        return Err(KeyError::None);
    }
    for (index, key) in keys.iter().enumerate() {
        if keys[..index].iter().any(|earlier| earlier.name == key.name) {
            return Err(KeyError::Twice(key.name.clone()));
        }
    }
    Ok((stamps, keys.into()))
}

/// The stamp is the opened file's, so that a file replaced in between is read again.
fn read_one(path: &Path) -> Result<(Stamp, SecretKey), KeyError> {
    let mut text = Zeroizing::new(String::with_capacity(LONGEST_FILE as usize));
    let stamp = File::open(path)
        .and_then(|file| {
            let stamp = Stamp::of(&file.metadata()?);
            file.take(LONGEST_FILE).read_to_string(&mut text)?;
            Ok(stamp)
        })
        .map_err(|source| KeyError::Read { path: path.to_owned(), source })?;
    let key = SecretKey::parse(&text)
        .map_err(|source| KeyError::File { path: path.to_owned(), source: Box::new(source) })?;
    Ok((stamp, key))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;

    use super::*;

    /// Made by `nix-store --generate-binary-cache-key test-1` of Nix 2.8.
    const SECRET: &str =
        "test-1:5zIz2GMuFnGLEXs/wYGadS7RUxF0qQhonGLiydhtMxN2ZB1SAHAJOz8lXVLJ/cqLfe6ote6IrclNwfcQnDuz4g==";
    const PUBLIC: &str = "test-1:dmQdUgBwCTs/JV1Syf3Ki33uqLXuiK3JTcH3EJw7s+I=";

    #[test]
    fn a_key_made_by_nix_has_the_public_key_that_nix_says() {
        assert_eq!(SecretKey::parse(SECRET).unwrap().public_text(), PUBLIC);
    }

    #[test]
    fn a_key_is_written_as_it_was_read() {
        assert_eq!(SecretKey::parse(&format!("{SECRET}\n")).unwrap().to_text().as_str(), SECRET);
    }

    #[test]
    fn a_generated_key_is_read_back() {
        let key = SecretKey::generate("farm-1").unwrap();
        assert_eq!(SecretKey::parse(&key.to_text()).unwrap().public_text(), key.public_text());
    }

    #[test]
    fn two_generated_keys_differ() {
        let text = || SecretKey::generate("farm-1").unwrap().public_text();
        assert_ne!(text(), text());
    }

    #[test]
    fn the_public_text_is_what_checks_a_signature() {
        let key = SecretKey::generate("farm-1").unwrap();
        let public = PublicKey::parse(&key.public_text()).unwrap();
        let signature: nix_narinfo::NixSignature = key.sign(b"1;words").parse().unwrap();
        assert_eq!(signature.verify(b"1;words", &[public]), Ok(true));
    }

    #[test]
    fn a_seed_alone_is_the_key_that_it_makes() {
        let (name, pair) = SECRET.split_once(':').unwrap();
        let seed = STANDARD.encode(&STANDARD.decode(pair).unwrap()[..32]);
        let key = SecretKey::parse(&format!("{name}:{seed}")).unwrap();
        assert_eq!((key.public_text().as_str(), key.to_text().as_str()), (PUBLIC, SECRET));
    }

    #[test]
    fn a_key_that_was_cut_off_is_refused() {
        let cut = format!("farm-1:{}", STANDARD.encode([7; 48]));
        assert!(matches!(SecretKey::parse(&cut), Err(KeyError::Length { got: 48, .. })));
    }

    #[test]
    fn halves_of_different_keys_are_refused() {
        let mut pair = SigningKey::from_bytes(&[7; 32]).to_keypair_bytes();
        pair[32..].copy_from_slice(SigningKey::from_bytes(&[8; 32]).verifying_key().as_bytes());
        let text = format!("farm-1:{}", STANDARD.encode(pair));
        assert!(matches!(SecretKey::parse(&text), Err(KeyError::Halves { .. })));
    }

    #[test]
    fn names_that_would_break_a_narinfo_are_refused() {
        for name in ["", "a b", "a\nSig", "a:b", &"x".repeat(65)] {
            assert!(matches!(SecretKey::generate(name), Err(KeyError::Name)), "{name:?}");
        }
    }

    #[test]
    fn neither_debug_nor_an_error_shows_the_secret() {
        let encoded = SECRET.split_once(':').unwrap().1;
        let bad = format!("{encoded}:farm-1");
        let shown =
            format!("{:?} {:?}", SecretKey::parse(SECRET).unwrap(), SecretKey::parse(&bad).unwrap_err());
        assert!(!shown.contains(&encoded[..8]), "{shown}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,200}") {
            let _ = SecretKey::parse(&text);
        }
    }

    fn write_key(path: &Path, name: &str) -> String {
        let key = SecretKey::generate(name).unwrap();
        std::fs::write(path, key.to_text().as_bytes()).unwrap();
        key.public_text()
    }

    fn publics(keys: &Keys) -> Vec<String> {
        keys.current().iter().map(SecretKey::public_text).collect()
    }

    #[test]
    fn keys_sign_in_the_order_of_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let files = [dir.path().join("b"), dir.path().join("a")];
        let written = [write_key(&files[0], "b-1"), write_key(&files[1], "a-1")];
        assert_eq!(publics(&Keys::load(files).unwrap()), written);
    }

    #[test]
    fn no_file_and_two_keys_of_one_name_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let files = [dir.path().join("a"), dir.path().join("b")];
        files.iter().for_each(|file| drop(write_key(file, "same-1")));
        assert!(matches!(Keys::load([]), Err(KeyError::None)));
        assert!(matches!(Keys::load(files), Err(KeyError::Twice(name)) if name == "same-1"));
    }

    #[test]
    fn nothing_is_read_again_while_nothing_changes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        write_key(&file, "a-1");
        let mut keys = Keys::load([file]).unwrap();
        let before = keys.current();
        assert!(!keys.reload_if_changed().unwrap());
        assert!(Arc::ptr_eq(&before, &keys.current()));
    }

    #[test]
    fn a_turned_link_brings_the_new_key() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new, link, turn] = ["old", "new", "link", "turn"].map(|name| dir.path().join(name));
        write_key(&old, "a-1");
        let fresh = write_key(&new, "a-2");
        symlink(&old, &link).unwrap();
        let mut keys = Keys::load([link.clone()]).unwrap();
        symlink(&new, &turn).unwrap();
        std::fs::rename(&turn, &link).unwrap();
        assert!(keys.reload_if_changed().unwrap());
        assert_eq!(publics(&keys), [fresh]);
    }

    #[test]
    fn a_directory_stands_for_the_files_in_it_that_are_not_hidden() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let b = write_key(&file("b"), "b-1");
        std::fs::write(file("..data"), "no key").unwrap();
        let mut keys = Keys::load([dir.path().to_owned()]).unwrap();
        assert_eq!(publics(&keys), [b.as_str()]);
        let a = write_key(&file("a"), "a-1");
        assert!(keys.reload_if_changed().unwrap());
        assert_eq!(publics(&keys), [a, b]);
        assert!(!keys.reload_if_changed().unwrap());
    }

    #[test]
    fn a_bad_file_keeps_the_old_key_until_it_is_good_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let old = write_key(&file, "a-1");
        let mut keys = Keys::load([file.clone()]).unwrap();
        std::fs::write(&file, "a-1:cut of").unwrap();
        for _ in 0..2 {
            assert!(matches!(keys.reload_if_changed(), Err(KeyError::File { .. })));
            assert_eq!(publics(&keys), [old.as_str()]);
        }
        let new = write_key(&file, "a-2");
        assert!(keys.reload_if_changed().unwrap());
        assert_eq!(publics(&keys), [new]);
    }

    #[test]
    fn a_file_that_went_away_is_an_error_and_keeps_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let old = write_key(&file, "a-1");
        let mut keys = Keys::load([file.clone()]).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(matches!(keys.reload_if_changed(), Err(KeyError::Read { .. })));
        assert_eq!(publics(&keys), [old]);
    }
}
