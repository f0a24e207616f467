//! What a signer says while it sweeps the bucket: one sweeper at a time, in bounded steps, each under its generation.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::db::LONG;
use crate::signer::{Output, Published};
use crate::{Db, Result};

/// The right to sweep, for as long as a step comes every two minutes.
#[derive(Debug)]
pub struct Sweep<'a> {
    db: &'a Db,
    generation: i64,
}

/// Who sweeps, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Who swept last.
    pub holder: Option<String>,
    /// It still does.
    pub running: bool,
    /// When it began.
    pub began_at: Option<String>,
    /// When the last whole sweep ended.
    pub ended_at: Option<String>,
}

/// A path that is forgotten, and whose objects are to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condemned {
    /// The path.
    pub path: String,
    /// Hash of its NAR.
    pub nar_hash: Vec<u8>,
    /// The attempt that made it, where an attempt did.
    pub attempt: Option<i64>,
    /// Bytes of its NAR in the bucket; none: it is not there.
    pub file_size: Option<i64>,
}

/// A derivation that makes a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Maker {
    /// The path.
    pub path: String,
    /// The derivation.
    pub drv_path: String,
    /// As which output.
    pub output: String,
    /// Its other outputs.
    pub others: Vec<String>,
}

/// What is known of a path of which an object gives the hash part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// The path on record,
    pub path: Option<String>,
    /// its NAR
    pub nar_hash: Option<Vec<u8>>,
    /// and the attempt that made it.
    pub attempt: Option<i64>,
    /// A job makes it.
    pub made: bool,
}

impl<'a> Sweep<'a> {
    /// Takes the sweep unless somebody has it; with `every`, only if the last one is so long ago or broke off.
    pub async fn begin(db: &'a Db, holder: &str, every: Option<Duration>) -> Result<Option<Sweep<'a>>> {
        let query = sqlx::query("SELECT ci.begin_sweep($1, make_interval(secs => $2))").bind(holder);
        let generation: Option<i64> = db.value(query.bind(every.map(|every| every.as_secs_f64()))).await?;
        Ok(generation.map(|generation| Sweep { db, generation }))
    }

    /// The sweep of this generation, begun elsewhere.
    pub fn resume(db: &'a Db, generation: i64) -> Sweep<'a> {
        Sweep { db, generation }
    }

    /// The same to compare database and bucket: marks of before are void.
    pub async fn begin_resync(db: &'a Db, holder: &str) -> Result<Option<Sweep<'a>>> {
        let generation: Option<i64> =
            db.within(LONG).value(sqlx::query("SELECT ci.begin_resync($1)").bind(holder)).await?;
        Ok(generation.map(|generation| Sweep { db, generation }))
    }

    /// Records what the bucket has, each with the derivation that made it. Answers how many were news.
    pub async fn adopt(&self, found: &[Published]) -> Result<i32> {
        fn all<'f, T>(found: &'f [Published], field: impl Fn(&'f Output) -> T) -> Vec<T> {
            found.iter().map(|found| field(&found.output)).collect()
        }
        let query = sqlx::query("SELECT ci.adopt($1, $2, $3, $4, $5, $6, $7, $8, $9)")
            .bind(self.generation)
            .bind(all(found, |o| o.path.as_str()))
            .bind(all(found, |o| o.nar_hash.as_slice()))
            .bind(all(found, |o| o.nar_size))
            .bind(all(found, |o| o.references.join(" ")))
            .bind(all(found, |o| o.file_hash.as_slice()))
            .bind(all(found, |o| o.file_size))
            .bind(all(found, |o| o.content_address.as_deref()))
            .bind(found.iter().map(|found| found.drv_path.as_deref()).collect::<Vec<_>>());
        self.db.value(query).await
    }

    /// Attempts are numbered from after this one on.
    pub async fn advance_attempts(&self, attempt: i64) -> Result<()> {
        let query = sqlx::query("SELECT ci.advance_attempts($1, $2)").bind(self.generation).bind(attempt);
        self.db.row(query).await.map(drop)
    }

    /// It is done, and the next one due after its time.
    pub async fn end(self) -> Result<()> {
        self.leave(true).await
    }

    /// Nobody has it any more; the next one is due as before.
    pub async fn release(self) -> Result<()> {
        self.leave(false).await
    }

    async fn leave(self, whole: bool) -> Result<()> {
        let query = sqlx::query("SELECT ci.end_sweep($1, $2)").bind(self.generation).bind(whole);
        self.db.row(query).await.map(drop)
    }

    /// Reads some texts for the sources they name. False: all were read.
    pub async fn read_sources(&self, rows: i32) -> Result<bool> {
        let query = sqlx::query("SELECT ci.read_sources($1, $2)").bind(self.generation).bind(rows);
        Ok(self.db.value::<i32>(query).await? > 0)
    }

    /// Marks what nobody makes and no text names among some records after a path. Answers where to go on.
    pub async fn mark_candidates(&self, after: &str, rows: i32, younger: Duration) -> Result<Option<String>> {
        let query = sqlx::query("SELECT ci.plan_candidates($1, $2, $3, make_interval(secs => $4))")
            .bind(self.generation)
            .bind(after)
            .bind(rows);
        self.db.value(query.bind(younger.as_secs_f64())).await
    }

    /// Spares what those of some records that stay refer to. Answers where to go on.
    pub async fn spare_references(&self, after: &str, rows: i32) -> Result<Option<String>> {
        let query = sqlx::query("SELECT ci.plan_references($1, $2, $3)").bind(self.generation);
        self.db.value(query.bind(after).bind(rows)).await
    }

    /// The grace of some paths that were marked begins. Answers where to go on.
    pub async fn confirm(&self, after: &str, rows: i32) -> Result<Option<String>> {
        let query = sqlx::query("SELECT ci.plan_confirm($1, $2, $3)").bind(self.generation);
        self.db.value(query.bind(after).bind(rows)).await
    }

    /// Forgets some paths whose grace is over. None: there are no more, or texts have to be read first.
    pub async fn condemn(&self, grace: Duration, rows: i32) -> Result<Vec<Condemned>> {
        let query = sqlx::query("SELECT * FROM ci.condemn($1, make_interval(secs => $2), $3)");
        let query = query.bind(self.generation).bind(grace.as_secs_f64()).bind(rows);
        self.db.rows(query).await?.iter().map(read_condemned).collect()
    }

    /// What a sweep that broke off left.
    pub async fn unburied(&self, rows: i32) -> Result<Vec<Condemned>> {
        let query = sqlx::query("SELECT * FROM ci.unburied($1, $2)").bind(self.generation).bind(rows);
        self.db.rows(query).await?.iter().map(read_condemned).collect()
    }

    /// It goes on.
    pub async fn renew(&self) -> Result<()> {
        self.bury(&[]).await
    }

    /// The objects of these are gone.
    pub async fn bury(&self, paths: &[String]) -> Result<()> {
        let query = sqlx::query("SELECT ci.bury($1, $2)").bind(self.generation).bind(paths);
        self.db.row(query).await.map(drop)
    }
}

fn read_condemned(row: &PgRow) -> Result<Condemned> {
    Ok(Condemned {
        path: row.try_get("path")?,
        nar_hash: row.try_get("nar_hash")?,
        attempt: row.try_get("attempt")?,
        file_size: row.try_get("file_size")?,
    })
}

/// All steps of one pass of a plan, each from where the one before it ended.
pub async fn pass<F: Future<Output = Result<Option<String>>>>(step: impl Fn(String) -> F) -> Result<()> {
    let mut after = Some(String::new());
    while let Some(path) = after {
        after = step(path).await?;
    }
    Ok(())
}

/// Who sweeps.
pub async fn state(db: &Db) -> Result<State> {
    let row = db.row(sqlx::query("SELECT holder, running, began_at, ended_at FROM ci.sweep_state()")).await?;
    Ok(State {
        holder: row.try_get(0)?,
        running: row.try_get(1)?,
        began_at: row.try_get(2)?,
        ended_at: row.try_get(3)?,
    })
}

/// Paths that a sweep would remove now, and those whose grace would begin or goes on: how many, and their bytes.
pub async fn would_sweep(db: &Db, grace: Duration) -> Result<[(i64, i64); 2]> {
    let query = sqlx::query(
        "SELECT count(*) FILTER (WHERE ripe), coalesce(sum(file_size) FILTER (WHERE ripe), 0)::bigint,
                count(*) FILTER (WHERE NOT ripe), coalesce(sum(file_size) FILTER (WHERE NOT ripe), 0)::bigint
         FROM ci.would_sweep(make_interval(secs => $1), make_interval(secs => $1))",
    );
    let row = db.within(LONG).row(query.bind(grace.as_secs_f64())).await?;
    Ok([(row.try_get(0)?, row.try_get(1)?), (row.try_get(2)?, row.try_get(3)?)])
}

/// Paths that are marked and still there: how many, and their bytes.
pub async fn marked(db: &Db) -> Result<(i64, i64)> {
    let row = db.within(LONG).row(sqlx::query("SELECT paths, bytes FROM ci.marked()")).await?;
    Ok((row.try_get(0)?, row.try_get(1)?))
}

/// What is known of paths, by their hash parts.
pub async fn known_hashes(db: &Db, hashes: &[&str]) -> Result<HashMap<String, Known>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.known_hashes($1)").bind(hashes)).await?;
    let known = rows.iter().map(|row| {
        let known = Known {
            path: row.try_get("path")?,
            nar_hash: row.try_get("nar_hash")?,
            attempt: row.try_get("attempt")?,
            made: row.try_get("made")?,
        };
        Ok((row.try_get("hash")?, known))
    });
    known.collect()
}

/// Which of these derivations have a job.
pub async fn known_derivations(db: &Db, drv_paths: &[String]) -> Result<Vec<String>> {
    db.column(sqlx::query("SELECT ci.known_derivations($1)").bind(drv_paths)).await
}

/// Which of these paths are on record.
pub async fn known_paths(db: &Db, paths: &[String]) -> Result<Vec<String>> {
    db.column(sqlx::query("SELECT ci.known_paths($1)").bind(paths)).await
}

/// Who of us makes these paths.
pub async fn makers(db: &Db, paths: &[String]) -> Result<Vec<Maker>> {
    let rows = db.rows(sqlx::query("SELECT * FROM ci.makers($1)").bind(paths)).await?;
    let makers = rows.iter().map(|row| {
        Ok(Maker {
            path: row.try_get("path")?,
            drv_path: row.try_get("drv_path")?,
            output: row.try_get("output")?,
            others: row.try_get("others")?,
        })
    });
    makers.collect()
}
