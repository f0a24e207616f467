//! How a pool gets smaller without stopping a build. Level-triggered: each step follows from what is there, whoever made the
//! steps before.
//!
//! Of a Deployment, idle builders are marked in the queue, where they claim nothing from that moment on; their pods are made
//! cheap to delete; when the API server has that, replicas are lowered by as many, and the cheapest go. Pods of a StatefulSet
//! go by their number: the last ones drain, and replicas follow when they hold nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use harmonia_queue::nodes::Node;

/// The reason of a drain that makes a pool smaller.
pub const SCALE_IN: &str = "scale-in";
/// Marked for so long without its pod being deleted, a builder claims again.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A pod of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodView {
    /// Its name, which is its builder's.
    pub name: String,
    /// It is being deleted.
    pub going: bool,
    /// It is cheap to delete.
    pub cheap: bool,
}

/// What is there, and what is wanted.
#[derive(Debug, Clone)]
pub struct View<'a> {
    /// The pods.
    pub pods: &'a [PodView],
    /// The builders of the pool that the queue knows.
    pub builders: &'a [Node],
    /// How many there are to be now.
    pub replicas: i32,
    /// How many there should be.
    pub target: i32,
    /// Pods are being replaced by others: nothing gets smaller meanwhile unless somebody says so.
    pub rolling: bool,
    /// Somebody said a number: busy builders go too, once there is no idle one left to go instead.
    pub told: bool,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Mark those of these builders that are idle.
    MarkIdle(Vec<i32>),
    /// Mark a builder, whatever it holds.
    Mark(i32),
    /// Let a builder claim again.
    Unmark(i32),
    /// Make a pod cheap to delete.
    Cheapen(String),
    /// Make a pod like the others again.
    Spare(String),
}

/// What to do now, and how many there are to be from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// In this order.
    pub steps: Vec<Step>,
    /// Not below the target, and not above what there are to be.
    pub replicas: i32,
}

/// A builder and its pod.
struct Pair<'a> {
    builder: &'a Node,
    pod: Option<&'a PodView>,
}

impl Pair<'_> {
    fn marked(&self) -> bool {
        self.builder.drains_for(SCALE_IN).is_some()
    }

    fn stays(&self) -> bool {
        self.pod.is_some_and(|pod| !pod.going)
    }

    fn idle(&self) -> bool {
        self.builder.building + self.builder.uploading == 0
    }

    fn overdue(&self) -> bool {
        self.builder.drains_for(SCALE_IN).is_some_and(|drain| drain.since > PATIENCE)
    }
}

fn pairs<'a>(view: &View<'a>) -> Vec<Pair<'a>> {
    let pods: BTreeMap<&str, &PodView> = view.pods.iter().map(|pod| (pod.name.as_str(), pod)).collect();
    let pair = |builder: &'a Node| Pair { builder, pod: pods.get(builder.name.as_str()).copied() };
    view.builders.iter().map(pair).collect()
}

/// For a Deployment.
pub fn shrink(view: &View<'_>) -> Plan {
    let pairs = pairs(view);
    let staying: Vec<&PodView> = view.pods.iter().filter(|pod| !pod.going).collect();
    let surplus = count(staying.len()) - view.target;
    let mut steps = Vec::new();

    // Marks that lead nowhere: the pod is gone, nobody deletes it, or it is wanted again.
    let mut kept: Vec<&Pair> = Vec::new();
    for pair in pairs.iter().filter(|pair| pair.marked()) {
        let going = pair.pod.is_some_and(|pod| pod.going);
        if pair.stays() && !pair.overdue() && count(kept.len()) < surplus {
            kept.push(pair);
        } else if !going {
            steps.push(Step::Unmark(pair.builder.id));
            steps.extend(pair.pod.filter(|pod| pod.cheap).map(|pod| Step::Spare(pod.name.clone())));
        }
    }
    let unregistered = |pod: &&&PodView| {
        !view.builders.iter().any(|builder| builder.name == pod.name && builder.seen.is_some())
    };
    let starting = count(staying.iter().filter(unregistered).count());

    if view.rolling || view.replicas <= view.target {
        let replicas = if view.told { view.replicas.min(view.target) } else { view.replicas };
        return Plan { steps, replicas };
    }
    // Pods that do not run yet go first, by themselves.
    let missing = surplus - starting - count(kept.len());
    let mut idle: Vec<&Pair> = pairs
        .iter()
        .filter(|pair| !pair.marked() && pair.stays() && pair.idle() && pair.builder.seen.is_some())
        .collect();
    // Who drains anyway goes first, then who came last: the others' stores are warmer.
    idle.sort_by_key(|pair| (pair.builder.drains.is_empty(), std::cmp::Reverse(pair.builder.id)));
    let chosen: Vec<i32> =
        idle.iter().take(usize::try_from(missing).unwrap_or(0)).map(|pair| pair.builder.id).collect();
    let nobody_left = chosen.is_empty();
    if !chosen.is_empty() {
        steps.push(Step::MarkIdle(chosen));
    }
    let cheap = kept.iter().filter(|pair| pair.pod.is_some_and(|pod| pod.cheap)).count();
    let dear = kept.iter().filter_map(|pair| pair.pod).filter(|pod| !pod.cheap);
    steps.extend(dear.map(|pod| Step::Cheapen(pod.name.clone())));

    let lower = count(staying.len()) - starting - count(cheap);
    let replicas = match view.told && nobody_left && cheap == kept.len() {
        true => view.target,
        false => lower.clamp(view.target, view.replicas),
    };
    Plan { steps, replicas }
}

/// For a StatefulSet.
pub fn shrink_by_number(view: &View<'_>) -> Plan {
    let pairs = pairs(view);
    let mut steps = Vec::new();
    let mut holds = BTreeMap::new();
    for pair in &pairs {
        let Some(number) = number(&pair.builder.name) else { continue };
        let (leaves, lives) = (number >= view.target, pair.builder.seen.is_some());
        match (leaves, pair.marked()) {
            (true, false) if lives => steps.push(Step::Mark(pair.builder.id)),
            (false, true) => steps.push(Step::Unmark(pair.builder.id)),
            (true, true) if !lives && pair.pod.is_none() => steps.push(Step::Unmark(pair.builder.id)),
            _ => {}
        }
        holds.insert(number, lives && !(pair.marked() && pair.idle()));
    }
    let mut replicas = view.replicas;
    while (view.told || !view.rolling)
        && replicas > view.target
        && !holds.get(&(replicas - 1)).copied().unwrap_or(false)
    {
        replicas -= 1;
    }
    Plan { steps, replicas }
}

/// The number of a pod of a StatefulSet.
fn number(name: &str) -> Option<i32> {
    name.rsplit_once('-')?.1.parse().ok()
}

fn count(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use harmonia_queue::nodes::Drain;

    use super::*;
    use crate::nodes::tests::builder;

    fn pod(number: i32) -> PodView {
        PodView { name: format!("x86-builder-{number}"), going: false, cheap: false }
    }

    fn idle(number: i32) -> Node {
        builder(number, "a", &[])
    }

    fn busy(number: i32) -> Node {
        Node { building: 1, ..idle(number) }
    }

    fn marked(number: i32, seconds: u64) -> Node {
        let drain = Drain { reason: SCALE_IN.to_owned(), since: Duration::from_secs(seconds), left: None };
        Node { drains: vec![drain], ..idle(number) }
    }

    fn cheap(number: i32) -> PodView {
        PodView { cheap: true, ..pod(number) }
    }

    fn going(number: i32) -> PodView {
        PodView { going: true, ..cheap(number) }
    }

    fn view<'a>(pods: &'a [PodView], builders: &'a [Node], replicas: i32, target: i32) -> View<'a> {
        View { pods, builders, replicas, target, rolling: false, told: false }
    }

    fn plan(steps: &[Step], replicas: i32) -> Plan {
        Plan { steps: steps.to_vec(), replicas }
    }

    #[test]
    fn idle_builders_are_marked_then_made_cheap_then_fewer() {
        let builders = [busy(1), idle(2), idle(3)];
        let pods = [pod(1), pod(2), pod(3)];
        assert_eq!(shrink(&view(&pods, &builders, 3, 2)), plan(&[Step::MarkIdle(vec![3])], 3));
        let builders = [busy(1), idle(2), marked(3, 1)];
        let name = pods[2].name.clone();
        assert_eq!(shrink(&view(&pods, &builders, 3, 2)), plan(&[Step::Cheapen(name)], 3));
        let pods = [pod(1), pod(2), cheap(3)];
        assert_eq!(shrink(&view(&pods, &builders, 3, 2)), plan(&[], 2));
        // Until its pod is deleted, and for as long as that takes, it stays marked.
        assert_eq!(shrink(&view(&pods, &builders, 2, 2)), plan(&[], 2));
        assert_eq!(shrink(&view(&[pod(1), pod(2), going(3)], &builders, 2, 2)), plan(&[], 2));
        assert_eq!(shrink(&view(&[pod(1), pod(2)], &builders, 2, 2)), plan(&[Step::Unmark(3)], 2));
    }

    #[test]
    fn busy_builders_stay() {
        let builders = [busy(1), busy(2), idle(3)];
        assert_eq!(
            shrink(&view(&[pod(1), pod(2), pod(3)], &builders, 3, 0)),
            plan(&[Step::MarkIdle(vec![3])], 3)
        );
        let builders = [busy(1), busy(2), marked(3, 1)];
        assert_eq!(shrink(&view(&[pod(1), pod(2), cheap(3)], &builders, 3, 0)), plan(&[], 2));
    }

    #[test]
    fn a_number_that_somebody_said_counts_although_all_are_busy() {
        let (pods, builders) = ([pod(1), pod(2)], [busy(1), busy(2)]);
        let told = View { told: true, ..view(&pods, &builders, 2, 1) };
        assert_eq!(shrink(&told), plan(&[], 1));
    }

    #[test]
    fn idle_builders_go_before_busy_ones_although_somebody_said_a_number() {
        let builders = [busy(1), idle(2)];
        let pods = [pod(1), pod(2)];
        let told = View { told: true, ..view(&pods, &builders, 2, 1) };
        assert_eq!(shrink(&told), plan(&[Step::MarkIdle(vec![2])], 2));
        let builders = [busy(1), marked(2, 1)];
        let told = View { builders: &builders, ..told };
        assert_eq!(shrink(&told).replicas, 2);
    }

    #[test]
    fn pods_that_do_not_run_yet_go_first() {
        let builders = [busy(1)];
        assert_eq!(shrink(&view(&[pod(1), pod(2), pod(3)], &builders, 3, 1)), plan(&[], 1));
    }

    #[test]
    fn who_is_wanted_again_claims_again() {
        let builders = [marked(1, 1), marked(2, 1)];
        let pods = [cheap(1), pod(2)];
        let spared = [Step::Unmark(1), Step::Spare(pods[0].name.clone()), Step::Unmark(2)];
        assert_eq!(shrink(&view(&pods, &builders, 2, 2)), plan(&spared, 2));
    }

    #[test]
    fn who_is_marked_in_vain_claims_again() {
        let builders = [busy(1), marked(2, 61)];
        let pods = [pod(1), cheap(2)];
        let steps = [Step::Unmark(2), Step::Spare(pods[1].name.clone())];
        assert_eq!(shrink(&view(&pods, &builders, 1, 1)), plan(&steps, 1));
    }

    #[test]
    fn nothing_gets_smaller_during_a_rollout() {
        let (pods, builders) = ([pod(1), pod(2)], [idle(1), idle(2)]);
        let rolling = View { rolling: true, ..view(&pods, &builders, 2, 0) };
        assert_eq!(shrink(&rolling), plan(&[], 2));
        assert_eq!(shrink(&View { told: true, ..rolling }), plan(&[], 0));
    }

    #[test]
    fn those_on_a_cordoned_node_go_first() {
        let builders = [builder(1, "a", &["cordoned"]), idle(2)];
        assert_eq!(shrink(&view(&[pod(1), pod(2)], &builders, 2, 1)), plan(&[Step::MarkIdle(vec![1])], 2));
    }

    #[test]
    fn the_last_of_a_stateful_set_drain_and_go_when_they_hold_nothing() {
        let builders = [idle(0), idle(1), busy(2), idle(3)];
        let pods: Vec<PodView> = (0..4).map(pod).collect();
        let by_number = |builders: &[Node], replicas| shrink_by_number(&view(&pods, builders, replicas, 1));
        assert_eq!(by_number(&builders, 4), plan(&[Step::Mark(1), Step::Mark(2), Step::Mark(3)], 4));
        let still_busy = Node { building: 1, ..marked(2, 99) };
        let builders = [idle(0), marked(1, 99), still_busy, marked(3, 99)];
        assert_eq!(by_number(&builders, 4), plan(&[], 3));
        let builders = [idle(0), marked(1, 99), marked(2, 99)];
        assert_eq!(by_number(&builders, 3), plan(&[], 1));
    }

    #[test]
    fn the_first_of_a_stateful_set_claim_again_when_they_are_wanted() {
        let builders = [idle(0), marked(1, 1)];
        let pods = [pod(0), pod(1)];
        assert_eq!(shrink_by_number(&view(&pods, &builders, 2, 2)), plan(&[Step::Unmark(1)], 2));
    }
}
