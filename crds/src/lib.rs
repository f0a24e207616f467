//! The custom resources of harmonia-ci: what `kubectl apply`, `explain` and `get` know of a build farm.
//!
//! Everything here is data: what the API server checks is written into the CRDs, what follows from a spec is the
//! operator's.

pub mod conditions;
pub mod overlay;
pub mod pool;
pub mod project;
pub mod quantity;
pub mod reference;
#[cfg(test)]
mod rules;
mod schema;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResourceExt, ResourceExt};
use thiserror::Error;

pub use crate::pool::{BuilderPool, BuilderPoolSpec, BuilderPoolStatus};
pub use crate::project::{Project, ProjectSpec, ProjectStatus};

/// With the value `disabled`, the operator leaves the object alone, as with `spec.paused`.
pub const RECONCILE_ANNOTATION: &str = "ci.harmonia.dev/reconcile";

/// Every CRD, as the API server gets it.
pub fn all() -> [CustomResourceDefinition; 2] {
    [schema::readable(BuilderPool::crd()), schema::readable(Project::crd())]
}

/// A CRD as a document of YAML, for `kubectl apply --server-side`.
pub fn yaml(crd: &CustomResourceDefinition) -> Result<String, YamlError> {
    let document = schema::plain(serde_json::to_value(crd)?);
    Ok(serde_saphyr::to_string(&document)?)
}

/// A CRD cannot be written as YAML.
#[derive(Debug, Error)]
pub enum YamlError {
    /// Not even as JSON.
    #[error("a custom resource definition cannot be written as JSON")]
    Json(#[from] serde_json::Error),
    /// As JSON, but not as YAML.
    #[error("a custom resource definition cannot be written as YAML")]
    Yaml(#[from] serde_saphyr::SerializeError),
}

impl BuilderPool {
    /// Whether the operator should leave it alone.
    pub fn is_paused(&self) -> bool {
        self.spec.paused || is_disabled(self)
    }
}

impl Project {
    /// Whether the operator should leave it alone. `spec.paused` does not say so: that pauses its builds.
    pub fn is_disabled(&self) -> bool {
        is_disabled(self)
    }
}

fn is_disabled(object: &impl ResourceExt) -> bool {
    object.annotations().get(RECONCILE_ANNOTATION).is_some_and(|value| value == "disabled")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `harmonia-ci crds --directory crds`
    #[test]
    fn the_yaml_is_up_to_date() {
        let files = [include_str!("../builderpools.yaml"), include_str!("../projects.yaml")];
        for (crd, file) in all().iter().zip(files) {
            assert!(yaml(crd).unwrap() == file, "make {} again", crd.name_any());
        }
    }
}
