use k8s_openapi::api::core::v1::{
    EnvVar, PodSecurityContext, PodSpec, PodTemplateSpec, SecretVolumeSource, Volume, VolumeMount,
};
use serde_json::json;

use super::Wanted;
use super::pod::{USER, bucket, container, slim, template};
use crate::installation::config::{Forge, Oidc};
use crate::pod::{RUN, mount, setting};

pub fn build(wanted: &Wanted<'_>) -> PodTemplateSpec {
    let frontend = &wanted.installation.frontend;
    let (mut env, key) = bucket(wanted);
    env.extend([
        setting("URL", &frontend.url),
        setting("ANONYMOUS_READ", frontend.anonymous_read.to_string()),
    ]);
    env.extend(frontend.public_url.as_ref().map(|url| setting("PUBLIC_URL", url)));
    let forges = &wanted.installation.forges;
    if !forges.is_empty() {
        env.push(setting("FORGES", json!(forges.iter().map(entry).collect::<Vec<_>>()).to_string()));
    }
    let oidc = wanted.installation.oidc.as_ref();
    env.extend(oidc.into_iter().flat_map(sign_in));
    let mut container = container(wanted, slim(wanted), USER, env);
    let forges =
        forges.iter().map(|forge| secret(&format!("forge-{}", forge.name), &forge.secret, &place(forge)));
    let oidc = oidc.and_then(|oidc| oidc.secret.as_ref()).map(|name| secret("oidc", name, &client()));
    let (volumes, mounts): (Vec<_>, Vec<_>) = key.into_iter().chain(forges).chain(oidc).unzip();
    container.volume_mounts.get_or_insert_default().extend(mounts);
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

/// As the setting has it: secrets are files, which are read again when they change.
fn entry(forge: &Forge) -> serde_json::Value {
    let file = |key: &str| format!("{}/{key}", place(forge));
    let mut entry =
        json!({"name": forge.name, "type": forge.kind, "webhook_secret_file": file("webhook-secret")});
    if let Some(url) = &forge.url {
        entry["url"] = json!(url);
    }
    match forge.app_id {
        Some(id) => {
            entry["app_id"] = json!(id);
            entry["private_key_file"] = json!(file("private-key"));
        }
        None => entry["token_file"] = json!(file("token")),
    }
    if let Some(id) = &forge.client_id {
        entry["client_id"] = json!(id);
        entry["client_secret_file"] = json!(file("client-secret"));
    }
    entry
}

fn place(forge: &Forge) -> String {
    format!("{RUN}/forges/{}", forge.name)
}

/// Where the secret of the provider's client is.
fn client() -> String {
    format!("{RUN}/oidc")
}

/// The settings by which people sign in.
fn sign_in(oidc: &Oidc) -> Vec<EnvVar> {
    let mut env: Vec<EnvVar> = oidc.issuer.iter().map(|issuer| setting("OIDC_ISSUER", issuer)).collect();
    env.extend(oidc.client_id.iter().map(|id| setting("OIDC_CLIENT_ID", id)));
    if oidc.secret.is_some() {
        env.push(setting("OIDC_CLIENT_SECRET_FILE", format!("{}/client-secret", client())));
    }
    for (name, people) in
        [("ADMINS", &oidc.admins), ("OPERATORS", &oidc.operators), ("READERS", &oidc.readers)]
    {
        if !people.is_empty() {
            env.push(setting(name, people.join(",")));
        }
    }
    env
}

fn secret(name: &str, secret: &str, place: &str) -> (Volume, VolumeMount) {
    let volume = Volume {
        name: name.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            default_mode: Some(0o440),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    };
    (volume, mount(name, place))
}
