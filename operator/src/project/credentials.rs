//! How private code is read: what the Secrets hold that Projects name, brought into the one Secret that evaluators mount, each under
//! its namespace and name. Whoever writes a Secret says in it which hosts see it: a Project cannot send it elsewhere.

use harmonia_crds::Project;
use harmonia_service::netrc;
use harmonia_service::sentence::sentence;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::Store;
use thiserror::Error;

use crate::context::Context;
use crate::installation::secrets::{credentials_secret, write};
use crate::installation::{InstallationError, Role, owner};
use crate::names::MANAGED_BY;
use crate::scope::Scope;
use crate::secrets::Contents;

/// Under this key a Secret has its netrc file.
const KEY: &str = "netrc";
/// A Secret holds a MiB, and this one is everybody's: nobody gets more of it than that.
const LONGEST: usize = 4 << 10;

/// Why a Project's Secret is of no use. What it holds is in none of these.
#[derive(Debug, Error)]
pub enum CredentialError {
    /// It is not there.
    #[error(
        "there is no Secret {0}, which spec.source.secretRef names: make it in the Project's namespace, with a netrc file under the \
         key {KEY}"
    )]
    Missing(String),
    /// It is a Secret for something else.
    #[error(
        "the Secret {0}, which spec.source.secretRef names, has no key {KEY}: put a netrc file there, `machine HOST login NAME \
         password SECRET` for each host"
    )]
    NoKey(String),
    /// It has something else under that key.
    #[error("the key {KEY} of the Secret {name} cannot be used: {why}")]
    Form {
        /// Which.
        name: String,
        /// What is wrong.
        why: &'static str,
    },
    /// The API server said no, or cannot be asked.
    #[error("the Secret {name} cannot be read")]
    Api {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
}

/// What evaluators call a Project's Secret: names of namespaces have no dots. None: it names none.
pub fn key(project: &Project) -> Option<String> {
    let secret = project.spec.source.secret_ref.as_ref()?;
    Some(format!("{}.{}", project.namespace().unwrap_or_default(), secret.name))
}

/// The netrc file in the Secret that a Project names, if it names one.
pub async fn of(context: &Context, project: &Project) -> Result<Option<String>, CredentialError> {
    let Some(secret) = &project.spec.source.secret_ref else { return Ok(None) };
    let (namespace, name) = (project.namespace().unwrap_or_default(), secret.name.clone());
    // A Secret that the cache does not have yet comes with its own word.
    if context.caches.secrets.get(&namespace, &name).is_none() {
        return Err(CredentialError::Missing(name));
    }
    match context.read_secret(&namespace, &name).await {
        Ok(Some(contents)) => usable(&name, &contents).map(Some),
        Ok(None) => Err(CredentialError::Missing(name)),
        Err(source) => Err(CredentialError::Api { name, source: Box::new(source) }),
    }
}

fn usable(name: &str, contents: &Contents) -> Result<String, CredentialError> {
    let text = contents.get(KEY).ok_or_else(|| CredentialError::NoKey(name.to_owned()))?;
    let read = match text.len() {
        0..=LONGEST => netrc::parse(text),
        _ => Err("it has more than 4 KiB"),
    };
    match read {
        Ok(_) => Ok(text.clone()),
        Err(why) => Err(CredentialError::Form { name: name.to_owned(), why }),
    }
}

/// What was brought, so that nothing is sent twice.
#[derive(Default)]
pub struct Brought {
    owner: Option<OwnerReference>,
    contents: Option<Contents>,
}

impl Brought {
    /// Brings what all Projects together name, and takes away what none names any more.
    pub async fn keep(&mut self, context: &Context, stores: &[(Scope, Store<DeserializeGuard<Project>>)]) {
        if !context.standing().may_apply() {
            self.contents = None;
        } else if let Err(error) = self.bring(context, stores).await {
            tracing::warn!(error = sentence(&error), "credentials cannot be brought to the evaluators");
        }
    }

    async fn bring(
        &mut self,
        context: &Context,
        stores: &[(Scope, Store<DeserializeGuard<Project>>)],
    ) -> Result<(), InstallationError> {
        let mut wanted = Contents::new();
        for object in stores.iter().flat_map(|(_, store)| store.state()) {
            let Ok(project) = &object.0 else { continue };
            let Some(key) = key(project).filter(|_| project.metadata.deletion_timestamp.is_none()) else {
                continue;
            };
            match of(context, project).await {
                Ok(netrc) => wanted.extend(netrc.map(|netrc| (key, netrc))),
                // Of this one nothing is known: all stays as it is.
                Err(CredentialError::Api { source, .. }) => {
                    return Err(InstallationError::Api { action: "read a Project's Secret", source });
                }
                // Its Project says so.
                Err(_) => {}
            }
        }
        if self.is_settled(context, &wanted).await? {
            return Ok(());
        }
        let owner = match &self.owner {
            Some(owner) => owner.clone(),
            None => self.owner.insert(owner(context).await?).clone(),
        };
        let name = credentials_secret(&context.installation);
        write(context, &owner, Role::Evaluator.name(), &name, wanted.clone()).await?;
        self.contents = Some(wanted);
        Ok(())
    }

    /// Whether evaluators have all of it, and nothing of before. Keys that other people put there are theirs.
    async fn is_settled(&self, context: &Context, wanted: &Contents) -> Result<bool, InstallationError> {
        let name = credentials_secret(&context.installation);
        let live = context.caches.secrets.get(&context.namespace, &name);
        let ours =
            live.is_some_and(|live| live.labels().get(MANAGED_BY.0).is_some_and(|by| by == MANAGED_BY.1));
        if wanted.is_empty() && !ours {
            return Ok(true);
        }
        if self.contents.as_ref() != Some(wanted) {
            return Ok(false);
        }
        let live = context.read_secret(&context.namespace, &name).await;
        let live =
            live.map_err(InstallationError::api("read the evaluators' credentials"))?.unwrap_or_default();
        Ok(wanted.iter().all(|(key, netrc)| live.get(key) == Some(netrc)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::project::validate::tests::project;

    fn told(contents: &[(&str, &str)]) -> String {
        let contents = contents.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        usable("reader", &contents).unwrap_or_else(|error| error.to_string())
    }

    #[test]
    fn a_secret_without_a_netrc_file_says_what_is_wrong_and_not_what_it_holds() {
        assert!(told(&[("password", "s3cret")]).contains("has no key netrc"));
        for (text, why) in [("default login me password s3cret", "every host"), ("s3cret", "machine HOST")] {
            let told = told(&[("netrc", text)]);
            assert!(told.contains(why) && !told.contains("s3cret"), "{told}");
        }
        assert!(told(&[("netrc", &"x".repeat(5000))]).contains("more than 4 KiB"));
        let whole = "machine h login me password s3cret";
        assert_eq!(told(&[("netrc", whole)]), whole);
    }

    #[test]
    fn evaluators_know_a_secret_by_its_namespace_and_name() {
        let source = json!({"github": {"owner": "acme", "repo": "dots"}, "secretRef": {"name": "reader"}});
        assert_eq!(key(&project(json!({ "source": source }))).as_deref(), Some("ci.reader"));
        assert_eq!(key(&project(json!({}))), None);
    }
}
