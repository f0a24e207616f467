//! One life of a builder: a session, and what it holds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use harmonia_queue::Fence;
use harmonia_queue::builder::{Claim, Pulse, Session};
use harmonia_service::protocol::Token;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::drain::{self, Work};
use crate::log::Tail;
use crate::upload::{Limits, Uploader};

/// Signers may be away for long: what was built is worth more than the wait.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Why something that is held has to end now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Halt {
    /// Cancelled, or not this session's any more: nobody wants to hear of it.
    Abandoned,
    /// Another node is to do it.
    GivenBack(String),
}

/// A session and all that belongs to it.
pub struct Life {
    /// The session.
    pub session: Session,
    /// Publishes what it built.
    pub uploader: Uploader,
    /// What it holds.
    pub held: Held,
    /// To be heard by the queue at once.
    pub beat_now: Notify,
    /// How long before a deadline builds are given back.
    margin: Duration,
    signers: watch::Sender<Vec<String>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Why it drains, and until when.
    drains: Vec<(String, Option<Instant>)>,
    /// SIGTERM came: the process ends then at the latest.
    stops_at: Option<Instant>,
    /// It failed for reasons of its own, and claims nothing more in this life.
    unwell: bool,
}

impl Life {
    /// A life that has just begun.
    pub fn new(session: Session, http: reqwest::Client, margin: Duration) -> Self {
        let (signers, known) = watch::channel(Vec::new());
        let token = Token::Builder { session: session.id, secret: session.secret.clone() };
        let limits = Limits { patience: PATIENCE, ..Limits::default() };
        Self {
            uploader: Uploader::new(http, known, &token, limits),
            session,
            held: Held::default(),
            beat_now: Notify::new(),
            margin,
            signers,
            state: Mutex::default(),
        }
    }

    /// Does what the queue said.
    pub fn hear(&self, pulse: Pulse) {
        self.signers.send_if_modified(|known| {
            let news = *known != pulse.signers;
            *known = pulse.signers;
            news
        });
        for job in pulse.abandon {
            self.held.halt(job, &Halt::Abandoned);
        }
        let now = Instant::now();
        let drains = pulse.drains.into_iter().map(|(reason, left)| (reason, left.map(|left| now + left)));
        let drains: Vec<_> = drains.collect();
        let mut state = self.state();
        let reasons = |drains: &[(String, Option<Instant>)]| -> Vec<String> {
            drains.iter().map(|(reason, _)| reason.clone()).collect()
        };
        if reasons(&state.drains) != reasons(&drains) {
            match drains.is_empty() {
                true => tracing::info!("claiming again"),
                false => tracing::info!(reasons = reasons(&drains).join(", "), "draining"),
            }
        }
        state.drains = drains;
        if let Some(notice) = pulse.notice {
            if !state.unwell {
                tracing::warn!(notice, "this node has to prove itself again");
            }
            state.unwell = true;
        }
        drop(state);
        self.held.changed.notify_one();
    }

    /// Something was built. Whoever has heard of no signer asks for one now, not at the next beat.
    pub fn start_upload(&self, fence: Fence, bytes: u64) {
        self.held.start_upload(fence, bytes);
        if self.signers.borrow().is_empty() {
            self.beat_now.notify_one();
        }
    }

    /// SIGTERM came.
    pub fn stop(&self, grace: Duration) {
        self.state().stops_at = Some(Instant::now() + grace);
        self.beat_now.notify_one();
        self.held.changed.notify_one();
    }

    /// How long the process has, once SIGTERM came.
    pub fn stopping_in(&self) -> Option<Duration> {
        self.state().stops_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether nothing more is to be claimed in this life.
    pub fn is_ending(&self) -> bool {
        let state = self.state();
        state.stops_at.is_some() || state.unwell
    }

    /// Whether nothing is to be claimed now.
    pub fn is_draining(&self) -> bool {
        let state = self.state();
        state.stops_at.is_some() || state.unwell || !state.drains.is_empty()
    }

    /// Gives back what cannot end in time. The earliest deadline counts, and it may have moved.
    pub fn keep_deadline(&self) {
        let deadline = {
            let state = self.state();
            state.drains.iter().filter_map(|(_, at)| *at).chain(state.stops_at).min()
        };
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        self.held.drain(left, self.margin);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Claims that have not come to their end.
#[derive(Debug, Default)]
pub struct Held {
    jobs: Mutex<HashMap<i64, Job>>,
    /// Something ended, or went on to its upload.
    pub changed: Notify,
}

#[derive(Debug)]
struct Job {
    fence: Fence,
    begun: Instant,
    p50: Option<Duration>,
    /// Another was being built at some time while it was.
    had_company: bool,
    /// Bytes that are waiting to be uploaded, once it is built.
    uploading: Option<u64>,
    tail: Arc<Mutex<Tail>>,
    halt: watch::Sender<Option<Halt>>,
}

impl Held {
    /// Something was claimed. Answers who will say that it has to end.
    pub fn begin(&self, claim: &Claim, tail: Arc<Mutex<Tail>>) -> watch::Receiver<Option<Halt>> {
        let (halt, halted) = watch::channel(None);
        let mut jobs = self.jobs();
        let mut had_company = false;
        for other in jobs.values_mut().filter(|job| job.uploading.is_none()) {
            (other.had_company, had_company) = (true, true);
        }
        let job = Job {
            fence: claim.fence,
            begun: Instant::now(),
            p50: claim.estimate,
            had_company,
            uploading: None,
            tail,
            halt,
        };
        jobs.insert(claim.fence.job, job);
        halted
    }

    /// It is built, and that large.
    pub fn start_upload(&self, fence: Fence, bytes: u64) {
        if let Some(job) = self.jobs().get_mut(&fence.job).filter(|job| job.fence == fence) {
            job.uploading = Some(bytes);
        }
        self.changed.notify_one();
    }

    /// It is over.
    pub fn end(&self, fence: Fence) {
        let mut jobs = self.jobs();
        if jobs.get(&fence.job).is_some_and(|job| job.fence == fence) {
            jobs.remove(&fence.job);
        }
        drop(jobs);
        self.changed.notify_one();
    }

    /// Tells one that it has to end.
    pub fn halt(&self, job: i64, why: &Halt) {
        if let Some(job) = self.jobs().get(&job) {
            job.halt.send_replace(Some(why.clone()));
        }
    }

    /// Tells all.
    pub fn halt_all(&self, why: &Halt) {
        for job in self.jobs().values() {
            job.halt.send_replace(Some(why.clone()));
        }
    }

    fn drain(&self, left: Option<Duration>, margin: Duration) {
        for job in self.jobs().values().filter(|job| job.halt.borrow().is_none()) {
            let work = match job.uploading {
                Some(_) => Work::Uploading,
                None => Work::Building { elapsed: job.begun.elapsed(), p50: job.p50 },
            };
            if drain::gives_back(work, left, margin) {
                let seconds = left.unwrap_or_default().as_secs();
                let why = format!("the node drains and has {seconds} s left");
                job.halt.send_replace(Some(Halt::GivenBack(why)));
            }
        }
    }

    /// What the queue is told that we hold.
    pub fn fences(&self) -> Vec<Fence> {
        self.jobs().values().map(|job| job.fence).collect()
    }

    /// The ends of their logs.
    pub fn tails(&self) -> Vec<(Fence, Arc<Mutex<Tail>>)> {
        self.jobs().values().map(|job| (job.fence, Arc::clone(&job.tail))).collect()
    }

    /// Whether others were being built while this one was.
    pub fn had_company(&self, fence: Fence) -> bool {
        self.jobs().get(&fence.job).is_some_and(|job| job.fence == fence && job.had_company)
    }

    /// How many are being built.
    pub fn building(&self) -> usize {
        self.jobs().values().filter(|job| job.uploading.is_none()).count()
    }

    /// How many wait to be uploaded, and their bytes.
    pub fn backlog(&self) -> (usize, u64) {
        let jobs = self.jobs();
        let waiting = jobs.values().filter_map(|job| job.uploading);
        waiting.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.jobs().is_empty()
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<i64, Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
