//! Who refers to Secrets of other people: a change of one concerns them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{Stream, StreamExt, stream};
use kube::Resource;
use kube::runtime::reflector::ObjectRef;

use crate::cache::{Caches, Touched};

/// Names of objects of one kind by the Secrets that they refer to, which are in the same namespace.
#[derive(Default)]
pub struct Referring(Mutex<HashMap<(String, String), BTreeSet<String>>>);

impl Referring {
    /// Remembers which Secrets an object refers to.
    pub fn refer(&self, namespace: &str, name: &str, secrets: impl Iterator<Item = String>) {
        let mut referring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, names) in referring.iter_mut().filter(|((of, _), _)| of == namespace) {
            names.remove(name);
        }
        for secret in secrets {
            referring.entry((namespace.to_owned(), secret)).or_default().insert(name.to_owned());
        }
        referring.retain(|_, names| !names.is_empty());
    }

    /// Those that refer to a Secret that has changed.
    pub fn changes<K>(self: &Arc<Self>, caches: &Caches) -> impl Stream<Item = ObjectRef<K>> + Send + use<K>
    where
        K: Resource<DynamicType = ()> + Send,
    {
        let referring = Arc::clone(self);
        caches.touched().flat_map(move |touched| {
            stream::iter(match touched {
                Touched::Object(seen) if seen.kind == "Secret" => referring.to(&seen.namespace, &seen.name),
                Touched::Object(_) | Touched::All => Vec::new(),
            })
        })
    }

    fn to<K: Resource<DynamicType = ()>>(&self, namespace: &str, secret: &str) -> Vec<ObjectRef<K>> {
        let referring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let names = referring.get(&(namespace.to_owned(), secret.to_owned()));
        names.into_iter().flatten().map(|name| ObjectRef::new(name).within(namespace)).collect()
    }
}

#[cfg(test)]
mod tests {
    use harmonia_crds::Project;

    use super::*;

    #[test]
    fn only_what_refers_to_a_secret_now_is_concerned() {
        let referring = Referring::default();
        referring.refer("ci", "a", ["one".to_owned(), "two".to_owned()].into_iter());
        referring.refer("ci", "b", ["one".to_owned()].into_iter());
        let names = |namespace, secret| {
            let found: Vec<ObjectRef<Project>> = referring.to(namespace, secret);
            found.into_iter().map(|found| found.name).collect::<Vec<_>>()
        };
        assert_eq!((names("ci", "one"), names("other", "one")), (vec!["a".into(), "b".into()], vec![]));
        referring.refer("ci", "a", std::iter::empty());
        assert_eq!((names("ci", "one"), names("ci", "two")), (vec!["b".to_owned()], vec![]));
    }
}
