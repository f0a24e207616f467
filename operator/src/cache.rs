//! What the API server has of the kinds that we make, as its watches tell. A settled object is compared with this and causes
//! no request.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;

use futures::future::{BoxFuture, join_all};
use futures::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::broadcast;

use crate::names::MANAGED;
use crate::scope::Scope;

/// Who hears late of so many changes looks at everything instead.
const BACKLOG: usize = 1024;

/// All objects of one kind.
pub struct Cache<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    stores: Vec<Store<K>>,
}

impl<K> Cache<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + Send + Sync + 'static,
{
    /// One object.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        let key = ObjectRef::new(name).within(namespace);
        self.stores.iter().find_map(|store| store.get(&key))
    }

    /// Those of all namespaces for which `wanted` holds.
    pub fn all(&self, wanted: impl Fn(&K) -> bool) -> Vec<Arc<K>> {
        self.stores.iter().flat_map(|store| store.state_filter(&wanted)).collect()
    }

    /// Those of a namespace for which `wanted` holds.
    pub fn select(&self, namespace: &str, wanted: impl Fn(&K) -> bool) -> Vec<Arc<K>> {
        let wanted = |object: &K| object.meta().namespace.as_deref() == Some(namespace) && wanted(object);
        self.stores.iter().flat_map(|store| store.state_filter(&wanted)).collect()
    }
}

/// The kinds that we make or look at, each watched once for all who ask.
pub struct Caches {
    /// Those that we manage.
    pub deployments: Cache<Deployment>,
    /// Those that we manage.
    pub stateful_sets: Cache<StatefulSet>,
    /// Those of workloads that we manage.
    pub pods: Cache<Pod>,
    /// Those that we manage.
    pub disruption_budgets: Cache<PodDisruptionBudget>,
    /// Those that we manage.
    pub service_accounts: Cache<ServiceAccount>,
    /// Those that we manage.
    pub config_maps: Cache<ConfigMap>,
    /// Those that we manage.
    pub network_policies: Cache<NetworkPolicy>,
    /// All, for people's Secrets are referred to; without their contents.
    pub secrets: Cache<PartialObjectMeta<Secret>>,
    touched: broadcast::Sender<Touched>,
}

/// What has changed.
#[derive(Debug, Clone)]
pub enum Touched {
    /// One object.
    Object(Arc<Seen>),
    /// Perhaps anything: a watch began anew.
    All,
}

/// An object that has changed or is gone.
#[derive(Debug)]
pub struct Seen {
    /// Such as `Deployment`.
    pub kind: String,
    /// Where it is.
    pub namespace: String,
    /// What it is called.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whose it is.
    pub owners: Vec<OwnerReference>,
}

impl Caches {
    /// The caches, and what keeps them up to date for as long as it runs.
    pub fn new(client: &Client, scopes: &[Scope]) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (touched, _) = broadcast::channel(BACKLOG);
        let mut watches = Watches { client, scopes, touched: touched.clone(), running: Vec::new() };
        let ours = watcher::Config::default().labels(MANAGED);
        let caches = Self {
            deployments: watches.add(ours.clone()),
            stateful_sets: watches.add(ours.clone()),
            pods: watches.add(ours.clone()),
            disruption_budgets: watches.add(ours.clone()),
            service_accounts: watches.add(ours.clone()),
            config_maps: watches.add(ours.clone()),
            network_policies: watches.add(ours),
            secrets: watches.add(watcher::Config::default()),
            touched,
        };
        let running = watches.running;
        (caches, join_all(running).map(drop))
    }

    /// Waits until all is known.
    pub async fn warm(&self) {
        async fn wait<K>(cache: &Cache<K>)
        where
            K: Resource<DynamicType = ()> + Clone + 'static,
        {
            for store in &cache.stores {
                // The writer lives for as long as the process.
                let _ = store.wait_until_ready().await;
            }
        }
        wait(&self.deployments).await;
        wait(&self.stateful_sets).await;
        wait(&self.pods).await;
        wait(&self.disruption_budgets).await;
        wait(&self.service_accounts).await;
        wait(&self.config_maps).await;
        wait(&self.network_policies).await;
        wait(&self.secrets).await;
    }

    /// Something about an object has changed that no watch tells.
    pub fn touch(&self, kind: &str, namespace: &str, name: &str) {
        let seen = Seen {
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            labels: BTreeMap::new(),
            owners: Vec::new(),
        };
        let _ = self.touched.send(Touched::Object(Arc::new(seen)));
    }

    /// Something has changed that concerns all.
    pub fn touch_all(&self) {
        let _ = self.touched.send(Touched::All);
    }

    /// What changes from now on.
    pub fn touched(&self) -> impl Stream<Item = Touched> + Send + use<> {
        stream::unfold(self.touched.subscribe(), |mut heard| async move {
            match heard.recv().await {
                Ok(touched) => Some((touched, heard)),
                Err(broadcast::error::RecvError::Lagged(_)) => Some((Touched::All, heard)),
                Err(broadcast::error::RecvError::Closed) => None,
            }
        })
    }
}

struct Watches<'a> {
    client: &'a Client,
    scopes: &'a [Scope],
    touched: broadcast::Sender<Touched>,
    running: Vec<BoxFuture<'static, ()>>,
}

impl Watches<'_> {
    fn add<K>(&mut self, config: watcher::Config) -> Cache<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
    {
        let mut stores = Vec::new();
        for scope in self.scopes {
            let (store, writer) = reflector::store();
            let events = watch::watcher(scope.api::<K>(self.client), config.clone())
                .modify(|object| object.managed_fields_mut().clear())
                .default_backoff();
            let touched = self.touched.clone();
            let tell = move |event| tell(event, &touched);
            self.running.push(Box::pin(reflector::reflector(writer, events).for_each(move |event| {
                tell(event);
                std::future::ready(())
            })));
            stores.push(store);
        }
        Cache { stores }
    }
}

/// Nobody may be listening.
fn tell<K>(event: Result<Event<K>, watcher::Error>, touched: &broadcast::Sender<Touched>)
where
    K: Resource<DynamicType = ()>,
{
    match event {
        Ok(Event::Apply(object) | Event::Delete(object)) => {
            let seen = Seen {
                kind: K::kind(&()).into_owned(),
                namespace: object.namespace().unwrap_or_default(),
                name: object.name_any(),
                labels: object.labels().clone(),
                owners: object.owner_references().to_vec(),
            };
            let _ = touched.send(Touched::Object(Arc::new(seen)));
        }
        // Only now does the store have what was listed.
        Ok(Event::InitDone) => drop(touched.send(Touched::All)),
        Ok(Event::Init | Event::InitApply(_)) => {}
        Err(error) => {
            let kind = K::kind(&());
            tracing::warn!(%kind, error = &error as &dyn std::error::Error, "a watch broke off; it is tried again");
        }
    }
}
