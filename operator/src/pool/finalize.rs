//! The pool's row in the database outlives no pool. Nothing waits for the database for long: a namespace that cannot be
//! deleted is worse than a row too many.

use std::sync::PoisonError;
use std::time::Duration;

use harmonia_crds::BuilderPool;
use harmonia_queue::mirror;
use harmonia_service::sentence::sentence;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Api, Resource, ResourceExt};
use serde_json::json;

use crate::events::News;
use crate::names::{FINALIZER, POOL};

use super::build::child_name;
use super::{PoolError, Pools, database, reference};

/// A database that has been away for so long is not waited for any more.
const PATIENCE: Duration = Duration::from_secs(120);
/// Others than the last leader wait for longer: it may be about to let go.
const FOLLOWERS: Duration = Duration::from_secs(150);
/// How soon it is asked again.
const RETRY: Duration = Duration::from_secs(5);

/// Marks a pool before the database hears of it.
pub async fn hold(pools: &Pools, pool: &BuilderPool) -> Result<(), PoolError> {
    let meta = pool.meta();
    if holds(meta) {
        return Ok(());
    }
    let mut finalizers = meta.finalizers.clone().unwrap_or_default();
    finalizers.push(FINALIZER.to_owned());
    patch(pools, meta, finalizers).await.map_err(PoolError::api("set the pool's finalizer"))
}

/// Takes a deleted pool out of the database and lets it go; its objects go with it.
pub async fn finalize(pools: &Pools, meta: &ObjectMeta) -> Result<Action, PoolError> {
    if !holds(meta) {
        return Ok(Action::await_change());
    }
    match forget(pools, meta).await {
        Ok(()) => {}
        Err(reason) if waited(meta) < PATIENCE => {
            tracing::info!(pool = database::name_of(meta), reason, "a deleted pool is still in the database");
            return Ok(Action::requeue(RETRY));
        }
        Err(reason) => {
            let note =
                format!("the pool is deleted and its row stays in the database until that is back: {reason}");
            let news = News { warning: true, reason: "RowLeftBehind", action: "Delete", note };
            pools.context.publish_about(&reference(meta), news).await;
        }
    }
    let_go(pools, meta).await
}

/// A deleted pool that no leader cares for: the operator may have been restarted while the database was away, and then nobody
/// leads. Whoever sees that lets go; the row goes when the database is back.
pub async fn abandon(pools: &Pools, meta: &ObjectMeta) -> Result<Action, PoolError> {
    if !holds(meta) {
        return Ok(Action::await_change());
    }
    let asked =
        waited(meta) > FOLLOWERS && database::bounded(mirror::pool_counts(pools.context.db())).await.is_err();
    if !asked {
        return Ok(Action::requeue(RETRY));
    }
    tracing::warn!(pool = database::name_of(meta), "a deleted pool is let go without the database");
    let_go(pools, meta).await
}

async fn let_go(pools: &Pools, meta: &ObjectMeta) -> Result<Action, PoolError> {
    hand_over(pools, meta).await?;
    let known_as = database::name_of(meta);
    pools.mirrored.forget(&known_as);
    pools.shown.forget(&known_as);
    pools.histories.forget(&known_as);
    pools.noted.lock().unwrap_or_else(PoisonError::into_inner).remove(&known_as);
    let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
    pools.context.counts.pool_gone(namespace.unwrap_or_default(), name.unwrap_or_default());
    pools.referring.refer(namespace.unwrap_or_default(), name.unwrap_or_default(), std::iter::empty());
    let finalizers = meta.finalizers.iter().flatten().filter(|name| *name != FINALIZER).cloned().collect();
    match patch(pools, meta, finalizers).await {
        Ok(()) => Ok(Action::await_change()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Action::await_change()),
        Err(error) => Err(PoolError::api("remove the pool's finalizer")(error)),
    }
}

/// The pods that finish what they have run foreign code until the last of them is gone: so long their policy stays. It becomes
/// theirs, for it would go with the pool.
async fn hand_over(pools: &Pools, meta: &ObjectMeta) -> Result<(), PoolError> {
    let (namespace, pool) =
        (meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default());
    let (caches, name) = (&pools.context.caches, child_name(pool));
    let pods = caches.pods.select(namespace, |pod| pod.labels().get(POOL).is_some_and(|of| of == pool));
    let Some(policy) = caches.network_policies.get(namespace, &name) else { return Ok(()) };
    let Some(owners) = heirs(policy.meta(), pods.iter().map(|pod| pod.meta())) else { return Ok(()) };
    let api: Api<NetworkPolicy> = Api::namespaced(pools.context.client.clone(), namespace);
    let change = json!({"metadata": {"uid": policy.uid(), "ownerReferences": owners}});
    match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(change)).await {
        Ok(_) => Ok(()),
        // It is gone, or is another one by now.
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        // Where owner references are checked, changing them needs the right to delete. No pool hangs for what is refused.
        Err(kube::Error::Api(status)) if status.code < 500 => {
            tracing::warn!(namespace, name, reason = status.message, "a policy goes before its pods");
            Ok(())
        }
        Err(error) => Err(PoolError::api("leave the pool's policy to its pods")(error)),
    }
}

/// To whom a policy belongs when it is these pods' too. None: they have it already, or there are none.
fn heirs<'a>(policy: &ObjectMeta, pods: impl Iterator<Item = &'a ObjectMeta>) -> Option<Vec<OwnerReference>> {
    let mut owners = policy.owner_references.clone().unwrap_or_default();
    let before = owners.len();
    for pod in pods {
        let uid = pod.uid.clone().unwrap_or_default();
        if owners.iter().all(|owner| owner.uid != uid) {
            owners.push(OwnerReference {
                api_version: Pod::api_version(&()).into_owned(),
                kind: Pod::kind(&()).into_owned(),
                name: pod.name.clone().unwrap_or_default(),
                uid,
                controller: None,
                block_owner_deletion: None,
            });
        }
    }
    (owners.len() > before).then_some(owners)
}

/// Or says why not.
async fn forget(pools: &Pools, meta: &ObjectMeta) -> Result<(), String> {
    let Some(lead) = pools.context.lead() else { return Err("the database is away".to_owned()) };
    let (name, uid) = (database::name_of(meta), meta.uid.as_deref().unwrap_or_default());
    let gone = mirror::pool_gone(&lead.db, lead.generation, uid, &name);
    match database::bounded(gone).await {
        Ok(_) => Ok(()),
        Err(error) => Err(sentence(&error)),
    }
}

fn holds(meta: &ObjectMeta) -> bool {
    meta.finalizers.iter().flatten().any(|name| name == FINALIZER)
}

fn waited(meta: &ObjectMeta) -> Duration {
    let since = meta.deletion_timestamp.as_ref().map_or(Timestamp::now(), |time| time.0);
    Timestamp::now().duration_since(since).unsigned_abs()
}

/// With the version that was seen: finalizers of others are not lost.
async fn patch(pools: &Pools, meta: &ObjectMeta, finalizers: Vec<String>) -> Result<(), kube::Error> {
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let api: Api<BuilderPool> = Api::namespaced(pools.context.client.clone(), namespace);
    let change = json!({"metadata": {"resourceVersion": meta.resource_version, "finalizers": finalizers}});
    let name = meta.name.as_deref().unwrap_or_default();
    api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(change)).await.map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn meta(name: &str) -> ObjectMeta {
        ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(format!("uid of {name}")),
            ..ObjectMeta::default()
        }
    }

    #[test]
    fn a_policy_is_left_to_the_pods_that_finish() {
        let pool =
            OwnerReference { name: "big".to_owned(), uid: "7d5c".to_owned(), ..OwnerReference::default() };
        let mut policy = ObjectMeta { owner_references: Some(vec![pool]), ..meta("big-builder") };
        let pods = [meta("big-builder-a"), meta("big-builder-b")];
        let owners = heirs(&policy, pods.iter()).unwrap();
        let words: Vec<(&str, &str)> =
            owners.iter().map(|owner| (owner.kind.as_str(), owner.uid.as_str())).collect();
        assert_eq!(words, [("", "7d5c"), ("Pod", "uid of big-builder-a"), ("Pod", "uid of big-builder-b")]);
        policy.owner_references = Some(owners);
        assert!(heirs(&policy, pods.iter()).is_none(), "what they have is not given again");
        assert!(heirs(&policy, std::iter::empty()).is_none());
    }
}
