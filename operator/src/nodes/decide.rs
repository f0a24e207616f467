use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use harmonia_queue::nodes::Node;

/// The reason of a drain that follows a Kubernetes node.
pub const CORDONED: &str = "cordoned";
/// The reason of a drain that follows a pod that is being deleted. Its deadline is when the kubelet kills it.
pub const TERMINATING: &str = "terminating";
/// Clocks that differ by less say the same.
const SAME: Duration = Duration::from_secs(2);

/// What to do about a builder, by its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It claims nothing more, and has this long, if that is known.
    Drain(i32, &'static str, Option<Duration>),
    /// That is no reason any more.
    Resume(i32, &'static str),
}

/// What happens to pods and to the Kubernetes nodes that they are on.
#[derive(Debug, Clone, Default)]
pub struct Departures {
    /// Kubernetes nodes that are leaving. None: nobody can tell.
    pub nodes: Option<BTreeSet<String>>,
    /// Pods that are being deleted, by pool and name, with the time that they have left.
    pub pods: BTreeMap<(String, String), Duration>,
}

/// What makes the drains follow the departures. Other reasons to drain are others' to take back. A builder that is gone keeps its
/// reason for as long as its Kubernetes node is leaving: it may come back there.
pub fn steps(departures: &Departures, builders: &[Node]) -> Vec<Step> {
    let of_node = |builder: &Node| {
        let leaving = departures.nodes.as_ref()?;
        let leaves = builder.kube_node.as_ref().is_some_and(|node| leaving.contains(node));
        match (leaves, builder.drains_for(CORDONED)) {
            (true, None) if builder.seen.is_some() => Some(Step::Drain(builder.id, CORDONED, None)),
            (false, Some(_)) => Some(Step::Resume(builder.id, CORDONED)),
            _ => None,
        }
    };
    let of_pod = |builder: &Node| {
        let left = departures.pods.get(&(builder.pool.clone(), builder.name.clone()));
        match (left, builder.drains_for(TERMINATING)) {
            (Some(left), known) if builder.seen.is_some() => {
                let known = known.and_then(|drain| drain.left);
                let told = known.is_some_and(|known| known.abs_diff(*left) < SAME);
                (!told).then_some(Step::Drain(builder.id, TERMINATING, Some(*left)))
            }
            (None, Some(_)) => Some(Step::Resume(builder.id, TERMINATING)),
            _ => None,
        }
    };
    builders.iter().flat_map(|builder| [of_node(builder), of_pod(builder)]).flatten().collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use harmonia_queue::nodes::Drain;

    use super::*;

    /// A builder that lives, on a Kubernetes node.
    pub fn builder(id: i32, kube_node: &str, drains: &[&str]) -> Node {
        let drain = |reason: &&str| Drain { reason: (*reason).to_owned(), since: Duration::ZERO, left: None };
        Node {
            id,
            name: format!("x86-builder-{id}"),
            pool: "ci/x86".to_owned(),
            slots: 1,
            building: 0,
            uploading: 0,
            speed: 1.0,
            drains: drains.iter().map(drain).collect(),
            kube_node: Some(kube_node.to_owned()),
            version: None,
            seen: Some(Duration::ZERO),
        }
    }

    fn leaving(names: &[&str]) -> Departures {
        let nodes = names.iter().map(|&name| name.to_owned()).collect();
        Departures { nodes: Some(nodes), ..Departures::default() }
    }

    fn deleted(id: i32, seconds: u64) -> Departures {
        let pod = ("ci/x86".to_owned(), format!("x86-builder-{id}"));
        Departures { nodes: None, pods: [(pod, Duration::from_secs(seconds))].into() }
    }

    fn cordon(id: i32) -> Step {
        Step::Drain(id, CORDONED, None)
    }

    #[test]
    fn builders_on_a_leaving_node_drain_and_no_others() {
        let builders = [builder(1, "a", &[]), builder(2, "b", &[]), builder(3, "a", &["by hand"])];
        assert_eq!(steps(&leaving(&["a"]), &builders), [cordon(1), cordon(3)]);
    }

    #[test]
    fn what_is_as_it_should_be_stays() {
        let builders = [builder(1, "a", &[CORDONED]), builder(2, "b", &["by hand"])];
        assert_eq!(steps(&leaving(&["a"]), &builders), []);
    }

    #[test]
    fn only_its_own_reason_is_taken_back() {
        let builders = [builder(1, "a", &["by hand", CORDONED]), builder(2, "a", &["scale-in"])];
        assert_eq!(steps(&leaving(&[]), &builders), [Step::Resume(1, CORDONED)]);
    }

    #[test]
    fn a_builder_that_is_gone_is_not_drained_and_is_forgotten_with_its_node() {
        let gone = |drains: &[&str]| Node { seen: None, ..builder(1, "a", drains) };
        assert_eq!(steps(&leaving(&["a"]), &[gone(&["by hand"])]), []);
        assert_eq!(steps(&leaving(&["a"]), &[gone(&[CORDONED])]), []);
        assert_eq!(steps(&leaving(&[]), &[gone(&[CORDONED])]), [Step::Resume(1, CORDONED)]);
    }

    #[test]
    fn a_builder_outside_of_kubernetes_is_left_alone() {
        let outside = Node { kube_node: None, ..builder(1, "", &[]) };
        assert_eq!(steps(&leaving(&["a"]), &[outside]), []);
    }

    #[test]
    fn nobody_claims_again_because_nodes_cannot_be_seen() {
        assert_eq!(steps(&Departures::default(), &[builder(1, "a", &[CORDONED])]), []);
    }

    #[test]
    fn a_pod_that_is_deleted_has_as_long_as_the_kubelet_gives_it() {
        let builders = [builder(1, "a", &[]), builder(2, "a", &[])];
        let step = |seconds| Step::Drain(1, TERMINATING, Some(Duration::from_secs(seconds)));
        assert_eq!(steps(&deleted(1, 5), &builders), [step(5)]);
    }

    #[test]
    fn a_deadline_that_moves_is_told_again() {
        let mut told = builder(1, "a", &[TERMINATING]);
        told.drains[0].left = Some(Duration::from_secs(100));
        assert_eq!(steps(&deleted(1, 99), std::slice::from_ref(&told)), []);
        let sooner = Step::Drain(1, TERMINATING, Some(Duration::from_secs(5)));
        assert_eq!(steps(&deleted(1, 5), std::slice::from_ref(&told)), [sooner]);
    }

    #[test]
    fn a_pod_of_the_same_name_begins_anew() {
        let again = builder(1, "a", &[TERMINATING]);
        assert_eq!(steps(&Departures::default(), &[again]), [Step::Resume(1, TERMINATING)]);
    }
}
