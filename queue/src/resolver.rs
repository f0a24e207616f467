//! The loop that turns ends into beginnings. Any number of processes may run it: the database lets one step at a time.

use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::Row;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::listen::{Channel, notify};
use crate::{Db, Result};

/// Rows a step touches at most: some 20 ms of work, so that nobody waits long for what it locks.
pub const STEP_ROWS: i32 = 250;
/// Wake-ups are sent this far apart at least, each for all that became ready meanwhile.
const WAKE_EVERY: Duration = Duration::from_millis(15);
/// Without a nudge it looks this often.
const POLL: Duration = Duration::from_millis(500);
/// A step costs about a millisecond however little it finds: after a small one, more is let gather.
const GATHER: Duration = Duration::from_millis(5);
/// So few events are a small step.
const SMALL: i32 = STEP_ROWS / 5;
/// Somebody else is at it, but may not have seen what we were nudged for.
const BUSY: Duration = Duration::from_millis(10);

/// What a step did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Another process was at it.
    pub busy: bool,
    /// Events looked at. 0 and not busy: all is resolved.
    pub events: i32,
    /// Classes that gained ready jobs.
    pub classes: Vec<i32>,
    /// Jobs that ended or opened again.
    pub ended: i32,
    /// A running build is to be stopped.
    pub stops: bool,
}

/// One step of at most `rows` rows.
pub async fn step(db: &Db, rows: i32) -> Result<Step> {
    let row = db.row(sqlx::query("SELECT * FROM ci.resolve($1)").bind(rows)).await?;
    let events: i32 = row.try_get("events")?;
    Ok(Step {
        busy: events < 0,
        events: events.max(0),
        classes: row.try_get::<Option<_>, _>("classes")?.unwrap_or_default(),
        ended: row.try_get("ended")?,
        stops: row.try_get("stops")?,
    })
}

/// Steps until all is resolved, without wake-ups: for tests and tools.
pub async fn settle(db: &Db) -> Result<()> {
    loop {
        let step = step(db, STEP_ROWS).await?;
        if step.busy {
            tokio::time::sleep(BUSY).await;
        } else if step.events == 0 {
            return Ok(());
        }
    }
}

/// Runs the resolver in this process.
#[derive(Debug, Default)]
pub struct Resolver {
    nudged: Notify,
}

impl Resolver {
    /// There may be something to resolve: to be called after a finish, a chunk, a rebuild, once committed.
    pub fn nudge(&self) {
        self.nudged.notify_one();
    }

    /// Resolves for as long as it lives, on a connection of its own.
    pub async fn run(&self, db: &Db) {
        let db = &db.alone();
        let mut wake = WakeUps::default();
        loop {
            match step(db, STEP_ROWS).await {
                Ok(step) if step.busy => tokio::time::sleep(BUSY).await,
                Ok(step) => {
                    let (idle, small) = (step.events == 0, step.events < SMALL);
                    wake.add(step);
                    if let Err(error) = wake.send(db, idle).await {
                        tracing::warn!(%error, "could not wake builders; they poll");
                    }
                    if idle {
                        let _ = timeout(POLL, self.nudged.notified()).await;
                    } else if small {
                        tokio::time::sleep(GATHER).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "could not resolve");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct WakeUps {
    classes: BTreeSet<i32>,
    ended: bool,
    stops: bool,
    sent: Option<Instant>,
}

impl WakeUps {
    fn add(&mut self, step: Step) {
        self.classes.extend(step.classes);
        self.ended |= step.ended > 0;
        self.stops |= step.stops;
    }

    /// Sends what is due; `now`, whatever there is.
    async fn send(&mut self, db: &Db, now: bool) -> Result<()> {
        if !now && self.sent.is_some_and(|sent| sent.elapsed() < WAKE_EVERY) {
            return Ok(());
        }
        if !self.classes.is_empty() {
            let classes: Vec<String> = std::mem::take(&mut self.classes).iter().map(i32::to_string).collect();
            notify(db, Channel::Ready, &classes.join(",")).await?;
            self.sent = Some(Instant::now());
        }
        if std::mem::take(&mut self.ended) {
            notify(db, Channel::Ended, "").await?;
        }
        if std::mem::take(&mut self.stops) {
            notify(db, Channel::Stop, "").await?;
        }
        Ok(())
    }
}
