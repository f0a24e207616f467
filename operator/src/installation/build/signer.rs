use k8s_openapi::api::core::v1::{PodSecurityContext, PodSpec, PodTemplateSpec, SecretVolumeSource, Volume};

use super::Wanted;
use super::pod::{USER, bucket, container, own_url, slim, template};
use crate::pod::{RUN, mount, setting};

const SIGNING: &str = "signing";

/// Only these pods have the keys: every value of the Secret is one.
pub fn build(wanted: &Wanted<'_>) -> PodTemplateSpec {
    let (mut env, key) = bucket(wanted);
    let keys = format!("{RUN}/{SIGNING}");
    env.extend([own_url(wanted), setting("SIGNING_KEY_FILES", &keys)]);
    let signer = &wanted.installation.signer;
    let kept = [
        ("SWEEP_EVERY", &signer.sweep_every),
        ("SWEEP_GRACE", &signer.sweep_grace),
        ("LOG_RETENTION", &signer.log_retention),
    ];
    env.extend(kept.into_iter().filter_map(|(name, value)| Some(setting(name, value.as_deref()?))));
    env.extend(wanted.installation.tracing.iter().map(|tracing| setting("OTLP_ENDPOINT", &tracing.endpoint)));
    let mut container = container(wanted, slim(wanted), USER, env);
    let mounts = container.volume_mounts.get_or_insert_default();
    mounts.push(mount(SIGNING, &keys));
    let mut volumes = vec![Volume {
        name: SIGNING.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(wanted.installation.signing.secret.clone()),
            default_mode: Some(0o400),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }];
    if let Some((volume, mount)) = key {
        volumes.push(volume);
        mounts.push(mount);
    }
    template(
        wanted,
        PodSpec {
            containers: vec![container],
            volumes: Some(volumes),
            security_context: Some(PodSecurityContext {
                fs_group: Some(USER),
                ..PodSecurityContext::default()
            }),
            ..PodSpec::default()
        },
    )
}
