use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nix_derivation::{ContentAddressMethod, Derivation, HashAlgorithm, Output, StorePath};
use serde::Deserialize;
use thiserror::Error;

use super::message::numbers;
use super::wire::{
    self, Answer, Input, MAX_ITEMS, MAX_TEXT, MAX_WORD, Op, Request, flag, length, number, sentence, word,
};
use super::{Connection, Result, Sink};

/// A derivation that needs no other: its inputs are store paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BasicDerivation {
    /// Its outputs by name.
    pub outputs: BTreeMap<String, BasicOutput>,
    /// What the build may read; everything that these refer to comes along.
    pub inputs: BTreeSet<StorePath>,
    /// The system that it builds on.
    pub system: String,
    /// The program that builds it.
    pub builder: String,
    /// The program's arguments.
    pub args: Vec<String>,
    /// The program's environment; structured attributes are `__json`.
    pub env: BTreeMap<String, Vec<u8>>,
}

/// An output in the three words that the protocol has for it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BasicOutput {
    /// Its path, if that is known before the build.
    pub path: Option<StorePath>,
    /// How its content is hashed, such as `r:sha256`, if it is.
    pub method: String,
    /// The hash that its content must have, in hexadecimal digits, if one is given.
    pub hash: String,
}

/// Why a derivation cannot be built by value.
#[derive(Debug, Error)]
pub enum Unresolved {
    /// An input has no path yet.
    #[error(
        "output {output:?} of derivation {derivation:?} has no path yet, because one of its inputs is content-addressed: \
         resolve its inputs first"
    )]
    Deferred {
        /// The derivation's name.
        derivation: String,
        /// The output.
        output: String,
    },
    /// An output of a fixed hash whose path cannot be formed.
    #[error("output {output:?} of derivation {derivation:?} has no path that Nix accepts")]
    Path {
        /// The derivation's name.
        derivation: String,
        /// The output.
        output: String,
        /// Why.
        source: nix_derivation::Error,
    },
}

impl BasicDerivation {
    /// The derivation with its input derivations replaced by `input_outputs`, the paths of their outputs.
    pub fn resolve(
        derivation: &Derivation,
        input_outputs: impl IntoIterator<Item = StorePath>,
    ) -> std::result::Result<Self, Unresolved> {
        let mut env = derivation.environment().clone();
        if let Some(attrs) = derivation.structured_attrs() {
            env.insert("__json".to_owned(), attrs.raw_json().to_vec());
        }
        let outputs = derivation
            .outputs()
            .iter()
            .map(|(name, output)| Ok((name.clone(), BasicOutput::resolve(derivation, name, output)?)))
            .collect::<std::result::Result<_, _>>()?;
        Ok(Self {
            outputs,
            inputs: derivation.input_sources().iter().cloned().chain(input_outputs).collect(),
            system: derivation.system().to_owned(),
            builder: derivation.builder().to_owned(),
            args: derivation.arguments().to_vec(),
            env,
        })
    }

    fn write(&self, request: Request) -> Request {
        request
            .list(&self.outputs, |request, (name, output)| {
                request
                    .string(name)
                    .optional_path(output.path.as_ref())
                    .string(&output.method)
                    .string(&output.hash)
            })
            .paths(&self.inputs)
            .string(&self.system)
            .string(&self.builder)
            .list(&self.args, Request::string)
            .list(&self.env, |request, (name, value)| request.string(name).string(value))
    }
}

impl BasicOutput {
    fn resolve(
        derivation: &Derivation,
        name: &str,
        output: &Output,
    ) -> std::result::Result<Self, Unresolved> {
        let (derivation_name, output_name) = (derivation.name().to_owned(), name.to_owned());
        let path = output.path_in(derivation.store_dir(), derivation.name(), name).map_err(|source| {
            Unresolved::Path { derivation: derivation_name.clone(), output: output_name.clone(), source }
        })?;
        let (method, hash) = match output {
            Output::InputAddressed { .. } => (String::new(), String::new()),
            Output::Fixed { ca } => {
                let hash = ca.hash();
                let digits = hash.digest_as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                (content_method(ca.method(), hash.algorithm()), digits)
            }
            Output::Floating { method, hash_algorithm } => {
                (content_method(*method, *hash_algorithm), String::new())
            }
            Output::Impure { method, hash_algorithm } => {
                (content_method(*method, *hash_algorithm), "impure".to_owned())
            }
            Output::Deferred => {
                return Err(Unresolved::Deferred { derivation: derivation_name, output: output_name });
            }
        };
        Ok(Self { path, method, hash })
    }
}

fn content_method(method: ContentAddressMethod, algorithm: HashAlgorithm) -> String {
    let prefix = match method {
        ContentAddressMethod::Flat => "",
        ContentAddressMethod::Nar => "r:",
        ContentAddressMethod::Text => "text:",
        ContentAddressMethod::Git => "git:",
    };
    format!("{prefix}{algorithm}")
}

numbers! {
    /// How a build ended.
    BuildStatus {
        /// It was built.
        Built = 0,
        /// Its outputs were fetched.
        Substituted = 1,
        /// Its outputs were there.
        AlreadyValid = 2,
        /// The builder failed.
        PermanentFailure = 3,
        /// The derivation is not acceptable.
        InputRejected = 4,
        /// An output is not acceptable, or has another hash than the fixed one.
        OutputRejected = 5,
        /// It failed in a way that may pass.
        TransientFailure = 6,
        /// It failed earlier.
        CachedFailure = 7,
        /// It took too long, or was silent too long.
        TimedOut = 8,
        /// Something else failed.
        MiscFailure = 9,
        /// An input failed.
        DependencyFailed = 10,
        /// It printed too much.
        LogLimitExceeded = 11,
        /// Two builds differ.
        NotDeterministic = 12,
        /// What it resolves to is there.
        ResolvesToAlreadyValid = 13,
        /// Nobody has its outputs.
        NoSubstituters = 14,
        /// An output has another hash than the fixed one, as told apart by newer versions of Nix.
        HashMismatch = 15,
        /// It was stopped.
        Cancelled = 16,
    }
}

impl BuildStatus {
    /// Whether the outputs are valid now.
    pub fn is_success(self) -> bool {
        matches!(self, Self::Built | Self::Substituted | Self::AlreadyValid | Self::ResolvesToAlreadyValid)
    }
}

/// What became of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildResult {
    /// How it ended.
    pub status: BuildStatus,
    /// Why, in the daemon's words without their colours, if it failed.
    pub message: String,
    /// How often it was built.
    pub times_built: u64,
    /// Whether a second build differed.
    pub non_deterministic: bool,
    /// When it began, in seconds since 1970; 0 if it was not built.
    pub start_time: u64,
    /// When it ended, likewise.
    pub stop_time: u64,
    /// Processor time of its own, since 1.37 and where control groups count it.
    pub cpu_user: Option<Duration>,
    /// Processor time of the system for it, likewise.
    pub cpu_system: Option<Duration>,
    /// What it made, as far as the daemon tells.
    pub built_outputs: Vec<BuiltOutput>,
}

/// One output that the daemon says was built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltOutput {
    /// The hash of the derivation, `!` and the name of the output.
    pub id: String,
    /// Its path, unless the daemon tells it in a way that is not known here.
    pub path: Option<StorePath>,
}

impl Answer for BuildResult {
    async fn read<R: Input>(input: &mut R, minor: u8) -> wire::Result<Self> {
        let status = number(input).await?.into();
        let message = super::error::plain(&sentence(input, &mut { MAX_TEXT }).await?);
        let mut result = Self {
            status,
            message,
            times_built: number(input).await?,
            non_deterministic: flag(input).await?,
            start_time: number(input).await?,
            stop_time: number(input).await?,
            cpu_user: None,
            cpu_system: None,
            built_outputs: Vec::new(),
        };
        if minor >= 37 {
            result.cpu_user = microseconds(input).await?;
            result.cpu_system = microseconds(input).await?;
        }
        for _ in 0..length(input, "the number of built outputs", MAX_ITEMS).await? {
            result.built_outputs.push(BuiltOutput {
                id: word(input, "the id of a built output", MAX_WORD).await?,
                path: realised(&word(input, "a realisation", MAX_WORD).await?),
            });
        }
        Ok(result)
    }
}

async fn microseconds<R: Input>(input: &mut R) -> wire::Result<Option<Duration>> {
    match number(input).await? {
        0 => Ok(None),
        1 => Ok(Some(Duration::from_micros(number(input).await?))),
        other => Err(wire::Error::unexpected("the presence of a time", other)),
    }
}

/// The path in the JSON of a realisation.
fn realised(json: &str) -> Option<StorePath> {
    #[derive(Deserialize)]
    struct Realisation {
        #[serde(rename = "outPath")]
        out_path: String,
    }
    let realisation: Realisation = serde_json::from_str(json).ok()?;
    StorePath::from_basename(realisation.out_path.as_bytes()).ok()
}

impl Connection {
    /// Builds a derivation by value; it need not be in the store, its inputs must be. A build that fails is an answer
    /// with that status; an error means that it did not come to be built.
    ///
    /// Dropping the future ends the build. A daemon that was just about to wait for more output can miss that until
    /// the build prints or comes to a limit; one with `min-free` set looks every 10 s.
    pub async fn build_derivation(
        &mut self,
        path: &StorePath,
        derivation: &BasicDerivation,
        limit: Duration,
        sink: &mut impl Sink,
    ) -> Result<BuildResult> {
        // The last word is the mode: unless it is built.
        let request = derivation.write(Request::new(Op::BuildDerivation).path(path)).number(0);
        self.run(request, limit, sink).await
    }
}
