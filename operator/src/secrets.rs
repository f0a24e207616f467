//! Secrets that we make, and those that a Project names: read when they have changed, and remembered. Passwords go to PostgreSQL at
//! every reconcile, and a settled object causes no request. No other Secret is ever read.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt};
use sha2::{Digest, Sha256};

use crate::context::Context;

/// What a Secret holds, by key.
pub type Contents = BTreeMap<String, String>;

/// A version, and what it had.
type Read = (String, Arc<Contents>);

/// Contents by namespace and name, with the version that had them.
#[derive(Default)]
pub struct Secrets(Mutex<HashMap<(String, String), Read>>);

impl Secrets {
    fn known(&self, namespace: &str, name: &str, version: &str) -> Option<Arc<Contents>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, contents) = known.get(&(namespace.to_owned(), name.to_owned()))?;
        (at == version).then(|| contents.clone())
    }

    /// Remembers a Secret as the API server has it.
    pub fn remember(&self, secret: &Secret) -> Arc<Contents> {
        let contents = Arc::new(contents(secret));
        let key = (secret.namespace().unwrap_or_default(), secret.name_any());
        let version = secret.resource_version().unwrap_or_default();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(key, (version, contents.clone()));
        contents
    }

    /// Forgets one that is gone.
    pub fn forget(&self, namespace: &str, name: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(&(namespace.to_owned(), name.to_owned()));
    }
}

impl Context {
    /// What a Secret holds. None: it is not there. The cache may lag behind a Secret that was made a moment ago, so one that
    /// it does not have is asked for.
    pub async fn read_secret(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<Contents>>, kube::Error> {
        let cached = self.caches.secrets.get(namespace, name).and_then(|cached| cached.resource_version());
        if let Some(known) = cached.and_then(|version| self.secrets.known(namespace, name, &version)) {
            return Ok(Some(known));
        }
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        match api.get_opt(name).await? {
            Some(secret) => Ok(Some(self.secrets.remember(&secret))),
            None => {
                self.secrets.forget(namespace, name);
                Ok(None)
            }
        }
    }
}

/// What is not text is left out: we write none.
fn contents(secret: &Secret) -> Contents {
    let text = |(key, ByteString(value)): (&String, &ByteString)| {
        Some((key.clone(), String::from_utf8(value.clone()).ok()?))
    };
    secret.data.iter().flatten().filter_map(text).collect()
}

/// One word for all that pods mount: it changes when any of it does.
pub fn hash<'a>(parts: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut digest = Sha256::new();
    for (key, value) in parts {
        for text in [key, value] {
            digest.update((text.len() as u64).to_be_bytes());
            digest.update(text);
        }
    }
    format!("{:x}", digest.finalize())[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_changes_with_any_part() {
        let one = hash([("a", "1"), ("b", "2")]);
        assert_eq!(one, hash([("a", "1"), ("b", "2")]));
        for other in [&[("a", "1")][..], &[("a", "1"), ("b", "3")], &[("a", "1b"), ("", "2")]] {
            assert_ne!(one, hash(other.iter().copied()));
        }
    }
}
