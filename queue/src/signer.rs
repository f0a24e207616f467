//! What a signer says: whose claim is live, what a path is, what is published.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::{Db, Fence, Result};

/// A builder's word lasts milliseconds. One that keeps its claim locked for longer has only itself to blame.
const BUSY: Duration = Duration::from_millis(20);
const BUSY_TRIES: usize = 50;

/// A builder's fence as it reaches a signer: with the session and its secret.
#[derive(Debug, Clone)]
pub struct Holder {
    /// The builder's session.
    pub session: i64,
    /// Its secret.
    pub secret: String,
    /// The claim.
    pub fence: Fence,
}

/// What a live claim may produce.
#[derive(Debug, Clone)]
pub struct LiveClaim {
    /// The derivation.
    pub drv_path: String,
    /// The node that builds it.
    pub node: i32,
    /// Its outputs; a path is unknown before the build if the output is content-addressed.
    pub outputs: Vec<(String, Option<String>)>,
}

/// An output as it was uploaded.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Its store path.
    pub path: String,
    /// SHA-256 of the NAR.
    pub nar_hash: Vec<u8>,
    /// Bytes of the NAR.
    pub nar_size: i64,
    /// Store paths it refers to.
    pub references: Vec<String>,
    /// SHA-256 of the stored object.
    pub file_hash: Vec<u8>,
    /// Bytes of the stored object.
    pub file_size: i64,
    /// Its content address, if it has one.
    pub content_address: Option<String>,
    /// The attempt that made it, where an attempt did.
    pub made_by: Option<i64>,
}

/// What became of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its bytes are what the paths are from now on.
    Accepted,
    /// Another attempt's bytes are; publish those. If they differ, a finding was recorded.
    Adopted,
    /// The claim is not live: nothing was changed.
    Stale,
    /// Somebody keeps the claim locked: nothing was changed, ask again.
    Busy,
    /// Outputs are missing, foreign or not where the derivation says: nothing was changed.
    Incomplete,
    /// Publishing it would mix the outputs of two builds: nothing was changed.
    Conflict,
}

/// An accepted result that nobody has finished publishing.
#[derive(Debug, Clone)]
pub struct Unpublished {
    /// Finish it with this.
    pub fence: Fence,
    /// The derivation.
    pub drv_path: String,
    /// Its outputs as recorded, by name.
    pub outputs: Vec<Output>,
    /// Only the build showed where they are.
    pub realised: bool,
}

/// Where an output is of which only a build shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Realised {
    /// The derivation.
    pub drv_path: String,
    /// The output.
    pub output: String,
    /// Its store path.
    pub path: String,
}

/// What is recorded of a path that somebody wants to store.
#[derive(Debug, Clone, Default)]
pub struct Recorded {
    /// Hash of its NAR, if anything is.
    pub nar_hash: Option<Vec<u8>>,
    /// Hash and size of the object in the bucket, if it is there.
    pub file: Option<(Vec<u8>, i64)>,
    /// Another claim makes the same path at this moment.
    pub contested: bool,
}

/// What is known of a derivation.
#[derive(Debug, Clone)]
pub struct Text {
    /// The derivation.
    pub drv_path: String,
    /// What was proven of it before.
    pub proof: Option<Vec<u8>>,
    /// Its text.
    pub text: Option<Vec<u8>>,
}

/// A path as the bucket should have it.
#[derive(Debug, Clone)]
pub struct Published {
    /// The derivation that made it.
    pub drv_path: Option<String>,
    /// The path; its name is empty.
    pub output: Output,
}

/// The live claim, or none.
pub async fn check_claim(db: &Db, holder: &Holder) -> Result<Option<LiveClaim>> {
    let mut live = check_claims(db, holder.session, &holder.secret, &[holder.fence]).await?;
    Ok(live.remove(&holder.fence))
}

/// Those of a session's claims that are live.
pub async fn check_claims(
    db: &Db,
    session: i64,
    secret: &str,
    fences: &[Fence],
) -> Result<HashMap<Fence, LiveClaim>> {
    let (jobs, attempts) = Fence::columns(fences);
    let query = sqlx::query("SELECT * FROM ci.check_claims($1, $2, $3, $4)").bind(session).bind(secret);
    let mut live = HashMap::new();
    for row in db.rows(query.bind(jobs).bind(attempts)).await? {
        let names: Vec<String> = row.try_get("output_names")?;
        let paths: Vec<Option<String>> = row.try_get("output_paths")?;
        let claim = LiveClaim {
            drv_path: row.try_get("drv_path")?,
            node: row.try_get("node_id")?,
            outputs: names.into_iter().zip(paths).collect(),
        };
        live.insert(Fence { job: row.try_get("job_id")?, attempt: row.try_get("attempt")? }, claim);
    }
    Ok(live)
}

/// What is recorded of each path; `job` is who wants to store it.
pub async fn recorded(db: &Db, wanted: &[(String, Option<i64>)]) -> Result<HashMap<String, Recorded>> {
    let (paths, jobs): (Vec<&str>, Vec<Option<i64>>) =
        wanted.iter().map(|(path, job)| (path.as_str(), *job)).unzip();
    let rows = db.rows(sqlx::query("SELECT * FROM ci.recorded($1, $2)").bind(paths).bind(jobs)).await?;
    let recorded = rows.iter().map(|row| {
        let hash: Option<Vec<u8>> = row.try_get("file_hash")?;
        let size: Option<i64> = row.try_get("file_size")?;
        let recorded = Recorded {
            nar_hash: row.try_get("nar_hash")?,
            file: hash.zip(size),
            contested: row.try_get("contested")?,
        };
        Ok((row.try_get("path")?, recorded))
    });
    recorded.collect()
}

/// What is known of derivations. Texts of what was proven before only if `always`.
pub async fn texts(db: &Db, drv_paths: &[String], always: bool) -> Result<Vec<Text>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.texts($1, $2)").bind(drv_paths).bind(always)).await?;
    let texts = rows.iter().map(|row| {
        Ok(Text {
            drv_path: row.try_get("drv_path")?,
            proof: row.try_get("proof")?,
            text: row.try_get("text")?,
        })
    });
    texts.collect()
}

/// Where outputs of these derivations are, as far as only builds show it and have.
pub async fn realised(db: &Db, drv_paths: &[String]) -> Result<Vec<Realised>> {
    read_realised(&db.rows(sqlx::query("SELECT * FROM ci.realised($1)").bind(drv_paths)).await?)
}

/// The same of all derivations that made one of these paths.
pub async fn realised_at(db: &Db, paths: &[String]) -> Result<Vec<Realised>> {
    read_realised(&db.rows(sqlx::query("SELECT * FROM ci.realised_at($1)").bind(paths)).await?)
}

fn read_realised(rows: &[PgRow]) -> Result<Vec<Realised>> {
    let realised = rows.iter().map(|row| {
        Ok(Realised {
            drv_path: row.try_get("drv_path")?,
            output: row.try_get("output")?,
            path: row.try_get("path")?,
        })
    });
    realised.collect()
}

/// So that it need not be proven again.
pub async fn remember_proofs(db: &Db, proofs: &[(String, Vec<u8>)]) -> Result<()> {
    let (paths, proofs): (Vec<&str>, Vec<&[u8]>) =
        proofs.iter().map(|(path, proof)| (path.as_str(), proof.as_slice())).unzip();
    db.row(sqlx::query("SELECT ci.remember_proofs($1, $2)").bind(paths).bind(proofs)).await?;
    Ok(())
}

/// Whether an evaluation is being written, by whoever has this secret.
pub async fn check_evaluation(db: &Db, evaluation: i64, secret: &str) -> Result<bool> {
    db.value(sqlx::query("SELECT ci.check_evaluation($1, $2)").bind(evaluation).bind(secret)).await
}

/// Of paths that an evaluation is about to name, those that are on record and in the bucket. No sweep takes them that has not begun.
pub async fn keep_published(db: &Db, paths: &[String]) -> Result<Vec<String>> {
    db.column(sqlx::query("SELECT ci.keep_published($1)").bind(paths)).await
}

/// Sources that are in the bucket now; answers what each path is. Nothing: the evaluation is not being written.
pub async fn accept_sources(
    db: &Db,
    evaluation: i64,
    secret: &str,
    sources: &[Output],
) -> Result<Vec<Output>> {
    let query = sqlx::query("SELECT * FROM ci.accept_sources($1, $2, $3, $4, $5, $6, $7, $8)")
        .bind(evaluation)
        .bind(secret)
        .bind(sources.iter().map(|s| s.path.as_str()).collect::<Vec<_>>())
        .bind(sources.iter().map(|s| s.nar_hash.as_slice()).collect::<Vec<_>>())
        .bind(sources.iter().map(|s| s.nar_size).collect::<Vec<_>>())
        .bind(sources.iter().map(|s| s.references.join(" ")).collect::<Vec<_>>())
        .bind(sources.iter().map(|s| s.file_hash.as_slice()).collect::<Vec<_>>())
        .bind(sources.iter().map(|s| s.file_size).collect::<Vec<_>>());
    db.rows(query).await?.iter().map(read_record).collect()
}

/// A row of `ci.canonical` in any of the functions that answer some.
fn read_record(row: &PgRow) -> Result<Output> {
    Ok(Output {
        name: String::new(),
        path: row.try_get("path")?,
        nar_hash: row.try_get("nar_hash")?,
        nar_size: row.try_get("nar_size")?,
        references: row.try_get("refs")?,
        file_hash: row.try_get::<Option<_>, _>("file_hash")?.unwrap_or_default(),
        file_size: row.try_get::<Option<_>, _>("file_size")?.unwrap_or_default(),
        content_address: None,
        made_by: None,
    })
}

/// Takes or adopts the canonical record of all outputs of each result, in one transaction, but for those whose builder
/// speaks at this very moment: they are asked for again.
pub async fn accept(db: &Db, results: &[(Holder, Vec<Output>)]) -> Result<Vec<Verdict>> {
    let mut verdicts = vec![Verdict::Busy; results.len()];
    let mut left: Vec<usize> = (0..results.len()).collect();
    for _ in 0..BUSY_TRIES {
        let asked: Vec<_> = left.iter().map(|&at| &results[at]).collect();
        let mut busy = Vec::new();
        for (at, answer) in left.into_iter().zip(accept_once(db, &asked).await?) {
            match answer {
                Some(verdict) => verdicts[at] = verdict,
                None => busy.push(at),
            }
        }
        if busy.is_empty() {
            break;
        }
        left = busy;
        tokio::time::sleep(BUSY).await;
    }
    Ok(verdicts)
}

/// None: ask again.
async fn accept_once(db: &Db, results: &[&(Holder, Vec<Output>)]) -> Result<Vec<Option<Verdict>>> {
    let mut of = Vec::new();
    let mut outputs = Vec::new();
    for (position, (_, made)) in (1..).zip(results.iter().copied()) {
        of.extend(std::iter::repeat_n(position, made.len()));
        let mut made: Vec<&Output> = made.iter().collect();
        made.sort_by(|a, b| a.name.cmp(&b.name));
        outputs.extend(made);
    }
    fn all<T>(outputs: &[&Output], field: impl Fn(&Output) -> T) -> Vec<T> {
        outputs.iter().map(|output| field(output)).collect()
    }
    let holders = || results.iter().map(|(holder, _)| holder);
    let query =
        sqlx::query("SELECT verdict FROM ci.accept($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)")
            .bind(holders().map(|h| h.session).collect::<Vec<_>>())
            .bind(holders().map(|h| h.secret.clone()).collect::<Vec<_>>())
            .bind(holders().map(|h| h.fence.job).collect::<Vec<_>>())
            .bind(holders().map(|h| h.fence.attempt).collect::<Vec<_>>())
            .bind::<Vec<i32>>(of)
            .bind(all(&outputs, |o| o.name.clone()))
            .bind(all(&outputs, |o| o.path.clone()))
            .bind(all(&outputs, |o| o.nar_hash.clone()))
            .bind(all(&outputs, |o| o.nar_size))
            .bind(all(&outputs, |o| o.references.join(" ")))
            .bind(all(&outputs, |o| o.file_hash.clone()))
            .bind(all(&outputs, |o| o.file_size))
            .bind(all(&outputs, |o| o.content_address.clone()));
    let verdicts: Vec<String> = db.column(query).await?;
    Ok(verdicts
        .iter()
        .map(|verdict| match verdict.as_str() {
            "accepted" => Some(Verdict::Accepted),
            "adopted" => Some(Verdict::Adopted),
            "incomplete" => Some(Verdict::Incomplete),
            "conflict" => Some(Verdict::Conflict),
            "busy" => None,
            _ => Some(Verdict::Stale),
        })
        .collect())
}

/// What became of jobs that are published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Finished {
    /// Ended by this call.
    pub jobs: Vec<i64>,
    /// Not ended: somebody keeps them locked.
    pub busy: Vec<i64>,
}

/// The narinfos are written: the jobs have succeeded, but for those whose builder speaks at this very moment: they are asked
/// for again.
pub async fn finish(db: &Db, fences: &[Fence]) -> Result<Finished> {
    let mut finished = Finished::default();
    let mut left = fences.to_vec();
    for _ in 0..BUSY_TRIES {
        let (jobs, attempts) = Fence::columns(&left);
        let query = sqlx::query("SELECT job_id, busy FROM ci.finish($1, $2)").bind(jobs).bind(attempts);
        finished.busy.clear();
        for row in db.rows(query).await? {
            let place = if row.try_get("busy")? { &mut finished.busy } else { &mut finished.jobs };
            place.push(row.try_get("job_id")?);
        }
        if finished.busy.is_empty() {
            break;
        }
        left.retain(|fence| finished.busy.contains(&fence.job));
        tokio::time::sleep(BUSY).await;
    }
    Ok(finished)
}

/// An accepted result cannot be published before a person has done something, as `sentence` says: its job fails, and what it would
/// have made of its paths is forgotten. False: it is not accepted any more, or somebody keeps it locked.
pub async fn give_up(db: &Db, fence: Fence, sentence: &str) -> Result<bool> {
    let query = sqlx::query("SELECT ci.give_up($1, $2, $3)").bind(fence.job).bind(fence.attempt);
    db.value(query.bind(sentence)).await
}

/// Accepted results whose signer went away before it finished them.
pub async fn unpublished(db: &Db, older_than: Duration) -> Result<Vec<Unpublished>> {
    let query = sqlx::query("SELECT * FROM ci.unpublished(make_interval(secs => $1))");
    read_unpublished(&db.rows(query.bind(older_than.as_secs_f64())).await?)
}

/// The records of jobs that were accepted just now.
pub async fn accepted(db: &Db, jobs: &[i64]) -> Result<Vec<Unpublished>> {
    let query = sqlx::query("SELECT * FROM ci.unpublished(p_jobs => $1)");
    read_unpublished(&db.rows(query.bind(jobs)).await?)
}

fn read_unpublished(rows: &[PgRow]) -> Result<Vec<Unpublished>> {
    let mut found: Vec<Unpublished> = Vec::new();
    for row in rows {
        let fence = Fence { job: row.try_get("job_id")?, attempt: row.try_get("attempt")? };
        if found.last().is_none_or(|last| last.fence != fence) {
            let (drv_path, realised) = (row.try_get("drv_path")?, row.try_get("realised")?);
            found.push(Unpublished { fence, drv_path, outputs: Vec::new(), realised });
        }
        let output = Output {
            name: row.try_get("output")?,
            content_address: row.try_get("ca")?,
            made_by: row.try_get("made_by")?,
            ..read_record(row)?
        };
        if let Some(last) = found.last_mut() {
            last.outputs.push(output);
        }
    }
    Ok(found)
}

/// What the bucket should hold, from a path on, in the order of paths.
pub async fn published(db: &Db, after: &str, rows: i32) -> Result<Vec<Published>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.published($1, $2)").bind(after).bind(rows)).await?;
    let published = rows.iter().map(|row| {
        let output = Output { content_address: row.try_get("ca")?, ..read_record(row)? };
        Ok(Published { drv_path: row.try_get("drv_path")?, output })
    });
    published.collect()
}

/// Paths that builders could not fetch, the oldest report first, with the job that waits.
pub async fn missing_reports(db: &Db) -> Result<Vec<(String, i64)>> {
    let rows = db.rows(sqlx::query("SELECT path, job_id FROM ci.missing_reports()")).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// A signer has looked: gone for good, or there after all. Answers how many producers build again.
pub async fn settle_missing(db: &Db, path: &str, gone: bool) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.settle_missing($1, $2)").bind(path).bind(gone)).await
}

/// Nodes of this name; `pool/name` is one of them.
pub async fn nodes_named(db: &Db, name: &str) -> Result<Vec<i32>> {
    db.column(sqlx::query("SELECT ci.nodes_named($1)").bind(name)).await
}

/// What is to be forgotten together, with all outputs of whoever makes it: to be removed from the bucket before [`forget`].
pub async fn to_forget(db: &Db, paths: &[String], built_by: Option<i32>) -> Result<Vec<String>> {
    db.column(sqlx::query("SELECT ci.to_forget($1, $2)").bind(paths).bind(built_by)).await
}

/// Forgets what these paths are, or all that a node built, and reopens their makers. Answers those that were on record.
pub async fn forget(db: &Db, paths: &[String], built_by: Option<i32>) -> Result<Vec<String>> {
    db.column(sqlx::query("SELECT ci.forget($1, $2)").bind(paths).bind(built_by)).await
}
