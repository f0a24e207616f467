//! From what is wanted to the objects of Kubernetes.

mod config_map;
mod deployment;
mod disruption_budget;
mod network_policy;
mod pod;
mod service_account;
mod stateful_set;

use std::collections::BTreeMap;
use std::marker::PhantomData;

use harmonia_crds::BuilderPool;
use harmonia_crds::pool::StoreMode;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};

use super::validate::Wanted;
use crate::names::{COMPONENT, MANAGED_BY, NAME, POOL};

/// As they should be.
#[derive(Debug)]
pub enum Prepared {}
/// As the API server has them.
#[derive(Debug)]
pub enum Applied {}

/// The objects of a pool.
#[derive(Debug)]
pub struct Objects<State> {
    /// Who the pods are, without a token.
    pub service_account: ServiceAccount,
    /// `nix.conf`.
    pub config_map: ConfigMap,
    /// Whom the pods may talk to.
    pub network_policy: NetworkPolicy,
    /// How many pods may be evicted at once. None: there are too few to count.
    pub disruption_budget: Option<PodDisruptionBudget>,
    /// What makes the pods.
    pub workload: Workload,
    /// Whose word this is.
    pub state: PhantomData<State>,
}

/// What makes pods.
#[derive(Debug, Clone)]
pub enum Workload {
    /// With stores that go with the pods.
    Deployment(Box<Deployment>),
    /// With stores that stay.
    StatefulSet(Box<StatefulSet>),
}

/// Everything.
pub fn build(wanted: &Wanted) -> Objects<Prepared> {
    let config_map = config_map::build(wanted);
    let template = pod::build(wanted, &config_map);
    Objects {
        service_account: service_account::build(wanted),
        network_policy: network_policy::build(wanted),
        disruption_budget: disruption_budget::build(wanted),
        workload: match wanted.store.mode {
            StoreMode::Ephemeral | StoreMode::EmptyDir => {
                Workload::Deployment(Box::new(deployment::build(wanted, template)))
            }
            StoreMode::Persistent => Workload::StatefulSet(Box::new(stateful_set::build(wanted, template))),
        },
        config_map,
        state: PhantomData,
    }
}

/// What all objects of a pool are called.
pub fn child_name(pool: &str) -> String {
    format!("{pool}-builder")
}

/// The labels of a pool's objects, by which its pods are found.
pub fn labels(pool: &str) -> BTreeMap<String, String> {
    let labels = [NAME, MANAGED_BY, (COMPONENT, "builder"), (POOL, pool)];
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// As `kubectl` and the scale subresource write a selector.
pub fn selector(pool: &str) -> String {
    let labels: Vec<String> = labels(pool).iter().map(|(key, value)| format!("{key}={value}")).collect();
    labels.join(",")
}

fn label_selector(wanted: &Wanted) -> LabelSelector {
    LabelSelector { match_labels: Some(labels(&wanted.name)), ..LabelSelector::default() }
}

fn metadata(wanted: &Wanted) -> ObjectMeta {
    ObjectMeta {
        name: Some(child_name(&wanted.name)),
        namespace: Some(wanted.namespace.clone()),
        labels: Some(labels(&wanted.name)),
        owner_references: Some(vec![wanted.owner.clone()]),
        ..ObjectMeta::default()
    }
}

/// The same for an object that is made before anything is validated.
pub fn metadata_of(pool: &BuilderPool, name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: pool.namespace(),
        labels: Some(labels(&pool.name_any())),
        owner_references: owner(pool).map(|owner| vec![owner]),
        ..ObjectMeta::default()
    }
}

/// The pool, to whom its objects belong. They do not keep it from going: where owner references are checked, that would need a
/// right to finalizers of pools, and nothing waits for it.
pub fn owner(pool: &BuilderPool) -> Option<OwnerReference> {
    let owner = pool.controller_owner_ref(&())?;
    Some(OwnerReference { block_owner_deletion: None, ..owner })
}

#[cfg(test)]
mod tests;
