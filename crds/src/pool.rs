//! `BuilderPool`: builders of one kind.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::{Message, Rule};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::overlay::PodOverlay;
use crate::quantity::{Size, Span};
use crate::schema::{between, list, rule, shorter, sized};

/// What a pool of builders should be.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[kube(
    group = "ci.harmonia.dev",
    version = "v1alpha1",
    kind = "BuilderPool",
    namespaced,
    status = "BuilderPoolStatus",
    shortname = "bp",
    category = "harmonia",
    derive = "PartialEq",
    doc = "Builders of one kind: pods that claim builds from the queue, build them with Nix and upload the results. The operator makes a workload named `<name>-builder` from it, with everything that its pods need.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether all builders that there should be are there."),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredReplicas",
        description = "How many builders there should be."),
    printcolumn(name = "Current", type_ = "integer", json_path = ".status.replicas",
        description = "How many builders there are."),
    printcolumn(name = "Busy", type_ = "integer", json_path = ".status.busy",
        description = "How many builders have a build."),
    printcolumn(name = "Queued", type_ = "integer", json_path = ".status.queued",
        description = "How many builds wait that this pool could do."),
    printcolumn(name = "Draining", type_ = "integer", json_path = ".status.draining",
        description = "How many builders finish what they have and take no more."),
    printcolumn(name = "Systems", type_ = "string", json_path = ".spec.systems",
        description = "What the pool builds for."),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Why the pool is ready or not.", priority = 1),
    validation = crate::schema::short_name()
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rule("!(has(self.replicas) && has(self.scaling) && has(self.scaling.max))",
    "replicas cannot be set while scaling.max is: the operator chooses the number between scaling.min and scaling.max").field_path(".replicas"))]
pub struct BuilderPoolSpec {
    /// The systems that the pool builds for, in Nix's words, such as `x86_64-linux`. Pods run on nodes of the
    /// architecture that follows from them. Cannot be changed later: make another pool and delete this one, which
    /// drains it.
    #[schemars(length(max = 32), inner(length(min = 1, max = 64), pattern("^[a-z0-9_]+-[a-z0-9_]+$")))]
    #[x_kube(
        merge_strategy = ListMerge::Set,
        validation = rule("self.size() > 0", "name at least one system, such as x86_64-linux"),
        validation = rule("self.all(system, system in oldSelf) && oldSelf.all(system, system in self)",
            "systems cannot be changed: make another pool and delete this one"))]
    pub systems: Vec<String>,

    /// The features that the builders offer: a derivation is built only where every feature of its
    /// `requiredSystemFeatures` is offered. Offer `kvm` only where /dev/kvm can be used. Default: Nix's own, without `kvm`.
    #[serde(default = "default::features")]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 64), pattern("^[A-Za-z0-9][A-Za-z0-9._+:-]*$"))
    )]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub features: Vec<String>,

    /// Features that a derivation must require to be built here at all, so that expensive builders are kept for those who
    /// ask for them. They count as offered. Default: none.
    #[serde(default)]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 64), pattern("^[A-Za-z0-9][A-Za-z0-9._+:-]*$"))
    )]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub mandatory_features: Vec<String>,

    /// How many builds one pod runs at once. All of them share the CPU and memory of the pod. Default: 1.
    #[serde(default = "default::slots")]
    #[schemars(range(min = 1, max = 1024))]
    pub slots: i32,

    /// How many cores a build is told to use (`NIX_BUILD_CORES`), on which most build systems act. 0 means all that the
    /// pod sees. A hint, not a limit: limits are `resources` of the container `nix-daemon` in `template`. Default: 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 4096))]
    pub cores: i32,

    /// The memory that the builds of one pod share: request and limit of the container `nix-daemon`. A build that runs out of it,
    /// alone in its pod, is tried in a pool with more, if there is one that could build it, even one without pods. Without it
    /// the container has what `template` gives it, and such a build is tried again anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = sized("64Mi", "64Ti"))]
    pub memory: Option<Size>,

    /// How many builders there are. This is what `kubectl scale` writes. Without it and without `scaling.max` there is one.
    /// Refused while `scaling.max` is set. When it is lowered, builders finish what they have before they go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub replicas: Option<i32>,

    /// Lets the number of builders follow the queue. Without it the number is `replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,

    /// Where a builder keeps its Nix store.
    #[serde(default)]
    pub store: Store,

    /// What happens when a builder has to go: its node is drained, the pool gets smaller, or its pod changes.
    #[serde(default)]
    pub drain: Drain,

    /// What a single build may use. A build that exceeds one of these fails and is not tried again.
    #[serde(default)]
    pub limits: Limits,

    /// How Nix is set up in the builders.
    #[serde(default)]
    pub nix: Nix,

    /// What is laid over the pods that the operator makes: where they run, what they may use, more volumes and variables.
    /// The fields are those of a pod template. Changing it replaces the builders, each after it finished what it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<PodOverlay>,

    /// Makes the operator leave the pool alone: nothing that it made is changed or deleted, and changes here have no effect
    /// until this is false again. Builders go on. The annotation `ci.harmonia.dev/reconcile: disabled` does the same.
    /// Default: false.
    #[serde(default)]
    pub paused: bool,
}

/// How the number of builders follows the queue.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rule("self.mode != 'Auto' || has(self.max)",
    "scaling needs max, the most builders that there may be").field_path(".max"))]
#[x_kube(validation = rule("self.mode != 'External' || !has(self.max) && self.min == 0",
    "min and max are for mode Auto: with External, whoever writes the scale subresource has bounds of its own"))]
#[x_kube(validation = rule("!has(self.max) || self.min <= self.max", "min must not be more than max"))]
pub struct Scaling {
    /// Who chooses the number. `Auto`: the operator, from the builds that wait and run. `External`: whoever writes the
    /// pool's scale subresource, such as a HorizontalPodAutoscaler; set a first number with `kubectl scale`.
    /// Default: Auto.
    #[serde(default)]
    pub mode: ScalingMode,

    /// The fewest builders that there are. With 0, the first build after a quiet time waits for a pod to start. Default: 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 10000))]
    pub min: i32,

    /// The most builders that there are. Required in mode Auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10000))]
    pub max: Option<i32>,

    /// How long builders must have been too many before they go; half of them go after half of it. Only idle ones do. Default: 5m.
    #[serde(default = "default::window")]
    #[x_kube(validation = between("0s", "24h"))]
    pub stabilization_window: Span,
}

/// Who chooses the number of builders.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ScalingMode {
    /// The operator.
    #[default]
    Auto,
    /// Whoever writes the scale subresource.
    External,
}

/// Where a builder keeps its Nix store.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rule("self.mode != 'EmptyDir' || !has(self.storageClassName)",
    "storageClassName is for the modes Ephemeral and Persistent: an emptyDir has none").field_path(".storageClassName"))]
#[x_kube(validation = rule("self.mode != 'Persistent' || self.size == oldSelf.size && has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
    "size and storageClassName of a Persistent store cannot be changed: make another pool and delete this one"))]
pub struct Store {
    /// `Ephemeral`: a volume for each pod, made by the storage class and deleted with the pod. `EmptyDir`: the node's own
    /// disk, which a full store can bring under pressure. `Persistent`: a volume that survives the pod and stays warm; a
    /// replacement then waits until the old pod is gone, and pods are removed by number, not by idleness. Cannot be
    /// changed later. Default: Ephemeral.
    #[serde(default)]
    #[x_kube(validation = rule("self == oldSelf",
        "store.mode cannot be changed: make another pool and delete this one"))]
    pub mode: StoreMode,

    /// The size of the volume, or the most that an EmptyDir may grow to. Garbage is collected before it is full.
    /// Default: 100Gi.
    #[serde(default = "default::size")]
    #[x_kube(validation = sized("1Mi", "1024Ti"))]
    pub size: Size,

    /// The storage class of the volumes. Without it, the cluster's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class_name: Option<String>,
}

impl Default for Store {
    fn default() -> Self {
        Self { mode: StoreMode::default(), size: default::size(), storage_class_name: None }
    }
}

/// What holds a builder's Nix store.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StoreMode {
    /// A generic ephemeral volume.
    #[default]
    Ephemeral,
    /// The node's disk.
    EmptyDir,
    /// A claim that survives the pod.
    Persistent,
}

/// What happens when a builder has to go.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = shorter("margin", "gracePeriod"))]
pub struct Drain {
    /// How long a builder that has to go may take to finish and upload what it has (the pod's
    /// `terminationGracePeriodSeconds`). It takes no new builds meanwhile, and goes as soon as it is done. What cannot be
    /// finished is given back to the queue and built elsewhere; that does not count as a failed attempt. Cluster
    /// autoscalers and managed upgrades may allow less. Default: 2h.
    #[serde(default = "default::grace_period")]
    #[x_kube(validation = between("10s", "168h"))]
    pub grace_period: Span,

    /// How long before the end of `gracePeriod` the builds that still run are stopped and given back, so that uploads can
    /// end. Must be shorter than `gracePeriod`. Default: 1m.
    #[serde(default = "default::margin")]
    #[x_kube(validation = between("1s", "1h"))]
    pub margin: Span,
}

impl Default for Drain {
    fn default() -> Self {
        Self { grace_period: default::grace_period(), margin: default::margin() }
    }
}

/// What a single build may use.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// How long a build may take. Default: 4h.
    #[serde(default = "default::timeout")]
    #[x_kube(validation = between("1s", "720h"))]
    pub timeout: Span,

    /// How long a build may print nothing. Default: 30m.
    #[serde(default = "default::max_silent")]
    #[x_kube(validation = between("1s", "720h"))]
    pub max_silent: Span,

    /// How large all outputs of a build may be together, uncompressed. Default: 4Gi.
    #[serde(default = "default::max_output_size")]
    #[x_kube(validation = sized("1Ki", "1024Ti"))]
    pub max_output_size: Size,

    /// How much of a build's log is kept. A build that prints more goes on, the rest is dropped. Default: 64Mi.
    #[serde(default = "default::max_log_size")]
    #[x_kube(validation = sized("1Ki", "16Gi"))]
    pub max_log_size: Size,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            timeout: default::timeout(),
            max_silent: default::max_silent(),
            max_output_size: default::max_output_size(),
            max_log_size: default::max_log_size(),
        }
    }
}

/// How Nix is set up in the builders.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Nix {
    /// Binary caches to fetch from, after the farm's own, which is always asked first. Default: https://cache.nixos.org.
    #[serde(default = "default::substituters")]
    #[schemars(length(max = 32), inner(length(max = 1024), pattern("^[a-z0-9+]+://[^ \\t\\n\\r]+$")))]
    pub substituters: Vec<String>,

    /// Public keys whose signatures are believed, beside the farm's own, as `name:base64`. Default: that of
    /// cache.nixos.org.
    #[serde(default = "default::trusted_public_keys")]
    #[schemars(length(max = 32), inner(length(max = 256), pattern("^[^ :\\t\\n\\r]+:[A-Za-z0-9+/=]+$")))]
    pub trusted_public_keys: Vec<String>,

    /// How builds are kept from each other and from the pod. `UserNamespace`: Nix's sandbox inside a user namespace of
    /// the pod, where root is nobody on the node; needs nodes that support it. `Privileged`: Nix's sandbox in a privileged
    /// container; a build that breaks out of the sandbox owns the node. `Disabled`: no sandbox; builds see the container,
    /// each other and the network, so only for nodes and code that are trusted. Default: UserNamespace.
    #[serde(default)]
    pub sandbox: Sandbox,

    /// More lines for nix.conf, by the name of the setting. Settings that the operator derives from the pool, or that would
    /// undo the sandbox or the trust in signatures, are refused. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "settings")]
    #[x_kube(validation = rule("self.all(name, name.matches('^[a-z][a-z0-9-]*$'))",
        "names of Nix settings have small letters, digits and dashes only"))]
    #[x_kube(validation = other_settings())]
    pub settings: BTreeMap<String, String>,
}

impl Default for Nix {
    fn default() -> Self {
        Self {
            substituters: default::substituters(),
            trusted_public_keys: default::trusted_public_keys(),
            sandbox: Sandbox::default(),
            settings: BTreeMap::new(),
        }
    }
}

/// How builds are kept from each other and from the pod.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sandbox {
    /// Nix's sandbox in a user namespace.
    #[default]
    UserNamespace,
    /// Nix's sandbox in a privileged container.
    Privileged,
    /// None.
    Disabled,
}

/// Settings of Nix that are not the person's, with the names that they had before.
const OURS: [&str; 29] = [
    "allow-new-privileges",
    "allowed-users",
    "build-cores",
    "build-max-jobs",
    "build-max-silent-time",
    "build-timeout",
    "build-use-chroot",
    "build-use-sandbox",
    "build-users-group",
    "builders",
    "cores",
    "diff-hook",
    "filter-syscalls",
    "include",
    "max-jobs",
    "max-silent-time",
    "narinfo-cache-negative-ttl",
    "netrc-file",
    "plugin-files",
    "post-build-hook",
    "pre-build-hook",
    "require-sigs",
    "sandbox",
    "sandbox-fallback",
    "secret-key-files",
    "store",
    "substitute",
    "system",
    "timeout",
];

/// The same, but lists: `extra-` before the name adds to them.
const OUR_LISTS: [&str; 8] = [
    "binary-cache-public-keys",
    "binary-caches",
    "substituters",
    "system-features",
    "trusted-binary-caches",
    "trusted-public-keys",
    "trusted-substituters",
    "trusted-users",
];

/// Settings of Nix that a pool may not have.
pub fn refused_settings() -> Vec<String> {
    let lists = OUR_LISTS.iter().flat_map(|name| [(*name).to_owned(), format!("extra-{name}")]);
    OURS.iter().map(|name| (*name).to_owned()).chain(lists).collect()
}

fn other_settings() -> Rule {
    let ours = refused_settings();
    let refused = format!("name in {}", list(ours.iter().map(String::as_str)));
    let sentence = format!(
        "'the Nix setting ' + self.filter(name, {refused})[0] + ' is refused: \
         it follows from other fields of the pool, or would undo the sandbox or the trust in signatures'"
    );
    Rule::new(format!("!self.exists(name, {refused})")).message(Message::Expression(sentence))
}

/// Values without line breaks, behind which another setting could hide.
fn settings(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": { "type": "string", "maxLength": 4096, "pattern": "^[^\\n\\r]*$" }
    })
}

/// What the operator and the queue know about a pool.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BuilderPoolStatus {
    /// How many builders there are, without those that are being deleted.
    #[serde(default)]
    pub replicas: i32,

    /// How many of them are ready.
    #[serde(default)]
    pub ready_replicas: i32,

    /// How many builders there should be.
    #[serde(default)]
    pub desired_replicas: i32,

    /// How many builders have a build. Absent until the database was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<i32>,

    /// How many builders finish what they have and take no more. Absent until the database was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<i32>,

    /// How many builds wait that this pool could do. Absent until the database was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<i32>,

    /// The labels of the builders' pods, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,

    /// The generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// `Ready`, `Progressing`, `DatabaseReachable` and `NodesWatched`, each with a reason and a message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

mod default {
    use crate::quantity::{Size, Span};

    pub fn features() -> Vec<String> {
        ["benchmark", "big-parallel", "nixos-test"].map(str::to_owned).to_vec()
    }

    pub const fn slots() -> i32 {
        1
    }

    pub const fn window() -> Span {
        Span::seconds(5 * 60)
    }

    pub const fn size() -> Size {
        Size(100 << 30)
    }

    pub const fn grace_period() -> Span {
        Span::seconds(2 * 3600)
    }

    pub const fn margin() -> Span {
        Span::seconds(60)
    }

    pub const fn timeout() -> Span {
        Span::seconds(4 * 3600)
    }

    pub const fn max_silent() -> Span {
        Span::seconds(30 * 60)
    }

    pub const fn max_output_size() -> Size {
        Size(4 << 30)
    }

    pub const fn max_log_size() -> Size {
        Size(64 << 20)
    }

    pub fn substituters() -> Vec<String> {
        vec!["https://cache.nixos.org".to_owned()]
    }

    pub fn trusted_public_keys() -> Vec<String> {
        vec!["cache.nixos.org-1:6NCHdD59X431o0gWypbMrAURkbJ16ZPMQFGspcDShjY=".to_owned()]
    }
}
