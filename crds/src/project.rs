//! `Project`: something that is built, and its part of the builders.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::{Days, Span};
use crate::schema::{between, rule};

/// What a project should be.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[kube(
    group = "ci.harmonia.dev",
    version = "v1alpha1",
    kind = "Project",
    namespaced,
    status = "ProjectStatus",
    shortname = "proj",
    category = "harmonia",
    derive = "PartialEq",
    doc = "A repository that is evaluated and built, and its part of the builders' time.",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the queue works on the project as the spec describes it."),
    printcolumn(name = "Shares", type_ = "integer", json_path = ".spec.shares",
        description = "The project's part of the builders' time against the others'."),
    printcolumn(name = "Queued", type_ = "integer", json_path = ".status.queued",
        description = "How many of its builds wait."),
    printcolumn(name = "Running", type_ = "integer", json_path = ".status.running",
        description = "How many of its builds run."),
    printcolumn(name = "Last", type_ = "string", json_path = ".status.lastEvaluation.status",
        description = "How the last evaluation stands."),
    printcolumn(name = "Commit", type_ = "string", json_path = ".status.lastEvaluation.commit",
        description = "The commit that was evaluated last.", priority = 1),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Why the project is ready or not.", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = crate::schema::short_name()
)]
#[serde(rename_all = "camelCase")]
pub struct ProjectSpec {
    /// The project's part of the builders' time against the other projects' that have builds waiting: with 200, twice as
    /// much as one with 100. What nobody else wants it gets in any case. Default: 100.
    #[serde(default = "default::shares")]
    #[schemars(range(min = 1, max = 1000000))]
    pub shares: i32,

    /// The most builds of the project that run at once, in all pools together. Without it, as many as there is room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub max_concurrent: Option<i32>,

    /// Where the code is.
    pub source: Source,

    /// What to build: attribute paths, such as `checks`. Everything below each is built. Default: what the source itself
    /// says, for a flake its checks and packages.
    #[serde(default)]
    #[schemars(length(max = 256), inner(length(min = 1, max = 256)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub attrs: Vec<String>,

    /// Whose pull requests are built, and where.
    #[serde(default)]
    pub pull_requests: PullRequests,

    /// The pools that build for the project, as `name` for one in the same namespace or as `namespace/name`. Without it, all
    /// that there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), inner(length(max = 128), pattern("^([a-z0-9-]+/)?[a-z0-9-]+$")))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub pools: Option<Vec<String>>,

    /// How long evaluations are kept, with what nothing else needs of their builds, in days. Default: 90d.
    #[serde(default = "default::retention")]
    #[x_kube(validation = rule("self.matches('^[1-9][0-9]{0,3}d$')",
        "write a number of days from 1d to 9999d, such as 90d"))]
    pub retention: Days,

    /// Evaluates nothing and starts no build of the project until this is false again. Builds that run go on. Default: false.
    #[serde(default)]
    pub paused: bool,
}

/// Where the code is: exactly one of the forges, or any git repository.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rule("[has(self.github), has(self.gitea), has(self.git)].filter(given, given).size() == 1",
    "give exactly one of github, gitea and git"))]
pub struct Source {
    /// A repository on github.com, or on a GitHub of one's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub github: Option<GitHub>,

    /// A repository on an instance of Gitea or Forgejo.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gitea: Option<Gitea>,

    /// Any git repository, which is asked for new commits from time to time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git: Option<Git>,

    /// A Secret in the same namespace by which a private repository and private flake inputs are read: a netrc file under the key
    /// `netrc`, which says to which hosts each password is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
}

/// A repository on github.com, or on a GitHub of one's own.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct GitHub {
    /// The address of the GitHub, such as `https://github.example.org`. Default: https://github.com.
    #[serde(default = "default::github")]
    #[schemars(length(max = 1024), pattern("^https?://[^ \\t\\n\\r]+$"))]
    pub instance: String,

    /// The person or organisation that owns the repository.
    #[schemars(length(min = 1, max = 100), pattern("^[A-Za-z0-9._-]+$"))]
    pub owner: String,

    /// The repository's name, without its owner.
    #[schemars(length(min = 1, max = 100), pattern("^[A-Za-z0-9._-]+$"))]
    pub repo: String,
}

/// A repository on an instance of Gitea or Forgejo.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Gitea {
    /// The address of the instance, such as `https://git.example.org`.
    #[schemars(length(max = 1024), pattern("^https?://[^ \\t\\n\\r]+$"))]
    pub instance: String,

    /// The person or organisation that owns the repository.
    #[schemars(length(min = 1, max = 100), pattern("^[A-Za-z0-9._-]+$"))]
    pub owner: String,

    /// The repository's name, without its owner.
    #[schemars(length(min = 1, max = 100), pattern("^[A-Za-z0-9._-]+$"))]
    pub repo: String,
}

/// Any git repository.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Git {
    /// The address to clone from, such as `https://git.example.org/team/repo.git`. Secrets do not belong here but into
    /// `secretRef`.
    #[schemars(length(max = 2048), pattern("^(https?|ssh|git)://[^ \\t\\n\\r]+$"))]
    pub url: String,

    /// The branch or tag to build. Without it, the repository's default branch.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "ref")]
    #[schemars(length(min = 1, max = 256), pattern("^[^- \\t\\n\\r][^ \\t\\n\\r]*$"))]
    pub reference: Option<String>,

    /// How often to look for new commits. Default: 5m.
    #[serde(default = "default::poll_interval")]
    #[x_kube(validation = between("10s", "24h"))]
    pub poll_interval: Span,
}

/// A Secret in the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct SecretRef {
    /// The Secret's name.
    // With the namespace's and a dot it is a key of another Secret, which has 253 letters at most: 253 - 63 - 1.
    #[schemars(length(min = 1, max = 189), pattern("^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
}

/// Whose pull requests are built, and where.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
pub struct PullRequests {
    /// Whose pull requests are built without a person's consent. `Collaborators`: of those who may push to the repository.
    /// `All`: everybody's, so strangers can run code on the pools below. `None`: nobody's. Default: Collaborators.
    #[serde(default)]
    pub trust: Trust,

    /// The pools that build pull requests from forks, as `name` or as `namespace/name`; they build nowhere else, and none
    /// are built without a pool here. Keep these pools apart from those that build what is trusted. Default: none.
    #[serde(default)]
    #[schemars(length(max = 64), inner(length(max = 128), pattern("^([a-z0-9-]+/)?[a-z0-9-]+$")))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub pools: Vec<String>,
}

/// Whose pull requests are built.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Trust {
    /// Of those who may push.
    #[default]
    Collaborators,
    /// Everybody's.
    All,
    /// Nobody's.
    None,
}

/// What the operator and the queue know about a project.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ProjectStatus {
    /// The evaluation that was started last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_evaluation: Option<LastEvaluation>,

    /// How many builds of the project wait. Absent until the database was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<i32>,

    /// How many builds of the project run. Absent until the database was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<i32>,

    /// The part of all builder time that the project used lately, in percent. Absent until the database was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_share: Option<i32>,

    /// The generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Ready` and `Synced`, each with a reason and a message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// An evaluation, in short.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct LastEvaluation {
    /// Its number, as `harmonia-ci status` takes it.
    pub id: i64,

    /// The commit that was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,

    /// How it stands, in the words of `harmonia-ci status`.
    pub status: String,

    /// When it was started.
    pub time: Time,
}

/// What the queue calls a pool that a project names: `namespace/name`.
pub fn pool_name(reference: &str, namespace: &str) -> String {
    if reference.contains('/') { reference.to_owned() } else { format!("{namespace}/{reference}") }
}

mod default {
    use crate::quantity::{Days, Span};

    pub fn github() -> String {
        "https://github.com".to_owned()
    }

    pub const fn shares() -> i32 {
        100
    }

    pub const fn retention() -> Days {
        Days(90)
    }

    pub const fn poll_interval() -> Span {
        Span::seconds(5 * 60)
    }
}
