//! From the installation to the objects of Kubernetes. Pure.

mod disruption_budget;
mod evaluator;
mod frontend;
mod pod;
mod signer;

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::{ConfigMap, PodTemplateSpec};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

pub use evaluator::nix_conf;

use super::config::{Installation, SecretKey};
use super::role::Role;
use crate::names::{COMPONENT, INSTANCE, MANAGED_BY, NAME};

/// Kept to look back at, not to go back to.
const HISTORY: i32 = 2;

/// All that a role's objects follow from.
#[derive(Debug, Clone)]
pub struct Wanted<'a> {
    /// As the chart wrote it down.
    pub installation: &'a Installation,
    /// Where the objects are.
    pub namespace: &'a str,
    /// Whose they are: with it they go.
    pub owner: &'a OwnerReference,
    /// Which.
    pub role: Role,
    /// Where its URL of the database is.
    pub database: SecretKey,
    /// Changes with what the pods read.
    pub secrets_hash: String,
}

/// What one role is made of.
#[derive(Debug, Clone)]
pub struct Objects {
    /// Its pods.
    pub deployment: Deployment,
    /// How many of them may be evicted at once. None: there is only one.
    pub disruption_budget: Option<PodDisruptionBudget>,
    /// Its `nix.conf`, where it has a store.
    pub config_map: Option<ConfigMap>,
}

/// Everything.
pub fn build(wanted: &Wanted<'_>) -> Objects {
    let template = match wanted.role {
        Role::Signer => signer::build(wanted),
        Role::Frontend => frontend::build(wanted),
        Role::Evaluator => evaluator::build(wanted),
    };
    Objects {
        deployment: deployment(wanted, template),
        disruption_budget: disruption_budget::build(wanted),
        config_map: match wanted.role {
            Role::Evaluator => Some(evaluator::config_map(wanted)),
            Role::Signer | Role::Frontend => None,
        },
    }
}

/// A new pod is there before an old one goes.
fn deployment(wanted: &Wanted<'_>, template: PodTemplateSpec) -> Deployment {
    Deployment {
        metadata: metadata(wanted, wanted.role.child_name(wanted.installation)),
        spec: Some(DeploymentSpec {
            replicas: Some(wanted.role.replicas(wanted.installation)),
            revision_history_limit: Some(HISTORY),
            selector: selector(wanted),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_unavailable: Some(IntOrString::Int(0)),
                    max_surge: Some(IntOrString::Int(1)),
                }),
            }),
            template,
            ..DeploymentSpec::default()
        }),
        ..Deployment::default()
    }
}

/// The labels of a role's objects.
pub fn labels(installation: &Installation, component: &str) -> BTreeMap<String, String> {
    let labels = [NAME, MANAGED_BY, (COMPONENT, component), (INSTANCE, &installation.name)];
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn selector(wanted: &Wanted<'_>) -> LabelSelector {
    let labels = labels(wanted.installation, wanted.role.name());
    LabelSelector { match_labels: Some(labels), ..LabelSelector::default() }
}

fn metadata(wanted: &Wanted<'_>, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: Some(wanted.namespace.to_owned()),
        labels: Some(labels(wanted.installation, wanted.role.name())),
        owner_references: Some(vec![wanted.owner.clone()]),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests;
