//! Three days of a pool, second by second, with the operator's own decision and nothing else of it: pushes come by day and by night,
//! builders take a while to start, and only idle ones go.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use harmonia_operator::pool::{Bounds, History, Snapshot, desired_replicas};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::measure::quantile;
use crate::report::Report;

pub const FIGURES: [&str; 3] = ["scaling_changes_per_h", "scaling_wasted_percent", "scaling_wait_vs_max"];

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
const DAYS: u64 = 3;
/// From a patched number to a builder that claims: a pod, an image that is there, a store.
const START: u64 = 15;
/// The operator looks so often.
const LOOK: u64 = 2;
const SLOTS: i32 = 2;
const BOUNDS: Bounds = Bounds { min: 0, max: 20, window: Duration::from_secs(300) };
/// Pushes an hour between nine and six, and else.
const BY_DAY: f64 = 6.0;
const BY_NIGHT: f64 = 0.5;
/// Most pushes change little; one in so many changes much.
const MUCH: u32 = 6;
/// Builds last e^(ln 60 + 1.2 n) seconds, n normal, and an hour at most.
const MEDIAN: f64 = 60.0;
const SIGMA: f64 = 1.2;

/// Puts the three figures, each over the same three days.
pub fn three_days(report: &mut Report<'_>) {
    let pushes = pushes(&mut SmallRng::seed_from_u64(8));
    let builds: usize = pushes.iter().map(|(_, durations)| durations.len()).sum();
    let scaled = simulate(&pushes, true);
    let always = simulate(&pushes, false);
    eprintln!(
        "   {} pushes, {builds} builds; {:.0} pod-hours instead of {:.0}",
        pushes.len(),
        scaled.pod_seconds / 3600.0,
        always.pod_seconds / 3600.0
    );
    report.put("scaling_changes_per_h", f64::from(scaled.changes) / (DAYS * 24) as f64);
    report.put("scaling_wasted_percent", 100.0 * scaled.idle_seconds / scaled.pod_seconds);
    let p95 = |mut waits: Vec<f64>| quantile(&mut waits, 0.95);
    report.put("scaling_wait_vs_max", p95(scaled.waits) / p95(always.waits));
}

/// When, and how long what it brings takes to build.
type Push = (u64, Vec<u64>);

fn pushes(random: &mut SmallRng) -> Vec<Push> {
    let mut pushes = Vec::new();
    for second in 0..DAYS * DAY {
        let rate = if (9..18).contains(&(second % DAY / HOUR)) { BY_DAY } else { BY_NIGHT };
        if random.random::<f64>() < rate / HOUR as f64 {
            let much = random.random_range(0..MUCH) == 0;
            let builds = if much { random.random_range(200..600) } else { random.random_range(1..30) };
            pushes.push((second, (0..builds).map(|_| duration(random)).collect()));
        }
    }
    pushes
}

fn duration(random: &mut SmallRng) -> u64 {
    let (a, b): (f64, f64) = (random.random(), random.random());
    let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    ((MEDIAN * (SIGMA * normal).exp()) as u64).clamp(1, HOUR)
}

#[derive(Default)]
struct Outcome {
    /// How often the number began to move the other way.
    changes: u32,
    pod_seconds: f64,
    /// Of those, with nothing to build: a pod that starts is no use either.
    idle_seconds: f64,
    waits: Vec<f64>,
}

/// A builder: when it claims, and what it builds.
struct Builder {
    from: u64,
    busy: i32,
}

fn simulate(pushes: &[Push], scale: bool) -> Outcome {
    let mut outcome = Outcome::default();
    let (mut builders, mut waiting): (Vec<Option<Builder>>, VecDeque<(u64, u64)>) = Default::default();
    let mut running: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut history, mut upwards, mut pushes) = (History::default(), true, pushes.iter().peekable());
    if !scale {
        builders.extend((0..BOUNDS.max).map(|_| Some(Builder { from: 0, busy: 0 })));
    }
    for now in 0.. {
        while let Some((_, durations)) = pushes.next_if(|(at, _)| *at <= now) {
            waiting.extend(durations.iter().map(|duration| (now, *duration)));
        }
        while let Some(&Reverse((ends, at))) = running.peek()
            && ends <= now
        {
            running.pop();
            builders[at].as_mut().expect("busy ones stay").busy -= 1;
        }
        for (at, builder) in builders.iter_mut().enumerate() {
            let Some(builder) = builder.as_mut().filter(|builder| builder.from <= now) else { continue };
            while builder.busy < SLOTS
                && let Some((since, duration)) = waiting.pop_front()
            {
                outcome.waits.push((now - since) as f64);
                builder.busy += 1;
                running.push(Reverse((now + duration, at)));
            }
        }
        if now >= DAYS * DAY && waiting.is_empty() && running.is_empty() {
            return outcome;
        }
        let there = builders.iter().flatten();
        outcome.pod_seconds += there.clone().count() as f64;
        outcome.idle_seconds += there.filter(|builder| builder.busy == 0).count() as f64;
        if scale && now % LOOK == 0 {
            let seen = look(&builders, waiting.len());
            history.note(Duration::from_secs(now), &seen, BOUNDS.window);
            let wanted = desired_replicas(&seen, &BOUNDS, &history, Duration::from_secs(now)).replicas;
            let moved = change(&mut builders, seen.replicas, wanted, now);
            if moved != 0 && (moved > 0) != upwards {
                upwards = !upwards;
                outcome.changes += 1;
            }
        }
    }
    outcome
}

/// As the operator would see it.
fn look(builders: &[Option<Builder>], waiting: usize) -> Snapshot {
    let busy = builders.iter().flatten().filter(|builder| builder.busy > 0);
    Snapshot {
        waiting: waiting as i64,
        slots: SLOTS,
        busy: busy.clone().count() as i32,
        free: busy.map(|builder| i64::from(SLOTS - builder.busy)).sum(),
        replicas: builders.iter().flatten().count() as i32,
        ..Snapshot::default()
    }
}

/// Starts builders, or ends idle ones; by how many the number changed.
fn change(builders: &mut Vec<Option<Builder>>, replicas: i32, wanted: i32, now: u64) -> i32 {
    if wanted >= replicas {
        builders.extend((replicas..wanted).map(|_| Some(Builder { from: now + START, busy: 0 })));
        return wanted - replicas;
    }
    let idle =
        builders.iter_mut().filter(|builder| builder.as_ref().is_some_and(|builder| builder.busy == 0));
    let mut gone = 0;
    for builder in idle.take((replicas - wanted) as usize) {
        *builder = None;
        gone -= 1;
    }
    gone
}
