//! The pool's row in the database outlives no pool. Nothing waits for the database for long: a namespace that cannot be
//! deleted is worse than a row too many.

use std::time::Duration;

use harmonia_crds::BuilderPool;
use harmonia_queue::mirror;
use harmonia_service::sentence::sentence;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Api, Resource};
use serde_json::json;

use crate::events::News;
use crate::names::FINALIZER;

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
    pools.mirrored.forget(&database::name_of(meta));
    pools.shown.forget(&database::name_of(meta));
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
