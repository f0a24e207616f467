//! What builders and evaluators say to signers, as JSON: `POST /api/upload-slots` asks where to put bytes,
//! `POST /api/build-complete` says that they are there. Both take lists and answer lists of the same length and order.
//!
//! `Authorization: Bearer builder.<session>.<secret>` or `evaluation.<id>.<secret>`: see [`Token`].

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use harmonia_nix::Sha256;
use serde::{Deserialize, Serialize};

/// The most wishes or results in one request.
pub const MOST: usize = 512;

/// Who speaks. Its text is a secret.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// One life of a builder, as `ci.register` began it.
    Builder {
        /// The session.
        session: i64,
        /// Its secret.
        secret: String,
    },
    /// An evaluation that is being written.
    Evaluation {
        /// The evaluation.
        id: i64,
        /// Its secret.
        secret: String,
    },
}

impl Token {
    /// As it follows `Bearer `.
    pub fn to_text(&self) -> String {
        match self {
            Self::Builder { session, secret } => format!("builder.{session}.{secret}"),
            Self::Evaluation { id, secret } => format!("evaluation.{id}.{secret}"),
        }
    }
}

impl FromStr for Token {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.splitn(3, '.');
        let (Some(kind), Some(number), Some(secret)) = (words.next(), words.next(), words.next()) else {
            return Err(());
        };
        let number = number.parse().map_err(|_| ())?;
        match kind {
            "builder" => Ok(Self::Builder { session: number, secret: secret.to_owned() }),
            "evaluation" => Ok(Self::Evaluation { id: number, secret: secret.to_owned() }),
            _ => Err(()),
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builder { session, .. } => write!(f, "builder.{session}.…"),
            Self::Evaluation { id, .. } => write!(f, "evaluation.{id}.…"),
        }
    }
}

/// A builder's claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The job.
    pub job: i64,
    /// The attempt at it.
    pub attempt: i64,
}

/// Bytes that somebody has and wants to store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bytes {
    /// How many.
    pub size: u64,
    /// Their hash.
    pub sha256: Sha256,
}

/// `POST /api/upload-slots`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotsRequest {
    /// What is to be stored.
    pub wishes: Vec<Wish>,
}

/// The answer, in the order of the wishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotsAnswer {
    /// Where each goes.
    pub slots: Vec<Slot>,
}

/// One object that somebody wants to store. `claim` is what it belongs to, for all but sources.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Wish {
    /// A compressed NAR, in one piece.
    Nar {
        /// Whose output.
        claim: Claim,
        /// The output's path.
        path: String,
        /// Hash of the NAR.
        nar_hash: Sha256,
        /// The compressed bytes.
        file: Bytes,
    },
    /// A compressed NAR, in parts that come to be one after the other.
    Parts {
        /// Whose output.
        claim: Claim,
        /// The output's path.
        path: String,
        /// Hash of the NAR, known before the pass from the local store's database.
        nar_hash: Sha256,
    },
    /// One part of it. All but the last have at least 5 MiB.
    Part {
        /// Whose output.
        claim: Claim,
        /// The output's path.
        path: String,
        /// Hash of the NAR.
        nar_hash: Sha256,
        /// As [`Slot::Parts`] named it.
        upload: String,
        /// From 1 to 10000.
        number: i32,
        /// The part.
        part: Bytes,
    },
    /// The listing of a NAR: JSON, compressed with zstd.
    Listing {
        /// Whose output.
        claim: Claim,
        /// The output's path.
        path: String,
        /// The compressed bytes.
        file: Bytes,
    },
    /// The log of the attempt, compressed with zstd.
    Log {
        /// Whose log.
        claim: Claim,
        /// The compressed bytes.
        file: Bytes,
    },
    /// A source, for evaluators.
    Source {
        /// What it is.
        source: Source,
        /// The compressed NAR.
        file: Bytes,
    },
    /// Whether a source has to be sent at all, for evaluators: asked before it is packed.
    Published {
        /// The source's path.
        path: String,
    },
}

/// A store path that no derivation makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The path.
    pub path: String,
    /// Hash of its NAR.
    pub nar_hash: Sha256,
    /// Bytes of its NAR.
    pub nar_size: u64,
    /// Store paths it refers to.
    pub references: Vec<String>,
    /// For a file whose path follows from its contents instead of its NAR (`builtins.toFile`): the contents, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Where an object goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Slot {
    /// PUT the bytes there with exactly these headers. 412 means that they are there already.
    Put {
        /// The address. It is a secret until it expires.
        url: String,
        /// Headers that the signature covers.
        headers: BTreeMap<String, String>,
    },
    /// Ask for a slot for each part with this name.
    Parts {
        /// The name of the upload.
        upload: String,
    },
    /// It is there already.
    Present,
    /// Nothing is published under this path.
    Absent,
    /// Never, and why.
    Refused {
        /// A sentence.
        reason: String,
    },
    /// Not now: ask again.
    Later {
        /// A sentence.
        reason: String,
    },
}

/// `POST /api/build-complete`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompleteRequest {
    /// What was built.
    #[serde(default)]
    pub results: Vec<BuildResult>,
    /// What was evaluated.
    #[serde(default)]
    pub sources: Vec<StoredSource>,
}

/// The answer, in the order of the request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompleteAnswer {
    /// What became of each result.
    pub results: Vec<Outcome>,
    /// What became of each source.
    pub sources: Vec<Outcome>,
}

/// A build whose outputs are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildResult {
    /// Whose.
    pub claim: Claim,
    /// All its outputs.
    pub outputs: Vec<Output>,
    /// Whether its log was stored.
    pub log: bool,
}

/// An output whose NAR is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Its path.
    pub path: String,
    /// Hash of its NAR.
    pub nar_hash: Sha256,
    /// Bytes of its NAR.
    pub nar_size: u64,
    /// Store paths it refers to.
    pub references: Vec<String>,
    /// Its content address, if it has one, as Nix writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// The compressed NAR.
    pub file: StoredFile,
    /// Whether its listing was stored.
    pub listing: bool,
}

/// A source whose NAR is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredSource {
    /// What it is.
    pub source: Source,
    /// The compressed NAR.
    pub file: Bytes,
}

/// A compressed NAR and how it was sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredFile {
    /// All of it.
    pub bytes: Bytes,
    /// In parts: the upload that has yet to be completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<Upload>,
}

/// All parts of an upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upload {
    /// As [`Slot::Parts`] named it.
    pub id: String,
    /// In their order.
    pub parts: Vec<StoredPart>,
}

/// A part that the server took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredPart {
    /// The server's word for it.
    pub etag: String,
    /// Its hash.
    pub sha256: Sha256,
}

/// What became of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Signed and published.
    Published,
    /// Another attempt's bytes are what the path is; those are published.
    Adopted,
    /// The claim is not live any more: drop the result.
    Stale,
    /// Something is not stored, or not as said: ask for slots again.
    Again {
        /// A sentence.
        reason: String,
    },
    /// Never, and why.
    Refused {
        /// A sentence.
        reason: String,
    },
    /// Not now: say the same again.
    Later {
        /// A sentence.
        reason: String,
    },
}
