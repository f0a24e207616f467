//! What the janitor's leader does, over and over, under its generation.

use std::time::Duration;

use crate::{Db, Error, Result};

/// How often it makes its round.
const ROUND: Duration = Duration::from_secs(5);
/// Every so many rounds, what need not be done that often.
const RARELY: u32 = 12;

/// Leads until another does. Meant as the work of [`crate::leader::campaign`].
pub async fn run(db: &Db, generation: i64) {
    let mut tick = tokio::time::interval(ROUND);
    for round in 0_u32.. {
        tick.tick().await;
        match make_round(db, generation, round.is_multiple_of(RARELY)).await {
            Ok(()) => {}
            Err(error @ Error::NotLeader(_)) => {
                tracing::info!(%error, "the janitor stops");
                return;
            }
            Err(error) => tracing::warn!(%error, "the janitor's round broke off"),
        }
    }
}

/// One round: dead builds, open transactions; `all`: the rare work too.
pub async fn make_round(db: &Db, generation: i64, all: bool) -> Result<()> {
    let reaped = reap(db, generation).await?;
    if reaped > 0 {
        tracing::info!(reaped, "builds lost their lease");
    }
    end_long_transactions(db, generation).await?;
    if all {
        let failed = fail_unsupported(db, generation).await?;
        if failed > 0 {
            tracing::info!(failed, "builds that nobody can run have failed");
        }
        decay(db, generation).await?;
        prune(db, generation).await?;
        while retain(db, generation).await? > 0 {}
    }
    Ok(())
}

/// Takes back builds whose lease ended. Answers how many.
pub async fn reap(db: &Db, generation: i64) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.reap($1)").bind(generation)).await
}

/// Ends transactions that builders keep open. Answers how many.
pub async fn end_long_transactions(db: &Db, generation: i64) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.end_long_transactions($1)").bind(generation)).await
}

/// Fails what nobody could run for 30 minutes. Answers how many.
pub async fn fail_unsupported(db: &Db, generation: i64) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.fail_unsupported($1)").bind(generation)).await
}

/// Forgets old use of builders. Answers the hours it caught up.
pub async fn decay(db: &Db, generation: i64) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.decay($1)").bind(generation)).await
}

/// Removes stale replicas, sessions and tails.
pub async fn prune(db: &Db, generation: i64) -> Result<()> {
    db.row(sqlx::query("SELECT ci.prune($1)").bind(generation)).await.map(drop)
}

/// A step of retention. Answers the rows looked at; 0: nothing is left to do.
pub async fn retain(db: &Db, generation: i64) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.retain($1)").bind(generation)).await
}
