//! The custom resources must be known to the API server. With Helm they come in the same release, a moment earlier or later, so
//! they are waited for, and `/readyz` says how to get them where they do not come.

use std::fmt::Debug;
use std::time::Duration;

use harmonia_crds::{BuilderPool, Project};
use k8s_openapi::NamespaceResourceScope;
use kube::Resource;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;

use crate::context::Context;
use crate::ready::RESOURCES;

/// How soon they are looked for again.
const RETRY: Duration = Duration::from_secs(2);

/// Ends when both are there.
pub async fn wait(context: &Context) {
    while let Err(reason) = both(context).await {
        context.ready.wait(RESOURCES, reason);
        tokio::time::sleep(RETRY).await;
    }
}

async fn both(context: &Context) -> Result<(), String> {
    known::<BuilderPool>(context).await?;
    known::<Project>(context).await
}

/// Asks for as little as possible: to look at definitions would need another right.
async fn known<K>(context: &Context) -> Result<(), String>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug,
{
    let Some(scope) = context.scopes.first() else { return Ok(()) };
    let api = scope.api::<PartialObjectMeta<K>>(&context.client);
    match api.list_metadata(&ListParams::default().limit(1)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Err(format!(
            "the API server does not know {}.{}: `harmonia-ci crds | kubectl apply --server-side --filename -` installs it",
            K::plural(&()),
            K::group(&())
        )),
        Err(error) => Err(format!("the API server cannot be asked for {}: {error}", K::plural(&()))),
    }
}
