//! What the frontend's API takes and answers, as the CLI reads it and `/api/openapi.json` describes it. Moments are in UTC,
//! as RFC 3339 writes them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A page of a list.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// Where the next page begins: give it as `after`. None: this was the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An evaluation to be queued.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEvaluation {
    /// Whose it is
    #[schema(min_length = 1, max_length = 200, pattern = r"^[^\x00]+$")]
    pub project: String,
    /// A directory, a git URL with an optional `?ref=` or `?rev=`, or a flake reference
    #[schema(min_length = 1, max_length = 4096, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")]
    pub source: String,
    /// The branch it counts for
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")]
    pub branch: Option<String>,
    /// Attributes to build; none: what the source offers by default
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 1000)]
    pub attrs: Vec<String>,
}

/// What has become of an evaluation and its builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EvaluationStatus {
    /// Waits for an evaluator
    Queued,
    /// Is being evaluated; builds may have begun
    Evaluating,
    /// Evaluated, builds are left
    Building,
    /// Everything is built
    Succeeded,
    /// Something could not be evaluated or built
    Failed,
    /// Ended by a person or by a newer push
    Cancelled,
}

impl EvaluationStatus {
    /// Whether nothing more will come of it by itself.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Evaluating => "evaluating",
            Self::Building => "building",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Builds of an evaluation by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BuildCounts {
    /// Waiting for inputs, for a retry or for a builder
    pub waiting: i64,
    /// On a builder
    pub running: i64,
    /// Built and published
    pub succeeded: i64,
    /// There already
    pub cached: i64,
    /// Failed
    pub failed: i64,
    /// Not tried because of one that failed
    pub dep_failed: i64,
    /// Ended by a person
    pub cancelled: i64,
}

/// An evaluation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Evaluation {
    /// Its number
    pub id: i64,
    /// Whose it is
    pub project: String,
    /// What was evaluated
    pub source: String,
    /// The branch it counts for
    pub branch: Option<String>,
    /// Its commit, once that is known
    pub commit: Option<String>,
    /// The attributes that were asked for; none: the source's default
    pub attrs: Vec<String>,
    /// A change from outside, which builds in pools of its own
    pub untrusted: bool,
    /// What has become of it
    pub status: EvaluationStatus,
    /// Why it could not be evaluated, or was cancelled
    pub error: Option<String>,
    /// When it was asked for
    pub created_at: String,
    /// When an evaluator began it, the last time
    pub started_at: Option<String>,
    /// When it was evaluated, or ended otherwise
    pub ended_at: Option<String>,
    /// It is kept for good, with all it built
    pub pinned: bool,
    /// Its builds
    pub builds: BuildCounts,
    /// How many attributes it has
    pub attributes: i64,
    /// How many of them could not be evaluated
    pub attribute_errors: i64,
}

/// An attribute of an evaluation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Attribute {
    /// Its path, such as `checks.x86_64-linux.unit`
    pub name: String,
    /// Its build
    pub build: Option<i64>,
    /// How far that is, as in a build
    pub state: Option<String>,
    /// Why it could not be evaluated, in Nix's own words
    pub error: Option<String>,
}

/// An evaluation with its attributes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EvaluationDetail {
    /// The evaluation
    #[serde(flatten)]
    pub evaluation: Evaluation,
    /// Its attributes by name, a page of them
    pub attribute_page: Page<Attribute>,
}

/// A build: one derivation, whoever wants it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// Its number
    pub id: i64,
    /// Its name without hash and ending
    pub name: String,
    /// Its derivation
    pub drv_path: String,
    /// What it is built on
    pub system: String,
    /// What its node must offer
    pub features: Vec<String>,
    /// blocked, ready, building, uploading, publishing, succeeded, cached, failed, dep_failed or cancelled
    pub state: String,
    /// The node that has it
    pub node: Option<String>,
    /// The attempt that runs
    pub attempt: Option<i64>,
    /// For how many seconds it has run
    pub running_for: Option<f64>,
    /// What kind of failure it, or its last attempt, ended with
    pub failure: Option<String>,
    /// The same in a sentence
    pub error: Option<String>,
    /// The build that failed first, if this one was not tried because of it
    pub root: Option<i64>,
    /// When it was first asked for
    pub created_at: String,
    /// When it ended
    pub ended_at: Option<String>,
}

impl Build {
    /// Whether something can still come of it by itself.
    pub fn is_open(&self) -> bool {
        matches!(self.state.as_str(), "blocked" | "ready" | "building" | "uploading" | "publishing")
    }
}

/// An output of a build.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Output {
    /// Its name
    pub name: String,
    /// Its path, once that is known
    pub path: Option<String>,
}

/// One try at a build.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Attempt {
    /// Its number, unique among all attempts at anything; not in their order
    pub id: i64,
    /// Where
    pub node: Option<String>,
    /// When it was claimed
    pub started_at: String,
    /// When it was over
    pub ended_at: Option<String>,
    /// How long it took, or has taken so far
    pub seconds: f64,
    /// succeeded, interrupted, cancelled or a kind of failure; none: it runs
    pub outcome: Option<String>,
    /// The same in a sentence
    pub message: Option<String>,
}

/// A build with its outputs and attempts.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BuildDetail {
    /// The build
    #[serde(flatten)]
    pub build: Build,
    /// What it makes
    pub outputs: Vec<Output>,
    /// All tries at it, the first one first
    pub attempts: Vec<Attempt>,
}

/// Why a build is not running, or has ended as it has.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Reason {
    /// For programs
    pub code: String,
    /// For people
    pub sentence: String,
}

/// A builder.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Node {
    /// Its number
    pub id: i32,
    /// Its name, unique in its pool
    pub name: String,
    /// Its pool
    pub pool: String,
    /// active, draining, drained or gone
    pub state: String,
    /// Builds at once
    pub slots: i32,
    /// What it builds
    pub building: i64,
    /// What it has built and not published yet
    pub uploading: i64,
    /// How fast it is against the others, for the same names
    pub speed: f32,
    /// Why it drains
    pub drains: Vec<String>,
    /// The Kubernetes node that it runs on
    pub kube_node: Option<String>,
    /// Its release
    pub version: Option<String>,
    /// How long ago it was heard
    pub seen_seconds_ago: Option<u64>,
}

/// How a node shall drain.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// What has not ended by then is given back; such as `2h`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[0-9]{1,4}[smhdw]$")]
    pub deadline: Option<String>,
    /// Give back everything at once, whatever the deadline
    #[serde(default)]
    pub now: bool,
}

/// A build that can be claimed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Ready {
    /// Its number
    pub id: i64,
    /// Its name
    pub name: String,
    /// Its derivation
    pub drv_path: String,
    /// For whom
    pub project: String,
    /// For which evaluation
    pub evaluation: i64,
    /// Asked for by a person, before all others
    pub manual: bool,
    /// Builds in the longest chain that waits for it
    pub height: i32,
    /// For how many seconds it could have been claimed
    pub waited: f64,
}

/// The queue: numbers, what runs, and what comes next.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Queue {
    /// Builds that wait for others or for a retry
    pub blocked: i64,
    /// Builds that could be claimed
    pub ready: i64,
    /// Builds on builders
    pub running: i64,
    /// What runs, the longest first
    pub now: Vec<Build>,
    /// What comes next if nothing else does
    pub next: Vec<Ready>,
}

/// A project.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Project {
    /// Its name
    pub name: String,
    /// Its part of the builders' time against the others'
    pub shares: i32,
    /// Builds at once, at most
    pub max_concurrent: Option<i32>,
    /// Only in these pools; none: in all
    pub pools: Option<Vec<String>>,
    /// Pools for changes from outside
    pub untrusted_pools: Vec<String>,
    /// Nothing is evaluated or claimed for it
    pub paused: bool,
    /// How long its evaluations are kept, such as `90d`
    pub retention: String,
    /// Where its code is; none: it is evaluated by hand only
    pub git: Option<GitSource>,
    /// Seconds of builder time that count against it; old ones count less
    pub used: f64,
    /// Builds that could be claimed for it
    pub ready: i64,
    /// Builds that run for it
    pub running: i64,
}

/// A project to be made, or what to change about one. What is left out stays as it is, or is the default. `null` takes a
/// limit away.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectChange {
    /// Its name; only where it is made
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[0-9A-Za-z][ -~]{0,199}$")]
    pub name: Option<String>,
    /// Its part of the builders' time against the others'
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub shares: Option<i32>,
    /// Builds at once, at most
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<i32>, minimum = 0, maximum = 10000)]
    pub max_concurrent: Option<Option<i32>>,
    /// Only in these pools
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<Vec<String>>)]
    pub pools: Option<Option<Vec<String>>>,
    /// Pools for changes from outside
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted_pools: Option<Vec<String>>,
    /// Nothing is evaluated or claimed for it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// How long its evaluations are kept, such as `90d`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[1-9][0-9]{0,3}[hdw]$")]
    pub retention: Option<String>,
    /// The repository whose commits are evaluated
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<GitChange>)]
    pub git: Option<Option<GitChange>>,
}

/// A repository whose commits are evaluated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GitSource {
    /// What git clones from
    pub url: String,
    /// The branch; none: the repository's default
    pub r#ref: Option<String>,
    /// How often new commits are looked for, such as `5m`
    pub poll: String,
    /// The attributes that are built; none: what the source offers by default
    pub attrs: Vec<String>,
    /// The name of the credential by which evaluators read it
    pub credential: Option<String>,
    /// Whose pull requests from outside are built without anybody's word; only of a forge that is configured
    pub pull_requests: Trust,
    /// Why the last look for new commits, or at what its forge says, saw nothing
    pub error: Option<String>,
}

/// Whose pull requests from outside are built without anybody's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// Of those who may push
    Collaborators,
    /// Everybody's
    All,
    /// Nobody's
    None,
}

/// A repository to follow, or what to change about it. What is left out stays as it is, or is the default. `null` takes it away.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GitChange {
    /// What git clones from
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(https?|ssh|git|file)://[!-~]{1,2000}$")]
    pub url: Option<String>,
    /// The branch
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<String>, pattern = "^[!-,.-~][!-~]{0,255}$")]
    pub r#ref: Option<Option<String>>,
    /// How often new commits are looked for, such as `5m`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[1-9][0-9]{0,3}[mhd]$")]
    pub poll: Option<String>,
    /// The attributes that are built
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attrs: Option<Vec<String>>,
    /// The name of the credential by which evaluators read it
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<String>, pattern = "^[0-9A-Za-z][0-9A-Za-z._-]{0,252}$")]
    pub credential: Option<Option<String>>,
    /// Whose pull requests from outside are built without anybody's word
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_requests: Option<Trust>,
}

/// `null` is not the same as nothing.
fn given<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// A token, without its secret.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// Its name
    pub name: String,
    /// read, operate or admin
    pub scope: String,
    /// Since when
    pub created_at: String,
    /// Until when; none: until it is revoked
    pub expires_at: Option<String>,
    /// That moment has passed
    pub expired: bool,
}

/// A token to be made.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    /// Its name, by which it is revoked
    #[schema(pattern = "^[0-9A-Za-z][ -~]{0,199}$")]
    pub name: String,
    /// read, operate or admin
    #[schema(pattern = "^(read|operate|admin)$")]
    pub scope: String,
    /// How long it lasts, such as `30d`; without it, until it is revoked
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[1-9][0-9]{0,3}[smhdw]$")]
    pub expires_in: Option<String>,
}

/// A new token's secret, shown this once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Secret {
    /// The secret
    pub secret: String,
}

/// What a request changed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct Changed {
    /// How many; 0: it was so already
    pub changed: i64,
}

/// A piece of a log, as an event's data. Its `id` is `<attempt>:<offset of the byte after it>`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LogPiece {
    /// Which attempt says this
    pub attempt: i64,
    /// Where in its log, in bytes
    pub offset: u64,
    /// What it says
    pub text: String,
}

/// How far a followed build is while no attempt at it runs, or when one begins: the data of an event `state`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogState {
    /// As in a build
    pub state: String,
    /// The attempt that runs
    pub attempt: Option<i64>,
}

/// Nothing more will come: the data of an event `end`, which is the last one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogEnd {
    /// The attempt that ended, the last one at a followed build; none: it was never tried
    pub attempt: Option<i64>,
    /// How it ended, as in an attempt, or the build's state if it was never tried
    pub outcome: String,
}

/// Something changed, as an event's data: look again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Event {
    /// Builds ended or became ready
    Builds,
    /// An evaluation was queued, began or ended
    Evaluation {
        /// Which
        id: i64,
    },
    /// Nodes drain, or do not any more
    Nodes,
    /// Events may have been missed: look at everything again
    Resync,
}

/// Who leads the janitors.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Leader {
    /// Where that replica is reached
    pub url: Option<String>,
    /// How often leadership has changed
    pub generation: i64,
    /// Since when
    pub since: Option<String>,
    /// Whether somebody leads at this moment
    pub held: bool,
}
