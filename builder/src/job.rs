//! One claim from its derivation to its end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use harmonia_nix::daemon::{self, BasicDerivation, BuildMode, BuildResult};
use harmonia_nix::resolve::{ResolveError, resolve};
use harmonia_nix::store_path::{self, PathError, StorePath};
use harmonia_queue::Fence;
use harmonia_queue::builder::{Claim, Failure, Input, Session};
use harmonia_service::protocol;
use harmonia_service::sentence::sentence;
use nix_derivation::{ContentAddressMethod, Derivation, HashAlgorithm, Output};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::Builder;
use crate::inputs::{self, InputError};
use crate::life::{Halt, Life};
use crate::log::Spool;
use crate::roots::Hold;
use crate::store::StoreError;
use crate::upload::{BuiltOutput, Ending, Log, UploadError};
use crate::verdict;
use crate::witness::Witness;

/// How long a failed build's log may take to be stored before the queue hears of the failure without it.
const LOG_PATIENCE: Duration = Duration::from_secs(60);
/// How long a daemon that died may take to come back.
const DAEMON_PATIENCE: Duration = Duration::from_secs(120);
/// What of a log is searched for why the build failed.
const LAST_WORDS: u64 = 16 << 10;

/// How an attempt ended.
#[derive(Debug)]
enum End {
    /// The queue knows, or does not want to.
    Settled,
    /// It failed.
    Failed(Failure, String),
    /// Another node is to do it.
    GivenBack(String),
    /// An input cannot be had.
    InputMissing(StorePath),
}

/// Why a claim cannot be built, whoever tries.
#[derive(Debug, Error)]
enum Unbuildable {
    #[error("the claim names no derivation")]
    Path(#[from] PathError),
    #[error("the derivation's text cannot be read")]
    Text(#[from] nix_derivation::Error),
    #[error("impure derivations (__impure) are not built here: their results cannot be shared")]
    Impure,
    #[error(
        "its output {0} is content-addressed otherwise than by the SHA-256 of a NAR: no signer could prove it"
    )]
    Unprovable(String),
    #[error(transparent)]
    Unresolved(#[from] ResolveError),
}

/// What is to be built.
struct Plan {
    drv: StorePath,
    derivation: BasicDerivation,
    inputs: Vec<StorePath>,
    /// Whether its outputs have fixed hashes.
    fetches: bool,
}

/// Does what was claimed and says so.
pub async fn run(builder: Arc<Builder>, life: Arc<Life>, claim: Claim) {
    let fence = claim.fence;
    let begun = Instant::now();
    tracing::info!(job = fence.job, attempt = fence.attempt, drv = claim.drv_path, "claimed");
    let file = builder.logs().join(format!("{}.{}", fence.job, fence.attempt));
    let end = match Spool::create(file, builder.config.limits.log) {
        Ok(mut spool) => {
            let mut halted = life.held.begin(&claim, spool.tail());
            tokio::select! {
                biased;
                halt = halt(&mut halted) => match halt {
                    Halt::Abandoned => End::GivenBack("it was cancelled".to_owned()),
                    Halt::GivenBack(why) => End::GivenBack(why),
                },
                end = attempt(&builder, &life, &claim, &mut spool) => end,
            }
        }
        // Given back, it would come again at once, until it had been interrupted too often.
        Err(error) => End::Failed(Failure::DiskFull, format!("its log cannot be written: {error}")),
    };
    report(fence, &end, begun.elapsed());
    tell(&life.session, fence, end).await;
    life.held.end(fence);
}

async fn halt(halted: &mut watch::Receiver<Option<Halt>>) -> Halt {
    match halted.wait_for(Option::is_some).await {
        Ok(halt) => halt.clone().unwrap_or(Halt::Abandoned),
        // Nobody is left who could want it.
        Err(_) => Halt::Abandoned,
    }
}

/// The whole way: inputs, build, upload.
async fn attempt(builder: &Builder, life: &Life, claim: &Claim, spool: &mut Spool) -> End {
    let plan = match plan(claim) {
        Ok(plan) => plan,
        Err(error) => return End::Failed(Failure::NotBuildable, sentence(&error)),
    };
    let _inputs = match inputs_of(builder, life, &plan).await {
        Ok(hold) => hold,
        Err(error) => return without_inputs(error),
    };
    let built = match build(builder, life, &plan, spool).await {
        Ok(built) => built,
        Err(End::Failed(failure, message)) => {
            store_log(life, claim.fence, spool).await;
            return End::Failed(failure, message);
        }
        Err(end) => return end,
    };
    let size: u64 = built.outputs.iter().map(|output| output.nar_size).sum();
    if size > builder.config.limits.output {
        store_log(life, claim.fence, spool).await;
        let limit = builder.config.limits.output;
        return End::Failed(
            Failure::OutputSize,
            format!("its outputs have {size} bytes, more than the {limit} allowed"),
        );
    }
    let seconds = built.took.as_secs_f32();
    tracing::info!(job = claim.fence.job, attempt = claim.fence.attempt, seconds, bytes = size, "built");
    publish(life, claim.fence, &built.outputs, spool, size).await
}

/// What a claim asks for, as a daemon is told it.
fn plan(claim: &Claim) -> Result<Plan, Unbuildable> {
    let drv = store_path::parse(&claim.drv_path)?;
    let name = drv.name().strip_suffix(".drv").unwrap_or(drv.name());
    let derivation = Derivation::from_aterm_bytes(&claim.aterm, name)?;
    for (name, output) in derivation.outputs() {
        match output {
            Output::Impure { .. } => return Err(Unbuildable::Impure),
            Output::Floating { method: ContentAddressMethod::Nar, hash_algorithm: HashAlgorithm::Sha256 } => {
            }
            Output::Floating { .. } => return Err(Unbuildable::Unprovable(name.clone())),
            _ => {}
        }
    }
    let fetches = derivation.outputs().values().any(|output| matches!(output, Output::Fixed { .. }));
    let derivation = resolve(&derivation, |drv, output| {
        let is = |input: &&Input| input.output == output && input.drv_path == drv.to_string();
        let path = claim.inputs.iter().find(is).and_then(|input| input.path.as_deref());
        path.and_then(|path| store_path::parse(path).ok())
    })?;
    let inputs = derivation.inputs.iter().cloned().collect();
    Ok(Plan { drv, derivation, inputs, fetches })
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

/// What was built.
struct Built {
    outputs: Vec<BuiltOutput>,
    took: Duration,
    /// The outputs are held until they are uploaded.
    _hold: Hold,
}

/// Builds. If the daemon dies while others build too, nobody knows whose fault it is: each is tried again alone.
async fn build(builder: &Builder, life: &Life, plan: &Plan, spool: &mut Spool) -> Result<Built, End> {
    let shared = builder.alone.read().await;
    let first = build_once(builder, plan, spool).await;
    let others = life.held.building() > 1;
    drop(shared);
    let lost = match first {
        Ok(built) => return Ok(built),
        Err(Trouble::Ended(end)) => return Err(end),
        Err(Trouble::Lost(error)) => error,
    };
    if !others {
        return Err(died_alone(&lost));
    }
    tracing::warn!(drv = %plan.drv, error = %lost, "the Nix daemon died under several builds: this one goes on alone");
    let _alone = builder.alone.write().await;
    match build_once(builder, plan, spool).await {
        Ok(built) => Ok(built),
        Err(Trouble::Ended(end)) => Err(end),
        Err(Trouble::Lost(error)) => Err(died_alone(&error)),
    }
}

fn died_alone(error: &StoreError) -> End {
    let message = format!(
        "the Nix daemon died while it built only this, out of memory most likely: {}",
        sentence(error)
    );
    End::Failed(Failure::Oom, message)
}

/// Why a build has no outputs.
enum Trouble {
    /// It came to an end.
    Ended(End),
    /// The daemon went away.
    Lost(StoreError),
}

/// Anywhere but in the middle of a build, a daemon that goes away says nothing about what is built.
impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Ended(End::Failed(Failure::DaemonGone, sentence(&error)))
    }
}

async fn build_once(builder: &Builder, plan: &Plan, spool: &mut Spool) -> Result<Built, Trouble> {
    let limits = builder.config.limits;
    let begun = Instant::now();
    let known = plan.derivation.outputs.values().filter_map(|output| output.path.clone()).collect();
    let mut connection = builder.connect(&builder.build_options(), DAEMON_PATIENCE).await?;
    let early = builder.roots.hold(known).await?;
    // The daemon keeps the time; this is for one that does not.
    let limit = limits.timeout + Duration::from_secs(600);
    let mut witness = Witness::new(spool, builder.store.directory());
    let result = connection
        .build_derivation(&plan.drv, &plan.derivation, BuildMode::Normal, limit, &mut witness)
        .await;
    let least_free = witness.least_free();
    let failed = |spool: &mut Spool, result: Option<&BuildResult>, message: &str| {
        Trouble::Ended(failed(builder, plan, spool, least_free, result, message))
    };
    let result = match result {
        Ok(result) if result.status.is_success() => result,
        Ok(result) => return Err(failed(spool, Some(&result), &result.message)),
        Err(error) if error.is_lost() => return Err(Trouble::Lost(error.into())),
        Err(error @ daemon::Error::TimedOut { .. }) => {
            return Err(Trouble::Ended(End::Failed(Failure::Timeout, sentence(&error))));
        }
        Err(error) => return Err(failed(spool, None, &sentence(&error))),
    };
    let paths = output_paths(&plan.derivation, &result);
    if let Some(name) = paths.iter().find_map(|(name, path)| path.is_none().then_some(name)) {
        let message = format!("the Nix daemon does not say where the output {name} is");
        return Err(Trouble::Ended(End::Failed(Failure::NotBuildable, message)));
    }
    let (names, paths): (Vec<String>, Vec<StorePath>) =
        paths.into_iter().filter_map(|(name, path)| Some((name, path?))).unzip();
    // Before the build's own connection, which holds them too, is closed.
    let hold = builder.roots.hold(paths.clone()).await?;
    drop((early, connection));
    let infos = builder.store.infos(paths).await?;
    let output =
        |(name, (path, info)): (String, (StorePath, harmonia_nix::database::PathInfo))| BuiltOutput {
            name,
            real_path: builder.store.real_path(&path),
            path: path.to_string(),
            nar_hash: info.nar_hash,
            nar_size: info.nar_size,
            references: info.references.iter().map(ToString::to_string).collect(),
            ca: info.ca,
        };
    Ok(Built {
        outputs: names.into_iter().zip(infos).map(output).collect(),
        took: begun.elapsed(),
        _hold: hold,
    })
}

/// Where each output is: as the derivation says, or as the daemon does.
fn output_paths(derivation: &BasicDerivation, result: &BuildResult) -> BTreeMap<String, Option<StorePath>> {
    let said = |name: &String| {
        let is = |id: &str| id.rsplit_once(['!', '^']).is_some_and(|(_, output)| output == name);
        result.built_outputs.iter().find(|built| is(&built.id)).and_then(|built| built.path.clone())
    };
    let outputs = derivation.outputs.iter();
    outputs.map(|(name, output)| (name.clone(), output.path.clone().or_else(|| said(name)))).collect()
}

fn failed(
    builder: &Builder,
    plan: &Plan,
    spool: &mut Spool,
    least_free: u64,
    result: Option<&BuildResult>,
    message: &str,
) -> End {
    let message = &verdict::own_words(message);
    let limits = builder.config.limits;
    let ending = verdict::Ending {
        status: result.map(|result| result.status),
        message,
        log: &spool.last(LAST_WORDS).unwrap_or_default(),
        fetches: plan.fetches,
        silent: verdict::was_silent(message, limits.silent, limits.timeout),
        disk_full: least_free < builder.config.min_free,
    };
    let failure = ending.failure();
    let words = match failure {
        Failure::Timeout => {
            format!("it took longer than the {} s allowed: {message}", limits.timeout.as_secs())
        }
        Failure::Silent => format!("it said nothing for {} s: {message}", limits.silent.as_secs()),
        _ => message.clone(),
    };
    End::Failed(failure, words)
}

/// Says that it is built, and gets it into the cache.
async fn publish(life: &Life, fence: Fence, outputs: &[BuiltOutput], spool: &mut Spool, bytes: u64) -> End {
    life.held.start_upload(fence, bytes);
    let fences = [fence];
    let told = persist(|| life.session.start_upload(&fences));
    let log = spool.finish().map(|file| Log::File(file.to_owned()));
    let log = log.inspect_err(|error| tracing::warn!(job = fence.job, %error, "a log is lost")).ok();
    let published = life.uploader.publish(claim_of(fence), outputs, log.as_ref());
    let (_, published) = tokio::join!(told, published);
    match published {
        Ok(Ending::Published | Ending::Adopted | Ending::Stale) => End::Settled,
        Ok(Ending::Refused { reason }) => End::Failed(Failure::NotBuildable, reason),
        Err(UploadError::Stopping) => End::GivenBack("the builder is stopping".to_owned()),
        Err(error) => End::Failed(Failure::Upload, sentence(&error)),
    }
}

/// The log of an attempt that failed is worth as much as that of one that did not, but not worth waiting for ever.
async fn store_log(life: &Life, fence: Fence, spool: &mut Spool) {
    let stored = match spool.finish() {
        Ok(file) => {
            let log = Log::File(file.to_owned());
            timeout(LOG_PATIENCE, life.uploader.store_log(claim_of(fence), &log)).await
        }
        Err(error) => return tracing::warn!(job = fence.job, %error, "a log is lost"),
    };
    match stored {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(job = fence.job, error = sentence(&error), "a log is not stored"),
        Err(_) => tracing::warn!(job = fence.job, "no signer took a log in time"),
    }
}

fn claim_of(fence: Fence) -> protocol::Claim {
    protocol::Claim { job: fence.job, attempt: fence.attempt }
}

fn without_inputs(error: InputError) -> End {
    match error {
        InputError::Missing { path, reason } => {
            tracing::warn!(%path, reason, "an input is missing");
            End::InputMissing(path)
        }
        InputError::Held { .. } => End::GivenBack(sentence(&error)),
        InputError::Network { .. } => End::Failed(Failure::Network, sentence(&error)),
        InputError::Store(error) => End::Failed(Failure::DaemonGone, sentence(&error)),
        InputError::Path(error) => End::Failed(Failure::NotBuildable, sentence(&error)),
        InputError::Unheard => End::Settled,
    }
}

fn report(fence: Fence, end: &End, took: Duration) {
    let (job, attempt, seconds) = (fence.job, fence.attempt, took.as_secs_f32());
    match end {
        End::Settled => tracing::info!(job, attempt, seconds, "published"),
        End::Failed(failure, message) => {
            tracing::warn!(job, attempt, seconds, ?failure, message, "failed");
        }
        End::GivenBack(why) => tracing::info!(job, attempt, seconds, why, "given back"),
        End::InputMissing(path) => {
            tracing::warn!(job, attempt, seconds, %path, "given back: an input is missing")
        }
    }
}

/// Tells the queue how an attempt ended.
async fn tell(session: &Session, fence: Fence, end: End) {
    let fences = [fence];
    match end {
        End::Settled => {}
        End::Failed(failure, message) => {
            persist(|| session.fail(fence, failure, &message)).await;
        }
        End::GivenBack(why) => {
            persist(|| session.give_back(&fences, &why)).await;
        }
        End::InputMissing(path) => {
            let path = path.to_string();
            persist(|| session.input_missing(fence, &path)).await;
        }
    }
}

/// Says it until it was heard: a database may be away for as long as a restart takes, or a weekend. None: the queue does
/// not want to hear it.
pub async fn persist<T, F: Future<Output = harmonia_queue::Result<T>>>(
    mut call: impl FnMut() -> F,
) -> Option<T> {
    let mut pause = Duration::from_millis(100);
    loop {
        match call().await {
            Ok(answer) => return Some(answer),
            Err(error) if error.is_transient() => {
                tracing::debug!(%error, "the queue has not heard yet");
                sleep(pause).await;
                pause = (2 * pause).min(Duration::from_secs(10));
            }
            Err(error) => {
                tracing::warn!(error = sentence(&error), "the queue does not want to hear");
                return None;
            }
        }
    }
}
