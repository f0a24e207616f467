//! The installation's own workloads: signers, frontends and evaluators, with the logins and tokens that they use.
//!
//! Logins and Secrets, then what needs them. Everything belongs to the operator's own Deployment and goes with it.

pub mod build;
pub mod config;
mod role;
pub mod secrets;

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use harmonia_crds::BuilderPool;
use harmonia_service::secret::SecretError;
use harmonia_service::sentence::sentence;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::PostParams;
use kube::{Api, Resource};
use thiserror::Error;

pub use role::Role;

use crate::apply::{self, ApplyError};
use crate::cache::{Seen, Touched};
use crate::conditions::replica_failure;
use crate::context::Context;
use crate::controller::{Failing, wait};
use crate::credentials::NoUrl;
use crate::names::{FIELD_MANAGER, INSTANCE};
use crate::ready::INSTALLATION;

const KIND: &str = "Installation";
/// Missed events are found after this long.
const RESYNC: Duration = Duration::from_secs(300);
/// Changes that come together are one.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Why the installation is not as it should be.
#[derive(Debug, Error)]
pub enum InstallationError {
    /// The queue said no, or cannot be asked.
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
    /// A file with a URL cannot be read.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The operator's own URL is none.
    #[error(transparent)]
    Url(#[from] NoUrl),
    /// An object could not be applied.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// Nobody says how a role logs in.
    #[error("the {0} has no login: give its Secret, or the database's admin URL to make it with")]
    NoDatabase(&'static str),
    /// A Secret that pods would mount is not there.
    #[error("there is no Secret {0}")]
    NoSecret(String),
    /// The API server said no, or cannot be asked.
    #[error("failed to {action}")]
    Api {
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: Box<kube::Error>,
    },
}

impl InstallationError {
    /// The API server said no to this.
    pub fn api(action: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Api { action, source: Box::new(source) }
    }
}

impl Failing for InstallationError {
    fn reason(&self) -> &'static str {
        match self {
            Self::Queue(_) => "DatabaseFailed",
            Self::Secret(_) | Self::Url(_) => "WrongUrl",
            Self::Apply(_) => "ApplyFailed",
            Self::NoDatabase(_) => "NoLogin",
            Self::NoSecret(_) => "SecretMissing",
            Self::Api { .. } => "ApiFailed",
        }
    }
}

/// What was done once, and by which leader.
#[derive(Default)]
struct Done {
    owner: Option<OwnerReference>,
    logins: HashMap<Role, i64>,
    pool: Option<i64>,
}

/// Until it is stopped.
pub async fn run(context: Arc<Context>) {
    let mut touched = pin!(context.caches.touched());
    let mut standings = context.standings();
    let mut done = Done::default();
    let mut failures = 0;
    loop {
        let pause = match keep(&context, &mut done).await {
            Ok(()) => {
                failures = 0;
                RESYNC
            }
            Err(error) => {
                failures += 1;
                context.counts.failed(KIND, error.reason());
                context.ready.wait(INSTALLATION, sentence(&error));
                tracing::warn!(
                    error = sentence(&error),
                    "the installation is not complete; it is tried again"
                );
                wait(failures)
            }
        };
        tokio::select! {
            () = context.stop.cancelled() => return,
            changed = standings.changed() => if changed.is_err() { return },
            () = change(&context, &mut touched) => tokio::time::sleep(DEBOUNCE).await,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Returns when something of the installation may have changed.
async fn change(context: &Context, touched: &mut (impl Stream<Item = Touched> + Unpin)) {
    while let Some(touched) = touched.next().await {
        match touched {
            Touched::All => return,
            Touched::Object(seen) if concerns(context, &seen) => return,
            Touched::Object(_) => {}
        }
    }
    // The caches end with the process.
    std::future::pending().await
}

/// Our own objects, pods apart, whose number Deployments tell; and Secrets of anybody that the pods mount.
fn concerns(context: &Context, seen: &Seen) -> bool {
    let installation = &context.installation;
    let ours = seen.labels.get(INSTANCE) == Some(&installation.name) && seen.kind != "Pod";
    let mounted = seen.kind == "Secret" && mounted(installation).any(|name| *name == seen.name);
    seen.namespace == context.namespace && (ours || mounted)
}

/// Secrets that somebody else keeps.
fn mounted(installation: &config::Installation) -> impl Iterator<Item = &String> {
    let config::Databases { admin: _, operator: _, signer, frontend, evaluator } = &installation.database;
    let databases = [signer, frontend, evaluator].into_iter().flatten().map(|given| &given.secret);
    let forges = installation.forges.iter().map(|forge| &forge.secret);
    let oidc = installation.oidc.iter().filter_map(|oidc| oidc.secret.as_ref());
    databases.chain([&installation.signing.secret]).chain(&installation.s3.secret).chain(forges).chain(oidc)
}

/// What fails holds up nothing else: the first error is answered when all was tried.
async fn keep(context: &Context, done: &mut Done) -> Result<(), InstallationError> {
    if !context.standing().may_apply() {
        return Ok(());
    }
    let _measure = context.counts.measure(KIND);
    let owner = match &done.owner {
        Some(owner) => owner.clone(),
        None => done.owner.insert(owner(context).await?).clone(),
    };
    let mut failed = None;
    for role in Role::ALL {
        keep_first(&mut failed, keep_role(context, done, &owner, role).await);
    }
    keep_first(&mut failed, secrets::admin_token(context, &owner).await);
    let leader = context.standing().generation();
    if leader.is_some() && done.pool != leader {
        let made = first_pool(context, &owner).await;
        done.pool = if made.is_ok() { leader } else { done.pool };
        keep_first(&mut failed, made);
    }
    match failed {
        Some(error) => Err(error),
        None => {
            look(context);
            Ok(())
        }
    }
}

/// Whoever called tells of the first; of the others the log does.
fn keep_first(failed: &mut Option<InstallationError>, outcome: Result<(), InstallationError>) {
    match (outcome, &failed) {
        (Ok(()), _) => {}
        (Err(error), None) => *failed = Some(error),
        (Err(error), Some(_)) => {
            tracing::warn!(error = sentence(&error), "another part of the installation is not complete");
        }
    }
}

async fn keep_role(
    context: &Context,
    done: &mut Done,
    owner: &OwnerReference,
    role: Role,
) -> Result<(), InstallationError> {
    let leader = context.standing().generation();
    let anew = leader.is_some() && done.logins.get(&role).copied() != leader;
    let (database, word) = secrets::database(context, owner, role, anew).await?;
    done.logins.extend(leader.map(|leader| (role, leader)));
    let mut words = vec![("database", word)];
    match role {
        Role::Signer => {
            words.push(("signing", secrets::version(context, &context.installation.signing.secret)?))
        }
        Role::Frontend => {
            for forge in &context.installation.forges {
                words.push(("forge", secrets::version(context, &forge.secret)?));
            }
            if let Some(secret) = context.installation.oidc.as_ref().and_then(|oidc| oidc.secret.as_ref()) {
                words.push(("oidc", secrets::version(context, secret)?));
            }
        }
        Role::Evaluator => {
            words.push(("netrc", secrets::evaluator_token(context, owner).await?));
            words.push(("nix.conf", build::nix_conf(&context.installation)));
        }
    }
    if let (Role::Signer | Role::Frontend, Some(secret)) = (role, &context.installation.s3.secret) {
        words.push(("s3", secrets::version(context, secret)?));
    }
    let wanted = build::Wanted {
        installation: &context.installation,
        namespace: &context.namespace,
        owner,
        role,
        database,
        secrets_hash: crate::secrets::hash(words.iter().map(|(key, word)| (*key, word.as_str()))),
    };
    put(context, build::build(&wanted)).await
}

/// The operator's own Deployment, with which everything goes.
pub async fn owner(context: &Context) -> Result<OwnerReference, InstallationError> {
    let api: Api<Deployment> = Api::namespaced(context.client.clone(), &context.namespace);
    let name = format!("{}-operator", context.installation.name);
    let found = api
        .get_metadata(&name)
        .await
        .map_err(InstallationError::api("find the operator's own Deployment"))?;
    Ok(OwnerReference {
        api_version: Deployment::api_version(&()).into_owned(),
        kind: Deployment::kind(&()).into_owned(),
        name,
        uid: found.metadata.uid.unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    })
}

async fn put(context: &Context, objects: build::Objects) -> Result<(), InstallationError> {
    let build::Objects { deployment, disruption_budget, config_map } = objects;
    let (namespace, caches) = (&context.namespace, &context.caches);
    let name = deployment.metadata.name.clone().unwrap_or_default();
    if let Some(config_map) = config_map {
        let cached = caches.config_maps.get(namespace, &name);
        apply::apply(context, config_map, cached.as_deref()).await?;
    }
    let cached = caches.deployments.get(namespace, &name);
    apply::apply(context, deployment, cached.as_deref()).await?;
    let cached = caches.disruption_budgets.get(namespace, &name);
    match (disruption_budget, cached) {
        (Some(budget), cached) => drop(apply::apply(context, budget, cached.as_deref()).await?),
        (None, Some(cached)) => apply::delete(context, &*cached).await?,
        (None, None) => {}
    }
    Ok(())
}

/// A pool to begin with, unless there is one of that name; from then on it is people's.
async fn first_pool(context: &Context, owner: &OwnerReference) -> Result<(), InstallationError> {
    let Some(first) = &context.installation.pool else { return Ok(()) };
    let api: Api<BuilderPool> = Api::namespaced(context.client.clone(), &context.namespace);
    let mut pool = BuilderPool::new(&first.name, first.spec.clone());
    pool.metadata.namespace = Some(context.namespace.clone());
    pool.metadata.owner_references = Some(vec![owner.clone()]);
    let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    match api.create(&parameters, &pool).await {
        Ok(_) => tracing::info!(name = first.name, "made the first pool"),
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        Err(source) => return Err(InstallationError::api("make the first pool")(source)),
    }
    Ok(())
}

/// This process is ready when every role has been there once.
fn look(context: &Context) {
    let found = |role: Role| {
        context.caches.deployments.get(&context.namespace, &role.child_name(&context.installation))
    };
    let waiting: Vec<String> = Role::ALL
        .into_iter()
        .filter_map(|role| waits(role, role.replicas(&context.installation), found(role).as_deref()))
        .collect();
    match waiting.is_empty() {
        true => context.ready.meet(INSTALLATION),
        false => context.ready.wait(INSTALLATION, format!("no pod is ready of: {}", waiting.join(", "))),
    }
}

/// The role, if none of its pods is ready, with what keeps them from being made. None: it has one, or is to have none.
fn waits(role: Role, replicas: i32, found: Option<&Deployment>) -> Option<String> {
    let available =
        found.and_then(|found| found.status.as_ref()?.available_replicas).is_some_and(|number| number > 0);
    if available || replicas < 1 {
        return None;
    }
    let failure = found.and_then(replica_failure);
    Some(failure.map_or_else(|| role.name().to_owned(), |failure| format!("{} ({failure})", role.name())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_role_whose_pods_are_refused_says_why() {
        let refused = json!({"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"});
        let says = |replicas, status: Value| {
            let deployment = serde_json::from_value(json!({"metadata": {}, "status": status})).unwrap();
            waits(Role::Evaluator, replicas, Some(&deployment))
        };
        let none = json!({"conditions": [refused]});
        assert_eq!(says(1, none.clone()).as_deref(), Some("evaluator (violates PodSecurity)"));
        assert_eq!(says(0, none), None);
        assert_eq!(says(2, json!({"availableReplicas": 1, "conditions": [refused]})), None);
        assert_eq!(says(1, json!({})).as_deref(), Some("evaluator"));
        assert_eq!(waits(Role::Signer, 1, None).as_deref(), Some("signer"));
    }

    #[test]
    fn the_first_error_is_answered() {
        let mut failed = None;
        for name in ["signing", "app"] {
            keep_first(&mut failed, Ok(()));
            keep_first(&mut failed, Err(InstallationError::NoSecret(name.to_owned())));
        }
        assert_eq!(failed.unwrap().to_string(), "there is no Secret signing");
    }
}
