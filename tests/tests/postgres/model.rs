//! The queue against a small model of itself: random graphs and operations, done to both, compared after each.

mod queue;

use std::collections::{BTreeMap, BTreeSet};

use harmonia_queue::builder::{self, Failure, Session};
use harmonia_queue::ingest::{self, Ingest};
use harmonia_queue::leader::Leadership;
use harmonia_queue::people::{self, Ending, Project};
use harmonia_queue::signer::{self, Holder, Verdict};
use harmonia_queue::{Error, Fence, janitor};
use harmonia_tests::farm::{self, Farm, PoolHandle};
use harmonia_tests::pg::Server;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use queue::{Drv, Queue, Shape, State};
use sqlx::Row;

const SYSTEMS: [&str; 2] = ["x86_64-linux", "aarch64-linux"];
/// Name, pool, slots. The first pool builds for one system, the second for both.
const NODES: [(&str, usize, usize); 3] = [("first", 0, 2), ("second", 0, 1), ("third", 1, 3)];
const NODE_SECRET: &str = "the secret of a node";
/// Shares and limits; the first project is alone often enough to show the order.
const PROJECTS: [(&str, i32, Option<usize>); 3] =
    [("plain", 100, None), ("small", 50, Some(1)), ("large", 400, Some(3))];

/// What can be done. Indexes choose among what there is at the time; with nothing there, nothing is done.
#[derive(Debug, Clone)]
enum Op {
    Begin {
        project: Index,
        tops: Vec<Index>,
    },
    Chunk {
        evaluation: Index,
        nodes: usize,
    },
    Complete(Index),
    End(Index),
    Register(Index),
    Heartbeat(Index),
    Claim {
        session: Index,
        jobs: usize,
    },
    Upload(Index),
    Accept(Index),
    Finish(Index),
    /// The whole way of a good build.
    Build(Index),
    Fail {
        held: Index,
        build_error: bool,
    },
    GiveBack(Index),
    InputMissing {
        held: Index,
        input: Index,
    },
    SettleMissing {
        report: Index,
        gone: bool,
    },
    Forget(Index),
    Rebuild(Index),
    Cancel(Index),
    Drain(Index),
    Resume(Index),
    Pause {
        project: Index,
        paused: bool,
    },
    Advance(u32),
    Reap,
    /// A former attempt speaks up.
    Zombie(Index),
}

fn op() -> impl Strategy<Value = Op> {
    let at = any::<Index>;
    prop_oneof![
        3 => (at(), prop::collection::vec(at(), 1..4)).prop_map(|(project, tops)| Op::Begin { project, tops }),
        8 => (at(), 1..12_usize).prop_map(|(evaluation, nodes)| Op::Chunk { evaluation, nodes }),
        3 => at().prop_map(Op::Complete),
        2 => at().prop_map(Op::End),
        2 => at().prop_map(Op::Register),
        3 => at().prop_map(Op::Heartbeat),
        14 => (at(), 1..5_usize).prop_map(|(session, jobs)| Op::Claim { session, jobs }),
        3 => at().prop_map(Op::Upload),
        3 => at().prop_map(Op::Accept),
        3 => at().prop_map(Op::Finish),
        14 => at().prop_map(Op::Build),
        5 => (at(), any::<bool>()).prop_map(|(held, build_error)| Op::Fail { held, build_error }),
        3 => at().prop_map(Op::GiveBack),
        3 => (at(), at()).prop_map(|(held, input)| Op::InputMissing { held, input }),
        3 => (at(), any::<bool>()).prop_map(|(report, gone)| Op::SettleMissing { report, gone }),
        2 => at().prop_map(Op::Forget),
        4 => at().prop_map(Op::Rebuild),
        3 => at().prop_map(Op::Cancel),
        1 => at().prop_map(Op::Drain),
        2 => at().prop_map(Op::Resume),
        2 => (at(), any::<bool>()).prop_map(|(project, paused)| Op::Pause { project, paused }),
        3 => (1..200_u32).prop_map(Op::Advance),
        2 => Just(Op::Reap),
        3 => at().prop_map(Op::Zombie),
    ]
}

/// Derivations in topological order. Twins never depend on each other: a path cannot be its own input.
fn graph() -> impl Strategy<Value = Vec<Shape>> {
    let node =
        (prop::collection::vec(any::<Index>(), 0..4), any::<bool>(), 0..10_u8, 0..6_u8, any::<Index>());
    prop::collection::vec(node, 5..26).prop_map(|nodes| {
        let mut graph: Vec<Shape> = Vec::new();
        let mut below: Vec<BTreeSet<Drv>> = Vec::new();
        for (drv, (inputs, second, cached, twin, of)) in nodes.into_iter().enumerate() {
            let cached = cached == 0;
            let inputs: BTreeSet<Drv> = match drv {
                0 => BTreeSet::new(),
                _ if cached => BTreeSet::new(),
                _ => inputs.iter().map(|input| input.index(drv)).collect(),
            };
            let closure: BTreeSet<Drv> =
                inputs.iter().flat_map(|&input| below[input].iter().copied().chain([input])).collect();
            let mut shape = Shape {
                system: SYSTEMS[usize::from(second)],
                inputs: inputs.into_iter().collect(),
                cached,
                path: drv,
            };
            if drv > 0 && twin == 0 {
                let path = graph[of.index(drv)].path;
                let related = closure.iter().any(|&input| graph[input].path == path);
                if !related && !cached && !graph[path].cached {
                    shape.path = path;
                }
            }
            graph.push(shape);
            below.push(closure);
        }
        graph
    })
}

/// Seeds that once found something: what everybody runs is the same for everybody. `--long` looks for new ones.
const SEEDS: [u64; 2] = [9875909840398339150, 2281855953389760797];

#[test]
fn the_queue_does_what_its_model_does() {
    let fixed = std::env::var("HARMONIA_CI_MODEL_SEED").ok().map(|seed| seed.parse().expect("a number"));
    let cases = if harmonia_tests::long() { 400 } else { 24 };
    let seeds = match fixed {
        Some(seed) => vec![seed],
        None if harmonia_tests::long() => vec![rand::random()],
        None => SEEDS.to_vec(),
    };
    for seed in seeds {
        println!("HARMONIA_CI_MODEL_SEED={seed}");
        let config = Config {
            cases,
            max_shrink_iters: 40,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed),
            ..Config::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let steps = prop::collection::vec((op(), prop::bool::weighted(0.8)), 30..60);
        TestRunner::new(config)
            .run(&(graph(), steps), |(graph, steps)| {
                runtime.block_on(check(graph, steps));
                Ok(())
            })
            .unwrap_or_else(|error| panic!("HARMONIA_CI_MODEL_SEED={seed}: {error}"));
    }
}

async fn check(graph: Vec<Shape>, steps: Vec<(Op, bool)>) {
    let mut run = Run::begin(graph).await;
    // Everything is wanted once, so that no case waits long for its first job.
    run.model.evaluations.push(queue::Evaluation { project: 0, live: true, wants: BTreeSet::new() });
    run.ingests.push(Some((run.farm.begin(PROJECTS[0].0).await, (0..run.model.graph.len()).rev().collect())));
    run.chunk(0, run.model.graph.len() / 2 + 1).await;
    run.settle().await;
    for (op, settle) in steps {
        if settle || matches!(op, Op::Claim { .. }) {
            run.settle().await;
        }
        run.trace.push(format!("{op:?}"));
        run.apply(op).await;
        run.retire_fences();
        run.audit().await;
    }
    run.settle().await;
}

/// A queue, its model, and what a farm's processes remember.
struct Run {
    farm: Farm,
    pools: Vec<PoolHandle>,
    node_ids: Vec<i32>,
    project_ids: BTreeMap<i32, usize>,
    lead: Leadership,
    led_since: f64,
    model: Queue,
    /// By evaluation: while it is written, what is still to be sent, last first.
    ingests: Vec<Option<(Ingest, Vec<Drv>)>>,
    sessions: Vec<Session>,
    fences: BTreeMap<Drv, Fence>,
    former: Vec<(Drv, usize, Fence)>,
    trace: Vec<String>,
}

impl Run {
    async fn begin(graph: Vec<Shape>) -> Run {
        let database = Server::shared().database().await;
        // No crash is part of this, and thousands of small transactions are.
        database.execute(&format!("ALTER DATABASE {} SET synchronous_commit = off", database.name())).await;
        let farm = Farm::on(database).await;
        farm.freeze().await;
        let mut project_ids = BTreeMap::new();
        for (at, (name, shares, limit)) in PROJECTS.into_iter().enumerate() {
            let limit = limit.and_then(|limit| i32::try_from(limit).ok());
            let project = Project { shares, max_concurrent: limit, ..Project::new(name) };
            project_ids.insert(farm.put_project(project).await, at);
        }
        let pools = vec![farm.pool("one", &SYSTEMS[..1], 8).await, farm.pool("both", &SYSTEMS, 8).await];
        let projects = PROJECTS.map(|(_, _, limit)| queue::Project { limit, paused: false });
        let nodes = NODES.map(|(_, pool, _)| queue::Node { systems: &SYSTEMS[..=pool], draining: false });
        let lead = farm.lead().await;
        let mut run = Run {
            farm,
            pools,
            node_ids: Vec::new(),
            project_ids,
            lead,
            led_since: 0.0,
            model: Queue::new(graph, projects.into(), nodes.into()),
            ingests: Vec::new(),
            sessions: Vec::new(),
            fences: BTreeMap::new(),
            former: Vec::new(),
            trace: Vec::new(),
        };
        for node in 0..NODES.len() {
            run.register(node).await;
        }
        run.node_ids = sqlx::query_scalar("SELECT id FROM ci.node ORDER BY id")
            .fetch_all(&run.farm.database.admin())
            .await
            .unwrap();
        run
    }

    async fn apply(&mut self, op: Op) {
        match op {
            Op::Begin { project, tops } => self.begin_evaluation(project.index(PROJECTS.len()), &tops).await,
            Op::Chunk { evaluation, nodes } => {
                if let Some(at) = self.pick_ingest(&evaluation) {
                    self.chunk(at, nodes).await;
                }
            }
            Op::Complete(evaluation) => {
                if let Some(at) = self.pick_ingest(&evaluation) {
                    self.chunk(at, usize::MAX).await;
                    let (ingest, _) = self.ingests[at].take().unwrap();
                    ingest.complete(&[]).await.unwrap();
                    self.model.complete(at);
                }
            }
            Op::End(evaluation) => self.end_evaluation(evaluation.index(self.ingests.len())).await,
            Op::Register(node) => self.register(node.index(NODES.len())).await,
            Op::Heartbeat(session) => self.heartbeat(session.index(self.sessions.len())).await,
            Op::Claim { session, jobs } => self.claim(self.latest(&session), jobs).await,
            Op::Upload(held) => {
                if let Some(drv) = self.pick(&held, |state| state == State::Building) {
                    self.upload(drv).await;
                }
            }
            Op::Accept(held) => {
                if let Some(drv) =
                    self.pick(&held, |state| matches!(state, State::Building | State::Uploading))
                {
                    self.accept(drv).await;
                }
            }
            Op::Finish(held) => {
                if let Some(drv) = self.pick(&held, |state| state == State::Accepted) {
                    self.finish(drv).await;
                }
            }
            Op::Build(held) => {
                if let Some(drv) = self.pick(&held, |state| state == State::Building) {
                    self.upload(drv).await;
                    self.accept(drv).await;
                    self.finish(drv).await;
                }
            }
            Op::Fail { held, build_error } => {
                if let Some(drv) = self.pick_held(&held) {
                    let failure = if build_error { Failure::BuildError } else { Failure::Oom };
                    let (session, fence) = self.holder(drv);
                    assert!(session.fail(fence, failure, "it failed").await.unwrap());
                    self.model.fail(drv, build_error);
                }
            }
            Op::GiveBack(held) => {
                if let Some(drv) = self.pick_held(&held) {
                    let (session, fence) = self.holder(drv);
                    assert_eq!(session.give_back(&[fence], "it was asked to").await.unwrap(), [fence.job]);
                    self.model.interrupt(drv);
                }
            }
            Op::InputMissing { held, input } => {
                if let Some(drv) = self.pick(&held, |state| state == State::Building) {
                    let inputs = self.model.graph[drv].inputs.clone();
                    if !inputs.is_empty() {
                        let input = inputs[input.index(inputs.len())];
                        let (session, fence) = self.holder(drv);
                        assert!(session.input_missing(fence, &self.path(input)).await.unwrap());
                        self.model.input_missing(drv, input);
                    }
                }
            }
            Op::SettleMissing { report, gone } => {
                let reports: BTreeSet<usize> =
                    self.model.jobs.values().filter_map(|job| job.missing).collect();
                if let Some(path) = choose(reports, &report) {
                    signer::settle_missing(&self.farm.signer, &self.path(path), gone).await.unwrap();
                    self.model.settle_missing(path, gone);
                }
            }
            Op::Forget(path) => {
                if let Some(path) = choose(self.model.canonical.clone(), &path) {
                    let forgotten =
                        signer::forget(&self.farm.signer, &[self.path(path)], None).await.unwrap();
                    assert_eq!(forgotten, [self.path(path)]);
                    self.model.forget(path);
                }
            }
            Op::Rebuild(job) => {
                // One that could be, if there is any: most cannot.
                let ended = |state| matches!(state, State::Failed | State::Cancelled);
                if let Some(drv) = self.pick(&job, ended).or_else(|| self.pick(&job, |_| true)) {
                    match people::rebuild(&self.farm.frontend, self.model.jobs[&drv].id).await {
                        Ok(rebuilt) => assert_eq!(rebuilt, self.model.rebuild(drv), "rebuild of {drv}"),
                        Err(Error::WrongState(_)) => assert!(!self.model.rebuild(drv), "rebuild of {drv}"),
                        Err(error) => panic!("{error:?}"),
                    }
                }
            }
            Op::Cancel(job) => {
                if let Some(drv) = self.pick(&job, State::open) {
                    let cancelled =
                        people::cancel(&self.farm.frontend, self.model.jobs[&drv].id).await.unwrap();
                    assert_eq!(cancelled, self.model.cancel(drv), "cancel of {drv}");
                }
            }
            Op::Drain(node) => {
                let node = node.index(NODES.len());
                people::drain(&self.farm.operator, self.node_ids[node], "test", None).await.unwrap();
                self.model.nodes[node].draining = true;
            }
            Op::Resume(node) => {
                let node = node.index(NODES.len());
                let drained = people::resume(&self.farm.operator, self.node_ids[node], "test").await.unwrap();
                assert_eq!(drained, std::mem::take(&mut self.model.nodes[node].draining));
            }
            Op::Pause { project, paused } => {
                let at = project.index(PROJECTS.len());
                let (name, shares, limit) = PROJECTS[at];
                let limit = limit.and_then(|limit| i32::try_from(limit).ok());
                let project = Project { shares, max_concurrent: limit, paused, ..Project::new(name) };
                self.farm.put_project(project).await;
                self.model.projects[at].paused = paused;
            }
            Op::Advance(seconds) => self.advance(seconds).await,
            Op::Reap => {
                let reaped = janitor::reap(&self.farm.operator, self.lead.generation).await.unwrap();
                if self.model.now - self.led_since >= queue::LEASE {
                    self.model.reap();
                } else {
                    assert_eq!(reaped, 0, "the leader is too young to judge");
                }
            }
            Op::Zombie(former) => {
                if let Some((drv, session, fence)) = choose(self.former.clone(), &former) {
                    self.zombie(drv, session, fence).await;
                }
            }
        }
    }

    // ---------------------------------------------------------------------------------------------- evaluations

    async fn begin_evaluation(&mut self, project: usize, tops: &[Index]) {
        let mut closure = BTreeSet::new();
        let mut open: Vec<Drv> = tops.iter().map(|top| top.index(self.model.graph.len())).collect();
        while let Some(drv) = open.pop() {
            if closure.insert(drv) {
                open.extend(&self.model.graph[drv].inputs);
            }
        }
        self.ingests
            .push(Some((self.farm.begin(PROJECTS[project].0).await, closure.into_iter().rev().collect())));
        self.model.evaluations.push(queue::Evaluation { project, live: true, wants: BTreeSet::new() });
    }

    /// Sends the next nodes of an evaluation.
    async fn chunk(&mut self, evaluation: usize, nodes: usize) {
        let graph = &self.model.graph;
        let (ingest, left) = self.ingests[evaluation].as_mut().unwrap();
        let chunk = left.split_off(left.len().saturating_sub(nodes));
        let mut chain: BTreeMap<Drv, usize> = chunk.iter().map(|&drv| (drv, 0)).collect();
        for drv in &chunk {
            let above = chain[drv];
            for input in &graph[*drv].inputs {
                chain.entry(*input).and_modify(|below| *below = (*below).max(above + 1));
            }
        }
        let nodes = chunk.iter().map(|&drv| derivation(graph, drv)).collect();
        ingest.add(nodes).await.unwrap();
        let known = |&drv: &Drv| (drv, ingest.job(&drv_path(drv)).expect("a job"), chain[&drv]);
        let placed: Vec<_> = chunk.iter().rev().map(known).collect();
        self.model.ingest(evaluation, &placed);
    }

    async fn end_evaluation(&mut self, at: usize) {
        let evaluation = sqlx::query_scalar("SELECT id FROM ci.evaluation ORDER BY id OFFSET $1 LIMIT 1")
            .bind(i64::try_from(at).unwrap())
            .fetch_one(&self.farm.database.admin())
            .await
            .unwrap();
        let ended =
            people::end_evaluation(&self.farm.frontend, evaluation, Ending::Cancelled, None).await.unwrap();
        assert_eq!(ended, std::mem::take(&mut self.model.evaluations[at].live));
        self.ingests[at] = None;
    }

    fn pick_ingest(&self, index: &Index) -> Option<usize> {
        choose((0..self.ingests.len()).filter(|&at| self.ingests[at].is_some()), index)
    }

    // ---------------------------------------------------------------------------------------------- builders

    async fn register(&mut self, node: usize) {
        let (name, pool, slots) = NODES[node];
        let asked = builder::Node::new(name, NODE_SECRET, i32::try_from(slots).unwrap());
        self.sessions.push(Session::register(&self.pools[pool].db, &asked).await.unwrap());
        self.model.register(node, slots);
    }

    /// The last life of a node.
    fn latest(&self, index: &Index) -> usize {
        let node = index.index(NODES.len());
        self.model
            .sessions
            .iter()
            .rposition(|session| session.node == node)
            .expect("every node has registered")
    }

    async fn heartbeat(&mut self, session: usize) {
        let held: BTreeMap<Drv, Fence> = self
            .fences
            .clone()
            .into_iter()
            .filter(|(drv, _)| self.model.jobs[drv].session == session)
            .collect();
        let fences: Vec<Fence> = held.values().copied().collect();
        match self.sessions[session].heartbeat(&fences, None).await {
            Ok(pulse) => {
                let abandon: BTreeSet<i64> = pulse.abandon.into_iter().collect();
                let stop = self.model.heartbeat(session);
                assert_eq!(abandon, stop.iter().map(|drv| self.model.jobs[drv].id).collect());
            }
            Err(Error::SessionOver(_)) => assert!(self.model.sessions[session].ended),
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Claims, and checks that each job may be claimed, that none was left that could have been, and the order.
    async fn claim(&mut self, session: usize, want: usize) {
        let claims = match self.sessions[session].claim(i32::try_from(want).unwrap()).await {
            Ok(claims) => claims,
            Err(Error::SessionOver(_)) => return assert!(self.model.sessions[session].ended),
            Err(error) => panic!("{error:?}"),
        };
        let want = want.min(self.model.free_slots(session));
        let before = self.model.claimable(session);
        let mut taken = BTreeSet::new();
        for claim in &claims {
            let drv = (0..self.model.graph.len()).find(|&drv| drv_path(drv) == claim.drv_path).unwrap();
            let payer: i32 = sqlx::query_scalar(
                "SELECT l.project_id FROM ci.running r JOIN ci.lane l ON l.id = r.lane_id WHERE r.job_id = $1",
            )
            .bind(claim.fence.job)
            .fetch_one(&self.farm.database.admin())
            .await
            .unwrap();
            let payer = self.project_ids[&payer];
            let through = self.model.claimable(session).remove(&drv);
            assert!(
                through.is_some_and(|projects| projects.contains(&payer)),
                "{drv} was claimed through {payer}{}",
                self.story()
            );
            self.model.claim(drv, session, payer);
            self.fences.insert(drv, claim.fence);
            taken.insert(drv);
        }
        assert!(taken.len() <= want, "more jobs than slots");
        let left = self.model.claimable(session);
        assert!(taken.len() == want || left.is_empty(), "{left:?} could have been claimed{}", self.story());
        // Between projects, use decides; within one, the order is strict.
        let projects: BTreeSet<usize> = before.values().flatten().copied().collect();
        if let [project] = projects.into_iter().collect::<Vec<_>>()[..] {
            let mut best: Vec<Drv> = before.into_keys().collect();
            best.sort_by_key(|&drv| self.model.rank(drv, project));
            best.truncate(taken.len());
            assert_eq!(taken, best.into_iter().collect(), "the best of project {project}{}", self.story());
        }
    }

    async fn upload(&mut self, drv: Drv) {
        let (session, fence) = self.holder(drv);
        assert_eq!(session.start_upload(&[fence]).await.unwrap(), [fence.job]);
        self.model.job(drv).state = State::Uploading;
    }

    async fn accept(&mut self, drv: Drv) {
        let (session, fence) = self.holder(drv);
        let verdict = self.show(drv, session.clone(), fence).await;
        assert_eq!(verdict, Verdict::Accepted, "{drv}");
        self.model.accept(drv);
    }

    async fn finish(&mut self, drv: Drv) {
        let (_, fence) = self.holder(drv);
        assert_eq!(signer::finish(&self.farm.signer, &[fence]).await.unwrap().jobs, [fence.job]);
        self.model.finish(drv);
    }

    async fn show(&self, drv: Drv, session: Session, fence: Fence) -> Verdict {
        let holder = Holder { session: session.id, secret: session.secret, fence };
        let outputs = vec![farm::output("out", &self.path(self.model.graph[drv].path))];
        signer::accept(&self.farm.signer, &[(holder, outputs)]).await.unwrap()[0]
    }

    /// Everything that a former attempt can say changes nothing.
    async fn zombie(&self, drv: Drv, session: usize, fence: Fence) {
        let session = &self.sessions[session];
        let over = |error: Error| matches!(error, Error::SessionOver(_));
        assert!(session.start_upload(&[fence]).await.map_or_else(over, |held| held.is_empty()));
        assert!(session.give_back(&[fence], "late").await.map_or_else(over, |held| held.is_empty()));
        assert!(session.fail(fence, Failure::BuildError, "late").await.map_or_else(over, |held| !held));
        assert_eq!(self.show(drv, session.clone(), fence).await, Verdict::Stale);
        assert_eq!(signer::finish(&self.farm.signer, &[fence]).await.unwrap().jobs, Vec::<i64>::new());
    }

    fn holder(&self, drv: Drv) -> (&Session, Fence) {
        (&self.sessions[self.model.jobs[&drv].session], self.fences[&drv])
    }

    fn pick(&self, index: &Index, which: impl Fn(State) -> bool) -> Option<Drv> {
        choose(self.model.jobs.iter().filter(|(_, job)| which(job.state)).map(|(drv, _)| *drv), index)
    }

    /// One of the builds whose builder can still speak for it.
    fn pick_held(&self, index: &Index) -> Option<Drv> {
        let live = (0..self.sessions.len()).filter(|&session| !self.model.sessions[session].ended);
        choose(live.flat_map(|session| self.model.held(session)), index)
    }

    fn retire_fences(&mut self) {
        let jobs = &self.model.jobs;
        let over: Vec<_> = self.fences.extract_if(.., |drv, _| !jobs[drv].state.runs()).collect();
        self.former.extend(over.into_iter().map(|(drv, fence)| (drv, jobs[&drv].session, fence)));
    }

    fn path(&self, path: usize) -> String {
        store_path(&self.model.graph, path)
    }

    // ---------------------------------------------------------------------------------------------- comparing

    async fn advance(&mut self, seconds: u32) {
        self.farm.advance(f64::from(seconds)).await;
        self.model.now += f64::from(seconds);
    }

    /// Draws all conclusions on both sides and compares. Time passes, so that the resolver folds.
    async fn settle(&mut self) {
        self.advance(1).await;
        self.farm.settle().await;
        self.model.settle();
        self.audit().await;
        self.compare().await;
    }

    /// What was done, and what the model makes of it.
    fn story(&self) -> String {
        let jobs =
            self.model.jobs.iter().map(|(drv, job)| format!("{drv} {:?} {job:?}", self.model.graph[*drv]));
        let lines = self.trace.iter().cloned().chain(jobs);
        format!(" after:\n{}", lines.collect::<Vec<_>>().join("\n"))
    }

    async fn audit(&self) {
        let violations = people::audit(&self.farm.operator).await.unwrap();
        assert!(violations.is_empty(), "{violations:?}{}", self.story());
    }

    async fn compare(&self) {
        let rows = sqlx::query(
            "SELECT j.id, coalesce(r.phase::text, CASE WHEN y.job_id IS NOT NULL THEN 'ready' WHEN b.job_id IS NOT NULL THEN 'blocked' END,
                    j.state::text) AS state, j.retries, j.interruptions, j.priority, j.height, j.root, coalesce(r.cancelled, false) AS stopped,
                    l.project_id
             FROM ci.job j LEFT JOIN ci.running r ON r.job_id = j.id LEFT JOIN ci.ready y ON y.job_id = j.id
             LEFT JOIN ci.blocked b ON b.job_id = j.id LEFT JOIN ci.lane l ON l.id = r.lane_id",
        )
        .fetch_all(&self.farm.database.admin())
        .await
        .unwrap();
        assert_eq!(rows.len(), self.model.jobs.len());
        let drvs: BTreeMap<i64, Drv> = self.model.jobs.iter().map(|(drv, job)| (job.id, *drv)).collect();
        for row in rows {
            let drv = drvs[&row.get::<i64, _>("id")];
            let job = &self.model.jobs[&drv];
            let facts = |facts: String| format!("{drv}: {facts}");
            let open = job.state.open();
            let theirs = facts(format!(
                "{} {:?} height {}",
                row.get::<String, _>("state"),
                open.then(|| (
                    row.get::<i16, _>("retries"),
                    row.get::<i16, _>("interruptions"),
                    row.get::<i16, _>("priority"),
                    job.state != State::Accepted && row.get::<bool, _>("stopped"),
                )),
                row.get::<i32, _>("height"),
            ));
            let ours = facts(format!(
                "{} {:?} height {}",
                name(job.state),
                open.then_some((
                    job.retries,
                    job.interruptions,
                    job.priority,
                    matches!(job.state, State::Building | State::Uploading) && job.stopped,
                )),
                job.height,
            ));
            assert_eq!(theirs, ours, "database against model{}", self.story());
            if job.state == State::DepFailed {
                let root = drvs[&row.get::<i64, _>("root")];
                assert!(
                    self.model.roots(drv).contains(&root),
                    "{drv} names {root}, not {:?}",
                    self.model.roots(drv)
                );
            }
        }
    }
}

fn choose<T>(from: impl IntoIterator<Item = T>, index: &Index) -> Option<T> {
    let mut from: Vec<T> = from.into_iter().collect();
    (!from.is_empty()).then(|| from.swap_remove(index.index(from.len())))
}

fn name(state: State) -> &'static str {
    match state {
        State::Blocked => "blocked",
        State::Ready => "ready",
        State::Building => "building",
        State::Uploading => "uploading",
        State::Accepted => "accepted",
        State::Cached => "cached",
        State::Succeeded => "succeeded",
        State::Failed => "failed",
        State::DepFailed => "dep_failed",
        State::Cancelled => "cancelled",
    }
}

fn drv_path(drv: Drv) -> String {
    farm::drv_path(&format!("d{drv}"))
}

fn store_path(graph: &[Shape], path: usize) -> String {
    let path = graph[path].path;
    farm::store_path(&format!("p{path}"), &format!("p{path}"))
}

fn derivation(graph: &[Shape], drv: Drv) -> ingest::Node {
    let shape = &graph[drv];
    let inputs: Vec<String> = shape.inputs.iter().map(|input| format!("d{input}")).collect();
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let node = farm::derivation(&format!("d{drv}"), &inputs);
    ingest::Node {
        system: shape.system.to_owned(),
        cached: shape.cached,
        aterm: node.aterm.filter(|_| !shape.cached),
        outputs: vec![("out".to_owned(), Some(store_path(graph, drv)))],
        ..node
    }
}
