//! Events: what was decided, where `kubectl describe` shows it. A repeated one is a request too: whoever publishes does so
//! when something has changed.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::runtime::events::{Event, EventType};

use crate::context::Context;

/// The longest note that the API server takes.
const NOTE: usize = 1024;

/// Something to tell about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// Whether somebody should look.
    pub warning: bool,
    /// Why, as one word.
    pub reason: &'static str,
    /// What was done about it, as one word.
    pub action: &'static str,
    /// Why, as a sentence.
    pub note: String,
}

impl Context {
    /// Publishes an Event about an object. One that cannot be published is only logged.
    pub async fn publish<K: Resource<DynamicType = ()>>(&self, object: &K, news: News) {
        self.publish_about(&object.object_ref(&()), news).await;
    }

    /// The same for an object of which only the reference is known.
    pub async fn publish_about(&self, object: &ObjectReference, news: News) {
        let News { warning, reason, action, mut note } = news;
        let name = object.name.as_deref().unwrap_or_default();
        let namespace = object.namespace.as_deref().unwrap_or_default();
        if warning {
            tracing::warn!(namespace, name, reason, note, "event");
        } else {
            tracing::info!(namespace, name, reason, note, "event");
        }
        if !self.standing().may_apply() {
            return;
        }
        note.truncate(note.floor_char_boundary(NOTE));
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            action: action.to_owned(),
            note: Some(note),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, object).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "an event cannot be published");
        }
    }
}
