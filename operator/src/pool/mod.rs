//! `BuilderPool`: from what a person wants to pods that build.
//!
//! After `validate` nothing reads the custom resource any more.

mod apply;
mod build;
mod database;
mod dereference;
mod finalize;
mod keys;
mod mirrored;
mod numbers;
mod scale;
mod update_status;
mod validate;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use harmonia_crds::BuilderPool;
use harmonia_crds::conditions::reason;
use harmonia_queue::listen::{Channel, Listener, Wake};
use harmonia_queue::mirror;
use harmonia_queue::nodes::Node;
use harmonia_service::sentence::sentence;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt};
use thiserror::Error;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};

use crate::apply::ApplyError;
use crate::cache::Seen;
use crate::context::Context;
use crate::controller::{Backoff, Failing, controller, may_exist, resync};
use crate::events::News;
use crate::names::POOL;
use crate::referring::Referring;
use crate::scope::Scope;
use keys::Keys;
use mirrored::Mirrored;
use numbers::Numbers;
use scale::{Begun, Histories, Scaled};
/// How many builders a pool should have, for whoever simulates it.
pub use scale::{Bounds, Decision, History, Snapshot, desired_replicas};
use update_status::Shown;

const KIND: &str = "BuilderPool";
/// How often the database is asked for the numbers of all pools; sooner, if it says that something became ready,
const ROUND: Duration = Duration::from_secs(2);
/// but not sooner than this after the last time, and than ten times what that took.
const PAUSE: Duration = Duration::from_millis(200);
/// A pool that is about to change by itself is looked at again after this long.
const SOON: Duration = Duration::from_secs(5);

/// Why a pool is not as it should be.
#[derive(Debug, Error)]
pub enum PoolError {
    /// Only a leader writes.
    #[error("another replica leads")]
    NotLeading,
    /// It cannot be followed.
    #[error("{0}")]
    Invalid(String),
    /// A Secret that the template refers to.
    #[error("the template refers to Secret {0}, which does not exist")]
    SecretMissing(String),
    /// Nothing is known about the pool's login yet.
    #[error("{0}")]
    WaitingForDatabase(String),
    /// Builders could not check what they fetch.
    #[error("the frontend has not said yet which keys sign the cache")]
    WaitingForKeys,
    /// The queue said no.
    #[error("the database refused the pool")]
    Refused(#[source] harmonia_queue::Error),
    /// The API server did not take an object.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The API server could not be asked about the pool itself.
    #[error("failed to {verb}")]
    Api {
        /// What was tried.
        verb: &'static str,
        /// Why it failed.
        #[source]
        source: Box<kube::Error>,
    },
}

impl PoolError {
    fn api(verb: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Api { verb, source: Box::new(source) }
    }
}

impl Failing for PoolError {
    fn reason(&self) -> &'static str {
        match self {
            Self::NotLeading | Self::Apply(ApplyError::NotLeading) => "NotLeading",
            Self::Invalid(_) | Self::Refused(_) => reason::INVALID_SPEC,
            Self::SecretMissing(_) => reason::SECRET_MISSING,
            Self::WaitingForDatabase(_) => reason::WAITING_FOR_DATABASE,
            Self::WaitingForKeys => reason::WAITING_FOR_KEYS,
            Self::Apply(_) | Self::Api { .. } => reason::CREATE_FAILED,
        }
    }
}

/// All that reconciling pools needs.
struct Pools {
    context: Arc<Context>,
    numbers: Numbers,
    keys: Keys,
    backoff: Backoff,
    mirrored: Mirrored,
    histories: Histories,
    begun: Begun,
    shown: Shown,
    /// What the queue was told of each pool.
    noted: Mutex<HashMap<String, (i64, String, mirror::Bounds)>>,
    /// The numbers are wanted at once.
    hurry: Notify,
    /// Whom a Secret of other people concerns.
    referring: Arc<Referring>,
    /// Objects that cannot be read, with the version that was told about.
    unreadable: Mutex<HashMap<String, String>>,
}

/// Reconciles pools until the operator stops.
pub async fn run(context: Arc<Context>) {
    let pools = Arc::new(Pools {
        numbers: Numbers::default(),
        keys: Keys::new(),
        backoff: Backoff::default(),
        mirrored: Mirrored::default(),
        histories: Histories::default(),
        begun: Begun::now(),
        shown: Shown::default(),
        noted: Mutex::default(),
        hurry: Notify::new(),
        referring: Arc::default(),
        unreadable: Mutex::default(),
        context: context.clone(),
    });
    let (mut controllers, mut stores) = (Vec::new(), Vec::new());
    for scope in &context.scopes {
        let api = scope.api::<BuilderPool>(&context.client);
        let (controller, store) = controller(&context, api, owner, pools.referring.changes(&context.caches));
        controllers
            .push(controller.run(reconcile, retry, pools.clone()).for_each(|_| std::future::ready(())));
        stores.push((scope.clone(), store));
    }
    tokio::select! {
        _ = join_all(controllers) => {}
        () = follow(&pools, stores) => {}
        () = heed(&pools) => {}
        () = pools.keys.follow(&context) => {}
    }
}

/// Keeps the numbers up to date, and removes from the database what no BuilderPool keeps any more.
async fn follow(pools: &Pools, stores: Vec<(Scope, Store<DeserializeGuard<BuilderPool>>)>) {
    for (_, store) in &stores {
        // The writer lives for as long as this.
        let _ = store.wait_until_ready().await;
    }
    let exists = |namespace: &str, name: &str| may_exist(&stores, namespace, name);
    let find = |name: &str| {
        let (namespace, name) = name.split_once('/')?;
        let key = ObjectRef::new(name).within(namespace);
        stores.iter().find_map(|(_, store)| store.get(&key))
    };
    let mut tick = tokio::time::interval(ROUND);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = pools.hurry.notified() => {}
        }
        let asked = Instant::now();
        let stuck = scale::stuck(pools);
        let capacity = |name: &str, builders: &[Node]| match find(name).as_deref().map(|pool| &pool.0) {
            Some(Ok(pool)) => scale::capacity(pools, pool, builders, stuck.get(name).copied().unwrap_or(0)),
            Some(Err(_)) | None => scale::idle(builders),
        };
        pools.numbers.ask(&pools.context, capacity).await;
        tokio::time::sleep(PAUSE.max(10 * asked.elapsed())).await;
        let Some(lead) = pools.context.lead() else { continue };
        for (name, uid) in pools.numbers.orphans(exists) {
            tracing::info!(name, "no BuilderPool keeps this pool any more: it is removed");
            let gone = mirror::pool_gone(&lead.db, lead.generation, &uid, &name);
            if let Err(error) = database::bounded(gone).await {
                tracing::warn!(name, error = sentence(&error), "a pool cannot be removed");
            }
        }
    }
}

/// Asks for the numbers whenever something became ready.
async fn heed(pools: &Pools) {
    let mut listener = Listener::connect(pools.context.database.direct(), &[Channel::Ready], SOON).await;
    loop {
        if let Wake::Hint(..) = listener.next().await {
            pools.hurry.notify_one();
        }
    }
}

/// Whose a child is.
fn owner(seen: &Seen) -> Option<ObjectRef<BuilderPool>> {
    let name = match seen.kind.as_str() {
        KIND => &seen.name,
        "Pod" => seen.labels.get(POOL)?,
        _ => &seen.owners.iter().find(|owner| owner.kind == KIND)?.name,
    };
    Some(ObjectRef::new(name).within(&seen.namespace))
}

impl Pools {
    /// Whether this version of an object that cannot be read was not told about yet.
    fn is_news(&self, meta: &ObjectMeta) -> bool {
        let (uid, version) =
            (meta.uid.clone().unwrap_or_default(), meta.resource_version.clone().unwrap_or_default());
        let mut known = self.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(uid, version.clone()).is_none_or(|before| before != version)
    }
}

async fn reconcile(pool: Arc<DeserializeGuard<BuilderPool>>, pools: Arc<Pools>) -> Result<Action, PoolError> {
    let context = &pools.context;
    let (deleted, may_apply) = (pool.meta().deletion_timestamp.is_some(), context.standing().may_apply());
    let _measure = context.counts.measure(KIND);
    let outcome = match (deleted, may_apply, &pool.0) {
        (true, true, _) => finalize::finalize(&pools, pool.meta()).await,
        (true, false, _) => finalize::abandon(&pools, pool.meta()).await,
        // It is looked at again when that changes.
        (false, false, _) => return Ok(Action::await_change()),
        (false, true, Ok(readable)) => settle(&pools, readable).await,
        (false, true, Err(unreadable)) => return Ok(tell_unreadable(&pools, unreadable).await),
    };
    if outcome.is_ok() {
        pools.backoff.clear(&*pool);
    }
    outcome
}

/// The whole of it. What stands in the way is shown in the status before it is tried again.
async fn settle(pools: &Pools, pool: &BuilderPool) -> Result<Action, PoolError> {
    let outcome = steps(pools, pool).await;
    if let Err(PoolError::NotLeading | PoolError::Apply(ApplyError::NotLeading)) = outcome {
        return Ok(Action::await_change());
    }
    let unshown = update_status::update_status(pools, pool, &outcome).await?;
    match outcome {
        Ok(apply::Outcome { scaled: Scaled { unfinished: true, .. }, .. }) => Ok(Action::requeue(SOON)),
        // Trying again changes nothing.
        Ok(_) | Err(PoolError::Invalid(_)) => Ok(unshown.map_or_else(resync, Action::requeue)),
        Err(error) => Err(error),
    }
}

async fn steps(pools: &Pools, pool: &BuilderPool) -> Result<apply::Outcome, PoolError> {
    let context = &pools.context;
    // The database's part: finalizer, login, Secret, mirror (client and database).
    finalize::hold(pools, pool).await?;
    let reach = database::mirror(pools, pool).await?;
    // What the pool refers to (client).
    let known = dereference::dereference(pools, pool).await?;
    // How many builders there are to be, and who goes (client and database).
    let scaled = scale::scale(pools, pool).await;
    // What is wanted, as plain values (neither).
    let wanted = validate::validate(pool, known, &context.installation, &context.namespace, scaled.replicas)?;
    // The objects (neither).
    let objects = build::build(&wanted);
    // The API server's part (client).
    let applied = apply::apply(pools, pool, &wanted, objects, &scaled.reason).await?;
    Ok(apply::Outcome { applied, reach, scaled })
}

/// One that the API server has and this release cannot read, such as after a downgrade.
async fn tell_unreadable(pools: &Pools, object: &InvalidObject) -> Action {
    let meta = &object.metadata;
    let news = pools.is_news(meta);
    if news {
        let note = format!("the pool cannot be read and is left as it is: {}", object.error);
        let news = News { warning: true, reason: "Unreadable", action: "Reconcile", note };
        pools.context.publish_about(&reference(meta), news).await;
    }
    Action::await_change()
}

/// The kind is known, and the metadata was read.
fn reference(meta: &ObjectMeta) -> ObjectReference {
    ObjectReference {
        api_version: Some(BuilderPool::api_version(&()).into_owned()),
        kind: Some(KIND.to_owned()),
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        uid: meta.uid.clone(),
        ..ObjectReference::default()
    }
}

fn retry(pool: Arc<DeserializeGuard<BuilderPool>>, error: &PoolError, pools: Arc<Pools>) -> Action {
    let wait = pools.backoff.fail(&*pool);
    pools.context.counts.failed(KIND, error.reason());
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    tracing::warn!(namespace, name, error = sentence(error), again = ?wait, "a pool is not as it should be");
    Action::requeue(wait)
}
