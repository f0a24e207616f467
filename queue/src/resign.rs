//! Signing everything again, in the background: whoever asks says with which keys, and one signer that has them does it.

use serde::Serialize;
use sqlx::Row;

use crate::{Db, Result};

/// The right to sign everything again, for as long as a step comes every two minutes.
#[derive(Debug)]
pub struct Resign<'a> {
    db: &'a Db,
    generation: i64,
    /// The last path that is done.
    pub after: String,
}

/// How far it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct State {
    /// Since when it is asked for. None: it never was.
    pub asked_at: Option<String>,
    /// Who began it last.
    pub holder: Option<String>,
    /// It is at it.
    pub running: bool,
    /// Paths that are done,
    pub done: i64,
    /// of so many that are published now.
    pub total: i64,
    /// When all of them were done.
    pub ended_at: Option<String>,
}

/// Asks for everything to be signed with these keys, by their public halves, and with no other.
pub async fn ask(db: &Db, keys: &[String]) -> Result<()> {
    db.row(sqlx::query("SELECT ci.ask_resign($1)").bind(keys)).await.map(drop)
}

/// How far it is.
pub async fn state(db: &Db) -> Result<State> {
    let row = db.row(sqlx::query("SELECT * FROM ci.resign_state()")).await?;
    Ok(State {
        asked_at: row.try_get("asked_at")?,
        holder: row.try_get("holder")?,
        running: row.try_get("running")?,
        done: row.try_get("done")?,
        total: row.try_get("total")?,
        ended_at: row.try_get("ended_at")?,
    })
}

impl<'a> Resign<'a> {
    /// Takes up what is asked for, where the last one stopped. None: nothing is, or not with these keys, or somebody is at it.
    pub async fn begin(db: &'a Db, holder: &str, keys: &[String]) -> Result<Option<Resign<'a>>> {
        let query = sqlx::query("SELECT * FROM ci.begin_resign($1, $2)").bind(holder).bind(keys);
        let rows = db.rows(query).await?;
        let resign = rows.first().map(|row| {
            Ok(Resign { db, generation: row.try_get("generation")?, after: row.try_get("after")? })
        });
        resign.transpose()
    }

    /// So many more are done, up to this path.
    pub async fn advance(&mut self, after: String, count: i64) -> Result<()> {
        let query =
            sqlx::query("SELECT ci.resigned($1, $2, $3)").bind(self.generation).bind(&after).bind(count);
        self.db.row(query).await?;
        self.after = after;
        Ok(())
    }

    /// All are done.
    pub async fn end(self) -> Result<()> {
        self.db.row(sqlx::query("SELECT ci.end_resign($1)").bind(self.generation)).await.map(drop)
    }
}
