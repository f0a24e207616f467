//! One claim from its derivation to its end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use harmonia_nix::pack::PackError;
use harmonia_nix::{StorePath, store_path};
use harmonia_queue::builder::{Claim, Failure, Session};
use harmonia_queue::{Error, Fence};
use harmonia_service::protocol;
use harmonia_service::sentence::sentence;
use harmonia_service::trace::{Open, PUBLISH, Trace};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::Builder;
use crate::build::{Built, build};
use crate::inputs::{self, InputError};
use crate::life::{Halt, Life};
use crate::log::Spool;
use crate::misses::{MISSES, Misses};
use crate::persist::persist;
use crate::plan::{Plan, plan};
use crate::roots::Hold;
use crate::store::StoreError;
use crate::upload::{Ending, Log, UploadError};

/// How long a failed build's log may take to be stored before the queue hears of the failure without it.
const LOG_PATIENCE: Duration = Duration::from_secs(60);
/// And that of one that is given back: whoever drains a node has set a deadline, and the log is not what it was set for.
const LOG_HASTE: Duration = Duration::from_secs(1);
/// How long a daemon that died may take to come back.
pub const DAEMON_PATIENCE: Duration = Duration::from_secs(120);

/// How an attempt ended.
#[derive(Debug)]
pub enum End {
    /// The queue knows, or does not want to.
    Settled,
    /// It failed.
    Failed(Failure, String),
    /// Another node is to do it.
    GivenBack(String),
    /// An input cannot be had.
    InputMissing(StorePath),
    /// The claim was not this node's any more.
    Dropped,
}

impl End {
    /// All words of [`End::name`].
    pub const NAMES: [&'static str; 5] = ["settled", "failed", "given_back", "input_missing", "dropped"];

    /// In one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Failed(..) => "failed",
            Self::GivenBack(_) => "given_back",
            Self::InputMissing(_) => "input_missing",
            Self::Dropped => "dropped",
        }
    }
}

/// Does what was claimed and says so. It is held from this call on, not only from when its task begins.
pub fn run(builder: Arc<Builder>, life: Arc<Life>, claim: Claim) -> impl Future<Output = ()> + Send {
    let tail = Arc::default();
    let mut halted = life.held.begin(&claim, Arc::clone(&tail));
    let holding = Holding { life: Arc::clone(&life), fence: claim.fence };
    async move {
        let _holding = holding;
        let fence = claim.fence;
        let begun = Instant::now();
        tracing::info!(job = fence.job, attempt = fence.attempt, drv = claim.drv_path, "claimed");
        let trace = builder.tracer.attempt(fence.job, fence.attempt, &claim.drv_path);
        let mut whole = trace.whole();
        let file = builder.logs().join(format!("{}.{}", fence.job, fence.attempt));
        let end = match Spool::create(file, builder.config.limits.log, tail) {
            Ok(mut spool) => {
                let end = tokio::select! {
                    biased;
                    halt = halt(&mut halted) => match halt {
                        Halt::Abandoned => End::GivenBack("it was cancelled".to_owned()),
                        Halt::GivenBack(why) => End::GivenBack(why),
                    },
                    end = attempt(&builder, &life, &claim, &trace, &mut spool) => excused(&life, end),
                };
                // Before it is given back: signers take logs of what runs only.
                if matches!(end, End::GivenBack(_)) {
                    store_log(&life, fence, &mut spool, LOG_HASTE).await;
                }
                end
            }
            // Given back, it would come again at once, until it had been interrupted too often.
            Err(error) => End::Failed(Failure::DiskFull, sentence(&error)),
        };
        report(fence, &end, begun.elapsed());
        builder.counts.ended(&end);
        say(&mut whole, &end);
        tell(&life.session, fence, end).await;
    }
}

/// Something is held for as long as its task lives, however that ends.
struct Holding {
    life: Arc<Life>,
    fence: Fence,
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.life.held.end(self.fence);
    }
}

/// A pod that is stopped in haste may lose its Nix daemon first, which says nothing about what was built.
fn excused(life: &Life, end: End) -> End {
    match end {
        End::Failed(Failure::Oom | Failure::DaemonGone, _) if life.stopping_in().is_some() => {
            End::GivenBack("the Nix daemon went away while the builder was stopping".to_owned())
        }
        end => end,
    }
}

async fn halt(halted: &mut watch::Receiver<Option<Halt>>) -> Halt {
    match halted.wait_for(Option::is_some).await {
        Ok(halt) => halt.clone().unwrap_or(Halt::Abandoned),
        // Nobody is left who could want it.
        Err(_) => Halt::Abandoned,
    }
}

/// The whole way: inputs, build, upload.
async fn attempt(builder: &Builder, life: &Life, claim: &Claim, trace: &Trace, spool: &mut Spool) -> End {
    let plan = match plan(claim) {
        Ok(plan) => plan,
        Err(error) => return End::Failed(Failure::NotBuildable, sentence(&error)),
    };
    let fetching = trace.part("inputs");
    let inputs = inputs_of(builder, life, &plan).await;
    drop(fetching);
    let _inputs = match inputs {
        Ok(hold) => hold,
        Err(error) => return without_inputs(&builder.misses, claim.fence.job, error),
    };
    builder.misses.forget(claim.fence.job);
    let building = trace.part("build");
    let built = build(builder, life, claim.fence, &plan, spool).await;
    drop(building);
    let built = match built {
        Ok(built) => built,
        Err(End::Failed(failure, message)) => {
            store_log(life, claim.fence, spool, LOG_PATIENCE).await;
            return End::Failed(failure, message);
        }
        Err(end) => return end,
    };
    let size: u64 = built.outputs.iter().map(|output| output.nar_size).sum();
    if size > builder.config.limits.output {
        store_log(life, claim.fence, spool, LOG_PATIENCE).await;
        let limit = builder.config.limits.output;
        return End::Failed(
            Failure::OutputSize,
            format!("its outputs have {size} bytes, more than the {limit} allowed"),
        );
    }
    let (job, attempt, took) = (claim.fence.job, claim.fence.attempt, seconds(built.took));
    tracing::info!(job, attempt, took, bytes = size, "built");
    builder.counts.built(built.took, size);
    let (begun, _publishing) = (Instant::now(), trace.part(PUBLISH));
    let published = publish(life, claim.fence, &built, spool, size).await;
    builder.counts.uploaded(begun.elapsed());
    let end = match published {
        Ok(Ending::Published | Ending::Adopted) => End::Settled,
        Ok(Ending::Stale) => End::Dropped,
        Ok(Ending::Refused { reason }) => End::Failed(Failure::NotBuildable, reason),
        Err(UploadError::Stopping) => End::GivenBack("the builder is stopping".to_owned()),
        Err(error @ UploadError::Pack(PackError::Archive { .. } | PackError::Special { .. })) => {
            End::Failed(Failure::NotBuildable, sentence(&error))
        }
        Err(error) => {
            if let Some(file) = error.damaged() {
                discard(builder, built, file).await;
            }
            End::Failed(Failure::Upload, sentence(&error))
        }
    };
    if matches!(end, End::Failed(..)) {
        // It was on its way when something else failed, perhaps.
        store_log(life, claim.fence, spool, LOG_PATIENCE).await;
    }
    end
}

/// Deletes the output that a damaged file belongs to. As long as it is valid here, Nix does not build it again.
async fn discard(builder: &Builder, built: Built, file: &Path) {
    let output = built.outputs.iter().find(|output| file.starts_with(&output.real_path));
    let Some(Ok(path)) = output.map(|output| store_path::parse(&output.path)) else { return };
    drop(built);
    if let Err(error) = inputs::replace(&builder.store, &builder.roots, &path).await {
        tracing::warn!(%path, error = sentence(&error), "a damaged output stays");
    }
}

/// Makes inputs ready; once more, if the daemon was being restarted.
async fn inputs_of(builder: &Builder, life: &Life, plan: &Plan) -> Result<Hold, InputError> {
    let ready = || inputs::make_ready(&builder.store, &builder.roots, &life.session, plan.inputs.clone());
    match ready().await {
        Err(InputError::Store(StoreError::Daemon(error))) if error.is_lost() => {
            builder.connect(&builder.store.options(), DAEMON_PATIENCE).await?;
            ready().await
        }
        ready => ready,
    }
}

/// Says that it is built, and gets it into the cache.
async fn publish(
    life: &Life,
    fence: Fence,
    built: &Built,
    spool: &mut Spool,
    bytes: u64,
) -> Result<Ending, UploadError> {
    life.start_upload(fence, bytes);
    let fences = [fence];
    let told = persist(|| life.session.start_upload(&fences));
    // An empty log of what was there already would take the place of the one of the attempt that built it.
    let log = if built.is_new || !spool.is_empty() { finished(fence, spool) } else { None };
    let published = life.uploader.publish(claim_of(fence), &built.outputs, log.as_ref());
    let (_, published) = tokio::join!(told, published);
    published
}

/// The log of an attempt that came to nothing is worth as much as any other, but not worth waiting for ever. One that ended
/// before its first line has none.
async fn store_log(life: &Life, fence: Fence, spool: &mut Spool, patience: Duration) {
    if spool.is_empty() {
        return;
    }
    let Some(log) = finished(fence, spool) else { return };
    if timeout(patience, life.uploader.store_log(claim_of(fence), &log)).await.is_err() {
        tracing::warn!(job = fence.job, "a log is not stored in time");
    }
}

fn finished(fence: Fence, spool: &mut Spool) -> Option<Log> {
    let file = spool.finish().map(|file| Log::File(file.to_owned()));
    file.inspect_err(|error| tracing::warn!(job = fence.job, error = sentence(error), "a log is lost")).ok()
}

fn claim_of(fence: Fence) -> protocol::Claim {
    protocol::Claim { job: fence.job, attempt: fence.attempt }
}

fn without_inputs(misses: &Misses, job: i64, error: InputError) -> End {
    match error {
        InputError::Missing { path, published, reason } => {
            tracing::warn!(%path, reason, "an input is missing");
            // What is being built again is found when it is done, however long that takes.
            match if published { misses.count(job, &path) } else { 0 } {
                times if times <= MISSES => End::InputMissing(path),
                times => End::Failed(
                    Failure::Network,
                    format!(
                        "the input {path} was looked for {times} times on this node and not found, although the cache has \
                         it each time: check substituters, trusted-public-keys and netrc-file in the nix.conf of this \
                         node's Nix. It says: {reason}"
                    ),
                ),
            }
        }
        InputError::DiskFull { .. } => End::Failed(Failure::DiskFull, sentence(&error)),
        InputError::Held { .. } => End::Failed(Failure::StaleInput, sentence(&error)),
        InputError::Network { .. } => End::Failed(Failure::Network, sentence(&error)),
        InputError::Store(error) => End::Failed(Failure::DaemonGone, sentence(&error)),
        InputError::Path(error) => End::Failed(Failure::NotBuildable, sentence(&error)),
        InputError::Unheard => End::Dropped,
    }
}

fn report(fence: Fence, end: &End, took: Duration) {
    let (job, attempt, took) = (fence.job, fence.attempt, seconds(took));
    match end {
        End::Settled => tracing::info!(job, attempt, took, "published"),
        End::Failed(failure, reason) => {
            // Nix's words have several lines.
            let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
            tracing::warn!(job, attempt, took, ?failure, reason, "failed");
        }
        End::GivenBack(why) => tracing::info!(job, attempt, took, why, "given back"),
        End::InputMissing(path) => {
            tracing::warn!(job, attempt, took, %path, "given back: an input is missing");
        }
        End::Dropped => tracing::info!(job, attempt, took, "dropped: the claim is not this node's any more"),
    }
}

fn say(whole: &mut Open, end: &End) {
    whole.say("harmonia_ci.end", end.name());
    match end {
        End::Settled | End::Dropped => {}
        End::Failed(_, why) | End::GivenBack(why) => whole.fail(why),
        End::InputMissing(path) => whole.fail(&format!("the input {path} is missing")),
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f32())
}

/// Tells the queue how an attempt ended.
async fn tell(session: &Session, fence: Fence, end: End) {
    let fences = [fence];
    match end {
        End::Settled | End::Dropped => {}
        End::Failed(failure, message) => {
            persist(|| session.fail(fence, failure, &message)).await;
        }
        End::GivenBack(why) => {
            persist(|| session.give_back(&fences, &why)).await;
        }
        End::InputMissing(path) => tell_missing(session, fence, &path.to_string()).await,
    }
}

/// Says that an input is missing. Of one that the queue does not know it would have nobody look, and the job would wait for
/// the end of its lease.
async fn tell_missing(session: &Session, fence: Fence, path: &str) {
    let told = persist(async || match session.input_missing(fence, path).await {
        Err(Error::Invalid(why)) => Ok(Some(why)),
        told => told.map(|_| None),
    });
    if let Some(Some(why)) = told.await {
        tracing::warn!(job = fence.job, why, "the queue does not know an input that is missing");
        let words =
            format!("the input {path} cannot be had here, and the queue cannot have it made again: {why}");
        persist(|| session.fail(fence, Failure::Network, &words)).await;
    }
}
