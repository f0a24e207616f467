use harmonia_crds::pool::Sandbox;
use k8s_openapi::api::core::v1::{ConfigMap, PodSpec, PodTemplateSpec, SecretVolumeSource, Volume};

use super::pod::{container, own_url, template, with_nix};
use super::{Wanted, metadata};
use crate::installation::config::{Evaluator, Installation};
use crate::installation::secrets::{credentials_secret, netrc_secret};
use crate::pod::{CONF, NETRC, NIX, RUN, STATE, config, daemon, empty, field, mount, secret, seed, setting};

/// The user of the image with Nix.
const USER: i64 = 1000;
const NIX_CONF: &str = "nix.conf";
const STATE_DIR: &str = "/var/lib/harmonia-ci";
const CREDENTIALS: &str = "credentials";
const CREDENTIALS_DIR: &str = "/etc/harmonia-ci/credentials";

/// Like a builder's pod, but for the builds: its daemon only keeps what is evaluated.
pub fn build(wanted: &Wanted<'_>) -> PodTemplateSpec {
    let installation = wanted.installation;
    let evaluator = &installation.evaluator;
    let mut env = vec![
        own_url(wanted),
        setting("STATE_DIR", STATE_DIR),
        setting("CREDENTIALS_DIR", CREDENTIALS_DIR),
        field("HARMONIA_CI_NODE", "metadata.name"),
    ];
    let given = [
        ("EVAL_WORKERS", evaluator.workers.map(|workers| workers.to_string())),
        ("EVAL_MEMORY", evaluator.memory.map(|memory| memory.0.to_string())),
        ("EVAL_TIMEOUT", evaluator.timeout.map(|timeout| format!("{}s", timeout.0.as_secs()))),
        ("EVAL_NETWORKS", joined(&evaluator.networks, ",")),
        ("SUBSTITUTERS", joined(&evaluator.substituters, " ")),
        ("TRUSTED_PUBLIC_KEYS", joined(&evaluator.trusted_public_keys, " ")),
    ];
    env.extend(given.into_iter().filter_map(|(name, value)| Some(setting(name, value?))));
    let image = with_nix(wanted);
    let mut container = container(wanted, image, USER, env);
    container.volume_mounts.get_or_insert_default().extend([
        mount(NIX, "/nix"),
        mount(CONF, "/etc/nix"),
        mount(STATE, STATE_DIR),
        mount(CREDENTIALS, CREDENTIALS_DIR),
    ]);
    let mut daemon = daemon(image, Sandbox::Disabled);
    daemon.resources = Some(evaluator.daemon_resources.clone());
    template(
        wanted,
        PodSpec {
            init_containers: Some(vec![seed(image, &daemon), daemon]),
            containers: vec![container],
            volumes: Some(vec![
                empty(NIX),
                config(CONF, &wanted.role.child_name(installation), NIX_CONF),
                secret(NETRC, &netrc_secret(installation), NETRC, NETRC, 0o400),
                credentials(installation),
                // Its parent is nobody's but the program's.
                empty(STATE),
            ]),
            ..PodSpec::default()
        },
    )
}

fn joined(all: &[String], by: &str) -> Option<String> {
    (!all.is_empty()).then(|| all.join(by))
}

/// netrc files of private repositories. There is no such Secret until a Project names one of its own.
fn credentials(installation: &Installation) -> Volume {
    Volume {
        name: CREDENTIALS.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(credentials_secret(installation)),
            optional: Some(true),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// `nix.conf` of the evaluators.
pub fn config_map(wanted: &Wanted<'_>) -> ConfigMap {
    ConfigMap {
        metadata: metadata(wanted, wanted.role.child_name(wanted.installation)),
        data: Some([(NIX_CONF.to_owned(), nix_conf(wanted.installation))].into()),
        ..ConfigMap::default()
    }
}

/// Nothing is built here: what an evaluation would have to build first is refused with Nix's own sentence. What is fetched from
/// the farm's cache has its hash in its name, so no key of it is needed.
pub fn nix_conf(installation: &Installation) -> String {
    let Evaluator { substituters, trusted_public_keys, .. } = &installation.evaluator;
    let own = format!("{}/cache", installation.frontend.url.trim_end_matches('/'));
    let caches = [&own].into_iter().chain(substituters).map(String::as_str).collect::<Vec<_>>().join(" ");
    let keys = trusted_public_keys.join(" ");
    format!(
        "allow-import-from-derivation = false\n\
         build-users-group = nixbld\n\
         builders =\n\
         experimental-features = nix-command flakes ca-derivations\n\
         max-jobs = 0\n\
         narinfo-cache-negative-ttl = 0\n\
         netrc-file = {RUN}/{NETRC}\n\
         sandbox = false\n\
         substituters = {caches}\n\
         trusted-public-keys = {keys}\n\
         trusted-users = root harmonia\n"
    )
}
