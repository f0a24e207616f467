//! The Kubernetes nodes that are leaving. They belong to the cluster, not to a namespace: where the operator may not watch
//! them, builders hear of a drain by SIGTERM only.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::watch;

use crate::context::Context;

/// How soon it is tried again to watch what may not be watched.
const FORBIDDEN: Duration = Duration::from_secs(300);

/// Names of nodes. None: not known yet, or no more.
pub type Leaving = Option<BTreeSet<String>>;

/// Those that are leaving now, and what keeps that up to date for as long as it runs.
pub fn leaving(context: &Context) -> (watch::Receiver<Leaving>, impl Future<Output = ()>) {
    let (say, heard) = watch::channel(None);
    (heard, keep(context, say))
}

async fn keep(context: &Context, say: watch::Sender<Leaving>) {
    let taints = &context.installation.drain_taints;
    loop {
        let api: Api<Node> = Api::all(context.client.clone());
        let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
        let mut listed = BTreeSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    context.see_nodes(true);
                    hear(event, taints, &mut listed, &say);
                }
                Err(error) if is_forbidden(&error) => break,
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "the watch of nodes broke off; it is tried again"
                    );
                }
            }
        }
        context.see_nodes(false);
        say.send_replace(None);
        tokio::time::sleep(FORBIDDEN).await;
    }
}

/// A list replaces what was known only when it is complete.
fn hear(event: Event<Node>, taints: &[String], listed: &mut BTreeSet<String>, say: &watch::Sender<Leaving>) {
    match event {
        Event::Init => listed.clear(),
        Event::InitApply(node) => {
            if is_leaving(&node, taints) {
                listed.insert(node.name_any());
            }
        }
        Event::InitDone => {
            let listed = std::mem::take(listed);
            say.send_if_modified(|known| {
                let news = known.as_ref() != Some(&listed);
                *known = Some(listed);
                news
            });
        }
        Event::Apply(node) => {
            let leaves = is_leaving(&node, taints);
            change(say, &node.name_any(), leaves);
        }
        Event::Delete(node) => change(say, &node.name_any(), false),
    }
}

fn change(say: &watch::Sender<Leaving>, name: &str, leaves: bool) {
    say.send_if_modified(|known| {
        let Some(known) = known else { return false };
        let news = if leaves { known.insert(name.to_owned()) } else { known.remove(name) };
        if news {
            tracing::info!(node = name, leaves, "a Kubernetes node");
        }
        news
    });
}

/// Whether nothing new should begin there.
fn is_leaving(node: &Node, taints: &[String]) -> bool {
    let Some(spec) = &node.spec else { return false };
    spec.unschedulable == Some(true) || spec.taints.iter().flatten().any(|taint| taints.contains(&taint.key))
}

fn is_forbidden(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(status))
        | WatchStartFailed(kube::Error::Api(status))
        | WatchFailed(kube::Error::Api(status)) => status.is_forbidden(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeSpec, Taint};
    use kube::core::ObjectMeta;

    use super::*;

    fn node(name: &str, cordoned: bool, taints: &[&str]) -> Node {
        let taint = |key: &&str| Taint { key: (*key).to_owned(), ..Taint::default() };
        let spec = NodeSpec {
            unschedulable: cordoned.then_some(true),
            taints: Some(taints.iter().map(taint).collect()),
            ..NodeSpec::default()
        };
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        Node { metadata, spec: Some(spec), status: None }
    }

    fn after(events: Vec<Event<Node>>) -> Option<Vec<String>> {
        let (say, heard) = watch::channel(None);
        let mut listed = BTreeSet::new();
        events.into_iter().for_each(|event| hear(event, &taints(), &mut listed, &say));
        heard.borrow().clone().map(|known| known.into_iter().collect())
    }

    fn taints() -> Vec<String> {
        vec!["karpenter.sh/disrupted".to_owned()]
    }

    #[test]
    fn a_cordon_or_one_of_the_taints_is_a_farewell() {
        assert!(is_leaving(&node("a", true, &[]), &taints()));
        assert!(is_leaving(&node("a", false, &["karpenter.sh/disrupted"]), &taints()));
        assert!(!is_leaving(&node("a", false, &["node.kubernetes.io/not-ready", "dedicated"]), &taints()));
    }

    #[test]
    fn nothing_is_known_before_the_list_is_complete() {
        let mut events = vec![Event::Init, Event::InitApply(node("a", true, &[]))];
        assert_eq!(after(events.clone()), None);
        events.push(Event::InitDone);
        assert_eq!(after(events), Some(vec!["a".to_owned()]));
    }

    #[test]
    fn nodes_come_and_go() {
        let mut events = vec![Event::Init, Event::InitDone, Event::Apply(node("a", true, &[]))];
        assert_eq!(after(events.clone()), Some(vec!["a".to_owned()]));
        events.push(Event::Apply(node("a", false, &[])));
        assert_eq!(after(events.clone()), Some(vec![]));
        events.extend([Event::Apply(node("b", true, &[])), Event::Delete(node("b", true, &[]))]);
        assert_eq!(after(events), Some(vec![]));
    }

    #[test]
    fn a_new_list_forgets_what_is_not_in_it() {
        let first = [Event::Init, Event::InitApply(node("a", true, &[])), Event::InitDone];
        let second = [Event::Init, Event::InitApply(node("b", true, &[])), Event::InitDone];
        assert_eq!(after(first.into_iter().chain(second).collect()), Some(vec!["b".to_owned()]));
    }
}
