use k8s_openapi::api::apps::v1::{
    StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec,
};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::pod::NIX;

use super::{Wanted, child_name, label_selector, metadata, pod};

/// Kept to look back at, not to go back to.
const HISTORY: i32 = 2;

pub fn build(wanted: &Wanted, template: PodTemplateSpec) -> StatefulSet {
    let claim = PersistentVolumeClaim {
        metadata: ObjectMeta { name: Some(NIX.to_owned()), ..ObjectMeta::default() },
        spec: Some(pod::claim(wanted)),
        ..PersistentVolumeClaim::default()
    };
    // A store is a cache: it goes with its builder, or claims pile up.
    let delete = || Some("Delete".to_owned());
    StatefulSet {
        metadata: metadata(wanted),
        spec: Some(StatefulSetSpec {
            replicas: Some(wanted.replicas),
            revision_history_limit: Some(HISTORY),
            service_name: Some(child_name(&wanted.name)),
            // Builders do not wait for each other.
            pod_management_policy: Some("Parallel".to_owned()),
            persistent_volume_claim_retention_policy: Some(StatefulSetPersistentVolumeClaimRetentionPolicy {
                when_deleted: delete(),
                when_scaled: delete(),
            }),
            selector: label_selector(wanted),
            template,
            volume_claim_templates: Some(vec![claim]),
            ..StatefulSetSpec::default()
        }),
        ..StatefulSet::default()
    }
}
