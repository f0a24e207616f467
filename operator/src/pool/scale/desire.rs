//! How many builders a pool should have. Pure: time is told, so that days are simulated in a moment.

use std::collections::VecDeque;
use std::time::Duration;

/// What a pool has and what waits for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Builds that wait and count for this pool.
    pub waiting: i64,
    /// Builds at once on one builder.
    pub slots: i32,
    /// Builders that hold something and claim more,
    pub busy: i32,
    /// and their free slots.
    pub free: i64,
    /// Pods that stay and claim nothing, such as those on a cordoned node.
    pub lingering: i32,
    /// How many there are to be now.
    pub replicas: i32,
    /// Whether pods cannot be scheduled or started: more of them would not run either.
    pub stuck: bool,
}

/// Between what the number may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The fewest,
    pub min: i32,
    /// and the most.
    pub max: i32,
    /// How long there must have been too many before they go; half of them go after half of it.
    pub window: Duration,
}

/// How many there should be, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// How many.
    pub replicas: i32,
    /// For an Event.
    pub reason: String,
}

/// What was needed lately. `now` is a time that only grows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History(VecDeque<(Duration, i32)>);

impl History {
    /// Adds what is needed now, and forgets what is older than the window. Who has just begun to look has seen nothing: what is
    /// there counts as needed.
    pub fn note(&mut self, now: Duration, snapshot: &Snapshot, window: Duration) {
        let needed =
            if self.0.is_empty() { needed(snapshot).max(snapshot.replicas) } else { needed(snapshot) };
        // What is not above the newest can never be the most again.
        while self.0.back().is_some_and(|(_, before)| *before <= needed) {
            self.0.pop_back();
        }
        self.0.push_back((now, needed));
        // The newest stays, whatever its age.
        while self.0.len() > 1 && self.0.front().is_some_and(|(at, _)| *at + window <= now) {
            self.0.pop_front();
        }
    }

    /// The most that was needed within the window before `now`.
    fn most(&self, now: Duration, window: Duration) -> Option<i32> {
        let within = self.0.iter().find(|(at, _)| *at + window > now);
        within.or(self.0.back()).map(|(_, needed)| *needed)
    }
}

/// Busy builders stay. Their free slots take what waits, and the rest needs builders of its own.
pub fn needed(snapshot: &Snapshot) -> i32 {
    let rest = (snapshot.waiting - snapshot.free).max(0);
    let slots = i64::from(snapshot.slots.max(1));
    let more = i32::try_from(rest / slots + i64::from(rest % slots > 0)).unwrap_or(i32::MAX);
    snapshot.busy.saturating_add(snapshot.lingering).saturating_add(more)
}

/// More at once; fewer only when there was no need for them, half of them after half of the window.
pub fn desired_replicas(snapshot: &Snapshot, bounds: &Bounds, history: &History, now: Duration) -> Decision {
    let Bounds { min, max, window } = *bounds;
    let wanted = needed(snapshot).clamp(min, max);
    let work = format!("{} builds wait, {} builders are busy", snapshot.waiting, snapshot.busy);
    if wanted > snapshot.replicas {
        return match snapshot.stuck {
            // The bounds stand, and so does what was started.
            true => Decision {
                replicas: snapshot.replicas.clamp(min, max),
                reason: format!("{work}, and pods that were started do not run"),
            },
            false => Decision { replicas: wanted, reason: work },
        };
    }
    let most = |window| history.most(now, window).unwrap_or(snapshot.replicas).clamp(wanted, max);
    let (lately, before) = (most(window / 2), most(window));
    let down = lately.max(wanted + (before - wanted + 1) / 2);
    let reason = match down < snapshot.replicas {
        true if down < before => {
            format!("no more than {lately} were needed for {} s: half of the rest go", window.as_secs() / 2)
        }
        true => format!("no more than {down} were needed for {} s", window.as_secs()),
        false => work,
    };
    Decision { replicas: down.min(snapshot.replicas), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { min: 0, max: 10, window: Duration::from_secs(300) };

    fn snapshot(waiting: i64, busy: i32, replicas: i32) -> Snapshot {
        Snapshot { waiting, busy, replicas, slots: 2, ..Snapshot::default() }
    }

    /// What is decided at these seconds, with what was seen before.
    fn run(seen: &[(u64, Snapshot)], bounds: &Bounds) -> Vec<i32> {
        let mut history = History::default();
        seen.iter()
            .map(|(seconds, snapshot)| {
                let now = Duration::from_secs(*seconds);
                history.note(now, snapshot, bounds.window);
                desired_replicas(snapshot, bounds, &history, now).replicas
            })
            .collect()
    }

    #[test]
    fn a_builder_for_every_two_builds_that_wait() {
        for (waiting, replicas) in [(0, 0), (1, 1), (2, 1), (3, 2), (8, 4), (100, 10)] {
            assert_eq!(run(&[(0, snapshot(waiting, 0, 0))], &BOUNDS), [replicas], "{waiting}");
        }
    }

    #[test]
    fn free_slots_of_busy_builders_come_first() {
        let half_busy = Snapshot { free: 3, ..snapshot(4, 3, 3) };
        assert_eq!(needed(&half_busy), 4);
        assert_eq!(needed(&Snapshot { waiting: 3, ..half_busy }), 3);
    }

    #[test]
    fn the_bounds_hold() {
        let bounds = Bounds { min: 2, ..BOUNDS };
        assert_eq!(run(&[(0, snapshot(0, 0, 0)), (1, snapshot(99, 2, 2))], &bounds), [2, 10]);
    }

    #[test]
    fn what_was_started_and_does_not_run_yet_is_not_started_again() {
        assert_eq!(run(&[(0, snapshot(6, 0, 0)), (1, snapshot(6, 0, 3))], &BOUNDS), [3, 3]);
    }

    #[test]
    fn pods_that_wait_on_a_cordoned_node_are_replaced() {
        let cordoned = Snapshot { lingering: 1, ..snapshot(2, 0, 1) };
        assert_eq!(run(&[(0, cordoned)], &BOUNDS), [2]);
    }

    #[test]
    fn fewer_only_when_the_window_has_seen_no_need() {
        let seen = [
            (0, snapshot(99, 0, 0)),
            (60, snapshot(0, 0, 10)),
            (149, snapshot(0, 0, 10)),
            (150, snapshot(0, 0, 10)),
            (299, snapshot(0, 0, 5)),
            (300, snapshot(0, 0, 5)),
        ];
        assert_eq!(run(&seen, &BOUNDS), [10, 10, 10, 5, 5, 0]);
    }

    #[test]
    fn a_need_in_between_begins_the_window_anew() {
        let seen = [
            (0, snapshot(8, 0, 4)),
            (100, snapshot(0, 4, 4)),
            (249, snapshot(0, 0, 4)),
            (250, snapshot(0, 0, 4)),
            (400, snapshot(0, 0, 2)),
        ];
        assert_eq!(run(&seen, &BOUNDS), [4, 4, 4, 2, 0]);
    }

    #[test]
    fn who_has_just_begun_to_look_takes_nobody_away() {
        assert_eq!(run(&[(1000, snapshot(0, 0, 7)), (1149, snapshot(0, 0, 7))], &BOUNDS), [7, 7]);
    }

    #[test]
    fn more_pods_are_not_asked_for_while_some_cannot_run() {
        let stuck = Snapshot { stuck: true, ..snapshot(20, 1, 3) };
        let mut history = History::default();
        history.note(Duration::ZERO, &stuck, BOUNDS.window);
        let decision = desired_replicas(&stuck, &BOUNDS, &history, Duration::ZERO);
        assert_eq!(decision.replicas, 3);
        assert!(decision.reason.contains("do not run"), "{}", decision.reason);
    }

    #[test]
    fn busy_builders_are_never_too_many() {
        let seen = [(0, snapshot(0, 3, 5)), (600, snapshot(0, 3, 5)), (1200, snapshot(0, 3, 3))];
        assert_eq!(run(&seen, &BOUNDS), [5, 3, 3]);
    }

    #[test]
    fn a_lowered_maximum_counts_at_once() {
        assert_eq!(run(&[(0, snapshot(0, 8, 8))], &Bounds { max: 5, ..BOUNDS }), [5]);
    }
}
