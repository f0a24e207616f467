//! What a pool refers to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use harmonia_crds::BuilderPool;
use harmonia_crds::overlay::PodOverlay;
use kube::ResourceExt;
use reqwest::Url;

use crate::secrets::Contents;

use super::{PoolError, Pools, build, database};

/// Where something is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// A name or an address.
    pub host: String,
    /// A port.
    pub port: u16,
}

impl Endpoint {
    /// Of a URL. None: it names no host, such as that of a socket.
    pub fn of(url: &str, default: u16) -> Option<Self> {
        let url = Url::parse(url).ok()?;
        let host = url.host_str().filter(|host| !host.is_empty())?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Some(Self { host, port: url.port_or_known_default().unwrap_or(default) })
    }
}

/// All that is known around a pool.
#[derive(Debug, Clone)]
pub struct Dereferenced {
    /// The keys that sign the cache.
    pub public_keys: Vec<String>,
    /// What the builders log in with.
    pub credentials: Arc<Contents>,
    /// Versions of the Secrets that the template refers to.
    pub secrets: BTreeMap<String, String>,
    /// Where builders reach the database,
    pub database: Option<Endpoint>,
    /// and the bucket.
    pub bucket: Option<Endpoint>,
}

/// Fetches what the pool refers to.
pub async fn dereference(pools: &Pools, pool: &BuilderPool) -> Result<Dereferenced, PoolError> {
    let context = &pools.context;
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    let child = build::child_name(&name);
    let contents =
        context.read_secret(&namespace, &child).await.map_err(PoolError::api("read the pool's Secret"))?;
    let credentials = match contents {
        Some(contents) if contents.contains_key(database::DATABASE_URL) => contents,
        Some(_) if context.admin_url().is_ok_and(|url| url.is_none()) => {
            return Err(PoolError::WaitingForDatabase(format!(
                "the operator may not make logins: put the URL of the pool's login into Secret {child}, as {}",
                database::DATABASE_URL
            )));
        }
        _ => {
            let reason = "the pool has no login yet: that needs the database, which does not answer";
            return Err(PoolError::WaitingForDatabase(reason.to_owned()));
        }
    };
    let referred = pool.spec.template.as_ref().map(secrets_of).unwrap_or_default();
    pools.referring.refer(&namespace, &name, referred.iter().map(|(secret, _)| secret.clone()));
    let mut secrets = BTreeMap::new();
    for (secret, optional) in referred {
        match context.caches.secrets.get(&namespace, &secret).and_then(|cached| cached.resource_version()) {
            Some(version) => drop(secrets.insert(secret, version)),
            None if optional => {}
            None => return Err(PoolError::SecretMissing(secret)),
        }
    }
    let url = context.database_url().unwrap_or_default();
    let bucket = &context.installation.s3;
    let bucket = bucket.public_endpoint.as_deref().or(bucket.endpoint.as_deref());
    Ok(Dereferenced {
        public_keys: pools.keys.known().ok_or(PoolError::WaitingForKeys)?,
        credentials,
        secrets,
        database: Endpoint::of(&url, 5432),
        bucket: bucket.and_then(|url| Endpoint::of(url, 443)),
    })
}

/// Secrets that the pods read at their start, and whether they may be missing.
fn secrets_of(overlay: &PodOverlay) -> BTreeSet<(String, bool)> {
    let spec = &overlay.spec;
    let volumes = spec.volumes.iter().filter_map(|volume| {
        let secret = volume.secret.as_ref()?;
        Some((secret.secret_name.clone()?, secret.optional.unwrap_or(false)))
    });
    let projected = spec.volumes.iter().filter_map(|volume| volume.projected.as_ref()?.sources.as_ref());
    let projected = projected.flatten().filter_map(|source| {
        let secret = source.secret.as_ref()?;
        Some((secret.name.clone(), secret.optional.unwrap_or(false)))
    });
    let variables = spec.containers.iter().flat_map(|container| &container.env).filter_map(|variable| {
        let secret = variable.value_from.as_ref()?.secret_key_ref.as_ref()?;
        Some((secret.name.clone(), secret.optional.unwrap_or(false)))
    });
    volumes.chain(projected).chain(variables).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn hosts_and_ports_of_urls() {
        let endpoint = |url| Endpoint::of(url, 5432).map(|endpoint| (endpoint.host, endpoint.port));
        let is = |host: &str, port| Some((host.to_owned(), port));
        assert_eq!(endpoint("postgres://a:b@db.ci.svc/x"), is("db.ci.svc", 5432));
        assert_eq!(endpoint("postgres://a:b@[::1]:6000/x"), is("::1", 6000));
        assert_eq!(endpoint("https://s3.example"), is("s3.example", 443));
        assert_eq!(endpoint("postgres:///x?host=/run"), None);
    }

    #[test]
    fn secrets_are_found_wherever_pods_read_them() {
        let overlay = serde_json::from_value(json!({"spec": {
            "volumes": [
                {"name": "a", "secret": {"secretName": "one"}},
                {"name": "b", "projected": {"sources": [{"secret": {"name": "two", "optional": true}}]}},
            ],
            "containers": [{"name": "builder", "env": [
                {"name": "X", "valueFrom": {"secretKeyRef": {"name": "three", "key": "k"}}},
            ]}],
        }}));
        let found = secrets_of(&overlay.unwrap());
        let expected = [("one", false), ("three", false), ("two", true)];
        assert_eq!(found, expected.map(|(name, optional)| (name.to_owned(), optional)).into());
    }
}
