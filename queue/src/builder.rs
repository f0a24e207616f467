//! What a builder says and hears, under its pool's login.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::Row;

use crate::{Db, Fence, Result};

/// What the queue reckons with, in seconds, for a name that was never built.
const UNKNOWN: f32 = 60.0;

/// How a node presents itself. Systems, features and slots beyond its pool's are cut off.
#[derive(Debug, Clone)]
pub struct Node<'a> {
    /// Unique in its pool.
    pub name: &'a str,
    /// Kept on the node's own volume: proof that a new process is the same node.
    pub secret: &'a str,
    /// Builds at once.
    pub slots: i32,
    /// None: all that the pool has.
    pub systems: Option<Vec<String>>,
    /// None: all that the pool has.
    pub features: Option<Vec<String>>,
    /// The Kubernetes node it runs on.
    pub kube_node: Option<&'a str>,
    /// The release it runs.
    pub version: Option<&'a str>,
}

impl<'a> Node<'a> {
    /// A node with all that its pool offers.
    pub fn new(name: &'a str, secret: &'a str, slots: i32) -> Self {
        Self { name, secret, slots, systems: None, features: None, kube_node: None, version: None }
    }
}

/// One life of a builder process.
#[derive(Debug, Clone)]
pub struct Session {
    db: Db,
    /// Its number.
    pub id: i64,
    /// Goes with every call, and to signers as the token of the node.
    pub secret: String,
    /// The slots it was given.
    pub slots: i32,
}

/// A job to build, with all that is needed.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Goes with every word about it.
    pub fence: Fence,
    /// The derivation's path.
    pub drv_path: String,
    /// The derivation's text.
    pub aterm: Vec<u8>,
    /// What the farm expects it to take, if it has built something of that name before.
    pub estimate: Option<Duration>,
    /// Every output of every input derivation.
    pub inputs: Vec<Input>,
}

/// An output of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// The derivation that makes it.
    pub drv_path: String,
    /// The output's name.
    pub output: String,
    /// Where it is.
    pub path: Option<String>,
    /// The hash that its NAR must have, where one is known.
    pub nar_hash: Option<Vec<u8>>,
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, Default)]
pub struct Pulse {
    /// Signers that live, the oldest first.
    pub signers: Vec<String>,
    /// Why the node drains and how long each reason leaves, the most urgent first. Empty: it does not.
    pub drains: Vec<(String, Option<Duration>)>,
    /// Jobs to stop: cancelled, or not this session's any more.
    pub abandon: Vec<i64>,
    /// What a person should see at this node.
    pub notice: Option<String>,
}

/// Kinds of failure a builder can report. Which are retried, and which a new evaluation reopens, is the queue's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The derivation's builder failed.
    BuildError,
    /// It took too long.
    Timeout,
    /// It said nothing for too long.
    Silent,
    /// Its outputs are too large.
    OutputSize,
    /// A fixed output came out different.
    HashMismatch,
    /// A kind of derivation that is not built here.
    NotBuildable,
    /// A fixed output could not be made, from the network mostly.
    Fetch,
    /// The Nix daemon lacks a system or a feature that its pool offers.
    MissingFeature,
    /// Out of memory.
    Oom,
    /// Out of disk.
    DiskFull,
    /// Inputs could not be fetched.
    Network,
    /// An input differs from what was published and could not be replaced.
    StaleInput,
    /// The Nix daemon went away.
    DaemonGone,
    /// The outputs could not be uploaded.
    Upload,
}

impl Failure {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::BuildError,
        Self::Timeout,
        Self::Silent,
        Self::OutputSize,
        Self::HashMismatch,
        Self::NotBuildable,
        Self::Fetch,
        Self::MissingFeature,
        Self::Oom,
        Self::DiskFull,
        Self::Network,
        Self::StaleInput,
        Self::DaemonGone,
        Self::Upload,
    ];

    /// As the queue writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BuildError => "build_error",
            Self::Timeout => "timeout",
            Self::Silent => "silent",
            Self::OutputSize => "output_size",
            Self::HashMismatch => "hash_mismatch",
            Self::NotBuildable => "not_buildable",
            Self::Fetch => "fetch",
            Self::MissingFeature => "missing_feature",
            Self::Oom => "oom",
            Self::DiskFull => "disk_full",
            Self::Network => "network",
            Self::StaleInput => "stale_input",
            Self::DaemonGone => "daemon_gone",
            Self::Upload => "upload",
        }
    }
}

/// What was added to a log.
#[derive(Debug, Clone)]
pub struct LogPiece {
    /// Whose.
    pub fence: Fence,
    /// Where it begins, in bytes from the log's beginning.
    pub offset: i64,
    /// At most 64 KiB.
    pub data: Vec<u8>,
}

impl Session {
    /// Begins a life. A former one of the same node is released if the secret proves it, or when its lease has ended.
    pub async fn register(db: &Db, node: &Node<'_>) -> Result<Self> {
        let row = db
            .row(
                sqlx::query("SELECT session_id, secret, slots FROM ci.register($1, $2, $3, $4, $5, $6, $7)")
                    .bind(node.name)
                    .bind(node.secret)
                    .bind(node.slots)
                    .bind(node.systems.as_deref())
                    .bind(node.features.as_deref())
                    .bind(node.kube_node)
                    .bind(node.version),
            )
            .await?;
        Ok(Self { db: db.clone(), id: row.try_get(0)?, secret: row.try_get(1)?, slots: row.try_get(2)? })
    }

    /// The same session from its number and secret, for a process that kept them.
    pub fn resume(db: &Db, id: i64, secret: String, slots: i32) -> Self {
        Self { db: db.clone(), id, secret, slots }
    }

    /// Takes up to `want` jobs, never more than there are free slots.
    pub async fn claim(&self, want: i32) -> Result<Vec<Claim>> {
        let rows = self
            .db
            .rows(
                sqlx::query("SELECT * FROM ci.claim($1, $2, $3)").bind(self.id).bind(&self.secret).bind(want),
            )
            .await?;
        rows.iter().map(read_claim).collect()
    }

    /// Everything that these paths reach by references, with the hash it must have, where one is known. For inputs that
    /// were not checked before: a path's closure never changes.
    pub async fn closure(&self, paths: &[String]) -> Result<HashMap<String, Option<Vec<u8>>>> {
        let query =
            sqlx::query("SELECT * FROM ci.closure($1, $2, $3)").bind(self.id).bind(&self.secret).bind(paths);
        let rows = self.db.rows(query).await?;
        rows.iter().map(|row| Ok((row.try_get("path")?, row.try_get("nar_hash")?))).collect()
    }

    /// Says that it lives and what it holds; every 30 s. `stopping_in`: SIGTERM came, so much time is left.
    pub async fn heartbeat(&self, held: &[Fence], stopping_in: Option<Duration>) -> Result<Pulse> {
        let (jobs, attempts) = Fence::columns(held);
        let row = self
            .db
            .row(
                sqlx::query("SELECT * FROM ci.heartbeat($1, $2, $3, $4, $5)")
                    .bind(self.id)
                    .bind(&self.secret)
                    .bind(jobs)
                    .bind(attempts)
                    .bind(stopping_in.map(|left| left.as_secs_f64())),
            )
            .await?;
        let reasons: Option<Vec<String>> = row.try_get("drain_reasons")?;
        let seconds: Option<Vec<Option<f64>>> = row.try_get("drain_seconds")?;
        let left = seconds.unwrap_or_default().into_iter();
        let left =
            left.map(|left| left.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()));
        Ok(Pulse {
            signers: row.try_get("signers")?,
            drains: reasons.unwrap_or_default().into_iter().zip(left).collect(),
            abandon: row.try_get("abandon")?,
            notice: row.try_get("notice")?,
        })
    }

    /// The builds are done and their outputs are on the way: the slots are free. Answers the jobs still held.
    pub async fn start_upload(&self, fences: &[Fence]) -> Result<Vec<i64>> {
        let (jobs, attempts) = Fence::columns(fences);
        let query = sqlx::query("SELECT ci.start_upload($1, $2, $3, $4)");
        self.db.column(query.bind(self.id).bind(&self.secret).bind(jobs).bind(attempts)).await
    }

    /// Interrupted, not failed: others may have them. Answers the jobs that were still held.
    pub async fn give_back(&self, fences: &[Fence], why: &str) -> Result<Vec<i64>> {
        let (jobs, attempts) = Fence::columns(fences);
        let query = sqlx::query("SELECT ci.give_back($1, $2, $3, $4, $5)");
        self.db.column(query.bind(self.id).bind(&self.secret).bind(jobs).bind(attempts).bind(text(why))).await
    }

    /// The attempt failed. False: it was not this session's any more.
    pub async fn fail(&self, fence: Fence, failure: Failure, message: &str) -> Result<bool> {
        let query = sqlx::query("SELECT ci.fail($1, $2, $3, $4, $5, $6)").bind(self.id).bind(&self.secret);
        self.db
            .value(query.bind(fence.job).bind(fence.attempt).bind(failure.as_str()).bind(text(message)))
            .await
    }

    /// An input cannot be had. The job waits, at no cost, until a signer has looked for it.
    pub async fn input_missing(&self, fence: Fence, path: &str) -> Result<bool> {
        let query =
            sqlx::query("SELECT ci.input_missing($1, $2, $3, $4, $5)").bind(self.id).bind(&self.secret);
        self.db.value(query.bind(fence.job).bind(fence.attempt).bind(path)).await
    }

    /// Adds to the tails of logs. Pieces of jobs not held any more are dropped.
    pub async fn log_append(&self, pieces: &[LogPiece]) -> Result<()> {
        let (jobs, attempts): (Vec<_>, Vec<_>) =
            pieces.iter().map(|p| (p.fence.job, p.fence.attempt)).unzip();
        let (offsets, data): (Vec<_>, Vec<_>) = pieces.iter().map(|p| (p.offset, p.data.as_slice())).unzip();
        let query =
            sqlx::query("SELECT ci.log_append($1, $2, $3, $4, $5, $6)").bind(self.id).bind(&self.secret);
        self.db.row(query.bind(jobs).bind(attempts).bind(offsets).bind(data)).await?;
        Ok(())
    }

    /// Ends this life; what it still holds is given back. Answers how many jobs that were.
    pub async fn deregister(&self) -> Result<i32> {
        self.db.value(sqlx::query("SELECT ci.deregister($1, $2)").bind(self.id).bind(&self.secret)).await
    }
}

/// What people read, as the database can hold it: a message may quote what a build printed, and that may be any byte.
fn text(message: &str) -> String {
    message.replace('\0', "\u{fffd}")
}

fn read_claim(row: &sqlx::postgres::PgRow) -> Result<Claim> {
    let drvs: Option<Vec<String>> = row.try_get("input_drvs")?;
    let outputs: Option<Vec<String>> = row.try_get("input_outputs")?;
    let paths: Option<Vec<Option<String>>> = row.try_get("input_paths")?;
    let hashes: Option<Vec<Option<Vec<u8>>>> = row.try_get("input_hashes")?;
    let names = drvs.unwrap_or_default().into_iter().zip(outputs.unwrap_or_default());
    let contents = paths.unwrap_or_default().into_iter().zip(hashes.unwrap_or_default());
    let inputs = names.zip(contents).map(|((drv_path, output), (path, nar_hash))| Input {
        drv_path,
        output,
        path,
        nar_hash,
    });
    Ok(Claim {
        fence: Fence { job: row.try_get("job_id")?, attempt: row.try_get("attempt")? },
        drv_path: row.try_get("drv_path")?,
        aterm: row.try_get::<Option<Vec<u8>>, _>("aterm")?.unwrap_or_default(),
        estimate: Some(row.try_get("estimate")?)
            .filter(|seconds| *seconds != UNKNOWN)
            .and_then(|seconds| Duration::try_from_secs_f32(seconds).ok()),
        inputs: inputs.collect(),
    })
}
