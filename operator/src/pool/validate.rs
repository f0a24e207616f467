//! From a pool and what it refers to, to what is wanted. The API server has refused most of what is wrong by its own rules; a
//! CRD of another release may have let it through.

use std::collections::BTreeMap;
use std::time::Duration;

use harmonia_crds::overlay::{BUILDER, MOUNTS, NIX_DAEMON, OverlayContainer, PodOverlay, TMP, VOLUMES};
use harmonia_crds::pool::{Limits, Nix, Store, refused_settings};
use harmonia_crds::quantity::Size;
use harmonia_crds::{BuilderPool, BuilderPoolSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;

use crate::installation::config::Installation;
use crate::secrets;

use super::dereference::{Dereferenced, Endpoint};
use super::{PoolError, build, scale};

/// What is wanted of a pool, as plain values.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Where it is,
    pub namespace: String,
    /// and what it is called.
    pub name: String,
    /// To whom its objects belong.
    pub owner: OwnerReference,
    /// How many builders there are to be,
    pub replicas: i32,
    /// and how many there may be.
    pub most: i32,
    /// Its objects are left alone.
    pub paused: bool,
    /// What nodes must have, in Kubernetes' words.
    pub architecture: &'static str,
    /// What the builders offer.
    pub features: Vec<String>,
    /// Builds at once in one pod.
    pub slots: i32,
    /// What a build sees as `NIX_BUILD_CORES`.
    pub cores: i32,
    /// What the builds in one pod have.
    pub memory: Option<Size>,
    /// Where the Nix store is.
    pub store: Store,
    /// How long a builder may take to go,
    pub grace: Duration,
    /// and how long before that it gives back what it has.
    pub margin: Duration,
    /// What a build may use.
    pub limits: Limits,
    /// How Nix is set up.
    pub nix: Nix,
    /// The keys that sign the farm's own cache.
    pub public_keys: Vec<String>,
    /// The farm's own cache.
    pub cache: String,
    /// What is laid over the pods.
    pub overlay: PodOverlay,
    /// Changes with what the pods read from Secrets.
    pub secrets_hash: String,
    /// The builders' image,
    pub image: String,
    /// when it is pulled,
    pub image_pull_policy: Option<String>,
    /// and with which Secrets.
    pub image_pull_secrets: Vec<String>,
    /// Where the frontends and signers are.
    pub release_namespace: String,
    /// Where the database is reached,
    pub database: Option<Endpoint>,
    /// and the bucket.
    pub bucket: Option<Endpoint>,
    /// Where traces go.
    pub tracing: Option<String>,
    /// Networks that builds must not reach.
    pub forbidden: Vec<String>,
}

/// What is wanted, or why it cannot be had.
pub fn validate(
    pool: &BuilderPool,
    known: Dereferenced,
    installation: &Installation,
    release_namespace: &str,
    replicas: i32,
) -> Result<Wanted, PoolError> {
    let BuilderPoolSpec {
        systems,
        features,
        mandatory_features,
        slots,
        cores,
        memory,
        replicas: _,
        scaling: _,
        store,
        drain,
        limits,
        nix,
        template,
        paused: _,
    } = &pool.spec;
    let overlay = template.clone().unwrap_or_default();
    let mut wrong = Vec::new();
    let architecture = architecture(systems).unwrap_or_else(|sentence| {
        wrong.push(sentence);
        ""
    });
    check_overlay(&overlay, &mut wrong);
    check_settings(&nix.settings, &mut wrong);
    let Some(owner) = build::owner(pool) else {
        return Err(PoolError::Invalid("the pool has no uid".to_owned()));
    };
    if !wrong.is_empty() {
        return Err(PoolError::Invalid(wrong.join("; ")));
    }
    let credentials = known.credentials.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let referred = known.secrets.iter().map(|(name, version)| (name.as_str(), version.as_str()));
    let mut offered = features.clone();
    offered.extend(mandatory_features.iter().filter(|name| !features.contains(name)).cloned());
    Ok(Wanted {
        namespace: pool.namespace().unwrap_or_default(),
        name: pool.name_any(),
        owner,
        replicas,
        most: scale::most(&pool.spec),
        paused: pool.is_paused(),
        architecture,
        features: offered,
        slots: *slots,
        cores: *cores,
        memory: *memory,
        store: store.clone(),
        grace: drain.grace_period.0,
        margin: drain.margin.0,
        limits: limits.clone(),
        nix: nix.clone(),
        secrets_hash: secrets::hash(credentials.chain(referred)),
        public_keys: known.public_keys,
        cache: format!("{}/cache", installation.frontend.url.trim_end_matches('/')),
        overlay,
        image: installation.builder_image.clone(),
        image_pull_policy: installation.image_pull_policy.clone(),
        image_pull_secrets: installation.image_pull_secrets.clone(),
        release_namespace: release_namespace.to_owned(),
        database: known.database,
        bucket: known.bucket,
        tracing: installation.tracing.as_ref().map(|tracing| tracing.endpoint.clone()),
        forbidden: installation.forbidden.clone(),
    })
}

/// Kubernetes' word for what runs the first system.
fn architecture(systems: &[String]) -> Result<&'static str, String> {
    let Some(first) = systems.first() else { return Err("the pool has no systems".to_owned()) };
    let Some(machine) = first.strip_suffix("-linux") else {
        return Err(format!("pods run Linux, and {first} is another system"));
    };
    match machine {
        "x86_64" | "i686" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        "armv7l" | "armv6l" => Ok("arm"),
        "riscv64" => Ok("riscv64"),
        "powerpc64le" => Ok("ppc64le"),
        "s390x" => Ok("s390x"),
        _ => Err(format!("no Kubernetes node is known to run {first}")),
    }
}

/// What an overlay may not touch.
fn check_overlay(overlay: &PodOverlay, wrong: &mut Vec<String>) {
    let ours = |key: &str, prefixes: &[&str]| prefixes.iter().any(|prefix| key.starts_with(prefix));
    for key in
        overlay.metadata.labels.keys().filter(|key| ours(key, &["ci.harmonia.dev/", "app.kubernetes.io/"]))
    {
        wrong.push(format!("template: the label {key} is the operator's"));
    }
    for key in overlay.metadata.annotations.keys().filter(|key| ours(key, &["ci.harmonia.dev/"])) {
        wrong.push(format!("template: the annotation {key} is the operator's"));
    }
    if overlay.spec.node_selector.contains_key(ARCHITECTURE) {
        wrong.push(format!("template: {ARCHITECTURE} follows from systems"));
    }
    for volume in overlay.spec.volumes.iter().filter(|volume| VOLUMES.contains(&volume.name.as_str())) {
        wrong.push(format!("template: the pod has a volume {} of its own", volume.name));
    }
    for container in &overlay.spec.containers {
        check_container(container, wrong);
    }
}

fn check_container(container: &OverlayContainer, wrong: &mut Vec<String>) {
    let name = &container.name;
    if ![BUILDER, NIX_DAEMON].contains(&name.as_str()) {
        wrong.push(format!("template: there is no container {name}: {BUILDER} and {NIX_DAEMON} are"));
    }
    for variable in container.env.iter().filter(|variable| variable.name.starts_with("HARMONIA_CI_")) {
        wrong.push(format!("template: the variable {} is the operator's", variable.name));
    }
    for mount in container.volume_mounts.iter().filter(|mount| hides(&mount.mount_path)) {
        wrong.push(format!(
            "template: nothing can be mounted at {}, where the pod has mounts of its own",
            mount.mount_path
        ));
    }
}

/// Whether a mount is at, below or above one of ours, or at the one below which others may be.
fn hides(path: &str) -> bool {
    let parts = |path: &'static str| path.split('/').filter(|part| !part.is_empty());
    let given: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    given.contains(&"..")
        || parts(TMP).eq(given.iter().copied())
        || MOUNTS.iter().any(|ours| parts(ours).zip(&given).all(|(ours, given)| ours == *given))
}

fn check_settings(settings: &BTreeMap<String, String>, wrong: &mut Vec<String>) {
    let refused = refused_settings();
    for (name, value) in settings {
        if refused.contains(name) {
            wrong.push(format!("nix.settings: {name} follows from other fields, or would undo the sandbox or the trust in signatures"));
        }
        if [name, value].iter().any(|text| text.contains(['\n', '\r'])) || name.contains(['=', ' ', '#']) {
            wrong.push(format!("nix.settings: {name:?} cannot be a line of nix.conf"));
        }
    }
}

/// The label of nodes.
pub const ARCHITECTURE: &str = "kubernetes.io/arch";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A pool that says `spec`, as the API server would hand it out.
    pub fn pool(spec: Value) -> BuilderPool {
        let mut object = json!({
            "apiVersion": "ci.harmonia.dev/v1alpha1", "kind": "BuilderPool",
            "metadata": {"name": "big", "namespace": "team", "uid": "7d5c", "generation": 3},
            "spec": {"systems": ["x86_64-linux"]},
        });
        for (key, value) in spec.as_object().unwrap() {
            object["spec"][key] = value.clone();
        }
        serde_json::from_value(object).unwrap()
    }

    /// What is known around it.
    pub fn known() -> Dereferenced {
        let credentials = [
            ("database-url", "postgres://pool_team_big:secret@db/ci"),
            ("netrc", "machine f login nix password t"),
        ];
        Dereferenced {
            public_keys: vec!["farm-1:AAAA".to_owned()],
            credentials: std::sync::Arc::new(
                credentials.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ),
            secrets: BTreeMap::new(),
            database: Some(Endpoint { host: "db.ci.svc".into(), port: 5432 }),
            bucket: Some(Endpoint { host: "10.1.2.3".into(), port: 9000 }),
        }
    }

    /// An installation that is called differently from everything else.
    pub fn installation() -> Installation {
        let role = json!({"replicas": 1});
        let mut frontend = role.clone();
        frontend["url"] = "http://farm-frontend.farm.svc/".into();
        let mut evaluator = role.clone();
        evaluator["workers"] = 1.into();
        let file = json!({
            "name": "farm", "image": "image:1", "builderImage": "builder:1", "imagePullPolicy": "IfNotPresent",
            "imagePullSecrets": ["pull"], "s3": {"bucket": "b"}, "signing": {"secret": "s"},
            "frontend": frontend, "signer": role, "evaluator": evaluator,
        });
        serde_json::from_value(file).unwrap()
    }

    /// What is wanted of such a pool.
    pub fn wanted(spec: Value) -> Wanted {
        let pool = pool(spec);
        validate(&pool, known(), &installation(), "farm", pool.spec.replicas.unwrap_or(1)).unwrap()
    }

    fn refused(spec: Value) -> String {
        validate(&pool(spec), known(), &installation(), "farm", 1).unwrap_err().to_string()
    }

    #[test]
    fn nodes_follow_from_the_first_system() {
        let of = |systems: &[&str]| {
            architecture(&systems.iter().map(|system| (*system).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["i686-linux", "x86_64-linux"]), Ok("amd64"));
        assert_eq!(of(&["aarch64-linux"]), Ok("arm64"));
        assert!(of(&["aarch64-darwin"]).unwrap_err().contains("pods run Linux"));
    }

    #[test]
    fn an_overlay_cannot_touch_what_is_ours() {
        for (template, word) in [
            (json!({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}), "label"),
            (json!({"metadata": {"annotations": {"ci.harmonia.dev/secrets-hash": "x"}}}), "annotation"),
            (json!({"spec": {"nodeSelector": {"kubernetes.io/arch": "arm64"}}}), "systems"),
            (json!({"spec": {"volumes": [{"name": "nix", "emptyDir": {}}]}}), "volume nix"),
            (json!({"spec": {"containers": [{"name": "seed"}]}}), "no container seed"),
            (
                json!({"spec": {"containers": [{"name": "builder", "env": [{"name": "HARMONIA_CI_SLOTS", "value": "9"}]}]}}),
                "HARMONIA_CI_SLOTS",
            ),
            (
                json!({"spec": {"containers": [{"name": "builder", "volumeMounts": [{"name": "a", "mountPath": "/etc/nix"}]}]}}),
                "/etc/nix",
            ),
        ] {
            let sentence = refused(json!({"template": template}));
            assert!(sentence.contains(word), "{sentence}");
        }
    }

    #[test]
    fn mounts_cannot_hide_ours() {
        for path in [
            "/",
            "/nix",
            "/nix/store/",
            "//nix",
            "/etc",
            "/var/lib/harmonia-ci/x",
            "/a/../nix",
            "/tmp",
            "/tmp/",
        ] {
            assert!(hides(path), "{path}");
        }
        for path in ["/cache", "/etc/ssl", "/nixos", "/var/lib/other", "/tmp/scratch"] {
            assert!(!hides(path), "{path}");
        }
    }

    #[test]
    fn settings_of_nix_cannot_undo_the_sandbox() {
        for settings in [
            json!({"sandbox": "false"}),
            json!({"keep-going": "true\nsandbox = false"}),
            json!({"a = b #": "c"}),
        ] {
            assert!(refused(json!({"nix": {"settings": settings}})).contains("nix.settings"));
        }
        assert_eq!(
            wanted(json!({"nix": {"settings": {"keep-going": "true"}}})).nix.settings["keep-going"],
            "true"
        );
    }

    #[test]
    fn the_hash_changes_with_a_secret_that_is_referred_to() {
        let mut other = known();
        other.secrets.insert("token".to_owned(), "42".to_owned());
        let with = validate(&pool(json!({})), other, &installation(), "farm", 1).unwrap();
        assert_ne!(with.secrets_hash, wanted(json!({})).secrets_hash);
    }

    #[test]
    fn mandatory_features_count_as_offered() {
        let wanted = wanted(json!({"features": ["kvm"], "mandatoryFeatures": ["gpu", "kvm"]}));
        assert_eq!(wanted.features, ["kvm", "gpu"]);
    }
}
