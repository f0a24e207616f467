//! `spec.template`: what a person may lay over the pods of a pool.
//!
//! The shape of a pod template with the fields that cannot break a builder. Image, command, security context and
//! the volumes of our own are not among them: the API server refuses them as unknown.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, EnvVar, LocalObjectReference, ResourceRequirements, Toleration, TopologySpreadConstraint,
    Volume, VolumeMount,
};
use kube::KubeSchema;
use kube::core::Rule;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::schema::{list, rule};

/// The container that claims jobs.
pub const BUILDER: &str = "builder";
/// The sidecar that builds them.
pub const NIX_DAEMON: &str = "nix-daemon";

/// Volumes of a builder's pod that no overlay may name.
pub const VOLUMES: [&str; 6] = ["nix", "nix-conf", "database-url", "netrc", "state", "tmp"];

/// Where a builder's pod has its own mounts: no overlay may mount there, above or below.
pub const MOUNTS: [&str; 4] = ["/nix", "/etc/nix", "/run/harmonia-ci", "/var/lib/harmonia-ci"];

/// Where it has one more, below which there is room for others.
pub const TMP: &str = "/tmp";

/// What is laid over the pods of a pool.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
pub struct PodOverlay {
    /// Labels and annotations that every pod gets.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: OverlayMetadata,

    /// What is added to every pod's spec.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spec: OverlaySpec,
}

/// Labels and annotations of every pod.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
pub struct OverlayMetadata {
    /// Labels for the pods, beside those that the operator sets. Keys that start with `ci.harmonia.dev/` or
    /// `app.kubernetes.io/` are refused: the operator finds its pods by them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    #[x_kube(validation = foreign_keys(&["ci.harmonia.dev/", "app.kubernetes.io/"]))]
    pub labels: BTreeMap<String, String>,

    /// Annotations for the pods, beside those that the operator sets. Keys that start with `ci.harmonia.dev/` are
    /// refused.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    #[x_kube(validation = foreign_keys(&["ci.harmonia.dev/"]))]
    pub annotations: BTreeMap<String, String>,
}

/// What is added to every pod's spec.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct OverlaySpec {
    /// Labels that a node must have to run builders. The architecture that follows from `systems` is added and cannot
    /// be changed here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    #[x_kube(validation = rule("!('kubernetes.io/arch' in self)",
        "kubernetes.io/arch follows from systems and cannot be set here"))]
    pub node_selector: BTreeMap<String, String>,

    /// Taints that the pods tolerate, so that they may run on nodes kept for builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub tolerations: Vec<Toleration>,

    /// The pods' affinity, in the words of a pod's `spec.affinity` (`kubectl explain pod.spec.affinity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "anything")]
    pub affinity: Option<Affinity>,

    /// How the pods are spread over zones and nodes. Replaces the operator's own way, which spreads evenly over both as far
    /// as that is possible.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,

    /// The pods' priority class. A builder that is preempted has the time of `drain.gracePeriod`, if the scheduler grants
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub priority_class_name: Option<String>,

    /// The pods' runtime class, such as one that runs them in a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub runtime_class_name: Option<String>,

    /// Secrets to pull the images with, beside those of the installation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub image_pull_secrets: Vec<LocalObjectReference>,

    /// Volumes for the containers' `volumeMounts`, in the words of a pod's `spec.volumes` (`kubectl explain
    /// pod.spec.volumes`). The names of the pod's own volumes are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "volumes")]
    #[x_kube(validation = other_volumes())]
    pub volumes: Vec<Volume>,

    /// Changes to the containers `builder`, which claims and uploads, and `nix-daemon`, which builds: builds need their
    /// CPU and memory there. Other containers cannot be added, and images and commands cannot be changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    #[x_kube(
        merge_strategy = ListMerge::Map(vec!["name".into()]),
        validation = rule(format!("self.all(container, container.name in {})", list([BUILDER, NIX_DAEMON])),
            "the containers are builder and nix-daemon: no other can be added"))]
    pub containers: Vec<OverlayContainer>,
}

/// Changes to one container.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct OverlayContainer {
    /// Which container: `builder` or `nix-daemon`.
    #[schemars(length(max = 63))]
    pub name: String,

    /// What the container may use. Builds run in `nix-daemon`; `builder` packs and uploads, and needs little.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,

    /// Variables of the container's environment. Builds do not see them. Names that start with `HARMONIA_CI_` are refused:
    /// those are settings, which the operator derives from the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = rule("!self.exists(variable, variable.name.startsWith('HARMONIA_CI_'))",
        "variables that start with HARMONIA_CI_ are the operator's: set the field of the pool instead"))]
    pub env: Vec<EnvVar>,

    /// Where volumes of `volumes` are mounted in the container. Paths of the pod's own mounts are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(validation = other_mounts())]
    pub volume_mounts: Vec<VolumeMount>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn foreign_keys(prefixes: &[&str]) -> Rule {
    let ours =
        prefixes.iter().map(|prefix| format!("key.startsWith('{prefix}')")).collect::<Vec<_>>().join(" || ");
    let sentence = format!("keys that start with {} are the operator's", prefixes.join(" or "));
    rule(format!("!self.exists(key, {ours})"), &sentence)
}

fn other_volumes() -> Rule {
    let sentence =
        format!("the pod has volumes of its own named {}: choose another name", VOLUMES.join(", "));
    rule(format!("!self.exists(volume, volume.name in {})", list(VOLUMES)), &sentence)
}

fn other_mounts() -> Rule {
    let above = list(MOUNTS.into_iter().chain([TMP, "/", "/etc", "/run", "/var", "/var/lib"]));
    let below = MOUNTS.map(|path| format!("mount.mountPath.startsWith('{path}/')")).join(" || ");
    let sentence = format!("the pod has mounts of its own at {}, {TMP}: mount elsewhere", MOUNTS.join(", "));
    rule(format!("!self.exists(mount, mount.mountPath in {above} || {below})"), &sentence)
}

/// A schema of its own would be longer than all the rest.
fn anything(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// Checked when the pod is made; only the names matter here.
fn volumes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 32,
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": { "name": {
                "type": "string",
                "maxLength": 63,
                "description": "The volume's name, by which `volumeMounts` refer to it."
            } },
            "x-kubernetes-preserve-unknown-fields": true
        }
    })
}
