//! The texts whose hashes name outputs: a derivation with the paths of its input derivations replaced by their hashes, so
//! that fixed outputs below it do not count by how they were fetched.
//!
//! Versions of Nix do not agree about this text in two corners; seen by running 2.8 and 2.34 and by reading the others:
//! * Two input derivations can have the same hash (they differ in the URL of a fixed output) and be used for different
//!   outputs. 2.8 to 2.34 and 2.36 unite the outputs under that hash; 2.35 keeps those of the last path.
//! * Structured attributes. Up to 2.30 their JSON is hashed as it stands in the text. From 2.31 on it is read and written
//!   again, so that `1e+06`, which an older Nix wrote, is hashed as `1000000.0`.
//!
//! An honest derivation may come from any of them, so all three combinations are computed. They lose no meaning: the
//! united text names every output that is used, the JSON stays the same value, and the outputs that 2.35 leaves out are
//! those of a derivation that is the same but for how it fetched.

use std::collections::{BTreeMap, BTreeSet};

use nix_derivation::{ContentAddressMethod, Derivation, HashAlgorithm, InputDerivation, Output};

use super::InputHash;
use crate::Sha256;

/// How many different texts there are.
pub(super) const ALGORITHMS: usize = ALL.len();
/// So many of them are of versions that name realisations by hashes. Nix 2.35 began to name them by derivations.
pub(super) const NAMING: usize = 2;

#[derive(Clone, Copy)]
struct Algorithm {
    unites_outputs: bool,
    rewrites_json: bool,
}

const ALL: [Algorithm; 3] = [
    // Nix 2.8 to 2.30.
    Algorithm { unites_outputs: true, rewrites_json: false },
    // Nix 2.31 to 2.34 and 2.36.
    Algorithm { unites_outputs: true, rewrites_json: true },
    // Nix 2.35.
    Algorithm { unites_outputs: false, rewrites_json: true },
];

/// What stands in the place of input derivations: their hashes, and the outputs that are used.
type Inputs<'a> = BTreeMap<[u8; 32], BTreeSet<&'a str>>;

/// Both hashes of a derivation under one algorithm.
#[derive(Clone, Copy)]
pub(crate) struct Hashes {
    /// Without its own paths, which follow from this; and realisations have it in their names.
    pub masked: Sha256,
    /// With them, for those that depend on it.
    pub input: Sha256,
}

/// The hashes under every algorithm; none if an input has none. `inputs` is in the order of the derivation's input paths.
pub(crate) fn hashes(derivation: &Derivation, inputs: &[InputHash]) -> Option<[Hashes; ALGORITHMS]> {
    let mut done: Vec<(Inputs<'_>, Option<&[u8]>, Hashes)> = Vec::with_capacity(ALGORITHMS);
    for (index, algorithm) in ALL.iter().enumerate() {
        let hashed = hashed_inputs(derivation, inputs, index)?;
        let json = derivation.structured_attrs().map(|attributes| match algorithm.rewrites_json {
            true => attributes.canonical_json(),
            false => attributes.raw_json(),
        });
        // Almost always they agree, and then the text is written and hashed once.
        let same = done.iter().find(|(inputs, text, _)| *inputs == hashed && *text == json);
        let hashes = match same {
            Some((.., hashes)) => *hashes,
            None => Hashes {
                masked: Sha256::of(text(derivation, json, Some(&hashed), true)),
                input: Sha256::of(text(derivation, json, Some(&hashed), false)),
            },
        };
        done.push((hashed, json, hashes));
    }
    done.into_iter().map(|(.., hashes)| hashes).collect::<Vec<_>>().try_into().ok()
}

fn hashed_inputs<'a>(
    derivation: &'a Derivation,
    inputs: &[InputHash],
    algorithm: usize,
) -> Option<Inputs<'a>> {
    let mut hashed = Inputs::new();
    for (used, input) in derivation.input_derivations().values().zip(inputs) {
        let hash = input.under(algorithm)?;
        let outputs = hashed.entry(hash.0).or_default();
        if !ALL[algorithm].unites_outputs {
            outputs.clear();
        }
        outputs.extend(used.outputs().iter().map(String::as_str));
    }
    Some(hashed)
}

/// The hash of a fixed output for those that depend on it: what it holds and where, not how it was made.
pub(super) fn fixed(declared: &[String; 3]) -> Sha256 {
    let [path, method, hash] = declared;
    Sha256::of(format!("fixed:out:{method}:{hash}:{path}"))
}

/// The derivation as Nix writes it to a file, with its structured attributes as they were read.
pub(super) fn file_text(derivation: &Derivation) -> Vec<u8> {
    text(derivation, derivation.structured_attrs().map(|attributes| attributes.raw_json()), None, false)
}

/// What a derivation says about an output: path, method and algorithm, hash.
pub(super) fn declared(derivation: &Derivation, name: &str, output: &Output) -> [String; 3] {
    let path = || {
        let path = output.path(derivation.name(), name).ok().flatten();
        path.map(|path| path.to_string()).unwrap_or_default()
    };
    match output {
        Output::InputAddressed { .. } => [path(), String::new(), String::new()],
        Output::Fixed { ca } => {
            let hash = ca.hash();
            let digits = hash.to_nix_base16_string();
            let digits = digits.split_once(':').map(|(_, digits)| digits).unwrap_or_default();
            [path(), method(ca.method(), hash.algorithm()), digits.to_owned()]
        }
        Output::Floating { method: how, hash_algorithm } => {
            [String::new(), method(*how, *hash_algorithm), String::new()]
        }
        Output::Impure { method: how, hash_algorithm } => {
            [String::new(), method(*how, *hash_algorithm), "impure".to_owned()]
        }
        Output::Deferred => Default::default(),
    }
}

fn method(method: ContentAddressMethod, algorithm: HashAlgorithm) -> String {
    let prefix = match method {
        ContentAddressMethod::Flat => "",
        ContentAddressMethod::Nar => "r:",
        ContentAddressMethod::Text => "text:",
        ContentAddressMethod::Git => "git:",
    };
    format!("{prefix}{algorithm}")
}

/// Every string is escaped, also where Nix does not because it allows nothing there that needs it. So no two different
/// derivations have the same text.
fn text(derivation: &Derivation, json: Option<&[u8]>, inputs: Option<&Inputs<'_>>, masked: bool) -> Vec<u8> {
    let outputs = derivation.outputs();
    let dynamic =
        inputs.is_none() && derivation.input_derivations().values().any(InputDerivation::is_dynamic);
    let mut environment: Vec<(&str, &[u8])> =
        derivation.environment().iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
    environment.extend(json.map(|json| ("__json", json)));
    environment.sort_unstable_by_key(|(name, _)| *name);

    let mut text = Vec::new();
    let out = &mut text;
    out.extend_from_slice(if dynamic { b"DrvWithVersion(\"xp-dyn-drv\"," } else { b"Derive(" });
    list(out, outputs, |out, (name, output)| {
        let [mut path, method, hash] = declared(derivation, name, output);
        if masked {
            path.clear();
        }
        tuple(out, [name.as_bytes(), path.as_bytes(), method.as_bytes(), hash.as_bytes()]);
    });
    out.push(b',');
    match inputs {
        Some(inputs) => list(out, inputs, |out, (hash, outputs)| {
            out.push(b'(');
            string(out, Sha256(*hash).hex().as_bytes());
            out.push(b',');
            list(out, outputs, |out, output| string(out, output.as_bytes()));
            out.push(b')');
        }),
        None => list(out, derivation.input_derivations(), |out, (path, input)| {
            out.push(b'(');
            string(out, path.to_string().as_bytes());
            out.push(b',');
            used_outputs(out, input);
            out.push(b')');
        }),
    }
    out.push(b',');
    list(out, derivation.input_sources(), |out, path| string(out, path.to_string().as_bytes()));
    out.push(b',');
    string(out, derivation.system().as_bytes());
    out.push(b',');
    string(out, derivation.builder().as_bytes());
    out.push(b',');
    list(out, derivation.arguments(), |out, argument| string(out, argument.as_bytes()));
    out.push(b',');
    list(out, environment, |out, (name, value)| {
        let value = if masked && outputs.contains_key(name) { b"" } else { value };
        tuple(out, [name.as_bytes(), value]);
    });
    out.push(b')');
    text
}

/// What is used of an input derivation. It nests for outputs that are derivations themselves, as deep as the parser
/// allows.
fn used_outputs(out: &mut Vec<u8>, input: &InputDerivation) {
    let names = |out: &mut Vec<u8>| list(out, input.outputs(), |out, output| string(out, output.as_bytes()));
    if !input.is_dynamic() {
        return names(out);
    }
    out.push(b'(');
    names(out);
    out.push(b',');
    list(out, input.dynamic_outputs(), |out, (name, input)| {
        out.push(b'(');
        string(out, name.as_bytes());
        out.push(b',');
        used_outputs(out, input);
        out.push(b')');
    });
    out.push(b')');
}

fn list<T>(out: &mut Vec<u8>, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Vec<u8>, T)) {
    out.push(b'[');
    for (index, value) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        item(out, value);
    }
    out.push(b']');
}

fn tuple<'a>(out: &mut Vec<u8>, strings: impl IntoIterator<Item = &'a [u8]>) {
    let start = out.len();
    list(out, strings, string);
    out[start] = b'(';
    if let Some(end) = out.last_mut() {
        *end = b')';
    }
}

fn string(out: &mut Vec<u8>, value: &[u8]) {
    out.push(b'"');
    for byte in value {
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            _ => out.push(*byte),
        }
    }
    out.push(b'"');
}
