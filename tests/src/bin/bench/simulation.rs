//! Days of building in a minute: the real calls of the queue, with the database's clock replaced and set from one event
//! to the next. Nothing here is timed, so commits need not wait for the disk.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use harmonia_queue::builder::{Claim, Session};
use harmonia_queue::{Db, Fence, resolver, signer};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use sqlx::{Connection, PgConnection};

use crate::baseline::{Bench, phase};
use crate::farm::{Farm, Outputs, PASSWORD, POOL_LOGIN, Worker, together};
use crate::graphs::{self, Nixpkgs};
use crate::measure::quantile;
use crate::report::Report;

/// Slots of one builder.
const SLOTS: usize = 8;
/// Builds last e^(ln 60 + 1.5 n) seconds, n normal: half of them a minute at most.
const MEDIAN: f64 = 60.0;
const SIGMA: f64 = 1.5;
/// Time passes in whole seconds.
const SHORTEST: u64 = 1;

/// Durations by a seed.
struct Durations(SmallRng);

impl Durations {
    fn next(&mut self) -> u64 {
        let (a, b): (f64, f64) = (self.0.random(), self.0.random());
        let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        ((MEDIAN * (SIGMA * normal).exp()).round() as u64).max(SHORTEST)
    }
}

// ---------------------------------------------------------------------------------------------- the farm

/// A farm whose clock is ours.
struct Simulation {
    farm: Farm,
    clock: PgConnection,
    began: f64,
    builders: Vec<Worker>,
    free: Vec<usize>,
    running: BinaryHeap<Reverse<(u64, usize, i64)>>,
    held: HashMap<i64, Claim>,
}

/// Who built what, from when to when.
struct Built {
    drv_path: String,
    from: u64,
    to: u64,
}

impl Simulation {
    async fn new(farm: Farm, slots: usize, outputs: Outputs) -> Self {
        farm.database.freeze_clock().await;
        farm.database
            .execute(&format!("ALTER DATABASE {} SET synchronous_commit = off", farm.database.name()))
            .await;
        let farm = Farm::of(farm.database);
        let db = Db::direct(&farm.database.direct_url_as(POOL_LOGIN, PASSWORD), 1).expect("a URL");
        let mut builders = Vec::new();
        for n in 0..slots / SLOTS {
            let session: Session = farm.session(&db, &format!("builder-{n}"), SLOTS as i32).await;
            builders.push(Worker { session, signer: farm.signer.clone(), outputs: outputs.clone() });
        }
        farm.settle().await;
        let mut clock = PgConnection::connect(&farm.database.direct_url()).await.expect("connect");
        let began = sqlx::query_scalar("SELECT extract(epoch FROM t)::float8 FROM public.test_clock")
            .fetch_one(&mut clock)
            .await
            .expect("read the clock");
        let free = vec![SLOTS; builders.len()];
        Self { farm, clock, began, builders, free, running: BinaryHeap::new(), held: HashMap::new() }
    }

    async fn set_clock(&mut self, now: u64) {
        sqlx::query("UPDATE public.test_clock SET t = to_timestamp($1)")
            .bind(self.began + now as f64)
            .execute(&mut self.clock)
            .await
            .expect("set the clock");
    }

    /// Runs until `until` or until nothing is left; `duration` says how long a build takes.
    async fn run(&mut self, until: u64, duration: impl Fn(&Claim) -> u64) -> Vec<Built> {
        let mut built = Vec::new();
        let (mut now, mut dry) = (0, false);
        while now < until {
            // Whoever has a slot asks; after one that did not get all it asked for, nobody needs to.
            for n in 0..self.builders.len() {
                if self.free[n] == 0 || dry {
                    continue;
                }
                let claims = self.builders[n].session.claim(self.free[n] as i32).await.expect("claim");
                dry = claims.len() < self.free[n];
                self.free[n] -= claims.len();
                for claim in claims {
                    let ends = now + duration(&claim);
                    built.push(Built { drv_path: claim.drv_path.clone(), from: now, to: ends });
                    self.running.push(Reverse((ends, n, claim.fence.job)));
                    self.held.insert(claim.fence.job, claim);
                }
            }
            let Some(&Reverse((next, ..))) = self.running.peek() else { break };
            now = next;
            self.set_clock(now).await;
            let mut ended: HashMap<usize, Vec<Claim>> = HashMap::new();
            while let Some(&Reverse((at, n, job))) = self.running.peek() {
                if at > now {
                    break;
                }
                self.running.pop();
                ended.entry(n).or_default().push(self.held.remove(&job).expect("it was claimed"));
            }
            let mut fences: Vec<Fence> = Vec::new();
            for (n, claims) in ended {
                // The upload takes no time either: accepting frees the slot.
                self.builders[n].accept(&claims).await;
                self.free[n] += claims.len();
                fences.extend(claims.iter().map(|claim| claim.fence));
            }
            let finished = signer::finish(&self.farm.signer, &fences).await.expect("finish").jobs;
            assert_eq!(finished.len(), fences.len());
            resolver::settle(&self.farm.signer).await.expect("resolve");
            dry = false;
        }
        built
    }
}

// ---------------------------------------------------------------------------------------------- makespan

pub async fn makespan(bench: &Bench, report: &mut Report<'_>) {
    const SIZES: [usize; 3] = [16, 64, 256];
    let names: Vec<String> = SIZES
        .iter()
        .flat_map(|n| [format!("makespan_vs_bound_{n}"), format!("makespan_vs_fifo_{n}")])
        .collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.extend(["makespan_vs_bound", "makespan_vs_fifo"]);
    if !report.wants(&names) {
        return;
    }
    let nixpkgs = Nixpkgs::read(false);
    let template = phase("ingest nixpkgs without its texts", crate::drain::template(bench, &nixpkgs)).await;
    let plan = Plan::new(&nixpkgs);
    let mut farms = Vec::new();
    for slots in SIZES {
        farms.push((slots, bench.copy(&template).await, nixpkgs.outputs(), plan.by_path.clone()));
    }
    let simulated = phase(
        "build nixpkgs three times",
        together(farms.into_iter().map(|(slots, farm, outputs, durations)| async move {
            let mut simulation = Simulation::new(farm, slots, outputs).await;
            let ids: HashMap<String, i64> = sqlx::query_as("SELECT drv_path, id FROM ci.job")
                .fetch_all(&simulation.farm.database.admin())
                .await
                .expect("read the jobs")
                .into_iter()
                .collect();
            let built = simulation.run(u64::MAX, |claim| durations[&claim.drv_path]).await;
            assert_eq!(built.len(), durations.len(), "not everything was built");
            (slots, built.iter().map(|built| built.to).max().unwrap_or(0), ids, simulation.farm.database)
        })),
    )
    .await;
    let (mut bounds, mut fifos) = (vec![], vec![]);
    for (slots, took, ids, database) in simulated {
        let bound = plan.bound(slots);
        let fifo = plan.in_order(slots, |at| ids[&plan.paths[at]]);
        let chains = plan.in_order(slots, |at| -i64::from(plan.heights[at]));
        let known = plan.in_order(slots, |at| -(plan.remaining[at] as i64));
        eprintln!(
            "   {slots} slots: {took} s, bound {bound} s, FIFO {fifo} s; without a queue, by chains {chains} s, \
             by chains of durations known beforehand {known} s"
        );
        let (to_bound, to_fifo) = (took as f64 / bound as f64, took as f64 / fifo as f64);
        report.put(&format!("makespan_vs_bound_{slots}"), to_bound);
        report.put(&format!("makespan_vs_fifo_{slots}"), to_fifo);
        bounds.push(to_bound);
        fifos.push(to_fifo);
        bench.drop(database).await;
    }
    report.put("makespan_vs_bound", quantile(&mut bounds, 1.0));
    report.put("makespan_vs_fifo", quantile(&mut fifos, 1.0));
}

/// The graph with its durations, in memory.
struct Plan {
    paths: Vec<String>,
    inputs: Vec<Vec<usize>>,
    durations: Vec<u64>,
    /// Derivations of the longest chain above each.
    heights: Vec<u32>,
    /// Seconds from the start of each to the end of the longest chain above it.
    remaining: Vec<u64>,
    by_path: std::sync::Arc<HashMap<String, u64>>,
}

impl Plan {
    fn new(nixpkgs: &Nixpkgs) -> Self {
        let paths: Vec<String> = nixpkgs.nodes.iter().map(|node| node.drv_path.clone()).collect();
        let at: HashMap<&str, usize> =
            paths.iter().enumerate().map(|(at, path)| (path.as_str(), at)).collect();
        let inputs = nixpkgs
            .nodes
            .iter()
            .map(|node| node.inputs.iter().map(|path| at[path.as_str()]).collect())
            .collect();
        let mut durations = Durations(SmallRng::seed_from_u64(1));
        let durations: Vec<u64> = paths.iter().map(|_| durations.next()).collect();
        let by_path = paths.iter().cloned().zip(durations.iter().copied()).collect();
        let graph = harmonia_tests::graph::Graph::nixpkgs();
        let mut remaining = durations.clone();
        for at in graph.topological().into_iter().rev() {
            for (input, _) in &graph.nodes[at].inputs {
                remaining[*input] = remaining[*input].max(durations[*input] + remaining[at]);
            }
        }
        let heights = graph.height();
        Self { by_path: std::sync::Arc::new(by_path), paths, inputs, durations, heights, remaining }
    }

    /// Nobody can be faster than the longest chain, or than all slots busy all the time.
    fn bound(&self, slots: usize) -> u64 {
        let chain = self.remaining.iter().copied().max().unwrap_or(0);
        chain.max(self.durations.iter().sum::<u64>().div_ceil(slots as u64))
    }

    /// The same with ready jobs taken in the order of a key.
    fn in_order(&self, slots: usize, key: impl Fn(usize) -> i64) -> u64 {
        let above = self.above();
        let mut waits: Vec<usize> = self.inputs.iter().map(Vec::len).collect();
        let first = (0..waits.len()).filter(|&at| waits[at] == 0).map(|at| Reverse((key(at), at)));
        let mut ready: BinaryHeap<_> = first.collect();
        let mut running: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
        let mut now = 0;
        loop {
            while running.len() < slots {
                let Some(Reverse((_, at))) = ready.pop() else { break };
                running.push(Reverse((now + self.durations[at], at)));
            }
            let Some(Reverse((ends, at))) = running.pop() else { return now };
            now = ends;
            for &referrer in &above[at] {
                waits[referrer] -= 1;
                if waits[referrer] == 0 {
                    ready.push(Reverse((key(referrer), referrer)));
                }
            }
        }
    }

    fn above(&self) -> Vec<Vec<usize>> {
        let mut above = vec![Vec::new(); self.inputs.len()];
        for (at, inputs) in self.inputs.iter().enumerate() {
            inputs.iter().for_each(|&input| above[input].push(at));
        }
        above
    }
}

// ---------------------------------------------------------------------------------------------- fairness

const DAY: u64 = 86_400;
const WINDOW: u64 = 1_800;
const FAIR_SLOTS: usize = 64;

/// A day of projects that always have more to do: how far their part of each half hour is from their shares.
pub async fn fairness(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["fairness_p95", "fairness_worst"]) {
        return;
    }
    let mut farms = Vec::new();
    for shares in [vec![100, 100], vec![100, 200, 400]] {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(0, None).await;
        graphs::backlog(&farm, &shares).await;
        farm.tidy().await;
        farms.push((shares, farm));
    }
    let errors = phase(
        "two farms, a day each",
        together(farms.into_iter().map(|(shares, farm)| async move {
            let mut simulation = Simulation::new(farm, FAIR_SLOTS, graphs::synthetic_outputs()).await;
            let durations = std::sync::Mutex::new(Durations(SmallRng::seed_from_u64(2)));
            let next = |_: &Claim| durations.lock().map_or(SHORTEST, |mut durations| durations.next());
            let built = simulation.run(DAY, next).await;
            (errors(&built, &shares), simulation.farm.database)
        })),
    )
    .await;
    let mut all = Vec::new();
    for (errors, database) in errors {
        all.extend(errors);
        bench.drop(database).await;
    }
    report.put("fairness_p95", quantile(&mut all, 0.95));
    report.put("fairness_worst", quantile(&mut all, 1.0));
}

/// For every window and project, the distance between its part of the used time and its part of the shares.
fn errors(built: &[Built], shares: &[i32]) -> Vec<f64> {
    let all: i32 = shares.iter().sum();
    let mut errors = Vec::new();
    for window in 0..DAY / WINDOW {
        let (from, to) = (window * WINDOW, (window + 1) * WINDOW);
        let mut used = vec![0.0; shares.len()];
        for built in built {
            let seconds = built.to.min(to).saturating_sub(built.from.max(from));
            used[graphs::backlog_owner(&built.drv_path)] += seconds as f64;
        }
        let total: f64 = used.iter().sum();
        errors.extend(
            used.iter()
                .zip(shares)
                .map(|(used, &share)| (used / total - f64::from(share) / f64::from(all)).abs()),
        );
    }
    errors
}
