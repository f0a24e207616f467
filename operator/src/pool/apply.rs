//! Makes the API server have the objects.

use std::marker::PhantomData;

use harmonia_crds::BuilderPool;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use kube::ResourceExt;

use super::build::{Applied, Objects, Prepared, Workload, child_name};
use super::numbers::Reach;
use super::scale::Scaled;
use super::validate::Wanted;
use super::{PoolError, Pools};
use crate::apply::{apply as send, delete};
use crate::events::News;

/// What a reconcile came to.
#[derive(Debug)]
pub struct Outcome {
    /// The workload as the API server has it. None: a paused pool may have none.
    pub applied: Option<Workload>,
    /// Whether the database answers.
    pub reach: Reach,
    /// How many builders there should be.
    pub scaled: Scaled,
}

/// What is done with the objects.
enum Strategy {
    /// They are made so.
    Apply,
    /// They are left as they are.
    LeaveAlone,
}

/// Applies, or leaves a paused pool alone. Answers the workload as it is live.
pub async fn apply(
    pools: &Pools,
    pool: &BuilderPool,
    wanted: &Wanted,
    objects: Objects<Prepared>,
    why: &str,
) -> Result<Option<Workload>, PoolError> {
    let strategy = if wanted.paused { Strategy::LeaveAlone } else { Strategy::Apply };
    match strategy {
        Strategy::Apply => Ok(Some(apply_all(pools, pool, objects, why).await?.workload)),
        Strategy::LeaveAlone => Ok(live(pools, wanted)),
    }
}

/// In the order in which pods need them: who they are, what they read and whom they may talk to, before there are any.
async fn apply_all(
    pools: &Pools,
    pool: &BuilderPool,
    objects: Objects<Prepared>,
    why: &str,
) -> Result<Objects<Applied>, PoolError> {
    let (context, caches) = (&pools.context, &pools.context.caches);
    let (namespace, name) = (pool.namespace().unwrap_or_default(), child_name(&pool.name_any()));
    // Without `..`: an object that is built and not applied does not compile.
    let Objects {
        service_account,
        config_map,
        network_policy,
        disruption_budget,
        workload,
        state: PhantomData,
    } = objects;
    let cached = caches.service_accounts.get(&namespace, &name);
    let service_account = send(context, service_account, cached.as_deref()).await?;
    let cached = caches.config_maps.get(&namespace, &name);
    let config_map = send(context, config_map, cached.as_deref()).await?;
    let cached = caches.network_policies.get(&namespace, &name);
    let network_policy = send(context, network_policy, cached.as_deref()).await?;
    let cached = caches.disruption_budgets.get(&namespace, &name);
    let disruption_budget = match (disruption_budget, cached) {
        (Some(wanted), cached) => Some(send(context, wanted, cached.as_deref()).await?),
        (None, Some(surplus)) => {
            delete(context, &*surplus).await?;
            None
        }
        (None, None) => None,
    };
    let workload = match workload {
        Workload::Deployment(wanted) => {
            let cached = caches.deployments.get(&namespace, &name);
            let before = cached.as_ref().and_then(|live| deployment_replicas(live));
            let after = deployment_replicas(&wanted);
            let live = send(context, *wanted, cached.as_deref()).await?;
            tell_scaled(pools, pool, before, after, why).await;
            Workload::Deployment(Box::new(live))
        }
        Workload::StatefulSet(wanted) => {
            let cached = caches.stateful_sets.get(&namespace, &name);
            let before = cached.as_ref().and_then(|live| stateful_set_replicas(live));
            let after = stateful_set_replicas(&wanted);
            let live = send(context, *wanted, cached.as_deref()).await?;
            tell_scaled(pools, pool, before, after, why).await;
            Workload::StatefulSet(Box::new(live))
        }
    };
    Ok(Objects {
        service_account,
        config_map,
        network_policy,
        disruption_budget,
        workload,
        state: PhantomData,
    })
}

/// The workload as the cache has it.
fn live(pools: &Pools, wanted: &Wanted) -> Option<Workload> {
    let (caches, name) = (&pools.context.caches, child_name(&wanted.name));
    let deployment = caches.deployments.get(&wanted.namespace, &name);
    let stateful_set = caches.stateful_sets.get(&wanted.namespace, &name);
    let deployment = deployment.map(|live| Workload::Deployment(Box::new((*live).clone())));
    deployment.or_else(|| stateful_set.map(|live| Workload::StatefulSet(Box::new((*live).clone()))))
}

fn deployment_replicas(workload: &Deployment) -> Option<i32> {
    workload.spec.as_ref()?.replicas
}

fn stateful_set_replicas(workload: &StatefulSet) -> Option<i32> {
    workload.spec.as_ref()?.replicas
}

async fn tell_scaled(pools: &Pools, pool: &BuilderPool, before: Option<i32>, after: Option<i32>, why: &str) {
    if let (Some(before), Some(after)) = (before, after)
        && before != after
    {
        let note = format!("{after} builders instead of {before}: {why}");
        let news = News { warning: false, reason: "Scaled", action: "Scale", note };
        pools.context.publish(pool, news).await;
    }
}
