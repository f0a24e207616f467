//! What the pods of all roles have.

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EnvVar, EnvVarSource, Lifecycle, LifecycleHandler, LocalObjectReference,
    PodSpec, PodTemplateSpec, Probe, SecretKeySelector, SleepAction, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Wanted, labels, selector};
use crate::names::SECRETS_HASH;
use crate::pod::{
    Image, RUN, TMP, apart, empty, field, mount, part, probe, restricted, secret, setting, spread,
};

/// The user of the slim image.
pub const USER: i64 = 65532;
/// The label that tells the pods of one revision of a Deployment from those of another.
const REVISION: &str = "pod-template-hash";
/// For so long a pod that is to go still answers: not all who send requests know that yet.
const FAREWELL: i64 = 5;
const DATABASE: &str = "database-url";
const S3: &str = "s3";

/// A role's own container: settings, ports and probes. Alive means that it answers; the database is no part of it.
pub fn container(wanted: &Wanted<'_>, image: Image<'_>, user: i64, more: Vec<EnvVar>) -> Container {
    let (name, port) = (wanted.role.name(), wanted.role.port());
    let mut env = vec![
        // Before those that refer to it.
        field("POD_IP", "status.podIP"),
        setting("DATABASE_URL_FILE", format!("{RUN}/database/{}", wanted.database.key)),
        setting("LISTEN", format!("0.0.0.0:{port}")),
    ];
    env.extend(more);
    Container {
        args: Some(vec![name.to_owned()]),
        env: Some(env),
        ports: Some(vec![ContainerPort {
            name: Some("http".to_owned()),
            container_port: port,
            ..ContainerPort::default()
        }]),
        liveness_probe: Some(Probe {
            period_seconds: Some(20),
            failure_threshold: Some(6),
            ..probe("/healthz", port)
        }),
        readiness_probe: Some(Probe { period_seconds: Some(5), ..probe("/readyz", port) }),
        startup_probe: Some(Probe {
            period_seconds: Some(1),
            failure_threshold: Some(60),
            ..probe("/healthz", port)
        }),
        lifecycle: Some(Lifecycle {
            pre_stop: Some(LifecycleHandler {
                sleep: Some(SleepAction { seconds: FAREWELL }),
                ..LifecycleHandler::default()
            }),
            ..Lifecycle::default()
        }),
        security_context: Some(restricted(user)),
        volume_mounts: Some(vec![mount(DATABASE, &format!("{RUN}/database")), part(TMP, "/tmp", name)]),
        resources: Some(wanted.role.resources(wanted.installation).clone()),
        ..image.container(name)
    }
}

/// The address under which other pods reach this one.
pub fn own_url(wanted: &Wanted<'_>) -> EnvVar {
    setting("URL", format!("http://$(POD_IP):{}", wanted.role.port()))
}

/// How the bucket is reached.
pub fn bucket(wanted: &Wanted<'_>) -> (Vec<EnvVar>, Option<(Volume, VolumeMount)>) {
    let s3 = &wanted.installation.s3;
    let mut env =
        vec![setting("S3_BUCKET", &s3.bucket), setting("S3_VIRTUAL_HOST", s3.virtual_host.to_string())];
    let given = [
        ("S3_ENDPOINT", &s3.endpoint),
        ("S3_PUBLIC_ENDPOINT", &s3.public_endpoint),
        ("S3_REGION", &s3.region),
    ];
    env.extend(given.into_iter().filter_map(|(name, value)| Some(setting(name, value.as_ref()?))));
    let Some(name) = &s3.secret else { return (env, None) };
    let key = SecretKeySelector { name: name.clone(), key: "access-key-id".to_owned(), optional: None };
    env.push(EnvVar {
        value_from: Some(EnvVarSource { secret_key_ref: Some(key), ..EnvVarSource::default() }),
        value: None,
        ..setting("S3_ACCESS_KEY_ID", "")
    });
    let file = "secret-access-key";
    env.push(setting("S3_SECRET_ACCESS_KEY_FILE", format!("{RUN}/s3/{file}")));
    let volume = secret(S3, name, file, file, 0o440);
    (env, Some((volume, mount(S3, &format!("{RUN}/s3")))))
}

/// The pod around it.
pub fn template(wanted: &Wanted<'_>, spec: PodSpec) -> PodTemplateSpec {
    let installation = wanted.installation;
    let (node_selector, tolerations) = wanted.role.placement(installation);
    let pull = installation.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    let database =
        secret(DATABASE, &wanted.database.secret, &wanted.database.key, &wanted.database.key, 0o444);
    let mut volumes = vec![database, empty(TMP)];
    volumes.extend(spec.volumes.unwrap_or_default());
    let annotations = [(SECRETS_HASH.to_owned(), wanted.secrets_hash.clone())];
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(labels(installation, wanted.role.name())),
            annotations: Some(annotations.into()),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            service_account_name: Some(wanted.role.child_name(installation)),
            automount_service_account_token: Some(false),
            // Variables of Services would look like settings.
            enable_service_links: Some(false),
            volumes: Some(volumes),
            node_selector: Some(node_selector.clone()),
            tolerations: Some(tolerations.to_vec()),
            topology_spread_constraints: Some(spread(&selector(wanted), REVISION)),
            affinity: Some(apart(&selector(wanted), REVISION)),
            image_pull_secrets: Some(pull.collect()),
            ..spec
        }),
    }
}

/// The slim image.
pub fn slim<'a>(wanted: &Wanted<'a>) -> Image<'a> {
    Image { name: &wanted.installation.image, pull: wanted.installation.image_pull_policy.as_deref() }
}

/// The image with Nix.
pub fn with_nix<'a>(wanted: &Wanted<'a>) -> Image<'a> {
    Image { name: &wanted.installation.builder_image, pull: wanted.installation.image_pull_policy.as_deref() }
}
