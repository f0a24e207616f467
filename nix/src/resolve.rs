//! A derivation once its inputs are built. What an input's path will be is not known before if it follows from contents:
//! the derivation's text has a placeholder in its place, and perhaps no paths for its own outputs.

use std::collections::{BTreeMap, BTreeSet};

use nix_derivation::store_path::{build_output_path, downstream_placeholder};
use nix_derivation::{Derivation, Output, StructuredAttrs};
use thiserror::Error;

use crate::StorePath;
use crate::daemon::{BasicDerivation, Unresolved};
use crate::proof::{self, ProofError, modulo};

/// Why a derivation cannot be resolved.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// Nobody knows yet what it will depend on.
    #[error("{0} is an output of a derivation that another one makes, which is not supported")]
    Dynamic(StorePath),
    /// An input is not built, or not on record.
    #[error("where the output {output} of {drv} is, is not known")]
    NoPath {
        /// The input.
        drv: StorePath,
        /// What is used of it.
        output: String,
    },
    /// What comes out is no derivation.
    #[error("with the paths of its inputs it is no derivation that Nix would build")]
    Derivation(#[from] nix_derivation::Error),
    /// It cannot be built by value.
    #[error(transparent)]
    Unresolved(Box<Unresolved>),
    /// Its text is not what its path says.
    #[error(transparent)]
    Proof(Box<ProofError>),
}

impl From<Unresolved> for ResolveError {
    fn from(error: Unresolved) -> Self {
        Self::Unresolved(Box::new(error))
    }
}

impl From<ProofError> for ResolveError {
    fn from(error: ProofError) -> Self {
        Self::Proof(Box::new(error))
    }
}

/// The derivation as a daemon builds it: `path_of` says where an output of an input derivation is.
pub fn resolve(
    derivation: &Derivation,
    path_of: impl Fn(&StorePath, &str) -> Option<StorePath>,
) -> Result<BasicDerivation, ResolveError> {
    let inputs = Inputs::find(derivation, path_of)?;
    if derivation.outputs().values().any(|output| matches!(output, Output::InputAddressed { .. })) {
        // Its paths follow from its input derivations, so there is no placeholder in it.
        return Ok(BasicDerivation::resolve(derivation, inputs.paths)?);
    }
    Ok(BasicDerivation::resolve(&inputs.replaced_in(derivation)?, [])?)
}

/// The derivations that a derivation's text, which is proven to be the one of this path, depends on.
pub fn inputs(drv: &StorePath, text: &[u8]) -> Result<BTreeSet<StorePath>, ProofError> {
    Ok(proof::read(drv, text)?.input_derivations().keys().cloned().collect())
}

/// Where the deferred outputs of a derivation are, in each of the ways in which versions of Nix compute that. Nothing for
/// one without deferred outputs, but its inputs are looked for all the same.
pub fn deferred_paths(
    drv: &StorePath,
    text: &[u8],
    path_of: impl Fn(&StorePath, &str) -> Option<StorePath>,
) -> Result<Vec<BTreeMap<String, StorePath>>, ResolveError> {
    let derivation = proof::read(drv, text)?;
    let inputs = Inputs::find(&derivation, path_of)?;
    if !derivation.outputs().values().all(|output| matches!(output, Output::Deferred)) {
        return Ok(Vec::new());
    }
    let resolved = inputs.replaced_in(&derivation)?;
    let hashes = modulo::hashes(&resolved, &[]).into_iter().flatten();
    let ways = hashes.map(|hashes| {
        let names = resolved.outputs().keys();
        let path = |name: &String| {
            let path = build_output_path(hashes.masked.0.into(), name, resolved.name());
            path.map(|path| (name.clone(), path)).map_err(nix_derivation::Error::from)
        };
        names.map(path).collect::<Result<BTreeMap<_, _>, _>>()
    });
    let mut ways: Vec<_> = ways.collect::<Result<_, _>>()?;
    ways.dedup();
    Ok(ways)
}

/// What the input derivations of one came out as.
#[derive(Debug, Default)]
struct Inputs {
    paths: BTreeSet<StorePath>,
    placeholders: BTreeMap<String, String>,
}

impl Inputs {
    fn find(
        derivation: &Derivation,
        path_of: impl Fn(&StorePath, &str) -> Option<StorePath>,
    ) -> Result<Self, ResolveError> {
        let mut inputs = Self::default();
        for (drv, used) in derivation.input_derivations() {
            if used.is_dynamic() {
                return Err(ResolveError::Dynamic(drv.clone()));
            }
            for output in used.outputs() {
                let missing = || ResolveError::NoPath { drv: drv.clone(), output: output.clone() };
                let path = path_of(drv, output).ok_or_else(missing)?;
                let placeholder =
                    downstream_placeholder(drv, [output]).map_err(nix_derivation::Error::from)?;
                inputs.placeholders.insert(placeholder, path.to_string());
                inputs.paths.insert(path);
            }
        }
        Ok(inputs)
    }

    /// The derivation without input derivations. Deferred outputs have paths then, as a new Nix computes them.
    fn replaced_in(self, derivation: &Derivation) -> Result<Derivation, ResolveError> {
        let replaced = |bytes: &[u8]| replace_all(bytes, &self.placeholders);
        // Placeholders and paths are ASCII: text stays text.
        let text = |text: &str| String::from_utf8_lossy(&replaced(text.as_bytes())).into_owned();
        let mut builder = derivation.clone().into_builder();
        builder.input_derivations_mut().clear();
        *builder.builder_mut() = text(derivation.builder());
        *builder.arguments_mut() = derivation.arguments().iter().map(|argument| text(argument)).collect();
        *builder.environment_mut() =
            derivation.environment().iter().map(|(name, value)| (text(name), replaced(value))).collect();
        if let Some(attributes) = derivation.structured_attrs() {
            let attributes = StructuredAttrs::from_json_bytes(replaced(attributes.raw_json()))?;
            *builder.structured_attrs_mut() = Some(attributes);
        }
        builder.input_sources_mut().extend(self.paths);
        Ok(builder.build()?.into_derivation())
    }
}

/// All of them are of one length and begin with a slash, so none can hide another.
fn replace_all(bytes: &[u8], placeholders: &BTreeMap<String, String>) -> Vec<u8> {
    let length = placeholders.keys().next().map_or(usize::MAX, String::len);
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, after)) = rest.split_first() {
        let found = rest
            .get(..length)
            .filter(|_| *first == b'/')
            .and_then(|word| placeholders.get(std::str::from_utf8(word).ok()?));
        match found {
            Some(path) => {
                out.extend_from_slice(path.as_bytes());
                rest = &rest[length..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRV: &str = "/nix/store/m1rdj0iqamfp01vvx0km3xkhbkpfahzm-floating.drv";

    fn placeholders() -> BTreeMap<String, String> {
        let drv = DRV.parse().unwrap();
        ["out", "dev"]
            .map(|output| (downstream_placeholder(&drv, [output]).unwrap(), format!("<{output}>")))
            .into()
    }

    #[test]
    fn placeholders_are_replaced_wherever_they_stand() {
        let drv = DRV.parse().unwrap();
        let [out, dev] = ["out", "dev"].map(|output| downstream_placeholder(&drv, [output]).unwrap());
        for (text, expected) in [
            (String::new(), ""),
            ("/bin/sh".to_owned(), "/bin/sh"),
            (out.clone(), "<out>"),
            (format!("/{out}{dev}/{out}x"), "/<out><dev>/<out>x"),
            (out[..40].to_owned(), &out[..40]),
        ] {
            assert_eq!(replace_all(text.as_bytes(), &placeholders()), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn without_placeholders_nothing_changes() {
        assert_eq!(replace_all(b"/nix/store", &BTreeMap::new()), b"/nix/store");
    }
}
