//! One build by the daemon, from its inputs, which are there, to its outputs, which are held.

use std::collections::BTreeMap;
use std::time::Duration;

use harmonia_nix::StorePath;
use harmonia_nix::daemon::{self, BasicDerivation, BuildResult, BuildStatus};
use harmonia_nix::database::PathInfo;
use harmonia_queue::Fence;
use harmonia_queue::builder::Failure;
use harmonia_service::sentence::sentence;
use tokio::time::Instant;

use crate::Builder;
use crate::job::{DAEMON_PATIENCE, End};
use crate::life::Life;
use crate::log::Spool;
use crate::plan::Plan;
use crate::roots::Hold;
use crate::store::StoreError;
use crate::upload::BuiltOutput;
use crate::verdict;
use crate::witness::Witness;

/// What of a log is searched for why the build failed.
const LAST_WORDS: u64 = 16 << 10;

/// What was built.
pub struct Built {
    /// Its outputs.
    pub outputs: Vec<BuiltOutput>,
    /// How long it took.
    pub took: Duration,
    /// It was built now. Otherwise it was there: an attempt before this one has its log.
    pub is_new: bool,
    /// The outputs are held until they are uploaded.
    _hold: Hold,
}

/// Builds. If memory runs out of a build that had company, nobody knows whose fault it is: it is tried again alone.
pub async fn build(
    builder: &Builder,
    life: &Life,
    fence: Fence,
    plan: &Plan,
    spool: &mut Spool,
) -> Result<Built, End> {
    let shared = builder.alone.read().await;
    let first = build_once(builder, plan, spool).await;
    drop(shared);
    let trouble = match first {
        Err(trouble) if trouble.is_for_want_of_memory() && life.held.had_company(fence) => trouble,
        ended => return ended.map_err(Trouble::alone),
    };
    tracing::warn!(drv = %plan.drv, ?trouble, "memory ran out under several builds: this one goes on alone");
    // Claimed now, a job would only wait here until this one has ended.
    let _lonely = builder.lonely.begin();
    let _alone = builder.alone.write().await;
    build_once(builder, plan, spool).await.map_err(Trouble::alone)
}

/// Why a build has no outputs.
#[derive(Debug)]
enum Trouble {
    /// It came to an end.
    Ended(End),
    /// The daemon went away.
    Lost(StoreError),
}

impl Trouble {
    /// What the kernel does for want of memory, to the build or to the daemon under it.
    fn is_for_want_of_memory(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Ended(End::Failed(Failure::Oom, _)))
    }

    /// What it means for a build that had the node for itself.
    fn alone(self) -> End {
        match self {
            Self::Ended(end) => end,
            Self::Lost(error) => {
                let words = "the Nix daemon died while it built only this, out of memory most likely";
                End::Failed(Failure::Oom, format!("{words}: {}", sentence(&error)))
            }
        }
    }
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
    let result = connection.build_derivation(&plan.drv, &plan.derivation, limit, &mut witness).await;
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
    let output = |(name, (path, info)): (String, (StorePath, PathInfo))| BuiltOutput {
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
        is_new: result.status == BuildStatus::Built,
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
        disk_full: least_free < builder.config.marks.min_free,
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
