//! Where the operator looks.

use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Client, Resource};

/// Namespaces that are watched by one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All of them.
    All,
    /// One.
    Namespace(String),
}

impl Scope {
    /// What the setting `watch_namespaces` says; the operator's own namespace is always among them, for what it makes there.
    pub fn read(watch: &str, own: &str) -> Vec<Self> {
        let mut names: Vec<&str> = watch.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        if names.is_empty() {
            return vec![Self::All];
        }
        names.push(own);
        names.sort_unstable();
        names.dedup();
        names.into_iter().map(|name| Self::Namespace(name.to_owned())).collect()
    }

    /// Whether it is watched.
    pub fn has(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Namespace(name) => name == namespace,
        }
    }

    /// Objects of a kind there.
    pub fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match self {
            Self::All => Api::all(client.clone()),
            Self::Namespace(name) => Api::namespaced(client.clone(), name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_names_everything_is_watched() {
        assert_eq!(Scope::read(" ", "ci"), [Scope::All]);
    }

    #[test]
    fn the_operators_own_namespace_is_always_watched_once() {
        let names = |watch| Scope::read(watch, "ci");
        let scope = |name: &str| Scope::Namespace(name.to_owned());
        assert_eq!(names("b, a"), [scope("a"), scope("b"), scope("ci")]);
        assert_eq!(names("ci"), [scope("ci")]);
    }
}
