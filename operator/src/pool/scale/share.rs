//! Whose a waiting build is: every build counts for one pool, or two pools would start pods for it.

use std::collections::BTreeMap;

use harmonia_queue::mirror::Demand;

/// What a pool could take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Slots that are free now.
    pub idle: i64,
    /// Slots that builders would have that it may still start.
    pub room: i64,
}

/// How many waiting builds count for each pool. Free slots take what they can at once, whatever they are. For the rest pods are
/// started where the fewest features and the least memory are wasted, then where there is most room; beyond all room they wait there too.
pub fn share(demands: &[Demand], capacities: &BTreeMap<String, Capacity>) -> BTreeMap<String, i64> {
    let mut left = capacities.clone();
    let mut shares = BTreeMap::new();
    // Those who can go to few pools choose before those who can go to many.
    let mut demands: Vec<&Demand> = demands.iter().collect();
    demands.sort_by_key(|demand| demand.pools.len());
    for demand in demands {
        let mut jobs = demand.jobs;
        for part in [Part::Idle, Part::Room] {
            let mut pools: Vec<&(String, i32)> = demand.pools.iter().collect();
            let amount = |name: &str| left.get(name).map_or(0, |capacity| part.of(capacity));
            pools.sort_by_key(|(name, surplus)| (*surplus, std::cmp::Reverse(amount(name))));
            for (name, _) in pools {
                let Some(capacity) = left.get_mut(name) else { continue };
                let taken = jobs.min(part.of(capacity));
                *part.of_mut(capacity) -= taken;
                *shares.entry(name.clone()).or_default() += taken;
                jobs -= taken;
            }
        }
        let first = demand.pools.iter().min_by_key(|(_, surplus)| *surplus);
        if let Some((name, _)) = first.filter(|_| jobs > 0) {
            *shares.entry(name.clone()).or_default() += jobs;
        }
    }
    shares
}

#[derive(Clone, Copy)]
enum Part {
    Idle,
    Room,
}

impl Part {
    fn of(self, capacity: &Capacity) -> i64 {
        match self {
            Self::Idle => capacity.idle,
            Self::Room => capacity.room,
        }
    }

    fn of_mut(self, capacity: &mut Capacity) -> &mut i64 {
        match self {
            Self::Idle => &mut capacity.idle,
            Self::Room => &mut capacity.room,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(jobs: i64, pools: &[(&str, i32)]) -> Demand {
        Demand { pools: pools.iter().map(|(name, surplus)| ((*name).to_owned(), *surplus)).collect(), jobs }
    }

    fn shares(demands: &[Demand], capacities: &[(&str, i64, i64)]) -> Vec<(String, i64)> {
        let capacity = |(name, idle, room): &(&str, i64, i64)| {
            ((*name).to_owned(), Capacity { idle: *idle, room: *room })
        };
        let shares = share(demands, &capacities.iter().map(capacity).collect());
        shares.into_iter().filter(|(_, jobs)| *jobs > 0).collect()
    }

    fn of(shares: &[(&str, i64)]) -> Vec<(String, i64)> {
        shares.iter().map(|(name, jobs)| ((*name).to_owned(), *jobs)).collect()
    }

    #[test]
    fn pods_are_started_where_the_fewest_features_are_wasted() {
        let demands = [demand(4, &[("kvm", 2), ("plain", 0)])];
        assert_eq!(shares(&demands, &[("kvm", 0, 9), ("plain", 0, 9)]), of(&[("plain", 4)]));
    }

    #[test]
    fn a_pool_that_cannot_grow_leaves_it_to_the_next() {
        let demands = [demand(5, &[("kvm", 2), ("plain", 0)])];
        assert_eq!(shares(&demands, &[("kvm", 0, 9), ("plain", 0, 2)]), of(&[("kvm", 3), ("plain", 2)]));
    }

    #[test]
    fn free_slots_are_used_before_pods_are_started() {
        let demands = [demand(3, &[("kvm", 2), ("plain", 0)])];
        assert_eq!(shares(&demands, &[("kvm", 1, 9), ("plain", 1, 9)]), of(&[("kvm", 1), ("plain", 2)]));
    }

    #[test]
    fn among_equals_the_one_with_most_room_is_asked_first() {
        let demands = [demand(2, &[("a", 0), ("b", 0)])];
        assert_eq!(shares(&demands, &[("a", 0, 1), ("b", 0, 5)]), of(&[("b", 2)]));
    }

    #[test]
    fn who_has_no_choice_chooses_first() {
        let demands = [demand(2, &[("kvm", 0), ("plain", 0)]), demand(2, &[("plain", 0)])];
        assert_eq!(shares(&demands, &[("kvm", 0, 2), ("plain", 0, 2)]), of(&[("kvm", 2), ("plain", 2)]));
    }

    #[test]
    fn what_nobody_has_room_for_waits_for_one_pool() {
        let demands = [demand(9, &[("a", 0), ("b", 1)])];
        assert_eq!(shares(&demands, &[("a", 0, 1), ("b", 0, 1)]), of(&[("a", 8), ("b", 1)]));
    }
}
