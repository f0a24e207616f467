use k8s_openapi::api::core::v1::{PodSecurityContext, PodSpec, PodTemplateSpec};

use super::Wanted;
use super::pod::{USER, bucket, container, slim, template};
use crate::pod::setting;

pub fn build(wanted: &Wanted<'_>) -> PodTemplateSpec {
    let frontend = &wanted.installation.frontend;
    let (mut env, key) = bucket(wanted);
    env.extend([
        setting("URL", &frontend.url),
        setting("ANONYMOUS_READ", frontend.anonymous_read.to_string()),
    ]);
    let mut container = container(wanted, slim(wanted), USER, env);
    let (volumes, mounts): (Vec<_>, Vec<_>) = key.into_iter().unzip();
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
