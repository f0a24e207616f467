//! What a signer says: whose claim is live, what a path is, what is published.

use std::time::Duration;

use sqlx::Row;

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
    /// Its outputs as recorded.
    pub outputs: Vec<Output>,
}

/// The live claim, or none.
pub async fn check_claim(db: &Db, holder: &Holder) -> Result<Option<LiveClaim>> {
    let query =
        sqlx::query("SELECT * FROM ci.check_claim($1, $2, $3, $4)").bind(holder.session).bind(&holder.secret);
    let rows = db.rows(query.bind(holder.fence.job).bind(holder.fence.attempt)).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let names: Vec<String> = row.try_get("output_names")?;
    let paths: Vec<Option<String>> = row.try_get("output_paths")?;
    Ok(Some(LiveClaim {
        drv_path: row.try_get("drv_path")?,
        node: row.try_get("node_id")?,
        outputs: names.into_iter().zip(paths).collect(),
    }))
}

/// Takes or adopts the canonical record of all outputs of each result, in one transaction, but for those whose builder
/// speaks at this very moment: they are asked for again.
pub async fn accept(db: &Db, results: &[(Holder, Vec<Output>)]) -> Result<Vec<Verdict>> {
    let mut verdicts = vec![Verdict::Stale; results.len()];
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

/// The narinfos are written: the jobs have succeeded. Answers those that this call finished.
pub async fn finish(db: &Db, fences: &[Fence]) -> Result<Vec<i64>> {
    let (jobs, attempts) = Fence::columns(fences);
    db.column(sqlx::query("SELECT ci.finish($1, $2)").bind(jobs).bind(attempts)).await
}

/// Accepted results whose signer went away before it finished them.
pub async fn unpublished(db: &Db, older_than: Duration) -> Result<Vec<Unpublished>> {
    let query =
        sqlx::query("SELECT * FROM ci.unpublished(make_interval(secs => $1))").bind(older_than.as_secs_f64());
    let mut found: Vec<Unpublished> = Vec::new();
    for row in db.rows(query).await? {
        let fence = Fence { job: row.try_get("job_id")?, attempt: row.try_get("attempt")? };
        if found.last().is_none_or(|last| last.fence != fence) {
            found.push(Unpublished { fence, drv_path: row.try_get("drv_path")?, outputs: Vec::new() });
        }
        let output = Output {
            name: row.try_get("output")?,
            path: row.try_get("path")?,
            nar_hash: row.try_get("nar_hash")?,
            nar_size: row.try_get("nar_size")?,
            references: row.try_get("refs")?,
            file_hash: row.try_get::<Option<_>, _>("file_hash")?.unwrap_or_default(),
            file_size: row.try_get::<Option<_>, _>("file_size")?.unwrap_or_default(),
            content_address: row.try_get("ca")?,
        };
        if let Some(last) = found.last_mut() {
            last.outputs.push(output);
        }
    }
    Ok(found)
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

/// Forgets what paths are, or all that a node built, and reopens their makers. Answers the paths to remove.
pub async fn forget(db: &Db, paths: &[String], built_by: Option<i32>) -> Result<Vec<String>> {
    db.column(sqlx::query("SELECT ci.forget($1, $2)").bind(paths).bind(built_by)).await
}
