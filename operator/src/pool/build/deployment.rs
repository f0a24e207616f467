use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec};
use k8s_openapi::api::core::v1::PodTemplateSpec;

use super::{Wanted, label_selector, metadata};

/// Kept to look back at, not to go back to.
const HISTORY: i32 = 2;

pub fn build(wanted: &Wanted, template: PodTemplateSpec) -> Deployment {
    Deployment {
        metadata: metadata(wanted),
        spec: Some(DeploymentSpec {
            replicas: Some(wanted.replicas),
            revision_history_limit: Some(HISTORY),
            selector: label_selector(wanted),
            template,
            ..DeploymentSpec::default()
        }),
        ..Deployment::default()
    }
}
