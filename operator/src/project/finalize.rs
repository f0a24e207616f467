//! The end of a Project: its evaluations are cancelled, its history stays. Without a database that is waited for, but not for
//! ever: nobody's namespace hangs because of it.

use std::time::Duration;

use harmonia_crds::Project;
use harmonia_queue::mirror;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::runtime::finalizer;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::{ProjectError, Projects, queue_name};
use crate::context::Context;
use crate::events::News;
use crate::names::FINALIZER;

/// How long a database that is away is waited for.
const PATIENCE: SignedDuration = SignedDuration::from_mins(2);
/// Others than the last leader wait for longer: it may be about to let go.
const FOLLOWERS: SignedDuration = SignedDuration::from_secs(150);
const LOOK: Duration = Duration::from_secs(5);

/// To be called again soon.
pub fn look_again() -> Action {
    Action::requeue(LOOK)
}

/// Removes it from the queue; or lets go, with an Event, if the queue has been away for too long. Ok: the finalizer may go.
pub async fn end(projects: &Projects, project: &Project) -> Result<Action, ProjectError> {
    let name = queue_name(project);
    projects.mirrored.forget(&name);
    let namespace = project.namespace().unwrap_or_default();
    projects.referring.refer(&namespace, &project.name_any(), std::iter::empty());
    let done = match projects.context.lead() {
        Some(lead) => {
            let uid = project.uid().unwrap_or_default();
            mirror::project_gone(&lead.db, lead.generation, &uid, &name).await.map_err(Some)
        }
        None => Err(None),
    };
    match done {
        Ok(_) => Ok(Action::await_change()),
        Err(_) if waited(project, Timestamp::now()) > PATIENCE => {
            let note = format!(
                "the database has been away for two minutes: the Project goes, and project {name} with it when the \
                 database is back"
            );
            let news = News { warning: true, reason: "LetGo", action: "Finalize", note };
            projects.context.publish(project, news).await;
            Ok(Action::await_change())
        }
        Err(Some(source)) => Err(ProjectError::Queue { name, source }),
        Err(None) => Err(ProjectError::Waiting(name)),
    }
}

/// Lets go of one that this release cannot read. What the queue has of it goes with all that no Project keeps any more.
pub async fn let_go(context: &Context, meta: &ObjectMeta) -> Result<Action, ProjectError> {
    let held = meta.finalizers.clone().unwrap_or_default();
    let left: Vec<&String> = held.iter().filter(|name| *name != FINALIZER).collect();
    if left.len() == held.len() {
        return Ok(Action::await_change());
    }
    let change = json!({"metadata": {"resourceVersion": meta.resource_version, "finalizers": left}});
    let (namespace, name) =
        (meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default());
    let api: Api<Project> = Api::namespaced(context.client.clone(), namespace);
    match api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(change)).await {
        Ok(_) => Ok(Action::await_change()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Action::await_change()),
        Err(error) => {
            let source = Box::new(finalizer::Error::RemoveFinalizer(error));
            Err(ProjectError::Finalizer { name: format!("{namespace}/{name}"), source })
        }
    }
}

/// Whether no replica can know who leads, and the Project has waited for that long enough: then whoever sees it lets go.
pub async fn nobody_leads(context: &Context, project: &Project) -> bool {
    waited(project, Timestamp::now()) > FOLLOWERS
        && mirror::project_counts(context.db()).await.is_err_and(|error| error.is_transient())
}

fn waited(project: &Project, now: Timestamp) -> SignedDuration {
    let since = project.metadata.deletion_timestamp.as_ref().map_or(now, |since| since.0);
    now.duration_since(since)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::project::validate::tests::project;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    #[test]
    fn the_wait_is_counted_from_the_deletion() {
        let mut project = project(json!({}));
        assert_eq!(waited(&project, Timestamp::now()), SignedDuration::ZERO);
        project.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        let later = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(121);
        assert!(waited(&project, later) > PATIENCE);
    }
}
