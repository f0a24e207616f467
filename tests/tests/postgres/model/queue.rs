//! The queue in memory: what its design says, in the plainest words, with every fence and lock left out because
//! nothing happens at the same time. An operation states facts; [`Queue::settle`] draws the conclusions, as the
//! resolver does.

use std::collections::{BTreeMap, BTreeSet};

/// The time a claim or a heartbeat gives.
pub const LEASE: f64 = 120.0;
const RETRIES: i16 = 3;
const INTERRUPTIONS: i16 = 10;
const STREAK: u32 = 3;

/// A derivation, by its position in the graph.
pub type Drv = usize;

/// What is known of a derivation before anything happens.
#[derive(Debug, Clone)]
pub struct Shape {
    pub system: &'static str,
    pub inputs: Vec<Drv>,
    /// A substituter has it.
    pub cached: bool,
    /// Which store path it makes; twins make the same.
    pub path: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Blocked,
    Ready,
    Building,
    Uploading,
    Accepted,
    Cached,
    Succeeded,
    Failed,
    DepFailed,
    Cancelled,
}

impl State {
    pub fn runs(self) -> bool {
        matches!(self, State::Building | State::Uploading | State::Accepted)
    }
    pub fn open(self) -> bool {
        self.runs() || matches!(self, State::Blocked | State::Ready)
    }
    fn done(self) -> bool {
        matches!(self, State::Succeeded | State::Cached)
    }
    fn bad(self) -> bool {
        matches!(self, State::Failed | State::DepFailed | State::Cancelled)
    }
}

#[derive(Debug, Clone)]
pub struct Job {
    pub id: i64,
    pub state: State,
    pub depth: usize,
    pub height: usize,
    pub retries: i16,
    pub interruptions: i16,
    pub priority: i16,
    /// Failed for good: a new evaluation does not open it again.
    sticky: bool,
    /// Not before this time.
    run_at: f64,
    /// The path that its builder could not fetch, until a signer has looked.
    pub missing: Option<usize>,
    /// The node that failed it last,
    avoid: Option<usize>,
    /// which does not get it while another could take it.
    shunned: Option<usize>,
    /// Who runs it and which project pays.
    pub session: usize,
    pub payer: usize,
    pub lease: f64,
    /// Nobody wants the running build: its builder is told.
    pub stopped: bool,
    /// A person said no to it when there were so many evaluations: only later ones count.
    refused: usize,
}

#[derive(Debug)]
pub struct Evaluation {
    pub project: usize,
    pub live: bool,
    pub wants: BTreeSet<Drv>,
}

#[derive(Debug)]
pub struct Project {
    pub limit: Option<usize>,
    pub paused: bool,
}

#[derive(Debug)]
pub struct Node {
    pub systems: &'static [&'static str],
    pub draining: bool,
}

#[derive(Debug)]
pub struct Session {
    pub node: usize,
    pub slots: usize,
    pub last_seen: f64,
    pub ended: bool,
    streak: u32,
}

#[derive(Debug)]
pub struct Queue {
    pub now: f64,
    pub graph: Vec<Shape>,
    pub jobs: BTreeMap<Drv, Job>,
    pub evaluations: Vec<Evaluation>,
    pub projects: Vec<Project>,
    pub nodes: Vec<Node>,
    pub sessions: Vec<Session>,
    /// Paths with a canonical record.
    pub canonical: BTreeSet<usize>,
}

impl Queue {
    pub fn new(graph: Vec<Shape>, projects: Vec<Project>, nodes: Vec<Node>) -> Queue {
        Queue {
            now: 0.0,
            graph,
            jobs: BTreeMap::new(),
            evaluations: Vec::new(),
            projects,
            nodes,
            sessions: Vec::new(),
            canonical: BTreeSet::new(),
        }
    }

    // ------------------------------------------------------------------------------------------ facts: evaluations

    /// A chunk arrives: derivations, their ids, and how long the chain above each is, as far as this chunk knows.
    pub fn ingest(&mut self, evaluation: usize, chunk: &[(Drv, i64, usize)]) {
        for &(drv, id, chain) in chunk {
            self.evaluations[evaluation].wants.insert(drv);
            let depth = self.graph[drv].inputs.iter().map(|input| self.jobs[input].depth + 1).max();
            let state = if self.graph[drv].cached { State::Cached } else { State::Blocked };
            let job = self.jobs.entry(drv).or_insert(Job::new(id, state, depth.unwrap_or(0), chain));
            // A new wish opens what was cancelled or ended by exhausted retries; only a build error sticks.
            if job.state == State::Cancelled || (job.state == State::Failed && !job.sticky) {
                job.reopen(0);
            }
        }
    }

    /// The graph is whole: chains are as long as this evaluation sees them.
    pub fn complete(&mut self, evaluation: usize) {
        let wants = self.evaluations[evaluation].wants.clone();
        let mut chain: BTreeMap<Drv, usize> = BTreeMap::new();
        for &drv in wants.iter().rev() {
            let above = chain.get(&drv).copied().unwrap_or(0);
            for &input in &self.graph[drv].inputs {
                let below = chain.entry(input).or_default();
                *below = (*below).max(above + 1);
            }
        }
        for (drv, length) in chain {
            let job = self.job(drv);
            if job.state.open() {
                job.height = job.height.max(length);
            }
        }
    }

    fn wanted_since(&self, drv: Drv, refused: usize) -> bool {
        self.evaluations[refused..]
            .iter()
            .any(|evaluation| evaluation.live && evaluation.wants.contains(&drv))
    }

    pub fn wanted(&self, drv: Drv) -> bool {
        self.wanted_since(drv, 0)
    }

    /// The oldest live evaluation of a project that wants it.
    fn wanted_by(&self, drv: Drv, project: usize) -> Option<usize> {
        self.evaluations.iter().position(|evaluation| {
            evaluation.live && evaluation.project == project && evaluation.wants.contains(&drv)
        })
    }

    // ------------------------------------------------------------------------------------------ facts: sessions

    /// A new life of a node; the former one lets go of what it holds.
    pub fn register(&mut self, node: usize, slots: usize) {
        if let Some(before) = self.sessions.iter().rposition(|session| session.node == node && !session.ended)
        {
            self.sessions[before].ended = true;
            for drv in self.held(before) {
                self.interrupt(drv);
            }
        }
        self.sessions.push(Session { node, slots, last_seen: self.now, ended: false, streak: 0 });
    }

    /// Says that it lives, and with which builds. Answers those to abandon.
    pub fn heartbeat(&mut self, session: usize) -> Vec<Drv> {
        let now = self.now;
        self.sessions[session].last_seen = now;
        let held: Vec<Drv> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.state.runs() && job.session == session)
            .map(|(drv, _)| *drv)
            .collect();
        for &drv in &held {
            self.job(drv).lease = now + LEASE;
        }
        held.into_iter().filter(|drv| self.jobs[drv].stopped).collect()
    }

    /// What a session holds and has no accepted result of.
    pub fn held(&self, session: usize) -> Vec<Drv> {
        let held = self.jobs.iter().filter(|(_, job)| {
            matches!(job.state, State::Building | State::Uploading) && job.session == session
        });
        held.map(|(drv, _)| *drv).collect()
    }

    // ------------------------------------------------------------------------------------------ facts: attempts

    /// Jobs that a session may claim, each with the projects through which it may.
    pub fn claimable(&self, session: usize) -> BTreeMap<Drv, Vec<usize>> {
        let Session { node, ended, streak, .. } = self.sessions[session];
        if ended || streak >= STREAK || self.nodes[node].draining {
            return BTreeMap::new();
        }
        let ready = self.jobs.iter().filter(|(drv, job)| {
            job.state == State::Ready && job.shunned != Some(node) && self.fits(**drv, node)
        });
        let lanes = ready.map(|(&drv, _)| {
            let open = (0..self.projects.len()).filter(|&project| self.has_room(project));
            (drv, open.filter(|&project| self.wanted_by(drv, project).is_some()).collect::<Vec<_>>())
        });
        lanes.filter(|(_, projects)| !projects.is_empty()).collect()
    }

    pub fn free_slots(&self, session: usize) -> usize {
        let of =
            |phase| self.jobs.values().filter(|job| job.state == phase && job.session == session).count();
        let slots = self.sessions[session].slots;
        if of(State::Uploading) > 2 * slots { 0 } else { slots - of(State::Building) }
    }

    fn has_room(&self, project: usize) -> bool {
        let Project { limit, paused } = self.projects[project];
        !paused && limit.is_none_or(|limit| self.running(project) < limit)
    }

    /// Builds that a project pays for.
    pub fn running(&self, project: usize) -> usize {
        self.jobs.values().filter(|job| job.state.runs() && job.payer == project).count()
    }

    fn fits(&self, drv: Drv, node: usize) -> bool {
        self.nodes[node].systems.contains(&self.graph[drv].system)
    }

    /// The order within one project: manual priority, the older evaluation, the longer chain above, the lower id.
    pub fn rank(&self, drv: Drv, project: usize) -> impl Ord {
        let job = &self.jobs[&drv];
        (-job.priority, self.wanted_by(drv, project), std::cmp::Reverse(job.height), job.id)
    }

    pub fn claim(&mut self, drv: Drv, session: usize, payer: usize) {
        let lease = self.now + LEASE;
        let job = self.job(drv);
        *job =
            Job { state: State::Building, session, payer, lease, stopped: false, refused: 0, ..job.clone() };
    }

    pub fn accept(&mut self, drv: Drv) {
        self.canonical.insert(self.graph[drv].path);
        self.job(drv).state = State::Accepted;
    }

    pub fn finish(&mut self, drv: Drv) {
        let session = self.jobs[&drv].session;
        self.sessions[session].streak = 0;
        self.job(drv).state = State::Succeeded;
    }

    /// A build error sticks; anything else is the node's own and is tried again, elsewhere if possible.
    pub fn fail(&mut self, drv: Drv, build_error: bool) {
        if self.is_stopped(drv) {
            return self.interrupt(drv);
        }
        let session = self.jobs[&drv].session;
        if build_error {
            let job = self.job(drv);
            (job.state, job.sticky) = (State::Failed, true);
        } else {
            self.sessions[session].streak += 1;
            self.retry(drv, 15.0);
        }
    }

    /// After a pause of so many seconds, doubled with every retry.
    fn retry(&mut self, drv: Drv, pause: f64) {
        let (now, node) = (self.now, self.sessions[self.jobs[&drv].session].node);
        let job = self.job(drv);
        job.avoid = Some(node);
        job.retries += 1;
        job.state = if job.retries > RETRIES { State::Failed } else { State::Blocked };
        job.run_at = now + pause * f64::from(1 << job.retries);
    }

    /// The attempt did not end; the job did not fail.
    pub fn interrupt(&mut self, drv: Drv) {
        let stopped = self.is_stopped(drv);
        let job = self.job(drv);
        job.interruptions += 1;
        job.state = match () {
            () if stopped => State::Cancelled,
            () if job.interruptions >= INTERRUPTIONS => State::Failed,
            () => State::Blocked,
        };
    }

    fn is_stopped(&self, drv: Drv) -> bool {
        let job = &self.jobs[&drv];
        job.stopped && !self.wanted_since(drv, job.refused)
    }

    pub fn input_missing(&mut self, drv: Drv, input: Drv) {
        let path = self.graph[input].path;
        if self.is_stopped(drv) {
            self.job(drv).state = State::Cancelled;
        } else {
            let job = self.job(drv);
            (job.state, job.missing) = (State::Blocked, Some(path));
        }
    }

    /// A signer has looked for a path that builders could not fetch.
    pub fn settle_missing(&mut self, path: usize, gone: bool) {
        let makers =
            self.jobs.iter().any(|(&drv, job)| self.graph[drv].path == path && job.state != State::Cached);
        if gone {
            self.lose(path);
        }
        for job in self.jobs.values_mut().filter(|job| job.missing == Some(path)) {
            job.missing = None;
            if job.state != State::Blocked {
                continue;
            }
            if !gone {
                // Its node does not get what is there.
                job.interruptions += 1;
                job.avoid = Some(self.sessions[job.session].node);
            }
            // Nobody here can make it again, or nobody gets it.
            if gone && !makers || job.interruptions >= INTERRUPTIONS {
                job.state = State::Failed;
            }
        }
    }

    /// The cache is told to lose it, also if it is only about to be published: then its builder shows it again.
    pub fn forget(&mut self, path: usize) {
        self.lose(path);
        self.canonical.remove(&path);
        for (drv, job) in &mut self.jobs {
            if self.graph[*drv].path == path && job.state == State::Accepted {
                job.state = State::Uploading;
            }
        }
    }

    /// Whoever made it makes it again, if anybody wants it.
    fn lose(&mut self, path: usize) {
        let makers: Vec<Drv> =
            self.jobs.keys().copied().filter(|&drv| self.graph[drv].path == path).collect();
        for drv in makers {
            let wanted = self.wanted(drv);
            let job = self.job(drv);
            match job.state {
                State::Succeeded if wanted => job.reopen(0),
                State::Succeeded => job.state = State::Cancelled,
                _ => continue,
            }
            self.canonical.remove(&path);
        }
    }

    // ------------------------------------------------------------------------------------------ facts: people, time

    /// False: it cannot be rebuilt.
    pub fn rebuild(&mut self, drv: Drv) -> bool {
        let wanted = self.wanted(drv);
        let job = self.job(drv);
        let can = wanted && matches!(job.state, State::Failed | State::Cancelled);
        if can {
            job.reopen(100);
        }
        can
    }

    /// A person's no to one build. False: it had ended.
    pub fn cancel(&mut self, drv: Drv) -> bool {
        let evaluations = self.evaluations.len();
        let job = self.job(drv);
        match job.state {
            State::Blocked | State::Ready => {
                (job.state, job.missing) = (State::Cancelled, None);
                true
            }
            State::Building | State::Uploading => {
                (job.stopped, job.refused) = (true, evaluations);
                true
            }
            _ => false,
        }
    }

    /// A leader that has led for a whole lease takes back what nobody speaks for.
    pub fn reap(&mut self) {
        let expired = self.jobs.iter().filter(|(_, job)| {
            matches!(job.state, State::Building | State::Uploading) && job.lease < self.now
        });
        let expired: Vec<Drv> = expired.map(|(drv, _)| *drv).collect();
        for drv in expired {
            let session = &self.sessions[self.jobs[&drv].session];
            if !session.ended && session.last_seen > self.now - LEASE || self.is_stopped(drv) {
                self.interrupt(drv);
            } else {
                self.retry(drv, 0.0);
            }
        }
        for session in 0..self.sessions.len() {
            if self.sessions[session].last_seen < self.now - LEASE && self.held(session).is_empty() {
                self.sessions[session].ended = true;
            }
        }
    }

    // ------------------------------------------------------------------------------------------ conclusions

    /// What follows from the facts, until nothing more does.
    pub fn settle(&mut self) {
        let drvs: Vec<Drv> = self.jobs.keys().copied().collect();
        for &drv in &drvs {
            let job = &self.jobs[&drv];
            let (wanted, counts) = (self.wanted(drv), self.wanted_since(drv, job.refused));
            let job = self.job(drv);
            match job.state {
                State::Blocked | State::Ready if !wanted => {
                    (job.state, job.missing) = (State::Cancelled, None);
                }
                State::Building | State::Uploading => job.stopped = !counts,
                _ => {}
            }
        }
        while drvs.iter().any(|&drv| self.judge(drv)) {}
        for &drv in &drvs {
            let shunned = self.jobs[&drv].shunned.filter(|&node| self.other_node(drv, node));
            self.job(drv).shunned = shunned;
        }
    }

    /// Looks at one job; true if that moved it.
    fn judge(&mut self, drv: Drv) -> bool {
        let inputs: Vec<State> = self.graph[drv].inputs.iter().map(|input| self.jobs[input].state).collect();
        let bad = inputs.iter().any(|state| state.bad());
        let done = inputs.iter().all(|state| state.done());
        let (wanted, follows) = (self.wanted(drv), self.follows(drv));
        let published = self.published(self.graph[drv].path);
        let now = self.now;
        let job = &self.jobs[&drv];
        let shunned = job.avoid.filter(|&node| self.other_node(drv, node));
        let job = self.job(drv);
        let next = match job.state {
            State::Blocked if published => State::Succeeded,
            State::Blocked if bad => State::DepFailed,
            State::Blocked if done && !follows && job.run_at <= now && job.missing.is_none() => {
                job.shunned = shunned;
                State::Ready
            }
            State::Ready if !done => State::Blocked,
            State::DepFailed if !bad && wanted => {
                job.reopen(0);
                State::Blocked
            }
            State::DepFailed if !bad => State::Cancelled,
            state => state,
        };
        if next.bad() || next == State::Succeeded {
            job.missing = None;
        }
        std::mem::replace(&mut job.state, next) != next
    }

    /// The record is there, and not only about to be published.
    fn published(&self, path: usize) -> bool {
        let publishing =
            |(drv, job): (&Drv, &Job)| self.graph[*drv].path == path && job.state == State::Accepted;
        self.canonical.contains(&path) && !self.jobs.iter().any(publishing)
    }

    /// Another open job makes its path: one that got further, or, of those that wait, the one in front.
    fn follows(&self, drv: Drv) -> bool {
        let job = &self.jobs[&drv];
        self.jobs.iter().any(|(&other, twin)| {
            other != drv
                && self.graph[other].path == self.graph[drv].path
                && twin.state.open()
                && (twin.state != State::Blocked || (twin.depth, twin.id) < (job.depth, job.id))
        })
    }

    /// Could a node other than this take it?
    fn other_node(&self, drv: Drv, node: usize) -> bool {
        self.sessions.iter().any(|session| {
            !session.ended
                && session.last_seen > self.now - LEASE
                && session.node != node
                && session.streak < STREAK
                && !self.nodes[session.node].draining
                && self.fits(drv, session.node)
        })
    }

    /// What failed first, for a dep-failed job: any of these may be named.
    pub fn roots(&self, drv: Drv) -> BTreeSet<Drv> {
        let bad = self.graph[drv].inputs.iter().filter(|input| self.jobs[input].state.bad());
        bad.flat_map(|&input| match self.jobs[&input].state {
            State::DepFailed => self.roots(input),
            _ => BTreeSet::from([input]),
        })
        .collect()
    }

    pub fn job(&mut self, drv: Drv) -> &mut Job {
        self.jobs.get_mut(&drv).expect("a derivation that was ingested")
    }
}

impl Job {
    fn new(id: i64, state: State, depth: usize, height: usize) -> Job {
        Job {
            id,
            state,
            depth,
            height,
            retries: 0,
            interruptions: 0,
            priority: 0,
            sticky: false,
            run_at: 0.0,
            missing: None,
            avoid: None,
            shunned: None,
            session: 0,
            payer: 0,
            lease: 0.0,
            stopped: false,
            refused: 0,
        }
    }

    /// Back to work with a clean record.
    fn reopen(&mut self, priority: i16) {
        *self = Job { priority, ..Job::new(self.id, State::Blocked, self.depth, self.height) };
    }
}
