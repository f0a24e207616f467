//! Arithmetic proofs about derivations: that a derivation's path is the hash of its text, and that its outputs' paths
//! follow from it. Whoever wrote the text can then publish only what its own hashes say.

mod closure;
pub(crate) mod modulo;

use std::collections::{BTreeMap, BTreeSet};

use nix_derivation::{
    CAHash, ContentAddressMethod, Derivation, HashAlgorithm, InputDerivation, NixHash, Output, StorePath,
    store_path,
};
use thiserror::Error;

pub use closure::{Answer, Prover};
use modulo::{ALGORITHMS, Hashes, NAMING};

use crate::Sha256;

/// The most bytes of a derivation's text. The largest in nixpkgs, which list thousands of inputs, have some megabytes.
pub const LARGEST_TEXT: usize = 16 * 1024 * 1024;

/// Why there is no proof.
#[derive(Debug, Error)]
pub enum ProofError {
    /// Not the path of a derivation.
    #[error("{0} is no derivation: its name does not end in .drv")]
    NotADerivation(StorePath),
    /// More text than is read.
    #[error("{drv} has {size} bytes of text, more than the {LARGEST_TEXT} that are read")]
    TooLarge {
        /// The derivation.
        drv: StorePath,
        /// How many it has.
        size: usize,
    },
    /// The text is no derivation, or one that Nix would not build.
    #[error("the text of {drv} is no derivation")]
    Parse {
        /// The derivation.
        drv: StorePath,
        /// Why.
        source: nix_derivation::Error,
    },
    /// The text says the same as another one that Nix would have written.
    #[error("the text of {drv} is not written as Nix writes it")]
    Unusual {
        /// The derivation.
        drv: StorePath,
    },
    /// The path is not the hash of the text.
    #[error("the text said to be {claimed} is {actual}")]
    WrongPath {
        /// The path it was said to have.
        claimed: StorePath,
        /// The path it has.
        actual: StorePath,
    },
    /// Nothing is proven about an input.
    #[error("nothing is proven about {input}, which {drv} depends on")]
    MissingInput {
        /// The derivation.
        drv: StorePath,
        /// Its input.
        input: StorePath,
    },
    /// An input has only one output.
    #[error("{drv} uses the output {output:?} of {input}, which has only \"out\"")]
    NoSuchOutput {
        /// The derivation.
        drv: StorePath,
        /// Its input.
        input: StorePath,
        /// What it uses of it.
        output: String,
    },
    /// An output's path does not follow from the derivation.
    #[error("the output {output:?} of {drv} is said to be {claimed:?}, but it is {actual:?}")]
    WrongOutput {
        /// The derivation.
        drv: StorePath,
        /// The output.
        output: String,
        /// The path it was said to have.
        claimed: String,
        /// The path it has.
        actual: String,
    },
    /// An output's path is given before it can be known.
    #[error(
        "the output {output:?} of {drv} is said to be {claimed:?}, which only the build of its inputs can show"
    )]
    TooEarly {
        /// The derivation.
        drv: StorePath,
        /// The output.
        output: String,
        /// The path it was said to have.
        claimed: String,
    },
    /// The builder would be told another path than the one that follows. That variable is not part of any hash.
    #[error("the output {output:?} of {drv} is {path}, but its environment tells the builder {told:?}")]
    Misled {
        /// The derivation.
        drv: StorePath,
        /// The output.
        output: String,
        /// Its path.
        path: String,
        /// What the builder would see.
        told: String,
    },
    /// A closure needs more memory than it may have.
    #[error("the texts that {goal} depends on have more than {limit} bytes")]
    TooMuch {
        /// The derivation that was to be proven.
        goal: StorePath,
        /// The most that is held.
        limit: usize,
    },
}

/// Why a built output is not what its derivation promised.
#[derive(Debug, Error)]
pub enum BuiltError {
    /// There is no such output.
    #[error("the derivation has no output {0:?}")]
    NoSuchOutput(String),
    /// Another path.
    #[error("{path} is not the output {output:?}, which is {promised}")]
    OtherPath {
        /// The path.
        path: StorePath,
        /// The output.
        output: String,
        /// The path that follows from the derivation.
        promised: StorePath,
    },
    /// Other bytes.
    #[error("{path} has the NAR hash {nar_hash}, but {promised} was promised")]
    OtherContents {
        /// The path.
        path: StorePath,
        /// The hash of what was built.
        nar_hash: Sha256,
        /// The hash that the derivation names.
        promised: Sha256,
    },
    /// The path does not follow from what was built.
    #[error("{path} does not follow from its NAR hash {nar_hash}, its references and its name")]
    NotItsContents {
        /// The path.
        path: StorePath,
        /// The hash of what was built.
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
    /// Nothing can be said without the bytes, or at all.
    #[error("{path} cannot be checked: {reason}")]
    Uncheckable {
        /// The path.
        path: StorePath,
        /// Why.
        reason: &'static str,
    },
}

/// What is proven about a derivation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proven {
    /// What those that depend on it need.
    pub hash: InputHash,
    /// What it promises of each output.
    pub outputs: BTreeMap<String, Promise>,
    /// The hashes that stand for it in the names of realisations, as versions of Nix before 2.35 look for them. Empty if
    /// all paths are known before the build: nobody looks then.
    pub realised_as: Vec<Sha256>,
}

/// What a derivation says of an output before it is built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Promise {
    /// Its path, which follows from all that it is built from.
    Path(StorePath),
    /// Its path, which follows from its contents.
    Fixed {
        /// The path.
        path: StorePath,
        /// The hash of the contents.
        ca: CAHash,
    },
    /// Its path will follow from its contents.
    Floating {
        /// The name that its path will have.
        name: String,
        /// How the contents will be hashed.
        method: ContentAddressMethod,
        /// With which algorithm.
        algorithm: HashAlgorithm,
    },
    /// Its path follows from what it is built from, once paths of inputs that follow from contents are known.
    Deferred,
    /// It may be another at every build.
    Impure,
}

impl Promise {
    /// The path, if it is known before the build.
    pub fn path(&self) -> Option<&StorePath> {
        match self {
            Self::Path(path) | Self::Fixed { path, .. } => Some(path),
            Self::Floating { .. } | Self::Deferred | Self::Impure => None,
        }
    }
}

impl Proven {
    /// Whether only a build shows where its outputs are.
    pub fn is_open(&self) -> bool {
        self.outputs.values().any(|promise| matches!(promise, Promise::Floating { .. } | Promise::Deferred))
    }

    /// The same with paths for its deferred outputs, now that its inputs are built: those that were claimed, if they are
    /// among the ways to compute them.
    pub fn resolved(
        mut self,
        ways: &[BTreeMap<String, StorePath>],
        claimed: &BTreeMap<String, StorePath>,
    ) -> Self {
        let way = ways.iter().find(|way| *way == claimed).or(ways.first());
        for (name, path) in way.into_iter().flatten() {
            if let Some(promise @ Promise::Deferred) = self.outputs.get_mut(name) {
                *promise = Promise::Path(path.clone());
            }
        }
        self
    }

    /// Checks what was built against what was promised, as far as that can be done without its bytes, and says the
    /// content address of an output that has one.
    pub fn check_built(
        &self,
        output: &str,
        path: &StorePath,
        nar_hash: Sha256,
        references: &BTreeSet<StorePath>,
    ) -> Result<Option<CAHash>, BuiltError> {
        let promise = self.outputs.get(output).ok_or_else(|| BuiltError::NoSuchOutput(output.to_owned()))?;
        if let Some(promised) = promise.path()
            && promised != path
        {
            let (path, output, promised) = (path.clone(), output.to_owned(), promised.clone());
            return Err(BuiltError::OtherPath { path, output, promised });
        }
        let uncheckable = |reason| Err(BuiltError::Uncheckable { path: path.clone(), reason });
        match promise {
            Promise::Path(_) => Ok(None),
            Promise::Fixed { ca, .. } => match ca {
                CAHash::Nar(NixHash::Sha256(promised)) if *promised != nar_hash.0 => {
                    let promised = Sha256(*promised);
                    Err(BuiltError::OtherContents { path: path.clone(), nar_hash, promised })
                }
                _ => Ok(Some(ca.clone())),
            },
            Promise::Floating {
                name,
                method: ContentAddressMethod::Nar,
                algorithm: HashAlgorithm::Sha256,
            } => {
                let ca = CAHash::Nar(NixHash::Sha256(nar_hash.0));
                if references.contains(path) {
                    Err(BuiltError::SelfReference { path: path.clone() })
                } else if path.name() == name && crate::source::follows(path, &ca, references) {
                    Ok(Some(ca))
                } else {
                    Err(BuiltError::NotItsContents { path: path.clone(), nar_hash })
                }
            }
            Promise::Floating { .. } => {
                uncheckable("its path follows from another hash than that of its NAR")
            }
            Promise::Deferred => {
                uncheckable("its derivation depends on outputs whose paths are not on record")
            }
            Promise::Impure => uncheckable("its derivation is impure"),
        }
    }
}

/// What stands for a derivation in the hashes of those that depend on it. It is small, and worth remembering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputHash {
    /// Of an input-addressed derivation; one for each algorithm that versions of Nix have used.
    Regular([Sha256; ALGORITHMS]),
    /// Of a fixed output.
    Fixed(Sha256),
    /// Of a derivation whose outputs have no paths before something is built. No path follows from it; the names of
    /// realisations do.
    Deferred([Sha256; ALGORITHMS]),
    /// There is none: it is impure, or an input of it is made by a derivation that does not exist yet.
    Unknown,
}

impl InputHash {
    fn under(&self, algorithm: usize) -> Option<Sha256> {
        match self {
            Self::Regular(hashes) | Self::Deferred(hashes) => hashes.get(algorithm).copied(),
            Self::Fixed(hash) => Some(*hash),
            Self::Unknown => None,
        }
    }

    fn has_paths(&self) -> bool {
        matches!(self, Self::Regular(_) | Self::Fixed(_))
    }

    /// One byte that says which, then the hashes; equal ones only once. 33 bytes, but for rare corners.
    pub fn to_bytes(&self) -> Vec<u8> {
        let several = |once: u8, each: u8, hashes: &[Sha256; ALGORITHMS]| {
            let [first, rest @ ..] = hashes;
            let same = rest.iter().all(|hash| hash == first);
            let (kind, written) = if same { (once, &hashes[..1]) } else { (each, &hashes[..]) };
            let mut bytes = vec![kind];
            written.iter().for_each(|hash| bytes.extend_from_slice(&hash.0));
            bytes
        };
        match self {
            Self::Unknown => vec![b'u'],
            Self::Fixed(hash) => [b"f", &hash.0[..]].concat(),
            Self::Regular(hashes) => several(b'r', b'R', hashes),
            Self::Deferred(hashes) => several(b'd', b'D', hashes),
        }
    }

    /// Reads what [`Self::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let (hashes, odd) = rest.as_chunks::<32>();
        let several =
            |hashes: &[[u8; 32]]| Some(<[[u8; 32]; ALGORITHMS]>::try_from(hashes).ok()?.map(Sha256));
        match (kind, hashes, odd) {
            (b'u', [], []) => Some(Self::Unknown),
            (b'f', [hash], []) => Some(Self::Fixed(Sha256(*hash))),
            (b'r', [hash], []) => Some(Self::Regular([Sha256(*hash); ALGORITHMS])),
            (b'R', hashes, []) => several(hashes).map(Self::Regular),
            (b'd', [hash], []) => Some(Self::Deferred([Sha256(*hash); ALGORITHMS])),
            (b'D', hashes, []) => several(hashes).map(Self::Deferred),
            _ => None,
        }
    }
}

/// Proves a derivation from its text and from what is proven about its inputs. A fixed output needs none of them;
/// `inputs` answers none for those about which nothing is proven.
pub fn prove(
    path: &StorePath,
    text: &[u8],
    inputs: &dyn Fn(&StorePath) -> Option<InputHash>,
) -> Result<Proven, ProofError> {
    prove_read(path, &read(path, text)?, inputs)
}

fn prove_read(
    path: &StorePath,
    derivation: &Derivation,
    inputs: &dyn Fn(&StorePath) -> Option<InputHash>,
) -> Result<Proven, ProofError> {
    let missing = |input: &StorePath| ProofError::MissingInput { drv: path.clone(), input: input.clone() };
    let hashes: Vec<InputHash> = needed_inputs(derivation)
        .into_iter()
        .map(|input| inputs(input).ok_or_else(|| missing(input)))
        .collect::<Result<_, _>>()?;
    conclude(path, derivation, &hashes)
}

/// What a derivation's text, which is proven to be the one of this path, says about where its outputs are. Whether that
/// follows, only a proof shows.
pub fn named_outputs(
    path: &StorePath,
    text: &[u8],
) -> Result<BTreeMap<String, Option<StorePath>>, ProofError> {
    let derivation = read(path, text)?;
    let named = derivation.outputs().iter().map(|(name, output)| {
        let named = output.path(derivation.name(), name);
        named.map(|path| (name.clone(), path))
    });
    named.collect::<Result<_, _>>().map_err(|source| ProofError::Parse { drv: path.clone(), source })
}

/// Reads a text and proves that it is the one of this path.
pub(crate) fn read(path: &StorePath, text: &[u8]) -> Result<Derivation, ProofError> {
    let derivation = parse(path, text)?;
    let references = derivation.input_derivations().keys().chain(derivation.input_sources());
    let actual = store_path::build_text_path(path.name(), text, references)
        .map_err(|error| ProofError::Parse { drv: path.clone(), source: error.into() })?;
    if actual != *path {
        return Err(ProofError::WrongPath { claimed: path.clone(), actual });
    }
    if let Some((claimed, actual)) = wrong_fixed_path(&derivation, text) {
        return Err(ProofError::WrongOutput { drv: path.clone(), output: "out".to_owned(), claimed, actual });
    }
    // What is read of the text is then all that it says, whoever reads it.
    if modulo::file_text(&derivation) != text {
        return Err(ProofError::Unusual { drv: path.clone() });
    }
    Ok(derivation)
}

fn parse(path: &StorePath, text: &[u8]) -> Result<Derivation, ProofError> {
    let name = path.name().strip_suffix(".drv").ok_or_else(|| ProofError::NotADerivation(path.clone()))?;
    if text.len() > LARGEST_TEXT {
        return Err(ProofError::TooLarge { drv: path.clone(), size: text.len() });
    }
    let parsed = Derivation::from_aterm_bytes(text, name).and_then(|derivation| {
        // Fails if there is no output, or outputs of different kinds.
        derivation.is_fixed_output().map(|_| derivation)
    });
    parsed.map_err(|source| ProofError::Parse { drv: path.clone(), source })
}

/// The path that a text names for its fixed output, and the right one, if they differ. The parser drops the former.
fn wrong_fixed_path(derivation: &Derivation, text: &[u8]) -> Option<(String, String)> {
    let output = derivation.outputs().get("out").filter(|output| matches!(output, Output::Fixed { .. }))?;
    // Derive([("out","path" or DrvWithVersion("xp-dyn-drv",[("out","path"
    let quotes = if text.starts_with(b"Derive(") { 3 } else { 5 };
    let claimed = text.split(|byte| *byte == b'"').nth(quotes)?;
    let [actual, ..] = modulo::declared(derivation, "out", output);
    (claimed != actual.as_bytes()).then(|| (String::from_utf8_lossy(claimed).into_owned(), actual))
}

/// The inputs whose hashes are needed. The path of a fixed output follows from its hash alone, and nothing from what is
/// impure or not there yet.
fn needed_inputs(derivation: &Derivation) -> Vec<&StorePath> {
    let follows = !derivation
        .outputs()
        .values()
        .any(|output| matches!(output, Output::Fixed { .. } | Output::Impure { .. }))
        && !derivation.input_derivations().values().any(InputDerivation::is_dynamic);
    if follows { derivation.input_derivations().keys().collect() } else { Vec::new() }
}

/// `inputs` are the hashes of [`needed_inputs`].
fn conclude(path: &StorePath, derivation: &Derivation, inputs: &[InputHash]) -> Result<Proven, ProofError> {
    let (mut hash, mut realised_as) = (InputHash::Unknown, Vec::new());
    let mut outputs = BTreeMap::new();
    for (name, output) in derivation.outputs() {
        let parse = |error: store_path::Error| ProofError::Parse { drv: path.clone(), source: error.into() };
        let path_name = store_path::output_path_name(derivation.name(), name).map_err(parse)?;
        let promise = match output {
            Output::InputAddressed { path } => Promise::Path(path.clone()),
            Output::Fixed { ca } => {
                hash = InputHash::Fixed(modulo::fixed(&modulo::declared(derivation, name, output)));
                let path = store_path::build_ca_path(&path_name, ca, [], false).map_err(parse)?;
                Promise::Fixed { path, ca: ca.clone() }
            }
            Output::Floating { method, hash_algorithm } => {
                Promise::Floating { name: path_name, method: *method, algorithm: *hash_algorithm }
            }
            Output::Deferred => Promise::Deferred,
            Output::Impure { .. } => Promise::Impure,
        };
        outputs.insert(name.clone(), promise);
    }
    match outputs.values().next() {
        Some(Promise::Path(_)) => hash = input_addressed(path, derivation, inputs, &outputs)?,
        Some(Promise::Floating { .. } | Promise::Deferred) => {
            if let Some(hashes) = hashes_of(path, derivation, inputs)? {
                hash = InputHash::Deferred(hashes.map(|hashes| hashes.input));
                realised_as = hashes[..NAMING].iter().map(|hashes| hashes.masked).collect();
                realised_as.dedup();
            }
        }
        _ => {}
    }
    for (name, promise) in &outputs {
        if let (Some(output), Some(told)) = (promise.path(), derivation.environment().get(name))
            && told != output.to_string().as_bytes()
        {
            return Err(ProofError::Misled {
                drv: path.clone(),
                output: name.clone(),
                path: output.to_string(),
                told: String::from_utf8_lossy(told).into_owned(),
            });
        }
    }
    Ok(Proven { hash, outputs, realised_as })
}

/// None: not all inputs have one.
fn hashes_of(
    path: &StorePath,
    derivation: &Derivation,
    inputs: &[InputHash],
) -> Result<Option<[Hashes; ALGORITHMS]>, ProofError> {
    for (hash, (input, used)) in inputs.iter().zip(derivation.input_derivations()) {
        let other = used.outputs().iter().find(|output| *output != "out");
        if let (InputHash::Fixed(_), Some(output)) = (hash, other) {
            let (drv, input, output) = (path.clone(), input.clone(), output.clone());
            return Err(ProofError::NoSuchOutput { drv, input, output });
        }
    }
    // There are fewer hashes than inputs where some input is dynamic.
    let complete = inputs.len() == derivation.input_derivations().len();
    Ok(complete.then(|| modulo::hashes(derivation, inputs)).flatten())
}

/// Proves the paths that an input-addressed derivation names: all of them under one algorithm, whichever.
fn input_addressed(
    path: &StorePath,
    derivation: &Derivation,
    inputs: &[InputHash],
    outputs: &BTreeMap<String, Promise>,
) -> Result<InputHash, ProofError> {
    let claims = || outputs.iter().filter_map(|(name, promise)| Some((name, promise.path()?)));
    let hashes = hashes_of(path, derivation, inputs)?.filter(|_| inputs.iter().all(InputHash::has_paths));
    let Some(hashes) = hashes else {
        let (output, claimed) =
            claims().map(|(name, path)| (name.clone(), path.to_string())).next().unwrap_or_default();
        return Err(ProofError::TooEarly { drv: path.clone(), output, claimed });
    };
    let check = |masked: Sha256| {
        for (name, claimed) in claims() {
            let actual = store_path::build_output_path(masked.0.into(), name, derivation.name())
                .map_err(|error| ProofError::Parse { drv: path.clone(), source: error.into() })?;
            if actual != *claimed {
                let (output, claimed, actual) = (name.clone(), claimed.to_string(), actual.to_string());
                return Err(ProofError::WrongOutput { drv: path.clone(), output, claimed, actual });
            }
        }
        Ok(())
    };
    let [first, others @ ..] = hashes.map(|hashes| check(hashes.masked));
    if others.iter().all(Result::is_err) {
        first?;
    }
    Ok(InputHash::Regular(hashes.map(|hashes| hashes.input)))
}

#[cfg(test)]
mod tests;
