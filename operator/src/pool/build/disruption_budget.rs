use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Wanted, label_selector, metadata};
use crate::names::DRAINED;

/// None where there is never more than a single builder: a quarter of one, rounded up, is all there is, and a budget would
/// only stand in the way of tools that look for one. Builders that are drained do not count: a busy one never blocks the eviction of an idle one.
pub fn build(wanted: &Wanted) -> Option<PodDisruptionBudget> {
    if wanted.most < 2 {
        return None;
    }
    let mut selector = label_selector(wanted);
    selector.match_expressions = Some(vec![LabelSelectorRequirement {
        key: DRAINED.to_owned(),
        operator: "DoesNotExist".to_owned(),
        values: None,
    }]);
    Some(PodDisruptionBudget {
        metadata: metadata(wanted),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::String("25%".to_owned())),
            selector: Some(selector),
            // A pod that never became ready must not keep a node from being drained.
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        ..PodDisruptionBudget::default()
    })
}
