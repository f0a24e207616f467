//! Follows a build's log while it is written, from attempt to attempt if that is wanted.
//!
//! Every follower asks the database itself, once a second and by its share of the turns that the API has; how many there may
//! be is bounded. An attempt's last words may never have come by the database: once it has ended, the archive has them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use axum::response::sse;
use futures::{StreamExt, stream};
use harmonia_queue::builds::{self, Attempt, Build, Piece};
use harmonia_service::api::{LogEnd, LogPiece, LogState};
use harmonia_service::problem::Problem;
use harmonia_service::sentence::sentence;
use serde::Serialize;
use tokio::sync::mpsc;

use super::Api;
use super::log::object;
use super::utf8::text_of;
use crate::shelf::Plain;

/// How often the database is asked.
const LOOK: Duration = Duration::from_secs(1);
/// How long an archive that does not answer is asked again.
const PATIENCE: Duration = Duration::from_secs(30);
/// Events that wait for a slow client, each of up to 64 KiB.
const AHEAD: usize = 4;

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// With this attempt; none: with the next one.
    pub attempt: Option<i64>,
    /// At this byte of its log.
    pub offset: u64,
    /// And go on with the attempts after it.
    pub across: bool,
}

/// One client that follows one build.
pub struct Follower {
    api: Arc<Api>,
    build: i64,
    drv_path: String,
    /// Attempts that need not be looked at any more.
    done: Vec<i64>,
    told: Option<LogState>,
    out: mpsc::Sender<sse::Event>,
}

/// The client went away.
struct Gone;

impl Follower {
    /// The events, as they come.
    pub fn answer(
        api: Arc<Api>,
        build: Build,
        attempts: &[Attempt],
        start: Start,
    ) -> Result<Response, Problem> {
        let permit = api.streams.enter()?;
        let (out, events) = mpsc::channel(AHEAD);
        let events =
            stream::unfold(events, |mut events| async { events.recv().await.map(|event| (event, events)) });
        let response = api.streams.answer(permit, events.boxed());
        let done = passed(attempts, start.attempt);
        let follower = Self { api, build: build.id, drv_path: build.drv_path, done, told: None, out };
        tokio::spawn(async move {
            // Whoever is gone needs to hear nothing.
            let _ = follower.follow(start).await;
        });
        Ok(response)
    }

    async fn follow(mut self, start: Start) -> Result<(), Gone> {
        let (mut next, mut offset, mut last) = (start.attempt, start.offset, None);
        loop {
            let attempt = match next {
                Some(attempt) => attempt,
                None => match self.wait().await? {
                    Next::Attempt(attempt) => attempt,
                    Next::Ended(state) => return self.end(ending(last, &state)).await,
                },
            };
            let outcome = self.attempt(attempt, offset).await?;
            if !start.across {
                return self.end(LogEnd { attempt: Some(attempt), outcome }).await;
            }
            self.done.push(attempt);
            (next, offset, last) = (None, 0, Some((attempt, outcome)));
        }
    }

    /// Until there is an attempt that has not been told, or can be none any more.
    async fn wait(&mut self) -> Result<Next, Gone> {
        loop {
            if let Ok((build, attempts)) = self.look().await {
                let state = build.as_ref().map_or("gone", |build| &build.state).to_owned();
                let fresh = attempts.iter().find(|attempt| !self.done.contains(&attempt.id));
                let attempt = fresh.map(|attempt| attempt.id);
                if attempt.is_some() || build.as_ref().is_some_and(Build::is_open) {
                    self.say(LogState { state: state.clone(), attempt }).await?;
                }
                match attempt {
                    Some(attempt) => return Ok(Next::Attempt(attempt)),
                    None if !build.is_some_and(|build| build.is_open()) => return Ok(Next::Ended(state)),
                    None => {}
                }
            }
            self.pause().await?;
        }
    }

    /// All that an attempt says, until it has ended. Answers how.
    async fn attempt(&mut self, attempt: i64, mut offset: u64) -> Result<String, Gone> {
        loop {
            // First whether it runs, then what it said: what comes later is not missed.
            if let Ok((_, attempts)) = self.look().await {
                let outcome = match attempts.into_iter().find(|known| known.id == attempt) {
                    Some(known) => known.outcome,
                    None => Some("gone".to_owned()),
                };
                let ended = outcome.is_some();
                if ended {
                    offset = self.archived(attempt, offset).await?;
                }
                offset = self.tail(attempt, offset, ended).await?;
                if let Some(outcome) = outcome {
                    return Ok(outcome);
                }
            }
            self.pause().await?;
        }
    }

    async fn look(&self) -> Result<(Option<Build>, Vec<Attempt>), Problem> {
        let db = self.api.db().await;
        Ok((builds::get(&db, self.build).await?, builds::attempts(&db, self.build).await?))
    }

    /// What the database has of it, from an offset on. Answers where that ends.
    async fn tail(&self, attempt: i64, mut offset: u64, ended: bool) -> Result<u64, Gone> {
        let from = i64::try_from(offset).unwrap_or(i64::MAX);
        let found = builds::tail(&*self.api.db().await, self.build, attempt, from).await;
        let runs = runs(found.map_err(Problem::from).unwrap_or_default());
        for (index, (starts, bytes)) in runs.iter().enumerate() {
            let last = ended || index + 1 < runs.len();
            offset = self.piece(attempt, *starts, bytes, last).await?;
        }
        Ok(offset)
    }

    /// What the archive has of it, from an offset on. Answers where that ends. An archive that does not answer is asked again for a
    /// while: only who says that there is nothing is believed at once.
    async fn archived(&self, attempt: i64, mut offset: u64) -> Result<u64, Gone> {
        let Some(object) = object(&self.drv_path, attempt) else { return Ok(offset) };
        let mut since = Instant::now();
        while since.elapsed() < PATIENCE {
            match self.api.shelf.plain(&object).await {
                Ok(None) => return Ok(offset),
                Ok(Some(plain)) => match self.copy(attempt, offset, plain).await? {
                    Copied::Whole(end) => return Ok(end),
                    Copied::Part(end) if end > offset => (offset, since) = (end, Instant::now()),
                    Copied::Part(_) => {}
                },
                Err(_) => {}
            }
            self.pause().await?;
        }
        tracing::warn!(object, "whoever follows a log does not hear the end of it");
        Ok(offset)
    }

    /// Sends what lies behind an offset.
    async fn copy(&self, attempt: i64, mut offset: u64, mut plain: Plain) -> Result<Copied, Gone> {
        let (mut at, mut held) = (0, Vec::new());
        while let Some(bytes) = plain.next().await {
            let bytes = match bytes {
                Ok(bytes) => bytes,
                Err(error) => {
                    tracing::warn!(attempt, error = sentence(&error), "a log breaks off");
                    return Ok(Copied::Part(offset));
                }
            };
            // What is held back lies right before what comes; all before that is known.
            let known = offset + held.len() as u64;
            let known = usize::try_from(known.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
            at += bytes.len() as u64;
            held.extend_from_slice(&bytes[known..]);
            let end = self.piece(attempt, offset, &held, false).await?;
            held.drain(..usize::try_from(end - offset).unwrap_or(held.len()));
            offset = end;
        }
        self.piece(attempt, offset, &held, true).await.map(Copied::Whole)
    }

    /// Sends bytes as text. Answers where the next ones begin.
    async fn piece(&self, attempt: i64, offset: u64, bytes: &[u8], last: bool) -> Result<u64, Gone> {
        let (text, used) = text_of(bytes, last);
        let end = offset + used as u64;
        if used > 0 {
            let piece = data(&LogPiece { attempt, offset, text }).id(format!("{attempt}:{end}"));
            self.send(piece).await?;
        }
        Ok(end)
    }

    async fn say(&mut self, state: LogState) -> Result<(), Gone> {
        if self.told.as_ref() == Some(&state) {
            return Ok(());
        }
        self.send(data(&state).event("state")).await?;
        self.told = Some(state);
        Ok(())
    }

    async fn end(&self, end: LogEnd) -> Result<(), Gone> {
        self.send(data(&end).event("end")).await
    }

    async fn send(&self, event: sse::Event) -> Result<(), Gone> {
        self.out.send(event).await.map_err(|_| Gone)
    }

    async fn pause(&self) -> Result<(), Gone> {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => Ok(()),
            () = self.out.closed() => Err(Gone),
        }
    }
}

/// Up to where a log was sent,
enum Copied {
    /// its end,
    Whole(u64),
    /// or where it broke off.
    Part(u64),
}

enum Next {
    Attempt(i64),
    /// In this state.
    Ended(String),
}

/// Attempts that ended before the one to begin with, or before anybody followed.
fn passed(attempts: &[Attempt], begin: Option<i64>) -> Vec<i64> {
    let before = attempts.iter().take_while(|attempt| Some(attempt.id) != begin);
    before.filter(|attempt| attempt.outcome.is_some()).map(|attempt| attempt.id).collect()
}

/// How a build ended that was followed to its end: its last attempt says more than `failed`, but nothing about a build that
/// was cancelled after it.
fn ending(last: Option<(i64, String)>, state: &str) -> LogEnd {
    match last {
        Some((attempt, outcome)) if ["succeeded", "failed", "gone"].contains(&state) => {
            LogEnd { attempt: Some(attempt), outcome }
        }
        last => LogEnd { attempt: last.map(|(attempt, _)| attempt), outcome: state.to_owned() },
    }
}

/// Pieces that join up, joined, each with its offset.
fn runs(pieces: Vec<Piece>) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for piece in pieces {
        let starts = piece.offset.unsigned_abs();
        match runs.last_mut() {
            Some((before, bytes)) if *before + bytes.len() as u64 == starts => bytes.extend(piece.data),
            _ => runs.push((starts, piece.data)),
        }
    }
    runs
}

fn data(value: &impl Serialize) -> sse::Event {
    // These words are always fit for JSON.
    sse::Event::default().json_data(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(id: i64, outcome: Option<&str>) -> Attempt {
        let (node, started_at, ended_at, message) = (None, String::new(), None, None);
        Attempt { id, node, started_at, ended_at, seconds: 0.0, outcome: outcome.map(str::to_owned), message }
    }

    #[test]
    fn what_ended_before_is_not_told_again() {
        let attempts = [attempt(40, Some("oom")), attempt(9, Some("interrupted")), attempt(41, None)];
        assert_eq!(passed(&attempts, None), [40, 9]);
        assert_eq!(passed(&attempts, Some(41)), [40, 9]);
        assert_eq!(passed(&attempts, Some(9)), [40]);
    }

    #[test]
    fn the_last_attempt_tells_how_a_build_ended_unless_something_came_after_it() {
        let last = || Some((3, "build_error".to_owned()));
        assert_eq!(ending(last(), "failed"), LogEnd { attempt: Some(3), outcome: "build_error".to_owned() });
        assert_eq!(ending(last(), "cancelled"), LogEnd { attempt: Some(3), outcome: "cancelled".to_owned() });
        assert_eq!(ending(None, "failed"), LogEnd { attempt: None, outcome: "failed".to_owned() });
    }

    #[test]
    fn pieces_join_up_and_gaps_stay() {
        let piece = |offset, data: &[u8]| Piece { attempt: 1, offset, data: data.to_vec() };
        let pieces = vec![piece(4, b"ab"), piece(6, b"c"), piece(9, b"d")];
        assert_eq!(runs(pieces), [(4, b"abc".to_vec()), (9, b"d".to_vec())]);
        assert_eq!(runs(Vec::new()), []);
    }
}
