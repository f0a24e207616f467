//! What all controllers do the same: how they are triggered, how often they look again, and how long they wait after a failure.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use kube::core::DeserializeGuard;
use kube::runtime::controller::{Action, Config};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{Controller, Predicate, WatchStreamExt, predicates, watcher};
use kube::{Api, Resource, ResourceExt};
use rand::RngExt;
use serde::de::DeserializeOwned;

use crate::cache::Touched;
use crate::context::Context;
use crate::scope::Scope;
use crate::standing::Standing;

/// Objects at once.
const AT_ONCE: u16 = 8;
/// Changes that come together are one.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Missed events and rotated secrets are found after this long.
const RESYNC: Duration = Duration::from_secs(300);
/// The first wait after a failure, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));

/// Whether this word of an error is for people, for programs, for the retry.
pub trait Failing: std::error::Error {
    /// One word in PascalCase: the reason of Events and the label of metrics.
    fn reason(&self) -> &'static str;
}

/// Looks again after about five minutes: not all at the same moment.
pub fn resync() -> Action {
    Action::requeue(RESYNC.mul_f64(rand::rng().random_range(0.8..1.2)))
}

/// How often objects have failed since they last succeeded.
#[derive(Default)]
pub struct Backoff(Mutex<HashMap<(String, String), u32>>);

impl Backoff {
    /// One more failure; answers how long to wait.
    pub fn fail<K: Resource<DynamicType = ()>>(&self, object: &K) -> Duration {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key(object)).or_default();
        *count += 1;
        wait(*count).mul_f64(rand::rng().random_range(0.8..1.2))
    }

    /// It is well, or gone.
    pub fn clear<K: Resource<DynamicType = ()>>(&self, object: &K) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key(object));
    }
}

fn key<K: Resource<DynamicType = ()>>(object: &K) -> (String, String) {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// 1 s, 2 s, 4 s and so on, to five minutes.
pub fn wait(failures: u32) -> Duration {
    let (first, longest) = BACKOFF;
    first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(longest)
}

/// Whether an object is there, as far as its namespace is watched: what is not watched is not judged.
pub fn may_exist<K>(stores: &[(Scope, Store<DeserializeGuard<K>>)], namespace: &str, name: &str) -> bool
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let reference = ObjectRef::new(name).within(namespace);
    let mut watching = stores.iter().filter(|(scope, _)| scope.has(namespace)).peekable();
    watching.peek().is_none() || watching.any(|(_, store)| store.get(&reference).is_some())
}

/// A controller of one kind and its objects as they are known. It is triggered by changes of what people write (generation,
/// annotations, finalizers), by `touched` objects that `owner` finds one for, and by a change of this replica's standing.
/// An object that cannot be read comes as an error of its own and stops nothing.
pub fn controller<K>(
    context: &Context,
    api: Api<K>,
    owner: impl Fn(&crate::cache::Seen) -> Option<ObjectRef<K>> + Send + Sync + 'static,
    more: impl Stream<Item = ObjectRef<K>> + Send + 'static,
) -> (Controller<DeserializeGuard<K>>, Store<DeserializeGuard<K>>)
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let guarded: Api<DeserializeGuard<K>> = match api.namespace() {
        Some(namespace) => Api::namespaced(context.client.clone(), namespace),
        None => Api::all(context.client.clone()),
    };
    let (store, writer) = reflector::store();
    let predicate = predicates::generation.combine(predicates::finalizers).combine(predicates::annotations);
    let trigger =
        reflector::reflector(writer, watcher(guarded, watcher::Config::default()).default_backoff())
            .touched_objects()
            .predicate_filter(predicate, Default::default());
    let known = store.clone();
    let all = move || known.state().iter().map(|object| ObjectRef::from_obj(&**object)).collect::<Vec<_>>();
    let of_children = context.caches.touched().flat_map({
        let all = all.clone();
        move |touched| {
            futures::stream::iter(match touched {
                Touched::Object(seen) => owner(&seen).map(guard).into_iter().collect(),
                Touched::All => all(),
            })
        }
    });
    let of_standing = changes(context).flat_map(move |_| futures::stream::iter(all()));
    let stop = context.stop.clone();
    let controller = Controller::for_stream(trigger, store.clone())
        .with_config(Config::default().concurrency(AT_ONCE).debounce(DEBOUNCE))
        .reconcile_on(of_children)
        .reconcile_on(of_standing)
        .reconcile_on(more.map(guard))
        .graceful_shutdown_on(async move { stop.cancelled().await });
    (controller, store)
}

fn guard<K>(object: ObjectRef<K>) -> ObjectRef<DeserializeGuard<K>>
where
    K: Resource<DynamicType = ()> + Clone,
    K::DynamicType: Hash + Eq,
{
    ObjectRef::new(&object.name).within(object.namespace.as_deref().unwrap_or_default())
}

/// How this replica stands, whenever that has changed.
fn changes(context: &Context) -> impl Stream<Item = Standing> + Send + use<> {
    futures::stream::unfold(context.standings(), |mut standings| async move {
        standings.changed().await.ok()?;
        let standing = *standings.borrow_and_update();
        Some((standing, standings))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_is_waited_for_twice_as_long() {
        let waits: Vec<u64> = [1, 2, 3, 9, 10, 99].into_iter().map(|count| wait(count).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 256, 300, 300]);
    }
}
