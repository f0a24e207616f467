//! Those who work: builders, signers, evaluators, the control plane. Each does what the real one does, and what happens to the
//! real ones happens to them: they die without a word, are paused, lose answers, come back.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harmonia_queue::builder::{self, Claim, Failure, Session};
use harmonia_queue::ingest::Ingest;
use harmonia_queue::leader::{Leadership, Office};
use harmonia_queue::people::{self, Ending};
use harmonia_queue::signer::{self, Holder, Output, Verdict};
use harmonia_queue::{Error, Fence, Result, janitor};
use harmonia_tests::farm;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::sync::mpsc;
use tokio::time::sleep;
use uuid::Uuid;

use super::{SLOTS, STEADY, World};

const SOON: Duration = Duration::from_millis(20);
/// Of real time: some 20 s of the farm's.
const BEAT: Duration = Duration::from_millis(100);

/// Says it again until the database has answered: an answer may have been lost, so it may be said twice.
async fn persist<T, F: Future<Output = Result<T>>>(mut call: impl FnMut() -> F) -> Result<T> {
    loop {
        match call().await {
            Err(Error::Unreachable(_) | Error::Database(_)) => sleep(SOON).await,
            answer => return answer,
        }
    }
}

/// A build on its way to a signer.
pub struct Upload {
    holder: Holder,
    drv_path: String,
    held: Arc<Mutex<BTreeSet<Fence>>>,
}

// ------------------------------------------------------------------------------------------------ builders

/// How a builder's life ends.
enum End {
    /// Without a word.
    Killed,
    /// Stopped, and going on much later as if nothing had happened.
    Paused,
    /// The queue says that it is over, or it is of no use here any more.
    Over,
}

struct Life {
    world: Arc<World>,
    at: usize,
    session: Session,
    held: Arc<Mutex<BTreeSet<Fence>>>,
    abandoned: Mutex<HashSet<i64>>,
    uploads: mpsc::UnboundedSender<Upload>,
}

pub async fn worker(world: Arc<World>, at: usize, uploads: mpsc::UnboundedSender<Upload>) {
    let mut rng = world.rng(100 + at as u64);
    let name = format!("node-{at}");
    loop {
        let node = builder::Node::new(&name, "the secret of a node", SLOTS);
        let session = match Session::register(&world.pool.db, &node).await {
            Ok(session) => session,
            Err(_) => {
                sleep(SOON).await;
                continue;
            }
        };
        if at < STEADY {
            world.book().steady.insert(session.id);
        }
        let life = Life {
            world: world.clone(),
            at,
            session,
            held: Arc::default(),
            abandoned: Mutex::default(),
            uploads: uploads.clone(),
        };
        loop {
            let end = tokio::select! {
                end = life.work(&mut rng) => end,
                end = life.beat() => end,
            };
            match end {
                End::Paused => {
                    sleep(Duration::from_millis(rng.random_range(800..2000))).await;
                    life.come_back().await;
                }
                End::Killed => {
                    // Back at once on the same volume, or when nobody remembers it.
                    if rng.random_bool(0.5) {
                        sleep(Duration::from_millis(rng.random_range(800..2000))).await;
                    }
                    break;
                }
                End::Over => break,
            }
        }
    }
}

impl Life {
    async fn beat(&self) -> End {
        loop {
            let held: Vec<Fence> = self.held.lock().unwrap().iter().copied().collect();
            match self.session.heartbeat(&held, None).await {
                Ok(pulse) => {
                    self.abandoned.lock().unwrap().extend(pulse.abandon);
                    self.world.beaten(self.at);
                    if pulse.notice.is_some() {
                        let _ = persist(|| self.session.deregister()).await;
                        return End::Over;
                    }
                }
                Err(Error::SessionOver(_)) => {
                    if self.at < STEADY {
                        self.world.violation("a session that lived was ended".into());
                    }
                    return End::Over;
                }
                Err(_) => {}
            }
            sleep(BEAT).await;
        }
    }

    async fn work(&self, rng: &mut StdRng) -> End {
        loop {
            let drained = self.world.drained(self.at);
            let claims = match self.session.claim(SLOTS).await {
                Ok(claims) => claims,
                Err(Error::SessionOver(_)) => return End::Over,
                // The answer may have been lost; what it said runs out by itself.
                Err(_) => {
                    sleep(SOON).await;
                    continue;
                }
            };
            if !claims.is_empty() && drained.is_some() && drained == self.world.drained(self.at) {
                self.world.violation(format!("node {} claimed while it drained", self.at));
            }
            if claims.is_empty() {
                sleep(SOON).await;
            }
            self.held.lock().unwrap().extend(claims.iter().map(|claim| claim.fence));
            claims.iter().for_each(|claim| self.world.check_inputs(claim));
            sleep(Duration::from_millis(rng.random_range(0..15))).await;
            for claim in claims {
                if let Some(end) = self.end_build(rng, claim).await {
                    return end;
                }
            }
        }
    }

    /// One build comes to some end.
    async fn end_build(&self, rng: &mut StdRng, claim: Claim) -> Option<End> {
        let (session, fence) = (&self.session, claim.fence);
        let fences = [fence];
        let fate = if self.world.faults.load(Ordering::Relaxed) { rng.random_range(0..1000) } else { 1000 };
        let told = match fate {
            0..8 if self.at >= STEADY => return Some(End::Killed),
            8..16 if self.at >= STEADY => return Some(End::Paused),
            16..28 => {
                self.world.book().broken.insert(claim.drv_path.clone());
                persist(|| session.fail(fence, Failure::BuildError, "it does not build")).await.map(drop)
            }
            28..48 => persist(|| session.fail(fence, Failure::Oom, "no memory")).await.map(drop),
            48..63 => persist(|| session.give_back(&fences, "something else came up")).await.map(drop),
            63..73 if !claim.inputs.is_empty() => {
                let path = claim.inputs[rng.random_range(0..claim.inputs.len())].path.clone().unwrap();
                persist(|| session.input_missing(fence, &path)).await.map(drop)
            }
            _ if self.abandoned.lock().unwrap().remove(&fence.job) => {
                persist(|| session.give_back(&fences, "nobody wants it")).await.map(drop)
            }
            _ => {
                // Whether or not the answer arrives: the signer will know.
                let _ = session.start_upload(&[fence]).await;
                let _ = self.uploads.send(self.upload(&claim));
                return None;
            }
        };
        self.held.lock().unwrap().remove(&fence);
        told.is_err().then_some(End::Over)
    }

    fn upload(&self, claim: &Claim) -> Upload {
        Upload {
            holder: farm::holder(&self.session, claim),
            drv_path: claim.drv_path.clone(),
            held: self.held.clone(),
        }
    }

    /// Awake again after its lease: whatever was taken from it meanwhile, it cannot end any more.
    async fn come_back(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        for fence in held {
            let Ok(over) = self.world.is_over(fence).await else { continue };
            let holder = Holder { session: self.session.id, secret: self.session.secret.clone(), fence };
            let accepted = signer::accept(&self.world.farm.signer, &[(holder, Vec::new())]).await;
            let failed = self.session.fail(fence, Failure::Network, "it took too long").await;
            let deaf = |verdict: &Verdict| matches!(verdict, Verdict::Stale | Verdict::Busy);
            let heard =
                accepted.is_ok_and(|verdicts| !verdicts.iter().all(deaf)) || failed.is_ok_and(|held| held);
            if over && heard {
                self.world.violation(format!("{fence:?} was over, and a zombie was heard"));
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------ signers

pub async fn signer(
    world: Arc<World>,
    uploads: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Upload>>>,
    number: u64,
) {
    let mut rng = world.rng(200 + number);
    loop {
        let mut batch = Vec::new();
        uploads.lock().await.recv_many(&mut batch, 8).await;
        let results: Vec<(Holder, Vec<Output>)> =
            batch.iter().map(|upload| (upload.holder.clone(), world.outputs(&upload.drv_path))).collect();
        world.book().published.extend(batch.iter().map(|upload| upload.drv_path.clone()));
        let Ok(verdicts) = persist(|| signer::accept(&world.farm.signer, &results)).await else { continue };
        let mut accepted = Vec::new();
        for (upload, verdict) in batch.iter().zip(verdicts) {
            let fence = upload.holder.fence;
            upload.held.lock().unwrap().remove(&fence);
            match verdict {
                Verdict::Accepted => {
                    world.book().accepted.entry(upload.drv_path.clone()).or_default().insert(fence.attempt);
                    accepted.push(fence);
                }
                Verdict::Stale => {
                    // Nothing but its own builder or a judgement may have taken it.
                    if world.runs(fence).await {
                        world.violation(format!("{fence:?} was called stale while it ran"));
                    }
                }
                // As if it had not been shown: its lease ends.
                Verdict::Busy => {}
                verdict => world
                    .violation(format!("{verdict:?} for {}, which only one attempt made", upload.drv_path)),
            }
        }
        // It may die here: the records are there, another completes them.
        if !world.faults.load(Ordering::Relaxed) || rng.random_bool(0.9) {
            let _ = signer::finish(&world.farm.signer, &accepted).await;
            world.resolver.nudge();
        }
    }
}

/// Completes what other signers left, and looks for what builders could not fetch.
pub async fn sweeper(world: Arc<World>) {
    let mut rng = world.rng(300);
    let db = &world.farm.signer;
    loop {
        sleep(BEAT).await;
        if let Ok(left) = signer::unpublished(db, Duration::from_secs(30)).await {
            let left: Vec<Fence> = left.iter().map(|unpublished| unpublished.fence).collect();
            let _ = signer::finish(db, &left).await;
        }
        for (path, _) in signer::missing_reports(db).await.unwrap_or_default() {
            let gone = rng.random_bool(0.5);
            if gone {
                *world.book().lost.entry(world.makers[&path].clone()).or_default() += 1;
            }
            let _ = signer::settle_missing(db, &path, gone).await;
        }
    }
}

// ------------------------------------------------------------------------------------------------ evaluators

/// Evaluates a part of the graph for good, between others that are given up.
pub async fn evaluator(world: Arc<World>, number: usize, project: &'static str) {
    let mut rng = world.rng(400 + number as u64);
    let mut kept = false;
    let mut more = 3;
    while !kept || more > 0 {
        let keep = !kept && (more == 0 || rng.random_bool(0.5));
        if !keep {
            more -= 1;
        }
        let tops = world.tops(&mut rng, if keep { 0.7 } else { 0.3 });
        let db = &world.farm.evaluator;
        let Ok(mut ingest) = persist(|| Ingest::begin(db, project, "git", Some("main"), None, false)).await
        else {
            continue;
        };
        let evaluation = ingest.evaluation;
        let nodes = world.nodes(&tops);
        let size = rng.random_range(100..600);
        let gives_up = (!keep && rng.random_bool(0.5)).then(|| rng.random_range(0..nodes.len() / size + 1));
        let mut added = Ok(());
        for (at, chunk) in nodes.chunks(size).enumerate() {
            if gives_up == Some(at) {
                added = Err(());
            }
            if added.is_err() {
                break;
            }
            added = ingest.add(chunk.to_vec()).await.map_err(drop);
            world.resolver.nudge();
            sleep(SOON).await;
        }
        let completed = match added {
            Ok(()) => ingest.complete(&[]).await.is_ok(),
            Err(()) => false,
        };
        if keep && completed {
            kept = true;
            world.book().kept.extend(nodes.iter().map(|node| node.drv_path.clone()));
        } else {
            // A cancel, an evaluator that died, or one that gave up.
            sleep(Duration::from_millis(rng.random_range(0..500))).await;
            let end = if completed { Ending::Cancelled } else { Ending::Aborted };
            let _ = persist(|| people::end_evaluation(db, evaluation, end, None)).await;
        }
    }
}

// ------------------------------------------------------------------------------------------------ control plane

/// Leads whenever it can, and goes on as the leader until the database says that it is not.
pub async fn janitor(world: Arc<World>, number: u64) {
    let mut rng = StdRng::seed_from_u64(world.seed ^ (500 + number));
    let replica = Uuid::from_u128(rng.next_u64().into());
    loop {
        sleep(BEAT).await;
        let lead = Leadership::try_take(&world.leader_url, Office::Janitor, replica).await;
        let Ok(Some(lead)) = lead else { continue };
        for round in 1_u32.. {
            sleep(BEAT).await;
            let db = &world.farm.operator;
            let mut done = janitor::keep_order(db, lead.generation).await;
            if done.is_ok() && round.is_multiple_of(10) {
                done = janitor::clean_up(db, lead.generation).await;
            }
            let dies = world.faults.load(Ordering::Relaxed) && rng.random_bool(0.01);
            if dies || matches!(done, Err(Error::NotLeader(_))) {
                break;
            }
        }
    }
}
