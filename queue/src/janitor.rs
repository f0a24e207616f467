//! What the janitor's leader does, over and over, under its generation.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{Db, Error, Result};

/// How often leases are looked at,
const OFTEN: Duration = Duration::from_secs(5);
/// and what need not be looked at that often.
const RARELY: Duration = Duration::from_secs(60);
/// Retention keeps resolvers and ingests waiting: it works no longer at a time,
const SPELL: Duration = Duration::from_secs(5);
/// and they get their turn before its next step.
const REST: Duration = Duration::from_millis(100);

/// Leads until another does. Meant as the work of [`crate::leader::campaign`]. Leases wait for nothing that takes long.
pub async fn run(db: &Db, generation: i64) {
    tokio::select! {
        () = over_and_over(OFTEN, || keep_order(db, generation)) => {}
        () = over_and_over(RARELY, || clean_up(db, generation)) => {}
    }
}

/// Until another leads.
async fn over_and_over<R: Future<Output = Result<()>>>(period: Duration, round: impl Fn() -> R) {
    let mut tick = tokio::time::interval(period);
    loop {
        tick.tick().await;
        if let Err(error @ Error::NotLeader(_)) = round().await {
            tracing::info!(%error, "the janitor stops");
            return;
        }
    }
}

/// One round: dead builds, open transactions. A duty that fails keeps no other from being done; answers the first failure.
pub async fn keep_order(db: &Db, generation: i64) -> Result<()> {
    all_of([take_back(db, generation).await, end_long_transactions(db, generation).await.map(drop)])
}

/// One round of what has time; likewise.
pub async fn clean_up(db: &Db, generation: i64) -> Result<()> {
    all_of([
        give_up(db, generation).await,
        decay(db, generation).await.map(drop),
        prune(db, generation).await,
        retain_for_a_spell(db, generation).await,
    ])
}

fn all_of<const N: usize>(duties: [Result<()>; N]) -> Result<()> {
    let failures = duties.iter().filter_map(|duty| duty.as_ref().err());
    for error in failures.filter(|error| !matches!(error, Error::NotLeader(_))) {
        tracing::warn!(%error, "the janitor could not do one of its duties");
    }
    duties.into_iter().collect()
}

async fn take_back(db: &Db, generation: i64) -> Result<()> {
    let reaped = reap(db, generation).await?;
    if reaped > 0 {
        tracing::info!(reaped, "builds lost their lease");
    }
    Ok(())
}

async fn give_up(db: &Db, generation: i64) -> Result<()> {
    let failed = fail_unsupported(db, generation).await?;
    if failed > 0 {
        tracing::info!(failed, "builds that nobody can run have failed");
    }
    Ok(())
}

async fn retain_for_a_spell(db: &Db, generation: i64) -> Result<()> {
    let until = Instant::now() + SPELL;
    while retain(db, generation).await? > 0 && Instant::now() < until {
        sleep(REST).await;
    }
    Ok(())
}

/// Takes back builds whose lease ended. Answers how many.
pub async fn reap(db: &Db, generation: i64) -> Result<i32> {
    db.value(sqlx::query("SELECT ci.reap($1)").bind(generation)).await
}

/// Ends transactions that builders or evaluators keep open. Answers how many.
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
