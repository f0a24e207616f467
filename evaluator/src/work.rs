//! One evaluation, from claim to complete.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use futures::FutureExt;
use harmonia_builder::persist::persist;
use harmonia_builder::store::StoreError;
use harmonia_builder::upload::{Limits as UploadLimits, SignerError, UploadError, Uploader};
use harmonia_queue::branches::{self, EvaluationSource};
use harmonia_queue::evaluations::{self, Claimed};
use harmonia_queue::ingest::Ingest;
use harmonia_queue::people::{self, Ending};
use harmonia_service::protocol::Token;
use harmonia_service::sentence::sentence;
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::attr;
use crate::child::Bounds;
use crate::config::Limits;
use crate::credentials::Credential;
use crate::evaluate::{EvaluateError, Task, evaluate};
use crate::expression::Expression;
use crate::file;
use crate::git;
use crate::graph::{Graph, GraphError};
use crate::inputs::{self, Refused};
use crate::nix::Workplace;
use crate::run::Evaluator;
use crate::source::{Source, SourceError};
use crate::wishes::{self, Wishes};
use crate::witness::Witness;
use crate::{flake, git::BRANCH};

/// A lease lasts for four of these.
const KEEP: Duration = Duration::from_secs(15);
/// No repository says so much about itself.
const LONGEST_WISHES: u64 = 1 << 20;

/// How an evaluation ended here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its graph is known.
    Complete,
    /// It cannot be evaluated, and the queue knows why.
    Aborted,
    /// It was cancelled, or is somebody else's.
    Left,
    /// Something else than the evaluation is broken: it is to be tried again later.
    Later,
}

/// Why an evaluation does not come to its end here.
enum Stop {
    /// A person has to change something.
    Abort(String),
    /// The queue does not want it any more.
    Left,
    /// The database, the signers or the Nix daemon are away.
    Later(String),
}

impl From<harmonia_queue::Error> for Stop {
    fn from(error: harmonia_queue::Error) -> Self {
        match error {
            error if error.may_pass() => Self::Later(sentence(&error)),
            harmonia_queue::Error::WrongState(_) => Self::Left,
            error => Self::Abort(sentence(&error)),
        }
    }
}

impl From<GraphError> for Stop {
    fn from(error: GraphError) -> Self {
        match error {
            GraphError::Queue(error) => error.into(),
            GraphError::Upload(UploadError::Signer(SignerError::SessionOver)) => Self::Left,
            GraphError::Stopping
            | GraphError::Store(StoreError::Daemon(_) | StoreError::Stopping)
            | GraphError::Upload(
                UploadError::Signer(_) | UploadError::Bucket { .. } | UploadError::Stopping,
            ) => Self::Later(sentence(&error)),
            error => Self::Abort(sentence(&error)),
        }
    }
}

impl From<EvaluateError> for Stop {
    fn from(error: EvaluateError) -> Self {
        Self::Abort(sentence(&error))
    }
}

impl From<SourceError> for Stop {
    fn from(error: SourceError) -> Self {
        Self::Abort(error.to_string())
    }
}

/// Evaluates what was claimed, for as long as it is ours. `hints` are reasons to ask whether it still is.
pub async fn work(
    evaluator: &Evaluator,
    worker: usize,
    claimed: &Claimed,
    hints: &mut watch::Receiver<u64>,
) -> End {
    let begun = Instant::now();
    tracing::info!(evaluation = claimed.id, attempt = claimed.attempt, source = claimed.source, "claimed");
    evaluations::tell(&evaluator.db, claimed.id).await;
    let ended = tokio::select! {
        ended = evaluate_all(evaluator, worker, claimed).boxed() => ended,
        () = lost(evaluator, claimed, hints) => Err(Stop::Left),
    };
    let took = format!("{:.2} s", begun.elapsed().as_secs_f64());
    let end = match ended {
        Ok((derivations, errors)) => {
            tracing::info!(evaluation = claimed.id, took, derivations, errors, "evaluated");
            End::Complete
        }
        Err(Stop::Abort(error)) => {
            tracing::info!(evaluation = claimed.id, took, error, "aborted");
            abort(evaluator, claimed, &error).await
        }
        Err(Stop::Left) => {
            tracing::info!(evaluation = claimed.id, took, "not wanted from here any more");
            End::Left
        }
        Err(Stop::Later(reason)) => {
            tracing::warn!(evaluation = claimed.id, took, reason, "put off");
            End::Later
        }
    };
    evaluations::tell(&evaluator.db, claimed.id).await;
    end
}

/// Ends when the evaluation is not ours any more. While the database is away nobody else can have it either.
async fn lost(evaluator: &Evaluator, claimed: &Claimed, hints: &mut watch::Receiver<u64>) {
    loop {
        tokio::select! {
            () = sleep(KEEP) => {}
            Ok(()) = hints.changed() => {}
        }
        match evaluations::keep(&evaluator.db, claimed.id, claimed.attempt, None).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => tracing::debug!(error = sentence(&error), "not heard"),
        }
    }
}

async fn abort(evaluator: &Evaluator, claimed: &Claimed, error: &str) -> End {
    let db = &evaluator.db;
    let ours = persist(|| evaluations::keep(db, claimed.id, claimed.attempt, None)).await;
    if ours != Some(true) {
        return End::Left;
    }
    persist(|| people::end_evaluation(db, claimed.id, Ending::Aborted, Some(error))).await;
    evaluator.resolver.nudge();
    End::Aborted
}

/// What went wrong while the Nix daemon went away may be its fault alone.
async fn evaluate_all(
    evaluator: &Evaluator,
    worker: usize,
    claimed: &Claimed,
) -> Result<(usize, usize), Stop> {
    let mut witness = Witness::new(evaluator).await.map_err(|error| Stop::Later(sentence(&error)))?;
    match evaluate_under(&mut witness, evaluator, worker, claimed).boxed().await {
        Err(Stop::Abort(_)) if witness.was_left().await => Err(daemon_restarted()),
        ended => ended,
    }
}

fn daemon_restarted() -> Stop {
    Stop::Later("the Nix daemon went away meanwhile".to_owned())
}

async fn evaluate_under(
    witness: &mut Witness,
    evaluator: &Evaluator,
    worker: usize,
    claimed: &Claimed,
) -> Result<(usize, usize), Stop> {
    let limits = evaluator.config.limits;
    let begun = Instant::now();
    let bounds = Bounds { until: begun + limits.timeout, memory: limits.memory };
    let source = Source::parse(&claimed.source, claimed.commit.as_deref())?;
    let local = source.local_path();
    if local.is_some() && !evaluator.config.local_sources {
        return Err(SourceError::Local(claimed.source.clone()).into());
    }
    let name = claimed.id.to_string();
    let mut place = Workplace::make(&evaluator.config, &evaluator.sandbox, &name, worker, local.as_deref())
        .map_err(|error| no_place(&error))?;
    let prepared = prepare(evaluator, claimed, &mut place, source, bounds).await?;
    let Prepared { task, tree, wishes, refused } = prepared;
    let timeout = wishes.timeout.unwrap_or(limits.timeout).min(limits.timeout);
    if let Some(retention) = wishes.retention {
        branches::wish_retention(&evaluator.db, claimed.id, claimed.attempt, retention).await?;
    }
    let mut graph = begin(evaluator, claimed).await?;
    let before = match &tree {
        Some(tree) => branches::same_tree(&evaluator.db, claimed.id, claimed.attempt, tree).await?,
        None => None,
    };
    if let Some(found) = before
        && graph.takes(found).await?
    {
        tracing::info!(evaluation = claimed.id, tree, "was evaluated before");
        return Ok(graph.complete(BTreeMap::new()).await?);
    }
    let (tell, hear) = unbounded_channel();
    let evaluated = async {
        let limits = Limits { timeout, ..limits };
        let processes = evaluator.config.processes;
        let evaluated = evaluate(&place, &task, limits, begun + timeout, processes, &tell).await;
        drop(tell);
        let told = |error| inputs::explained(error, &refused);
        match evaluated {
            Ok(errors) => Ok(errors.into_iter().map(|(name, error)| (name, told(error))).collect()),
            Err(EvaluateError::Whole(error)) => Err(EvaluateError::Whole(told(error)).into()),
            Err(error) => Err(Stop::from(error)),
        }
    };
    let written = async { graph.write(hear).await.map_err(Stop::from) };
    let (errors, graph): (BTreeMap<_, _>, _) = tokio::try_join!(evaluated, written)?;
    if !errors.is_empty() && witness.was_left().await {
        return Err(daemon_restarted());
    }
    Ok(graph.complete(errors).await?)
}

/// A machine that has run out of something may have it again.
fn no_place(error: &io::Error) -> Stop {
    use io::ErrorKind::{OutOfMemory, QuotaExceeded, ResourceBusy, StorageFull};
    let words = format!("the evaluator has no place to work: {error}");
    let full = matches!(error.kind(), OutOfMemory | QuotaExceeded | ResourceBusy | StorageFull);
    let files = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    if full || files { Stop::Later(words) } else { Stop::Abort(words) }
}

async fn begin(evaluator: &Evaluator, claimed: &Claimed) -> Result<Graph, Stop> {
    let ingest = Ingest::of(&evaluator.db, claimed.id);
    let token = Token::Evaluation { id: claimed.id, secret: ingest.token().await? };
    evaluator.find_signers().await?;
    let signers = evaluator.signers.subscribe();
    let uploader = Uploader::new(evaluator.http.clone(), signers, &token, UploadLimits::default());
    Ok(Graph::new(evaluator, ingest, uploader))
}

/// What there is to evaluate.
struct Prepared {
    task: Task,
    /// What it is, and how it is evaluated; None: it may be another the next time.
    tree: Option<String>,
    wishes: Wishes,
    refused: Vec<Refused>,
}

/// Fetches the source and says what there is to evaluate in it. The project's credential is there for what is fetched, and is gone
/// before anything is evaluated.
async fn prepare(
    evaluator: &Evaluator,
    claimed: &Claimed,
    place: &mut Workplace,
    source: Source,
    bounds: Bounds,
) -> Result<Prepared, Stop> {
    let asked = paths(&claimed.attrs)?;
    let prepared = match source {
        Source::Directory(directory) => {
            let wishes = Wishes::parse(&own_wishes(&directory).unwrap_or_default()).map_err(abort_with)?;
            let reference = directory.display().to_string();
            let offer = Offer { files: &directory, shown: &directory, reference: &reference };
            let task = offered(place, offer, asked, &wishes, bounds).await?;
            Prepared { task, tree: None, wishes, refused: Vec::new() }
        }
        Source::Git { url, at } => {
            let project = lend(evaluator, claimed, place).await?;
            let trusted = project
                .as_ref()
                .map_or((url.as_str(), None), |project| (&project.url, project.branch.as_deref()));
            let (local, size) = (evaluator.config.local_sources, evaluator.config.limits.source);
            let wanted = git::Wanted { url: &url, at: &at, trusted, local, size };
            let checkout = git::fetch(place, wanted, bounds).await.map_err(abort_with)?;
            found(evaluator, claimed, &checkout.commit).await?;
            let read = |text: &Option<String>| {
                Wishes::parse(text.as_deref().unwrap_or_default()).map_err(abort_with)
            };
            let wishes = read(&checkout.wishes.0)?.trusting(read(&checkout.wishes.1)?);
            let is_flake = has_flake(&checkout.files) && !claimed.untrusted;
            let refused =
                if is_flake { inputs::fetch(place, &checkout.files, bounds).await } else { Vec::new() };
            take_back(place)?;
            let repository = checkout.repository.display();
            let reference = format!("git+file://{repository}?ref={BRANCH}&rev={}&shallow=1", checkout.commit);
            let offer = Offer { files: &checkout.files, shown: Path::new(&url), reference: &reference };
            let task = offered(place, offer, asked, &wishes, bounds).await?;
            let tree = format!("{} ifd={}", checkout.tree, wishes.allow_ifd);
            Prepared { task, tree: Some(tree), wishes, refused }
        }
        Source::Flake(reference) => {
            if !claimed.untrusted {
                lend(evaluator, claimed, place).await?;
            }
            let refused = fetch_flake(evaluator, place, &reference, bounds).await?;
            take_back(place)?;
            let (task, commit) = locked(place, &reference, asked, false, bounds).await?;
            if let Some(commit) = commit {
                found(evaluator, claimed, &commit).await?;
            }
            Prepared { task, tree: None, wishes: Wishes::default(), refused }
        }
    };
    Ok(prepared)
}

/// Whether a directory is taken as a flake.
fn has_flake(files: &Path) -> bool {
    files.join("flake.nix").exists() && !files.join("ci.nix").exists()
}

/// What of a flake a credential may be needed for.
async fn fetch_flake(
    evaluator: &Evaluator,
    place: &Workplace,
    reference: &str,
    bounds: Bounds,
) -> Result<Vec<Refused>, Stop> {
    if place.lent().is_none() {
        return Ok(Vec::new());
    }
    let fetched = flake::fetch(place, reference, bounds).await;
    let flake = fetched.map_err(|error| Stop::Abort(error.to_string()))?;
    let flake = evaluator.config.root.join(flake.strip_prefix("/").unwrap_or(&flake));
    Ok(inputs::fetch(place, &flake, bounds).await)
}

fn abort_with(error: impl std::error::Error) -> Stop {
    Stop::Abort(sentence(&error))
}

fn paths(attrs: &[String]) -> Result<Vec<Vec<String>>, Stop> {
    attrs.iter().map(|text| attr::parse(text)).collect::<Result<_, _>>().map_err(abort_with)
}

/// Lets children show the project's credential; answers where its code is.
async fn lend(
    evaluator: &Evaluator,
    claimed: &Claimed,
    place: &mut Workplace,
) -> Result<Option<EvaluationSource>, Stop> {
    let project = branches::evaluation_source(&evaluator.db, claimed.id).await?;
    if let Some(name) = project.as_ref().and_then(|project| project.credential.as_deref()) {
        let credential =
            Credential::load(evaluator.config.credentials.as_deref(), name).map_err(abort_with)?;
        place.lend(credential).map_err(|error| no_place(&error))?;
    }
    Ok(project)
}

fn take_back(place: &mut Workplace) -> Result<(), Stop> {
    place.take_back().map_err(abort_with)
}

/// A link would be followed by this process, which may read more than the directory's owner.
fn own_wishes(directory: &Path) -> Option<String> {
    let text = file::read(&directory.join(wishes::FILE), LONGEST_WISHES).ok()?;
    String::from_utf8(text).ok()
}

/// Says which commit it is.
async fn found(evaluator: &Evaluator, claimed: &Claimed, commit: &str) -> Result<(), Stop> {
    match evaluations::keep(&evaluator.db, claimed.id, claimed.attempt, Some(commit)).await? {
        true => Ok(()),
        false => Err(Stop::Left),
    }
}

/// A directory that was fetched, or is there.
#[derive(Clone, Copy)]
struct Offer<'a> {
    files: &'a Path,
    /// What people call it.
    shown: &'a Path,
    /// What Nix calls it.
    reference: &'a str,
}

/// What a directory offers: `ci.nix`, a flake, or `default.nix`.
async fn offered(
    place: &Workplace,
    Offer { files, shown, reference }: Offer<'_>,
    asked: Vec<Vec<String>>,
    wishes: &Wishes,
    bounds: Bounds,
) -> Result<Task, Stop> {
    let shown = shown.display();
    let has = |name: &str| files.join(name).exists();
    if !files.is_dir() {
        return Err(Stop::Abort(format!("there is no directory {shown}: check its name")));
    }
    let attrs = match &wishes.attrs {
        Some(attrs) if asked.is_empty() => paths(attrs)?,
        _ => asked,
    };
    let classic = |name: &str| Task {
        expression: Expression::file(&files.join(name)),
        pure: false,
        attrs: if attrs.is_empty() { vec![Vec::new()] } else { attrs.clone() },
        shown_as: vec![format!("{}/", files.display())],
        allow_ifd: wishes.allow_ifd,
    };
    match () {
        () if has("ci.nix") => Ok(classic("ci.nix")),
        () if has("flake.nix") => Ok(locked(place, reference, attrs, wishes.allow_ifd, bounds).await?.0),
        () if has("default.nix") => Ok(classic("default.nix")),
        () => Err(Stop::Abort(format!(
            "{shown} has nothing to evaluate: add a ci.nix, a flake.nix or a default.nix at its top"
        ))),
    }
}

/// The checks of a flake for all systems, unless others are asked for; and its commit.
async fn locked(
    place: &Workplace,
    reference: &str,
    attrs: Vec<Vec<String>>,
    allow_ifd: bool,
    bounds: Bounds,
) -> Result<(Task, Option<String>), Stop> {
    let locked =
        flake::lock(place, reference, bounds).await.map_err(|error| Stop::Abort(error.to_string()))?;
    let attrs = if attrs.is_empty() { vec![vec!["checks".to_owned()]] } else { attrs };
    let task = Task {
        expression: Expression::flake(&locked.reference),
        pure: true,
        attrs,
        shown_as: locked.shown_as,
        allow_ifd,
    };
    Ok((task, locked.commit))
}
