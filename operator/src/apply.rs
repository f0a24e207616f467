//! Server-side apply that sends nothing when the API server already has what is wanted.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::context::Context;
use crate::names::{APPLIED_HASH, FIELD_MANAGER};
use crate::quantity::same_quantity;

/// Why an object is not as it should be.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// Another replica leads.
    #[error("another replica leads")]
    NotLeading,
    /// It cannot be written down.
    #[error("failed to write {kind} {name} as JSON")]
    Serialise {
        /// Such as `Deployment`.
        kind: String,
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The API server said no, or cannot be asked.
    #[error("failed to {verb} {kind} {name}")]
    Api {
        /// `apply` or `delete`.
        verb: &'static str,
        /// Such as `Deployment`.
        kind: String,
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Applies an object; answers it as the API server has it. Nothing is sent if `cached`, what the API server has, was applied
/// from the same and still has all of it.
pub async fn apply<K>(context: &Context, desired: K, cached: Option<&K>) -> Result<K, ApplyError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let (kind, name) = (K::kind(&()).into_owned(), desired.name_any());
    let serialise = |source| ApplyError::Serialise { kind: kind.clone(), name: name.clone(), source };
    let wanted = stamped(desired).map_err(serialise)?;
    if let Some(cached) = cached
        && settled(&wanted, &serde_json::to_value(cached).map_err(serialise)?)
    {
        return Ok(cached.clone());
    }
    if !context.standing().may_apply() {
        return Err(ApplyError::NotLeading);
    }
    let namespace = wanted.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default();
    let api: Api<K> = Api::namespaced(context.client.clone(), namespace);
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    tracing::info!(kind, namespace, name, "apply");
    api.patch(&name, &parameters, &Patch::Apply(&wanted)).await.map_err(|source| ApplyError::Api {
        verb: "apply",
        kind,
        name,
        source: Box::new(source),
    })
}

/// Deletes an object that is wanted no more, and its dependents in the background. Only the one that was seen: a new one of
/// the same name stays.
pub async fn delete<K>(context: &Context, cached: &K) -> Result<(), ApplyError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    if cached.meta().deletion_timestamp.is_some() {
        return Ok(());
    }
    if !context.standing().may_apply() {
        return Err(ApplyError::NotLeading);
    }
    let (kind, name) = (K::kind(&()).into_owned(), cached.name_any());
    let namespace = cached.namespace().unwrap_or_default();
    let api: Api<K> = Api::namespaced(context.client.clone(), &namespace);
    let only = Preconditions { uid: cached.uid(), resource_version: None };
    let parameters = DeleteParams { preconditions: Some(only), ..DeleteParams::background() };
    tracing::info!(kind, namespace, name, "delete");
    match api.delete(&name, &parameters).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        Err(source) => Err(ApplyError::Api { verb: "delete", kind, name, source: Box::new(source) }),
    }
}

/// With a hash of itself: what was wanted once and is no more leaves no other trace in what is live.
fn stamped<K: Resource<DynamicType = ()> + Serialize>(mut desired: K) -> Result<Value, serde_json::Error> {
    let hash = format!("{:x}", Sha256::digest(serde_json::to_vec(&desired)?));
    desired.annotations_mut().insert(APPLIED_HASH.to_owned(), hash[..16].to_owned());
    serde_json::to_value(&desired)
}

/// Whether all that is wanted is live.
fn settled(wanted: &Value, live: &Value) -> bool {
    live.pointer("/metadata/deletionTimestamp").is_none() && contains(live, wanted, false)
}

/// Whether `live` has all of `wanted`, as server-side apply sees it: lists of named things by name, others as they are. What is
/// empty need not be there.
fn contains(live: &Value, wanted: &Value, quantities: bool) -> bool {
    match (wanted, live) {
        (Value::Object(wanted), Value::Object(live)) => wanted.iter().all(|(key, wanted)| {
            let quantities = quantities || matches!(key.as_str(), "requests" | "limits" | "sizeLimit");
            live.get(key).map_or_else(|| is_empty(wanted), |live| contains(live, wanted, quantities))
        }),
        (Value::Array(wanted), Value::Array(live)) if wanted.iter().all(|item| name(item).is_some()) => {
            wanted.iter().all(|wanted| {
                let same = live.iter().find(|live| name(live) == name(wanted));
                same.is_some_and(|live| contains(live, wanted, quantities))
            })
        }
        (Value::Array(wanted), Value::Array(live)) => {
            wanted.len() == live.len()
                && wanted.iter().zip(live).all(|(wanted, live)| contains(live, wanted, quantities))
        }
        (Value::String(wanted), Value::String(live)) => {
            wanted == live || (quantities && same_quantity(wanted, live))
        }
        (wanted, live) => wanted == live,
    }
}

fn name(item: &Value) -> Option<&str> {
    item.get("name").and_then(Value::as_str)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_server_adds_does_not_count() {
        let wanted = json!({"spec": {"replicas": 2, "containers": [{"name": "a", "image": "x"}]}});
        let live = json!({"spec": {"replicas": 2, "strategy": {"type": "RollingUpdate"},
            "containers": [{"name": "b"}, {"name": "a", "image": "x", "imagePullPolicy": "Always"}]}, "status": {}});
        assert!(settled(&wanted, &live));
    }

    #[test]
    fn what_somebody_changed_counts() {
        let wanted =
            json!({"spec": {"args": ["a", "b"], "replicas": 2, "containers": [{"name": "a", "image": "x"}]}});
        for (path, value) in [
            ("/spec/replicas", json!(3)),
            ("/spec/args", json!(["a"])),
            ("/spec/args", json!(["a", "c"])),
            ("/spec/containers", json!([])),
            ("/spec/containers/0/image", json!("y")),
        ] {
            let mut live = wanted.clone();
            *live.pointer_mut(path).unwrap() = value;
            assert!(!settled(&wanted, &live), "{path}");
        }
    }

    #[test]
    fn amounts_are_compared_as_amounts_and_only_they() {
        let wanted = |cpu| json!({"resources": {"requests": {"cpu": cpu}}});
        assert!(settled(&wanted("0.5"), &wanted("500m")));
        assert!(!settled(&wanted("0.5"), &wanted("501m")));
        assert!(!settled(&json!({"value": "1000"}), &json!({"value": "1k"})));
    }

    #[test]
    fn what_is_empty_need_not_be_there() {
        assert!(settled(&json!({"spec": {"list": [], "map": {}, "none": null}}), &json!({"spec": {}})));
        assert!(!settled(&json!({"spec": {"off": false}}), &json!({"spec": {}})));
    }

    #[test]
    fn what_is_being_deleted_is_not_settled() {
        let live = json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        assert!(!settled(&json!({"metadata": {"name": "a"}}), &live));
    }

    #[test]
    fn a_field_that_is_wanted_no_more_changes_the_stamp() {
        let map = |data: &[(&str, &str)]| {
            let data = data.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            stamped(ConfigMap { data: Some(data), ..ConfigMap::default() }).unwrap()
        };
        let (before, after) = (map(&[("a", "1"), ("b", "2")]), map(&[("a", "1")]));
        assert!(settled(&before, &before) && !settled(&after, &before));
    }
}
