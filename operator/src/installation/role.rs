use std::collections::BTreeMap;

use harmonia_queue::logins::Group;
use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};

use super::config::{Installation, SecretKey};

/// A part of the installation that the operator runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Holds the keys.
    Signer,
    /// The API and the cache.
    Frontend,
    /// Evaluates Nix.
    Evaluator,
}

impl Role {
    /// In the order in which they are made.
    pub const ALL: [Self; 3] = [Self::Signer, Self::Frontend, Self::Evaluator];

    /// The component's name, and the program's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Signer => "signer",
            Self::Frontend => "frontend",
            Self::Evaluator => "evaluator",
        }
    }

    /// Where its pages are.
    pub fn port(self) -> i32 {
        match self {
            Self::Frontend => 7777,
            Self::Signer => 7778,
            Self::Evaluator => 7780,
        }
    }

    /// Its group in the database.
    pub fn group(self) -> Group {
        match self {
            Self::Signer => Group::Signer,
            Self::Frontend => Group::Frontend,
            Self::Evaluator => Group::Evaluator,
        }
    }

    /// What its Deployment, ServiceAccount and disruption budget are called.
    pub fn child_name(self, installation: &Installation) -> String {
        format!("{}-{}", installation.name, self.name())
    }

    /// Its login, where we make it.
    pub fn login(self, installation: &Installation) -> String {
        format!("{}_{}", installation.name.replace('-', "_"), self.name())
    }

    /// Where its URL of the database is, and whether somebody else put it there.
    pub fn database(self, installation: &Installation) -> (SecretKey, bool) {
        let given = match self {
            Self::Signer => &installation.database.signer,
            Self::Frontend => &installation.database.frontend,
            Self::Evaluator => &installation.database.evaluator,
        };
        match given {
            Some(given) => (given.clone(), true),
            None => {
                let secret = format!("{}-database-{}", installation.name, self.name());
                (SecretKey { secret, key: "url".to_owned() }, false)
            }
        }
    }

    /// How many.
    pub fn replicas(self, installation: &Installation) -> i32 {
        match self {
            Self::Signer => installation.signer.replicas,
            Self::Frontend => installation.frontend.replicas,
            Self::Evaluator => installation.evaluator.replicas,
        }
    }

    /// Of each.
    pub fn resources(self, installation: &Installation) -> &ResourceRequirements {
        match self {
            Self::Signer => &installation.signer.resources,
            Self::Frontend => &installation.frontend.resources,
            Self::Evaluator => &installation.evaluator.resources,
        }
    }

    /// Where they run, and what they tolerate there.
    pub fn placement(self, installation: &Installation) -> (&BTreeMap<String, String>, &[Toleration]) {
        let Installation { signer, frontend, evaluator, .. } = installation;
        match self {
            Self::Signer => (&signer.node_selector, &signer.tolerations),
            Self::Frontend => (&frontend.node_selector, &frontend.tolerations),
            Self::Evaluator => (&evaluator.node_selector, &evaluator.tolerations),
        }
    }
}
