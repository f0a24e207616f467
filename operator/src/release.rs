//! `harmonia-ci operator --release`: lets go of all custom resources, so that nothing waits for an operator that will not come
//! again. The chart runs this before it is uninstalled.

use std::fmt::Debug;
use std::time::Duration;

use harmonia_crds::{BuilderPool, Project};
use harmonia_service::settings::Settings;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Config, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::OperatorError;
use crate::names::{COMPONENT, FINALIZER, INSTANCE};
use crate::run::{connect, read_installation};
use crate::scope::Scope;

/// How long operators may take to stop.
const PATIENCE: Duration = Duration::from_secs(30);

/// Stops the operators of the release, who would take hold again at once, and removes our finalizer from everything.
pub async fn release(settings: &Settings) -> Result<(), OperatorError> {
    let installation = read_installation(settings)?;
    let config = Config::infer().await.map_err(|error| OperatorError::Cluster(Box::new(error)))?;
    let (client, namespace) = connect(settings, config)?;
    stop_operators(&client, &namespace, &installation.name).await?;
    for scope in Scope::read(settings.get("watch_namespaces").unwrap_or_default(), &namespace) {
        let_go::<BuilderPool>(&client, &scope).await?;
        let_go::<Project>(&client, &scope).await?;
    }
    Ok(())
}

async fn stop_operators(client: &Client, namespace: &str, release: &str) -> Result<(), OperatorError> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let none = Patch::Merge(json!({"spec": {"replicas": 0}}));
    match deployments.patch(&format!("{release}-operator"), &PatchParams::default(), &none).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => return Err(Box::new(error).into()),
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let operators = ListParams::default().labels(&format!("{COMPONENT}=operator,{INSTANCE}={release}"));
    let gone = async {
        while !pods.list(&operators).await.map_err(Box::new)?.items.is_empty() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    };
    // One that hangs cannot do much either.
    tokio::time::timeout(PATIENCE, gone).await.unwrap_or(Ok(()))
}

async fn let_go<K>(client: &Client, scope: &Scope) -> Result<(), OperatorError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    let objects = match scope.api::<PartialObjectMeta<K>>(client).list_metadata(&ListParams::default()).await
    {
        Ok(objects) => objects,
        // There is no such kind, so there is nothing to hold.
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => return Err(Box::new(error).into()),
    };
    let held = objects.items.iter().filter(|object| object.finalizers().iter().any(|name| name == FINALIZER));
    for object in held {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let others: Vec<&String> = object.finalizers().iter().filter(|name| *name != FINALIZER).collect();
        let version = object.resource_version();
        let change = json!({"metadata": {"resourceVersion": version, "finalizers": others}});
        let api: Api<K> = Api::namespaced(client.clone(), &namespace);
        match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(change)).await {
            Ok(_) => tracing::info!(kind = %K::kind(&()), namespace, name, "let go"),
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(Box::new(error).into()),
        }
    }
    Ok(())
}
