use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Wanted, metadata, selector};

/// None for a single pod: a budget of it would make its node undrainable.
pub fn build(wanted: &Wanted<'_>) -> Option<PodDisruptionBudget> {
    if wanted.role.replicas(wanted.installation) < 2 {
        return None;
    }
    Some(PodDisruptionBudget {
        metadata: metadata(wanted, wanted.role.child_name(wanted.installation)),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(selector(wanted)),
            // A pod that never became ready must not keep a node from being drained.
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        ..PodDisruptionBudget::default()
    })
}
