//! Pods of builders that claim nothing and hold nothing are marked. Disruption budgets select what is not marked, so that an
//! eviction of an idle builder never waits for a busy one.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use harmonia_queue::nodes::Node;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::context::Context;
use crate::names::{COMPONENT, DRAINED, POOL};

/// Marks pods and takes marks away, where that is a change.
pub async fn mark(context: &Context, builders: &[Node]) {
    if !context.standing().may_apply() {
        return;
    }
    let pods =
        context.caches.pods.all(|pod| pod.labels().get(COMPONENT).is_some_and(|role| role == "builder"));
    let changes = changes(builders, &pods);
    join_all(changes.into_iter().map(|(pod, drained)| patch(context, pod, drained))).await;
}

/// Pods whose mark has to change, and whether they are to have one. One that is being deleted is let be.
fn changes<'a>(builders: &[Node], pods: &'a [Arc<Pod>]) -> Vec<(&'a Pod, bool)> {
    let drained: BTreeSet<(&str, &str)> = builders
        .iter()
        .filter(|builder| builder.state() == "drained")
        .map(|builder| (builder.pool.as_str(), builder.name.as_str()))
        .collect();
    let change = |pod: &'a Arc<Pod>| {
        let pool = format!("{}/{}", pod.namespace()?, pod.labels().get(POOL)?);
        let wanted = drained.contains(&(pool.as_str(), pod.metadata.name.as_deref()?));
        let marked = pod.labels().contains_key(DRAINED);
        (pod.metadata.deletion_timestamp.is_none() && wanted != marked).then_some((&**pod, wanted))
    };
    pods.iter().filter_map(change).collect()
}

async fn patch(context: &Context, pod: &Pod, drained: bool) {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &namespace);
    let label = drained.then_some("true");
    let patch = Patch::Merge(json!({"metadata": {"uid": pod.metadata.uid, "labels": {DRAINED: label}}}));
    tracing::info!(namespace, name, drained, "mark a builder's pod");
    match api.patch(&name, &PatchParams::default(), &patch).await {
        Ok(_) => {}
        // Gone, or another of its name: the uid does not fit.
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(namespace, name, error, "a builder's pod cannot be marked; tried again in 2 s");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::nodes::tests::builder;

    fn pod(name: &str, namespace: &str, more: serde_json::Value) -> Arc<Pod> {
        let mut pod = json!({"metadata": {"name": name, "namespace": namespace, "labels": {POOL: "x86", COMPONENT: "builder"}}});
        for (key, value) in more.as_object().unwrap() {
            match value.as_object() {
                Some(labels) => pod["metadata"]["labels"].as_object_mut().unwrap().extend(labels.clone()),
                None => pod["metadata"][key] = value.clone(),
            }
        }
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn marks(builders: &[Node], pods: &[Arc<Pod>]) -> Vec<bool> {
        changes(builders, pods).into_iter().map(|(_, drained)| drained).collect()
    }

    #[test]
    fn who_drains_and_holds_nothing_is_marked_once() {
        let builders = [builder(1, "a", &["cordoned"])];
        assert_eq!(marks(&builders, &[pod("x86-builder-1", "ci", json!({}))]), [true]);
        let marked = pod("x86-builder-1", "ci", json!({"labels": {DRAINED: "true"}}));
        assert_eq!(marks(&builders, std::slice::from_ref(&marked)), [] as [bool; 0]);
        assert_eq!(marks(&[builder(1, "a", &[])], &[marked]), [false]);
    }

    #[test]
    fn who_holds_something_or_claims_is_not_marked() {
        let busy = Node { uploading: 1, ..builder(1, "a", &["cordoned"]) };
        for builder in [busy, builder(1, "a", &[])] {
            assert!(marks(&[builder], &[pod("x86-builder-1", "ci", json!({}))]).is_empty());
        }
    }

    #[test]
    fn a_pod_of_the_same_name_in_another_namespace_is_another() {
        let builders = [builder(1, "a", &["cordoned"])];
        assert!(marks(&builders, &[pod("x86-builder-1", "other", json!({}))]).is_empty());
    }

    #[test]
    fn a_pod_that_is_being_deleted_is_let_be() {
        let builders = [builder(1, "a", &["cordoned"])];
        let going = pod("x86-builder-1", "ci", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
        assert!(marks(&builders, &[going]).is_empty());
    }
}
