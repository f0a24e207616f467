//! Projects: mirrored into the queue, and shown with what the queue knows of them.
//!
//! dereference (what the queue counts) → validate (the spec, in the queue's words) → apply (the mirror) → update_status. There is
//! nothing to build: a project has no objects of its own.

mod counts;
mod credentials;
mod finalize;
mod mirrored;
mod status;
mod validate;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use futures::stream::select;
use harmonia_crds::Project;
use harmonia_crds::conditions::READY;
use harmonia_queue::mirror;
use harmonia_service::sentence::sentence;
use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::finalizer::{Event, finalizer};
use kube::runtime::reflector::Store;
use kube::{Api, ResourceExt};
use serde_json::json;
use thiserror::Error;

use counts::Counted;
use credentials::{Brought, CredentialError};
use mirrored::Mirrored;
use status::Outcome;

use crate::conditions::news;
use crate::context::Context;
use crate::controller::{Backoff, Failing, controller, may_exist, resync};
use crate::events::News;
use crate::names::{FIELD_MANAGER, FINALIZER};
use crate::referring::Referring;
use crate::scope::Scope;

const KIND: &str = "Project";
/// How often the queue is asked for numbers.
const LOOK: Duration = Duration::from_secs(2);

/// Why a project is not as its spec says.
#[derive(Debug, Error)]
pub enum ProjectError {
    /// It cannot be read.
    #[error("the Project {0} cannot be read: {1}")]
    Unreadable(String, String),
    /// The queue said no, or cannot be asked.
    #[error("failed to mirror the Project {name}")]
    Queue {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: harmonia_queue::Error,
    },
    /// The database is away, and the Project waits for it to be deleted.
    #[error("the Project {0} waits for the database to be deleted there")]
    Waiting(String),
    /// The API server said no, or cannot be asked.
    #[error("failed to write the status of the Project {name}")]
    Status {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// The finalizer cannot be put on or taken off, or what it is for failed.
    #[error("failed to keep the finalizer of the Project {name}")]
    Finalizer {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: Box<kube::runtime::finalizer::Error<ProjectError>>,
    },
}

impl Failing for ProjectError {
    fn reason(&self) -> &'static str {
        match self {
            Self::Unreadable(..) => "Unreadable",
            Self::Queue { .. } => "MirrorFailed",
            Self::Waiting(_) => "WaitingForDatabase",
            Self::Status { .. } => "StatusFailed",
            Self::Finalizer { .. } => "FinalizerFailed",
        }
    }
}

struct Projects {
    context: Arc<Context>,
    backoff: Backoff,
    mirrored: Mirrored,
    counted: Counted,
    /// Whom a Secret with a credential concerns.
    referring: Arc<Referring>,
}

/// Until it is stopped.
pub async fn run(context: Arc<Context>) {
    let projects = Arc::new(Projects {
        context: context.clone(),
        backoff: Backoff::default(),
        mirrored: Mirrored::default(),
        counted: Counted::default(),
        referring: Arc::default(),
    });
    let (mut running, mut stores) = (Vec::new(), Vec::new());
    for scope in &context.scopes {
        let referring = projects.referring.changes(&context.caches);
        let more = select(projects.counted.changes(scope.clone()), referring);
        let (controller, store) = controller(&context, scope.api::<Project>(&context.client), |_| None, more);
        running
            .push(controller.run(reconcile, failed, projects.clone()).for_each(|_| std::future::ready(())));
        stores.push((scope.clone(), store));
    }
    tokio::select! {
        _ = join_all(running) => {}
        () = follow(&projects, stores) => {}
    }
}

/// Asks for the numbers of all projects while this replica leads, removes what no Project keeps any more, and brings evaluators the
/// credentials that Projects name.
async fn follow(projects: &Projects, stores: Vec<(Scope, Store<DeserializeGuard<Project>>)>) {
    for (_, store) in &stores {
        // The writer lives for as long as this.
        let _ = store.wait_until_ready().await;
    }
    let exists = |namespace: &str, name: &str| may_exist(&stores, namespace, name);
    let mut brought = Brought::default();
    loop {
        tokio::time::sleep(LOOK).await;
        brought.keep(&projects.context, &stores).await;
        let Some(lead) = projects.context.lead() else { continue };
        if let Err(error) = projects.counted.ask(&lead.db).await {
            tracing::debug!(error = sentence(&error), "projects cannot be counted");
            continue;
        }
        for (name, uid) in projects.counted.orphans(exists) {
            tracing::info!(name, "no Project keeps this project any more: it is removed");
            if let Err(error) = mirror::project_gone(&lead.db, lead.generation, &uid, &name).await {
                tracing::warn!(name, error = sentence(&error), "a project cannot be removed");
            }
        }
    }
}

fn failed(object: Arc<DeserializeGuard<Project>>, error: &ProjectError, projects: Arc<Projects>) -> Action {
    projects.context.counts.failed(KIND, error.reason());
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    tracing::warn!(namespace, name, error = sentence(error), "a Project cannot be reconciled");
    match error {
        // Trying again changes nothing.
        ProjectError::Unreadable(..) => Action::await_change(),
        _ => Action::requeue(projects.backoff.fail(&*object)),
    }
}

async fn reconcile(
    object: Arc<DeserializeGuard<Project>>,
    projects: Arc<Projects>,
) -> Result<Action, ProjectError> {
    let context = &projects.context;
    let _measure = context.counts.measure(KIND);
    let project = match &object.0 {
        Ok(project) => Arc::new(project.clone()),
        Err(invalid) if context.standing().may_apply() && invalid.metadata.deletion_timestamp.is_some() => {
            return finalize::let_go(context, &invalid.metadata).await;
        }
        Err(invalid) if context.standing().may_apply() => {
            let note = invalid.to_string();
            let news = News { warning: true, reason: "Unreadable", action: "Reconcile", note: note.clone() };
            context.publish(&*object, news).await;
            return Err(ProjectError::Unreadable(object.name_any(), note));
        }
        Err(_) => return Ok(Action::await_change()),
    };
    let deleted = project.metadata.deletion_timestamp.is_some();
    let may = context.standing().may_apply() || deleted && finalize::nobody_leads(context, &project).await;
    if !may {
        return Ok(if deleted { finalize::look_again() } else { Action::await_change() });
    }
    let api: Api<Project> = Api::namespaced(context.client.clone(), &project.namespace().unwrap_or_default());
    let name = queue_name(&project);
    let kept = finalizer(&api, FINALIZER, project, |event| async {
        match event {
            Event::Apply(project) => keep(&projects, &api, &project).await,
            Event::Cleanup(project) => finalize::end(&projects, &project).await,
        }
    });
    let action = kept.await.map_err(|source| match source {
        kube::runtime::finalizer::Error::ApplyFailed(error)
        | kube::runtime::finalizer::Error::CleanupFailed(error) => error,
        source => ProjectError::Finalizer { name, source: Box::new(source) },
    })?;
    projects.backoff.clear(&*object);
    Ok(action)
}

/// Mirrors it, and says how that went before it fails.
async fn keep(projects: &Projects, api: &Api<Project>, project: &Project) -> Result<Action, ProjectError> {
    let secret = project.spec.source.secret_ref.iter().map(|secret| secret.name.clone());
    let namespace = project.namespace().unwrap_or_default();
    projects.referring.refer(&namespace, &project.name_any(), secret);
    let unusable = credentials::of(&projects.context, project).await.err();
    let synced = sync(projects, project).await;
    update_status(projects, api, project, &synced, unusable.as_ref()).await?;
    match synced {
        Outcome::Failed(source) => Err(ProjectError::Queue { name: queue_name(project), source }),
        Outcome::Done | Outcome::Disabled | Outcome::Away => Ok(resync()),
    }
}

async fn sync(projects: &Projects, project: &Project) -> Outcome {
    if project.is_disabled() {
        return Outcome::Disabled;
    }
    let Some(lead) = projects.context.lead() else { return Outcome::Away };
    let mirrored = projects.mirrored.mirror(&lead, project).await;
    let counted = match mirrored {
        Ok(true) => projects.counted.ask(&lead.db).await,
        Ok(false) => Ok(()),
        Err(error) => Err(error),
    };
    match counted {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Failed(error),
    }
}

async fn update_status(
    projects: &Projects,
    api: &Api<Project>,
    project: &Project,
    synced: &Outcome,
    unusable: Option<&CredentialError>,
) -> Result<(), ProjectError> {
    let counts = projects.counted.get(&queue_name(project));
    let before = project.status.clone().unwrap_or_default();
    let found = status::findings(project, synced, counts.as_ref(), unusable);
    let status = status::status(project, &found, counts.as_ref(), Timestamp::now());
    if project.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let patch = json!({
        "apiVersion": "ci.harmonia.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": project.name_any()},
        "status": status,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch_status(&project.name_any(), &parameters, &Patch::Apply(patch))
        .await
        .map_err(|source| ProjectError::Status { name: queue_name(project), source: Box::new(source) })?;
    for finding in news(&before.conditions, &found).filter(|finding| finding.kind == READY) {
        projects.context.publish(project, status::event(finding)).await;
    }
    Ok(())
}

/// What the queue calls it.
fn queue_name(project: &Project) -> String {
    format!("{}/{}", project.namespace().unwrap_or_default(), project.name_any())
}
