//! Everything goes wrong at once, for thousands of jobs of the real graph, and nothing is lost, doubled or early.
//!
//! Time is virtual: a ticker moves the database's clock two hundred times as fast as the wall's, but waits for those
//! builders that are never hurt, so that a slow machine does not end their leases.

mod actors;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use harmonia_queue::builder::Claim;
use harmonia_queue::people::{self, Project};
use harmonia_queue::resolver::Resolver;
use harmonia_queue::{Error, Fence, ingest, janitor};
use harmonia_tests::PATIENCE;
use harmonia_tests::farm::{self, Farm, PoolHandle};
use harmonia_tests::graph::Graph;
use harmonia_tests::pg::{Options, Server};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

const PROJECTS: [(&str, i32, Option<i32>); 3] =
    [("first", 100, None), ("second", 300, None), ("limited", 100, Some(6))];
const WORKERS: usize = 8;
/// Of these, so many are never killed or paused: no fault of the database may cost them an attempt.
const STEADY: usize = 3;
const SLOTS: i32 = 4;
const JOBS: usize = 2_000;
/// Seconds that the clock moves at a time, and how far it may run ahead of a steady builder's heartbeat.
const TICK: u64 = 5;
const AHEAD: u64 = 60;
const OUTAGE: u64 = 300;
/// The longest that the farm works between two crashes.
const STAGE: Duration = Duration::from_secs(15);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_doubled_or_early_whatever_fails() {
    let fixed = std::env::var("HARMONIA_CI_CHAOS_SEED").ok().map(|seed| seed.parse().expect("a number"));
    let seeds = match fixed {
        Some(seed) => vec![seed],
        // What everybody runs is the same for everybody.
        None if !harmonia_tests::long() => vec![1, 2],
        None => (0..20).map(|_| rand::random()).collect(),
    };
    for seed in seeds {
        println!("HARMONIA_CI_CHAOS_SEED={seed}");
        let violations = run(seed).await;
        assert!(violations.is_empty(), "HARMONIA_CI_CHAOS_SEED={seed}: {violations:#?}");
    }
}

#[tokio::test]
async fn a_leader_whose_connection_broke_judges_nothing() {
    let farm = Farm::new().await;
    let lead = farm.lead().await;
    janitor::reap(&farm.operator, lead.generation).await.unwrap();
    let kill = "SELECT pg_terminate_backend(pid, 180000) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'harmonia-ci leader'";
    assert!(sqlx::query_scalar::<_, bool>(kill).fetch_one(&farm.database.admin()).await.unwrap());
    let judged = janitor::reap(&farm.operator, lead.generation).await;
    assert!(matches!(judged, Err(Error::NotLeader(_))), "{judged:?}");
}

struct World {
    seed: u64,
    farm: Farm,
    pool: PoolHandle,
    leader_url: String,
    graph: Graph,
    /// Which derivation makes a path.
    makers: HashMap<String, String>,
    outputs: HashMap<String, Vec<(String, String)>>,
    resolver: Resolver,
    /// Whether things go wrong.
    faults: AtomicBool,
    now: AtomicU64,
    /// When each steady builder was last heard.
    beats: Mutex<BTreeMap<usize, u64>>,
    /// By which drain a node is drained, from after it began until before it is taken back.
    drains: Mutex<BTreeMap<usize, u64>>,
    book: Mutex<Book>,
}

/// What the test knows by itself. Entries are made before the call that they are about, so that a lost answer cannot
/// make the book say less than what happened.
#[derive(Default)]
struct Book {
    /// Derivations whose outputs a signer was shown.
    published: HashSet<String>,
    /// Attempts that were accepted, by derivation,
    accepted: HashMap<String, BTreeSet<i64>>,
    /// and how often its outputs were lost.
    lost: HashMap<String, usize>,
    /// Derivations that were said not to build.
    broken: HashSet<String>,
    /// What a live evaluation wants in the end.
    kept: HashSet<String>,
    steady: HashSet<i64>,
    violations: BTreeSet<String>,
}

async fn run(seed: u64) -> Vec<String> {
    let world = Arc::new(World::new(seed).await);
    let mut actors = JoinSet::new();
    let mut evaluators = JoinSet::new();
    let (send, receive) = mpsc::unbounded_channel();
    let receive = Arc::new(tokio::sync::Mutex::new(receive));
    for at in 0..WORKERS {
        actors.spawn(actors::worker(world.clone(), at, send.clone()));
    }
    for number in 0..2 {
        actors.spawn(actors::signer(world.clone(), receive.clone(), number));
        actors.spawn(actors::janitor(world.clone(), number));
        actors.spawn(resolve(world.clone(), number));
    }
    for (number, (project, ..)) in PROJECTS.into_iter().enumerate() {
        evaluators.spawn(actors::evaluator(world.clone(), number, project));
    }
    actors.spawn(actors::sweeper(world.clone()));
    actors.spawn(tick(world.clone()));
    actors.spawn(sample(world.clone()));
    actors.spawn(monkey(world.clone()));

    tokio::select! {
        () = play(&world, evaluators) => {}
        // One that panicked would be missed only by what it leaves undone.
        panic = first_panic(&mut actors) => std::panic::resume_unwind(panic),
    }
    actors.shutdown().await;
    let violations = std::mem::take(&mut world.book().violations);
    violations.into_iter().take(20).collect()
}

async fn play(world: &World, mut evaluators: JoinSet<()>) {
    for (part, seconds) in [(0.1, 0), (0.3, OUTAGE), (0.5, 0)] {
        world.progress(part).await;
        world.crash(seconds).await;
    }
    world.progress(0.7).await;
    while let Some(end) = evaluators.join_next().await {
        end.unwrap();
    }
    world.faults.store(false, Ordering::Relaxed);

    world.all_end().await;
    world.check_failures().await;
    world.rebuild_all().await;
    world.check_history().await;
}

async fn first_panic(actors: &mut JoinSet<()>) -> Box<dyn Any + Send> {
    while let Some(end) = actors.join_next().await {
        if let Err(end) = end {
            return end.into_panic();
        }
    }
    std::future::pending().await
}

// ------------------------------------------------------------------------------------------------ what goes on

/// The resolver, now and then killed in the middle of a step.
async fn resolve(world: Arc<World>, number: u64) {
    let mut rng = world.rng(600 + number);
    loop {
        let life = Duration::from_millis(rng.random_range(50..3000));
        let _ = tokio::time::timeout(life, world.resolver.run(&world.farm.operator)).await;
    }
}

async fn tick(world: Arc<World>) {
    let admin = world.farm.database.admin();
    loop {
        sleep(Duration::from_millis(25)).await;
        let heard = world.beats.lock().unwrap().values().min().copied().unwrap_or(0);
        if world.now.load(Ordering::Relaxed) < heard + AHEAD {
            world.advance(&admin, TICK).await;
        }
    }
}

async fn sample(world: Arc<World>) {
    loop {
        sleep(Duration::from_secs(1)).await;
        if let Ok(violations) = people::audit(&world.farm.operator).await {
            violations
                .into_iter()
                .for_each(|(what, which)| world.violation(format!("audit: {what}: {which}")));
        }
    }
}

/// Breaks connections, drains and resumes nodes, cancels and rebuilds.
async fn monkey(world: Arc<World>) {
    let mut rng = world.rng(2);
    let admin = world.farm.database.admin();
    for number in 0.. {
        sleep(Duration::from_millis(rng.random_range(30..150))).await;
        if !world.faults.load(Ordering::Relaxed) {
            break;
        }
        match rng.random_range(0..10) {
            0..3 => {
                let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
                            AND usename <> current_user ORDER BY state = 'active' AND random() < 0.7 DESC, random() LIMIT 1";
                let _ = sqlx::query(kill).execute(&admin).await;
            }
            3..5 => {
                let at = rng.random_range(0..WORKERS);
                if world.drain(&admin, at, number).await.is_ok() {
                    sleep(Duration::from_millis(rng.random_range(0..300))).await;
                    world.resume(&admin, at).await;
                }
            }
            5 => {
                for job in world.some_jobs(&admin, "state = 'open'").await {
                    let _ = people::cancel(&world.farm.frontend, job).await;
                }
            }
            _ => {
                for job in world.some_jobs(&admin, "state IN ('failed', 'cancelled') AND ci.wanted(id)").await
                {
                    let _ = people::rebuild(&world.farm.frontend, job).await;
                }
            }
        }
    }
}

impl World {
    async fn new(seed: u64) -> World {
        let options = Options::default().fleeting().set("log_line_prefix", "%e %u ");
        let farm = Farm::on(Server::start(options).database().await).await;
        farm.freeze().await;
        for (name, shares, max_concurrent) in PROJECTS {
            farm.put_project(Project { shares, max_concurrent, ..Project::new(name) }).await;
        }
        let graph = part_of_nixpkgs(&mut StdRng::seed_from_u64(seed));
        let nodes = graph.nodes.iter().map(|node| {
            let base = node.drv.trim_end_matches(".drv");
            let path = |output: &String| (output.clone(), format!("/nix/store/{base}-{output}"));
            (drv_path(&node.drv), node.outputs.iter().map(path).collect::<Vec<_>>())
        });
        let outputs: HashMap<String, Vec<(String, String)>> = nodes.collect();
        let makers = outputs
            .iter()
            .flat_map(|(drv, outputs)| outputs.iter().map(|(_, path)| (path.clone(), drv.clone())));
        World {
            seed,
            pool: farm.pool("pool", &[farm::SYSTEM], SLOTS).await,
            leader_url: farm.database.make_login("harmonia_operator").await.direct_url,
            farm,
            graph,
            makers: makers.collect(),
            outputs,
            resolver: Resolver::default(),
            faults: AtomicBool::new(true),
            now: AtomicU64::new(0),
            // One that has not begun yet holds back the clock too.
            beats: Mutex::new((0..STEADY).map(|at| (at, 0)).collect()),
            drains: Mutex::default(),
            book: Mutex::default(),
        }
    }

    fn rng(&self, actor: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed.wrapping_add(actor))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap()
    }

    fn violation(&self, what: String) {
        self.book().violations.insert(what);
    }

    // -------------------------------------------------------------------------------------------- the graph

    /// Some of the tops of the graph.
    fn tops(&self, rng: &mut StdRng, part: f64) -> Vec<usize> {
        let mut roots = self.graph.roots();
        roots.shuffle(rng);
        let some = (roots.len() as f64 * part) as usize + 1;
        roots.truncate(some);
        roots
    }

    fn nodes(&self, tops: &[usize]) -> Vec<ingest::Node> {
        let part = self.graph.closure(tops);
        let node = |node: &harmonia_tests::graph::Node| ingest::Node {
            drv_path: drv_path(&node.drv),
            system: node.system.clone(),
            features: node.features.clone(),
            aterm: Some(format!("Derive({})", node.drv).into_bytes()),
            outputs: self.outputs[&drv_path(&node.drv)]
                .iter()
                .map(|(name, path)| (name.clone(), Some(path.clone())))
                .collect(),
            inputs: node.inputs.iter().map(|(input, _)| drv_path(&part.nodes[*input].drv)).collect(),
            ..ingest::Node::default()
        };
        part.nodes.iter().map(node).collect()
    }

    fn outputs(&self, drv_path: &str) -> Vec<harmonia_queue::signer::Output> {
        self.outputs[drv_path].iter().map(|(name, path)| farm::output(name, path)).collect()
    }

    /// Nothing is claimed before all that it needs was published.
    fn check_inputs(&self, claim: &Claim) {
        let book = self.book();
        let early = claim.inputs.iter().find(|input| !book.published.contains(&input.drv_path));
        drop(book);
        if let Some(input) = early {
            self.violation(format!("{} was claimed before {}", claim.drv_path, input.drv_path));
        }
    }

    // -------------------------------------------------------------------------------------------- faults

    /// Waits until so much of the graph was built, but not for ever: what nobody wants yet is not built.
    async fn progress(&self, part: f64) {
        let begin = Instant::now();
        while (self.book().published.len() as f64) < part * self.graph.nodes.len() as f64
            && begin.elapsed() < STAGE
        {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// PostgreSQL crashes and comes back `seconds` later by the clock. Nobody is let in before the clock says so.
    async fn crash(&self, seconds: u64) {
        let server = self.farm.database.server();
        let admin = self.farm.database.admin();
        if seconds > 0 {
            self.let_in(false).await;
        }
        server.stop_immediate().await;
        sleep(Duration::from_millis(200)).await;
        server.start_again().await;
        if seconds > 0 {
            while !self.advance(&admin, seconds).await {
                sleep(Duration::from_millis(10)).await;
            }
            self.let_in(true).await;
        }
    }

    async fn let_in(&self, open: bool) {
        let right = if open { "LOGIN" } else { "NOLOGIN" };
        let sql = format!(
            "DO $$ DECLARE r text; BEGIN FOR r IN SELECT rolname FROM pg_roles \
               WHERE NOT rolsuper AND rolname !~ '^(pg|harmonia)_' LOOP \
             EXECUTE format('ALTER ROLE %I {right}', r); END LOOP; END $$"
        );
        self.farm.database.execute(&sql).await;
    }

    async fn advance(&self, admin: &PgPool, seconds: u64) -> bool {
        let moved = sqlx::query("UPDATE public.test_clock SET t = t + make_interval(secs => $1)")
            .bind(seconds as f64)
            .execute(admin)
            .await;
        if moved.is_ok() {
            self.now.fetch_add(seconds, Ordering::Relaxed);
        }
        moved.is_ok()
    }

    fn beaten(&self, worker: usize) {
        if worker < STEADY {
            self.beats.lock().unwrap().insert(worker, self.now.load(Ordering::Relaxed));
        }
    }

    fn drained(&self, worker: usize) -> Option<u64> {
        self.drains.lock().unwrap().get(&worker).copied()
    }

    async fn drain(&self, admin: &PgPool, worker: usize, number: u64) -> Result<(), ()> {
        let node = node_id(admin, worker).await?;
        people::drain(&self.farm.operator, node, "chaos", None).await.map_err(drop)?;
        self.drains.lock().unwrap().insert(worker, number);
        Ok(())
    }

    async fn resume(&self, admin: &PgPool, worker: usize) {
        self.drains.lock().unwrap().remove(&worker);
        loop {
            if let Ok(node) = node_id(admin, worker).await
                && people::resume(&self.farm.operator, node, "chaos").await.is_ok()
            {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn some_jobs(&self, admin: &PgPool, which: &str) -> Vec<i64> {
        let sql = format!("SELECT id FROM ci.job WHERE {which} ORDER BY random() LIMIT 3");
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(admin).await.unwrap_or_default()
    }

    async fn runs(&self, fence: Fence) -> bool {
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM ci.running WHERE job_id = $1 AND attempt = $2)")
            .bind(fence.job)
            .bind(fence.attempt)
            .fetch_one(&self.farm.database.admin())
            .await
            .unwrap_or(false)
    }

    async fn is_over(&self, fence: Fence) -> Result<bool, sqlx::Error> {
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM ci.attempt WHERE id = $1 AND job_id = $2)")
            .bind(fence.attempt)
            .bind(fence.job)
            .fetch_one(&self.farm.database.admin())
            .await
    }

    // -------------------------------------------------------------------------------------------- checks

    /// Waits until no job is open: whatever was done to them, all end.
    async fn all_end(&self) {
        let admin = self.farm.database.admin();
        let mut moved = Instant::now();
        let mut ends = 0;
        loop {
            // In one look: an event becomes an open job in no time.
            let left: Option<(i64, String, i64)> = sqlx::query_as(
                "SELECT id, drv_path, (SELECT count(*) FROM ci.attempt) FROM ci.job WHERE state = 'open'
                 UNION ALL SELECT subject, 'an event', (SELECT count(*) FROM ci.attempt) FROM ci.event LIMIT 1",
            )
            .fetch_optional(&admin)
            .await
            .unwrap();
            let Some((job, what, attempts)) = left else { return };
            if attempts > ends {
                (moved, ends) = (Instant::now(), attempts);
            } else if moved.elapsed() > PATIENCE {
                let why = people::why(&self.farm.frontend, job).await;
                let facts = self.facts(&admin).await;
                panic!("HARMONIA_CI_CHAOS_SEED={}: {what} does not end: {why:?}\n{facts}", self.seed);
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// What the database knows about a farm that stands still.
    async fn facts(&self, admin: &PgPool) -> String {
        let bottom = "ci.job j WHERE state = 'open' AND NOT EXISTS \
             (SELECT FROM ci.job_input i JOIN ci.job o ON o.id = i.input WHERE i.referrer = j.id AND o.state = 'open')";
        let questions = [
            ("open, with no open input", format!("SELECT to_jsonb(j) - 'aterm' FROM {bottom}")),
            ("why", format!("SELECT to_jsonb(ci.why(j.id)) FROM {bottom}")),
            ("blocked", format!("SELECT to_jsonb(b) FROM ci.blocked b WHERE job_id IN (SELECT j.id FROM {bottom})")),
            ("ready", "SELECT to_jsonb(r) FROM ci.ready r".into()),
            ("offers", "SELECT to_jsonb(o) FROM ci.offer o".into()),
            ("running", "SELECT to_jsonb(r) FROM ci.running r".into()),
            ("events", "SELECT to_jsonb(e) FROM ci.event e".into()),
            ("missing", "SELECT to_jsonb(m) FROM ci.missing m".into()),
            ("clock", "SELECT to_jsonb(ci.clock())".into()),
            ("leader", "SELECT to_jsonb(l) FROM ci.leadership l".into()),
            ("sessions", "SELECT to_jsonb(s) FROM ci.session s WHERE ended_at IS NULL".into()),
            ("drains", "SELECT to_jsonb(d) FROM ci.drain d".into()),
            (
                "connections",
                "SELECT jsonb_build_array(pid, usename, state, wait_event, pg_blocking_pids(pid), now() - xact_start, left(query, 80)) \
                 FROM pg_stat_activity WHERE datname = current_database()"
                    .into(),
            ),
        ];
        let mut facts = format!("violations: {:#?}\n", self.book().violations);
        for (title, sql) in questions {
            let sql = format!("SELECT x::text FROM ({sql} LIMIT 20) x(x)");
            let rows = sqlx::query_scalar::<_, String>(AssertSqlSafe(sql)).fetch_all(admin).await;
            let rows = rows.map_or_else(|error| error.to_string(), |rows| rows.join("\n  "));
            facts.push_str(&format!("{title}:\n  {rows}\n"));
        }
        facts
    }

    /// What failed is what was said to fail, what depends on it, and nothing else.
    async fn check_failures(&self) {
        let admin = self.farm.database.admin();
        let states: Vec<(String, String, Option<String>)> =
            sqlx::query_as("SELECT drv_path, state::text, failure FROM ci.job")
                .fetch_all(&admin)
                .await
                .unwrap();
        let states: HashMap<&str, (&str, Option<&str>)> = states
            .iter()
            .map(|(path, state, failure)| (path.as_str(), (state.as_str(), failure.as_deref())))
            .collect();
        for node in &self.graph.nodes {
            let path = drv_path(&node.drv);
            let Some(&(state, failure)) = states.get(path.as_str()) else { continue };
            if failure == Some("build_error") && state == "failed" && !self.book().broken.contains(&path) {
                self.violation(format!("{path} failed, but no builder said so"));
            }
            let bad = |input: &usize| {
                let input = drv_path(&self.graph.nodes[*input].drv);
                states.get(input.as_str()).is_none_or(|(state, _)| *state != "succeeded")
            };
            let unmet = node.inputs.iter().any(|(input, _)| bad(input));
            if state == "dep_failed" && !unmet {
                self.violation(format!("{path} is {state}, but all its inputs are there"));
            }
        }
    }

    /// With every failure rebuilt and nothing in the way, all that is wanted succeeds.
    async fn rebuild_all(&self) {
        let admin = self.farm.database.admin();
        loop {
            let again: Vec<i64> = sqlx::query_scalar(
                "SELECT id FROM ci.job WHERE state IN ('failed', 'cancelled') AND ci.wanted(id)",
            )
            .fetch_all(&admin)
            .await
            .unwrap();
            if again.is_empty() {
                break;
            }
            for job in again {
                people::rebuild(&self.farm.frontend, job).await.unwrap();
            }
            self.all_end().await;
        }
        let left: Vec<(String, String)> =
            sqlx::query_as(
                "SELECT j.drv_path, concat_ws(' because of ', j.state, r.drv_path) FROM ci.job j LEFT JOIN ci.job r ON r.id = j.root
                 WHERE j.state <> 'succeeded'",
            )
            .fetch_all(&admin)
            .await
            .unwrap();
        let kept = std::mem::take(&mut self.book().kept);
        for (path, state) in left.into_iter().filter(|(path, _)| kept.contains(path)) {
            self.violation(format!("{path} is {state} in the end"));
        }
    }

    /// One accepted success a path, and one more for each time that the cache lost it.
    fn check_doubled(&self, successes: &[(String, i64)]) {
        let book = self.book();
        let seen = successes.iter().map(|(path, n)| (path, usize::try_from(*n).unwrap()));
        let seen = seen.chain(book.accepted.iter().map(|(path, attempts)| (path, attempts.len())));
        let allowed = |path: &String| 1 + book.lost.get(path).copied().unwrap_or(0);
        let doubled: Vec<String> = seen
            .filter(|(path, n)| *n > allowed(path))
            .map(|(path, n)| format!("{path} succeeded {n} times"))
            .collect();
        drop(book);
        doubled.into_iter().for_each(|what| self.violation(what));
    }

    /// The attempts, as the database remembers them.
    async fn check_history(&self) {
        let admin = self.farm.database.admin();
        let none = |sql: &'static str| {
            let admin = admin.clone();
            async move { sqlx::query_scalar::<_, String>(sql).fetch_all(&admin).await.unwrap() }
        };
        for job in none(
            "SELECT DISTINCT j.drv_path FROM ci.attempt a JOIN ci.job_input i ON i.referrer = a.job_id JOIN ci.job j ON j.id = a.job_id
             WHERE NOT EXISTS (SELECT FROM ci.attempt s WHERE s.job_id = i.input AND s.outcome = 'succeeded' AND s.ended_at <= a.claimed_at)",
        )
        .await
        {
            self.violation(format!("{job} was claimed before its inputs"));
        }
        let steady: Vec<i64> = self.book().steady.iter().copied().collect();
        let died: Vec<i64> = sqlx::query_scalar(
            "SELECT id FROM ci.attempt WHERE outcome = 'node_died' AND session_id = ANY ($1)",
        )
        .bind(steady)
        .fetch_all(&admin)
        .await
        .unwrap();
        for attempt in died {
            self.violation(format!("attempt {attempt} was lost although its builder lived"));
        }
        let successes: Vec<(String, i64)> = sqlx::query_as(
            "SELECT j.drv_path, count(*) FROM ci.attempt a JOIN ci.job j ON j.id = a.job_id WHERE a.outcome = 'succeeded' GROUP BY 1",
        )
        .fetch_all(&admin)
        .await
        .unwrap();
        self.check_doubled(&successes);
        for (what, which) in people::audit(&self.farm.operator).await.unwrap() {
            self.violation(format!("audit: {what}: {which}"));
        }
        // Refusals and ended connections are part of it; a deadlock or a broken constraint is not.
        let log = self.farm.database.server().log();
        let lines: Vec<&str> = log.lines().collect();
        for at in 0..lines.len() {
            let code = &lines[at].get(..2).unwrap_or_default();
            if lines[at].contains("ERROR:") && !["HC", "57"].contains(code) {
                let context = &lines[at..lines.len().min(at + 12)];
                self.violation(format!("PostgreSQL: {}", context.join("\n")));
            }
        }
    }
}

async fn node_id(admin: &PgPool, worker: usize) -> Result<i32, ()> {
    let name = format!("node-{worker}");
    sqlx::query_scalar("SELECT id FROM ci.node WHERE name = $1")
        .bind(name)
        .fetch_one(admin)
        .await
        .map_err(drop)
}

fn drv_path(drv: &str) -> String {
    format!("/nix/store/{drv}")
}

/// Enough random tops of nixpkgs to need some thousand jobs.
fn part_of_nixpkgs(rng: &mut StdRng) -> Graph {
    let nixpkgs = Graph::nixpkgs();
    let roots = nixpkgs.roots();
    let mut tops = Vec::new();
    loop {
        tops.extend((0..8).filter_map(|_| roots.choose(rng)));
        let part = nixpkgs.closure(&tops);
        if part.nodes.len() >= JOBS {
            return part;
        }
    }
}
