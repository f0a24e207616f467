//! Which path an output of a derivation came out as, for those that only a build shows: written and signed here, and read
//! back. Up to Nix 2.34 they are named by a hash of the derivation, since 2.35 by the derivation.

use std::collections::BTreeMap;

use nix_derivation::DrvOutput;
use nix_narinfo::{NixSignature, UnkeyedRealisation};
use serde::{Deserialize, Serialize};

use crate::key::{PublicKey, SecretKey};
use crate::{Sha256, StorePath};

/// The most bytes of one that are read.
pub use nix_narinfo::MAX_REALISATION_SIZE as LARGEST;

/// What realises an output, before it is signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Realisation {
    /// How it is looked for.
    pub name: Name,
    /// The output.
    pub output: String,
    /// What it came out as.
    pub path: StorePath,
}

/// How clients look for an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// Up to Nix 2.34: by what follows from the derivation, see [`crate::proof::Proven::realised_as`].
    Hash(Sha256),
    /// From Nix 2.35 on: by the derivation.
    Derivation(StorePath),
}

/// As Nix up to 2.34 writes it; fields in the order of their names, in which they are signed.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ByHash {
    #[serde(default)]
    dependent_realisations: BTreeMap<String, String>,
    id: String,
    out_path: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    signatures: Vec<String>,
}

impl Realisation {
    /// Its name in a cache.
    pub fn object_name(&self) -> String {
        match &self.name {
            Name::Hash(_) => format!("realisations/{}.doi", self.id()),
            Name::Derivation(drv) => nix_narinfo::realisation_cache_path(&self.traced(drv)),
        }
    }

    /// The text with the signature of every key.
    pub fn write(&self, keys: &[SecretKey]) -> Vec<u8> {
        let sign = |fingerprint: &str| keys.iter().map(|key| key.sign(fingerprint.as_bytes())).collect();
        match &self.name {
            Name::Hash(_) => {
                let plain = self.by_hash();
                let signatures: Vec<String> = sign(&json(&plain));
                json(&ByHash { signatures, ..plain }).into_bytes()
            }
            Name::Derivation(drv) => {
                let plain = UnkeyedRealisation::new(self.path.clone());
                let signatures: Vec<String> = sign(&plain.fingerprint(&self.traced(drv)));
                let signatures =
                    signatures.iter().filter_map(|signature| NixSignature::parse(signature).ok());
                plain.clone().with_signatures(signatures).unwrap_or(plain).to_canonical_bytes()
            }
        }
    }

    /// What a text that is there already says.
    pub fn compare(&self, text: &[u8], keys: &[PublicKey]) -> There {
        let (path, signed) = match &self.name {
            Name::Hash(_) => {
                let Ok(mut there) = serde_json::from_slice::<ByHash>(text) else { return There::Other };
                let signatures = std::mem::take(&mut there.signatures);
                let fingerprint = json(&there);
                let signed = signatures.iter().filter_map(|signature| NixSignature::parse(signature).ok());
                let signed = signed
                    .into_iter()
                    .any(|signature| signature.verify(fingerprint.as_bytes(), keys).unwrap_or(false));
                (there.out_path, signed && there.id == self.id())
            }
            Name::Derivation(drv) => match UnkeyedRealisation::parse(text) {
                Ok(there) => {
                    let signed = there.has_valid_signature(&self.traced(drv), keys);
                    (there.out_path().to_basename(), signed)
                }
                Err(_) => return There::Other,
            },
        };
        match (path == self.path.to_basename(), signed) {
            (false, _) => There::Other,
            (true, true) => There::Same,
            (true, false) => There::Unsigned,
        }
    }

    fn id(&self) -> String {
        match &self.name {
            Name::Hash(hash) => format!("sha256:{}!{}", hash.hex(), self.output),
            Name::Derivation(drv) => format!("{}^{}", drv.to_basename(), self.output),
        }
    }

    fn traced(&self, drv: &StorePath) -> DrvOutput {
        DrvOutput::new(drv.clone(), self.output.clone())
    }

    fn by_hash(&self) -> ByHash {
        ByHash {
            dependent_realisations: BTreeMap::new(),
            id: self.id(),
            out_path: self.path.to_basename(),
            signatures: Vec::new(),
        }
    }
}

/// How a text compares to what would be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum There {
    /// It says the same, and one of the keys signed it.
    Same,
    /// It says the same, but none of the keys signed it.
    Unsigned,
    /// It says something else.
    Other,
}

/// Strings in maps are always JSON.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn realisation(name: Name) -> Realisation {
        let path = "/nix/store/ka8rv1nj44ydsd6pr62yg1gbjkl6r9hi-floating".parse().unwrap();
        Realisation { name, output: "out".to_owned(), path }
    }

    fn names() -> [Name; 2] {
        let drv = "/nix/store/m1rdj0iqamfp01vvx0km3xkhbkpfahzm-floating.drv".parse().unwrap();
        [Name::Hash(Sha256::of("x")), Name::Derivation(drv)]
    }

    #[test]
    fn objects_are_named_as_clients_ask_for_them() {
        let [hash, drv] = names().map(|name| realisation(name).object_name());
        assert_eq!(hash, format!("realisations/sha256:{}!out.doi", Sha256::of("x").hex()));
        assert_eq!(drv, "build-trace-v2/m1rdj0iqamfp01vvx0km3xkhbkpfahzm-floating.drv/out.doi");
    }

    #[test]
    fn what_is_written_is_the_same_and_signed_by_every_key() {
        let keys = ["a-1", "b-1"].map(|name| SecretKey::generate(name).unwrap());
        for name in names() {
            let realisation = realisation(name);
            let text = realisation.write(&keys);
            for key in &keys {
                assert_eq!(realisation.compare(&text, &[key.public()]), There::Same);
            }
            let other = SecretKey::generate("a-1").unwrap();
            assert_eq!(realisation.compare(&text, &[other.public()]), There::Unsigned);
        }
    }

    #[test]
    fn another_path_or_no_realisation_is_something_else() {
        let key = SecretKey::generate("a-1").unwrap();
        for name in names() {
            let one = realisation(name);
            let path = "/nix/store/yndr0gyxnaqh51pfyg3w1war85cgp9i8-floating".parse().unwrap();
            let other = Realisation { path, ..one.clone() };
            let text = other.write(std::slice::from_ref(&key));
            assert_eq!(one.compare(&text, &[key.public()]), There::Other);
            assert_eq!(one.compare(b"{}", &[key.public()]), There::Other);
        }
    }
}
