//! The builder's pod: Nix's daemon as a native sidecar, so that it outlives the builder's last upload, and the builder beside it.

use std::collections::BTreeMap;
use std::time::Duration;

use harmonia_crds::overlay::{BUILDER, NIX_DAEMON, OverlayContainer, OverlaySpec, PodOverlay};
use harmonia_crds::pool::{Sandbox, StoreMode};
use harmonia_crds::quantity::Size;
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EphemeralVolumeSource,
    LocalObjectReference, PersistentVolumeClaimSpec, PersistentVolumeClaimTemplate, PodSpec, PodTemplateSpec,
    Probe, Volume, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::config_map::NIX_CONF;
use super::{Wanted, child_name, label_selector, labels};
use crate::names::{CONFIG_HASH, SECRETS_HASH};
use crate::pod::{
    self, CONF, Image, NETRC, NIX, RUN, STATE, TMP, apart, daemon, empty, field, mount, part, probe,
    restricted, seed, setting, spread,
};
use crate::pool::database::DATABASE_URL;
use crate::pool::validate::ARCHITECTURE;
use crate::secrets;

/// The builder's pages.
pub const PORT: i32 = 7779;
/// The builder's user in the image.
const USER: i64 = 1000;
/// The builder ends so long before the kubelet ends it.
const HASTE: Duration = Duration::from_secs(5);

pub fn build(wanted: &Wanted, config: &ConfigMap) -> PodTemplateSpec {
    let PodOverlay { metadata, spec: overlay } = wanted.overlay.clone();
    let OverlaySpec {
        node_selector,
        tolerations,
        affinity,
        topology_spread_constraints,
        priority_class_name,
        runtime_class_name,
        image_pull_secrets,
        volumes: more_volumes,
        containers,
    } = overlay;
    let image = Image { name: &wanted.image, pull: wanted.image_pull_policy.as_deref() };
    let mut daemon = daemon(image, wanted.nix.sandbox);
    let mut builder = builder(wanted, image);
    for overlay in containers {
        match overlay.name.as_str() {
            NIX_DAEMON => lay_over(&mut daemon, overlay),
            BUILDER => lay_over(&mut builder, overlay),
            // Refused before.
            _ => {}
        }
    }
    if let Some(memory) = wanted.memory {
        give(&mut daemon, memory);
    }
    let name = child_name(&wanted.name);
    let mut pull: Vec<LocalObjectReference> =
        wanted.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() }).collect();
    pull.extend(image_pull_secrets);
    let nodes = [(ARCHITECTURE, wanted.architecture), ("kubernetes.io/os", "linux")];
    let nodes = nodes.map(|(key, value)| (key.to_owned(), value.to_owned()));
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(joined(metadata.labels, labels(&wanted.name))),
            annotations: Some(joined(metadata.annotations, annotations(wanted, config))),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            service_account_name: Some(name.clone()),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            host_users: (wanted.nix.sandbox == Sandbox::UserNamespace).then_some(false),
            termination_grace_period_seconds: Some(wanted.grace.as_secs().cast_signed()),
            init_containers: Some(vec![seed(image, &daemon), daemon]),
            containers: vec![builder],
            volumes: Some(volumes(wanted, &name).into_iter().chain(more_volumes).collect()),
            node_selector: Some(joined(node_selector, nodes.into())),
            tolerations: some(tolerations),
            affinity: affinity.or_else(|| Some(apart(&label_selector(wanted), revision(wanted)))),
            topology_spread_constraints: Some(if topology_spread_constraints.is_empty() {
                spread(&label_selector(wanted), revision(wanted))
            } else {
                topology_spread_constraints
            }),
            priority_class_name,
            runtime_class_name,
            image_pull_secrets: some(pull),
            ..PodSpec::default()
        }),
    }
}

/// Ours win.
fn joined(theirs: BTreeMap<String, String>, ours: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut joined = theirs;
    joined.extend(ours);
    joined
}

fn some<T>(items: Vec<T>) -> Option<Vec<T>> {
    (!items.is_empty()).then_some(items)
}

/// The daemon reads `nix.conf` when it starts: other contents need other pods.
fn annotations(wanted: &Wanted, config: &ConfigMap) -> BTreeMap<String, String> {
    let files = config.data.iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
    let hashes = [(SECRETS_HASH, wanted.secrets_hash.clone()), (CONFIG_HASH, secrets::hash(files))];
    hashes.map(|(key, hash)| (key.to_owned(), hash)).into()
}

fn lay_over(container: &mut Container, overlay: OverlayContainer) {
    let OverlayContainer { name: _, resources, env, volume_mounts } = overlay;
    if resources.is_some() {
        container.resources = resources;
    }
    container.env.get_or_insert_default().extend(env);
    container.volume_mounts.get_or_insert_default().extend(volume_mounts);
}

/// So much memory, no more and no less, whatever is laid over it: the queue counts on it.
fn give(container: &mut Container, memory: Size) {
    let resources = container.resources.get_or_insert_default();
    for quantities in [&mut resources.requests, &mut resources.limits] {
        quantities.get_or_insert_default().insert("memory".to_owned(), Quantity(memory.to_string()));
    }
}

fn builder(wanted: &Wanted, image: Image<'_>) -> Container {
    let page = |path| probe(path, PORT);
    Container {
        args: Some(vec!["builder".to_owned()]),
        env: Some(environment(wanted)),
        ports: Some(vec![ContainerPort {
            name: Some("http".to_owned()),
            container_port: PORT,
            ..ContainerPort::default()
        }]),
        // Alive means that it answers. The database is no part of it: a blip must not end what fifty builders have.
        liveness_probe: Some(Probe {
            period_seconds: Some(20),
            failure_threshold: Some(6),
            ..page("/healthz")
        }),
        readiness_probe: Some(Probe { period_seconds: Some(5), ..page("/readyz") }),
        startup_probe: Some(Probe {
            period_seconds: Some(2),
            failure_threshold: Some(60),
            ..page("/healthz")
        }),
        security_context: Some(restricted(USER)),
        volume_mounts: Some(vec![
            mount(NIX, "/nix"),
            mount(CONF, "/etc/nix"),
            mount(DATABASE_URL, RUN),
            mount(STATE, "/var/lib/harmonia-ci"),
            part(TMP, "/tmp", BUILDER),
        ]),
        ..image.container(BUILDER)
    }
}

/// The builder's settings.
fn environment(wanted: &Wanted) -> Vec<EnvVar> {
    let seconds = |span: Duration| format!("{}s", span.as_secs());
    let limits = &wanted.limits;
    let free = free(wanted.store.size);
    let values = [
        ("DATABASE_URL_FILE", format!("{RUN}/{DATABASE_URL}")),
        ("LISTEN", format!("0.0.0.0:{PORT}")),
        ("SLOTS", wanted.slots.to_string()),
        ("BUILD_CORES", wanted.cores.to_string()),
        ("BUILD_TIMEOUT", seconds(limits.timeout.0)),
        ("MAX_SILENT", seconds(limits.max_silent.0)),
        ("MAX_OUTPUT_SIZE", limits.max_output_size.0.to_string()),
        ("MAX_LOG_SIZE", limits.max_log_size.0.to_string()),
        ("MIN_FREE", free.to_string()),
        ("MAX_FREE", (free * 4).to_string()),
        ("GRACE", seconds(wanted.grace.saturating_sub(HASTE))),
        ("MARGIN", seconds(wanted.margin)),
    ];
    let fields = [("NODE", "metadata.name"), ("KUBE_NODE", "spec.nodeName")];
    let fields = fields.map(|(name, path)| field(&format!("HARMONIA_CI_{name}"), path));
    let tracing = wanted.tracing.iter().map(|endpoint| setting("OTLP_ENDPOINT", endpoint));
    values.map(|(name, value)| setting(name, value)).into_iter().chain(tracing).chain(fields).collect()
}

/// Garbage is collected when a tenth of the store is left, or 2 GiB.
fn free(Size(store): Size) -> u64 {
    (store / 10).min(2 << 30)
}

fn volumes(wanted: &Wanted, name: &str) -> Vec<Volume> {
    let volume = |name: &str| Volume { name: name.to_owned(), ..Volume::default() };
    let nix = match wanted.store.mode {
        StoreMode::Ephemeral => Some(Volume {
            ephemeral: Some(EphemeralVolumeSource {
                volume_claim_template: Some(PersistentVolumeClaimTemplate {
                    metadata: Some(ObjectMeta {
                        labels: Some(labels(&wanted.name)),
                        ..ObjectMeta::default()
                    }),
                    spec: claim(wanted),
                }),
            }),
            ..volume(NIX)
        }),
        StoreMode::EmptyDir => Some(Volume {
            empty_dir: Some(EmptyDirVolumeSource {
                size_limit: Some(Quantity(wanted.store.size.to_string())),
                ..EmptyDirVolumeSource::default()
            }),
            ..volume(NIX)
        }),
        // Made by the StatefulSet.
        StoreMode::Persistent => None,
    };
    let ours = [
        pod::config(CONF, name, NIX_CONF),
        // The daemon is root; the builder is not, and nobody else mounts what it reads.
        pod::secret(DATABASE_URL, name, DATABASE_URL, DATABASE_URL, 0o444),
        pod::secret(NETRC, name, NETRC, NETRC, 0o400),
        empty(STATE),
        empty(TMP),
    ];
    nix.into_iter().chain(ours).collect()
}

/// A store's volume.
pub fn claim(wanted: &Wanted) -> PersistentVolumeClaimSpec {
    let size = Quantity(wanted.store.size.to_string());
    PersistentVolumeClaimSpec {
        access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
        storage_class_name: wanted.store.storage_class_name.clone(),
        resources: Some(VolumeResourceRequirements {
            requests: Some([("storage".to_owned(), size)].into()),
            limits: None,
        }),
        ..PersistentVolumeClaimSpec::default()
    }
}

/// The label that tells the pods of one revision of the workload from those of another.
fn revision(wanted: &Wanted) -> &'static str {
    match wanted.store.mode {
        StoreMode::Ephemeral | StoreMode::EmptyDir => "pod-template-hash",
        StoreMode::Persistent => "controller-revision-hash",
    }
}
