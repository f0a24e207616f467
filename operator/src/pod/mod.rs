//! Parts of pods that several workloads have.

use k8s_openapi::api::core::v1::{
    Affinity, AppArmorProfile, Capabilities, ConfigMapVolumeSource, Container, EmptyDirVolumeSource, EnvVar,
    EnvVarSource, HTTPGetAction, KeyToPath, ObjectFieldSelector, PodAffinityTerm, PodAntiAffinity, Probe,
    SeccompProfile, SecretVolumeSource, SecurityContext, TopologySpreadConstraint, Volume, VolumeMount,
    WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use harmonia_crds::overlay::NIX_DAEMON;
use harmonia_crds::pool::Sandbox;

/// The volume with the Nix store.
pub const NIX: &str = "nix";
/// The volume with `nix.conf`.
pub const CONF: &str = "nix-conf";
/// The volume with the daemon's token of the cache, and the file in it.
pub const NETRC: &str = "netrc";
/// The volume for what lasts as long as the pod.
pub const STATE: &str = "state";
/// The volume for what does not last.
pub const TMP: &str = "tmp";
/// Where Secrets are: each container sees its own.
pub const RUN: &str = "/run/harmonia-ci";

/// A volume belongs to everybody at first, and Nix does not build below a directory that everybody may write to.
const SEED: &str = "chown 0:0 /nix && chmod 0755 /nix && mkdir -p /nix/store /nix/var/nix && chown 0:30000 /nix/store && chmod 1775 /nix/store";

/// What a container runs.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    /// Its name.
    pub name: &'a str,
    /// When it is pulled.
    pub pull: Option<&'a str>,
}

impl Image<'_> {
    /// A container of it.
    pub fn container(self, name: &str) -> Container {
        Container {
            name: name.to_owned(),
            image: Some(self.name.to_owned()),
            image_pull_policy: self.pull.map(str::to_owned),
            ..Container::default()
        }
    }
}

/// Makes an empty volume a store; takes no time where there is one. It has the resources of the daemon, which begins when it ends:
/// the pod needs no more for it, and where a quota counts them no container may be without.
pub fn seed(image: Image<'_>, daemon: &Container) -> Container {
    Container {
        command: Some(["/bin/sh", "-ec", SEED].map(str::to_owned).into()),
        security_context: Some(SecurityContext {
            run_as_user: Some(0),
            run_as_group: Some(0),
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                add: Some(["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"].map(str::to_owned).into()),
            }),
            seccomp_profile: Some(seccomp("RuntimeDefault")),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(vec![mount(NIX, "/nix")]),
        resources: daemon.resources.clone(),
        ..image.container("seed")
    }
}

/// Nix's daemon as a native sidecar: it starts before those who use it, and outlives them. Builds live here, and so do their
/// resources. Without a startup probe, which would cost a second: who uses it waits for its socket.
pub fn daemon(image: Image<'_>, sandbox: Sandbox) -> Container {
    Container {
        command: Some(["nix-daemon", "--daemon"].map(str::to_owned).into()),
        restart_policy: Some("Always".to_owned()),
        security_context: Some(daemon_security(sandbox)),
        volume_mounts: Some(vec![
            mount(NIX, "/nix"),
            mount(CONF, "/etc/nix"),
            mount(NETRC, RUN),
            part(TMP, "/tmp", NIX_DAEMON),
        ]),
        ..image.container(NIX_DAEMON)
    }
}

/// Root, for it gives each build a user of its own.
fn daemon_security(sandbox: Sandbox) -> SecurityContext {
    let root = SecurityContext { run_as_user: Some(0), run_as_group: Some(0), ..SecurityContext::default() };
    match sandbox {
        // Root is nobody on the node. A sandbox of its own needs what profiles for ordinary pods forbid: namespaces, mounts,
        // and a /proc that is not masked.
        Sandbox::UserNamespace => SecurityContext {
            proc_mount: Some("Unmasked".to_owned()),
            seccomp_profile: Some(seccomp("Unconfined")),
            app_armor_profile: Some(AppArmorProfile {
                type_: "Unconfined".to_owned(),
                ..AppArmorProfile::default()
            }),
            ..root
        },
        Sandbox::Privileged => SecurityContext { privileged: Some(true), ..root },
        Sandbox::Disabled => SecurityContext { seccomp_profile: Some(seccomp("RuntimeDefault")), ..root },
    }
}

/// Nothing but what an ordinary program needs, as that user.
pub fn restricted(user: i64) -> SecurityContext {
    SecurityContext {
        run_as_user: Some(user),
        run_as_group: Some(user),
        run_as_non_root: Some(true),
        read_only_root_filesystem: Some(true),
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
        seccomp_profile: Some(seccomp("RuntimeDefault")),
        ..SecurityContext::default()
    }
}

fn seccomp(kind: &str) -> SeccompProfile {
    SeccompProfile { type_: kind.to_owned(), ..SeccompProfile::default() }
}

/// Asks one of our pages.
pub fn probe(path: &str, port: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(port),
            ..HTTPGetAction::default()
        }),
        timeout_seconds: Some(5),
        ..Probe::default()
    }
}

/// A setting of one of our programs.
pub fn setting(name: &str, value: impl Into<String>) -> EnvVar {
    EnvVar { name: format!("HARMONIA_CI_{name}"), value: Some(value.into()), value_from: None }
}

/// A variable with what the pod knows of itself.
pub fn field(name: &str, path: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: None,
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: path.to_owned(), api_version: None }),
            ..EnvVarSource::default()
        }),
    }
}

/// A whole volume.
pub fn mount(volume: &str, path: &str) -> VolumeMount {
    VolumeMount { name: volume.to_owned(), mount_path: path.to_owned(), ..VolumeMount::default() }
}

/// A part of a volume: containers do not see each other's.
pub fn part(volume: &str, path: &str, part: &str) -> VolumeMount {
    VolumeMount { sub_path: Some(part.to_owned()), ..mount(volume, path) }
}

/// A volume that is empty at first and goes with the pod.
pub fn empty(name: &str) -> Volume {
    Volume { name: name.to_owned(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() }
}

/// One value of a Secret, as the file `path`.
pub fn secret(volume: &str, secret: &str, key: &str, path: &str, mode: i32) -> Volume {
    Volume {
        name: volume.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            items: Some(vec![KeyToPath { key: key.to_owned(), path: path.to_owned(), mode: Some(mode) }]),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// One value of a ConfigMap, as a file of that name.
pub fn config(volume: &str, map: &str, key: &str) -> Volume {
    Volume {
        name: volume.to_owned(),
        config_map: Some(ConfigMapVolumeSource {
            name: map.to_owned(),
            items: Some(vec![KeyToPath { key: key.to_owned(), path: key.to_owned(), mode: None }]),
            ..ConfigMapVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// Over zones and nodes as far as that goes. Pods of an older template, which the label `revision` tells apart, do not count.
pub fn spread(selector: &LabelSelector, revision: &str) -> Vec<TopologySpreadConstraint> {
    vec![TopologySpreadConstraint {
        max_skew: 1,
        topology_key: "kubernetes.io/hostname".to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(selector.clone()),
        match_label_keys: Some(vec![revision.to_owned()]),
        ..TopologySpreadConstraint::default()
    }]
}

/// Over zones, where nodes have any. Not as a spread: the scheduler passes by all spreads of a pod on nodes that lack the label
/// of one of them, so that on nodes without zones pods would not be spread at all.
pub fn apart(selector: &LabelSelector, revision: &str) -> Affinity {
    let other_zones = PodAffinityTerm {
        label_selector: Some(selector.clone()),
        match_label_keys: Some(vec![revision.to_owned()]),
        topology_key: "topology.kubernetes.io/zone".to_owned(),
        ..PodAffinityTerm::default()
    };
    let preferred = WeightedPodAffinityTerm { weight: 100, pod_affinity_term: other_zones };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![preferred]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}
