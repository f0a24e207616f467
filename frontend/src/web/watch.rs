//! `/builds/{id}/log/live`: the lines of a log as they are written, as HTML. However many watch a build, the database is asked
//! once a second for it, and each line is painted once.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use harmonia_queue::builds::{self, Attempt, Build, Piece};
use harmonia_service::problem::Problem;
use maud::html;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};

use super::Web;
use super::ansi::Painter;
use super::ask::Numbered;
use super::frame::Trouble;
use super::log::line;
use super::visitor::Looking;
use crate::api::known_build;

/// How often the database is asked.
const LOOK: Duration = Duration::from_secs(1);
/// Lines that are kept for whoever comes later.
const KEPT: usize = 2000;
/// Messages that may wait for a slow reader, who is then sent everything once more.
const AHEAD: usize = 16;
/// A line that does not end is shown in pieces.
const LONGEST: usize = 16 << 10;

/// Builds that somebody watches.
#[derive(Default)]
pub struct Watches(Mutex<HashMap<i64, Arc<Watch>>>);

struct Watch {
    seen: Mutex<Seen>,
    told: Sender<Told>,
}

#[derive(Debug, Clone)]
enum Told {
    /// Further lines.
    Lines(Arc<str>),
    /// Forget what was before: another attempt begins.
    Whole,
    /// Nothing more comes.
    End,
}

/// What is known of a log that is being written.
#[derive(Default)]
struct Seen {
    attempt: Option<i64>,
    offset: u64,
    /// The number of the next line, if the beginning was seen.
    number: Option<u64>,
    painter: Painter,
    held: Vec<u8>,
    lines: VecDeque<String>,
}

impl Seen {
    fn begin(attempt: i64) -> Self {
        Self { attempt: Some(attempt), number: Some(1), ..Self::default() }
    }

    /// What is new, as HTML.
    fn take(&mut self, pieces: &[Piece], last: bool) -> String {
        let mut fresh = Vec::new();
        for piece in pieces {
            let starts = piece.offset.unsigned_abs();
            if starts > self.offset {
                let missed = starts - self.offset;
                self.held.clear();
                self.number = None;
                fresh.push(
                    html! { div.l.gap { span.n {} span { (missed) " bytes are not kept while it runs" } } }
                        .into_string(),
                );
            }
            let known = usize::try_from(self.offset.saturating_sub(starts)).unwrap_or(usize::MAX);
            self.offset = self.offset.max(starts + piece.data.len() as u64);
            self.bytes(piece.data.get(known..).unwrap_or_default(), &mut fresh);
        }
        if last && !self.held.is_empty() {
            self.line(&mut fresh);
        }
        let html = fresh.concat();
        self.lines.extend(fresh);
        self.lines.drain(..self.lines.len().saturating_sub(KEPT));
        html
    }

    fn bytes(&mut self, bytes: &[u8], fresh: &mut Vec<String>) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.held.extend_from_slice(part);
            if self.held.last() == Some(&b'\n') {
                self.held.pop();
                self.line(fresh);
            } else if self.held.len() > LONGEST {
                self.line(fresh);
            }
        }
    }

    fn line(&mut self, fresh: &mut Vec<String>) {
        let text = String::from_utf8_lossy(&self.held);
        fresh.push(line(self.number, self.painter.line(&text)).into_string());
        self.number = self.number.map(|number| number + 1);
        self.held.clear();
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All lines so far; what comes later is heard.
    fn join(&self) -> (Event, Receiver<Told>) {
        let seen = self.lock();
        (whole(&seen), self.told.subscribe())
    }
}

/// What has no data is no event: even a log without lines begins with something.
fn whole(seen: &Seen) -> Event {
    let begin = std::iter::once("<!---->");
    Event::default()
        .event("whole")
        .data(begin.chain(seen.lines.iter().map(String::as_str)).collect::<String>())
}

/// The lines that are known of what runs, for a page that is loaded now.
pub async fn now(web: &Web, build: &Build) -> Result<String, Problem> {
    let Some(attempt) = build.attempt else { return Ok(String::new()) };
    let pieces = builds::tail(&*web.db().await, build.id, attempt, 0).await?;
    Ok(Seen::begin(attempt).take(&pieces, false))
}

/// Server-sent events: `whole` is all that is known, `lines` what comes after it, `end` the last one.
pub async fn follow(
    _: Looking,
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
) -> Result<Response, Trouble> {
    let permit = web.streams.enter()?;
    known_build(&*web.db().await, id).await?;
    let (watch, fresh) = web.watches.watch(id);
    let (begin, live) = watch.join();
    if fresh {
        tokio::spawn(keep(web.clone(), id, watch.clone()));
    }
    let events = stream::once(async { begin }).chain(coming(watch, live));
    Ok(web.streams.answer(permit, events.boxed()).into_response())
}

fn coming(watch: Arc<Watch>, live: Receiver<Told>) -> impl Stream<Item = Event> + Send {
    stream::unfold(Some((watch, live)), |state| async move {
        let (watch, mut live) = state?;
        match live.recv().await {
            Ok(Told::Lines(lines)) => {
                Some((Event::default().event("lines").data(&*lines), Some((watch, live))))
            }
            Ok(Told::Whole) | Err(RecvError::Lagged(_)) => {
                let (event, live) = watch.join();
                Some((event, Some((watch, live))))
            }
            Ok(Told::End) => Some((Event::default().event("end").data("-"), None)),
            Err(RecvError::Closed) => None,
        }
    })
}

impl Watches {
    /// The one that watches a build; true: it is new, and nobody keeps it yet.
    fn watch(&self, build: i64) -> (Arc<Watch>, bool) {
        let mut watches = self.lock();
        if let Some(watch) = watches.get(&build) {
            return (watch.clone(), false);
        }
        let watch = Arc::new(Watch { seen: Mutex::default(), told: Sender::new(AHEAD) });
        watches.insert(build, watch.clone());
        (watch, true)
    }

    /// Whether it has ended, or nobody watches any more; then it is gone.
    fn leave(&self, build: i64, watch: &Watch, ended: bool) -> bool {
        let mut watches = self.lock();
        let over = ended || watch.told.receiver_count() == 0;
        if over {
            watches.remove(&build);
        }
        over
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Arc<Watch>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for a log until the build has ended, or nobody watches.
async fn keep(web: Arc<Web>, build: i64, watch: Arc<Watch>) {
    loop {
        // A database that is away comes back; until then nothing is told.
        let ended = step(&web, build, &watch).await.unwrap_or(false);
        if web.watches.leave(build, &watch, ended) {
            // Whoever joined in between hears it too: it was subscribed before this is sent, or finds another watch.
            let _ = watch.told.send(Told::End);
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// One look. True: nothing more will come.
async fn step(web: &Web, build: i64, watch: &Watch) -> Result<bool, Problem> {
    let db = web.db().await;
    let Some(found) = builds::get(&db, build).await? else { return Ok(true) };
    let attempts: Vec<Attempt> =
        if found.attempt.is_none() { Vec::new() } else { builds::attempts(&db, build).await? };
    let running = attempts.iter().find(|attempt| attempt.outcome.is_none()).map(|attempt| attempt.id);
    let Some(attempt) = running else { return Ok(!found.is_open()) };
    let offset = {
        let mut seen = watch.lock();
        if seen.attempt != Some(attempt) {
            *seen = Seen::begin(attempt);
            let _ = watch.told.send(Told::Whole);
        }
        i64::try_from(seen.offset).unwrap_or(i64::MAX)
    };
    let pieces = builds::tail(&db, build, attempt, offset).await?;
    let mut seen = watch.lock();
    let html = seen.take(&pieces, false);
    if !html.is_empty() {
        let _ = watch.told.send(Told::Lines(html.into()));
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: i64, data: &[u8]) -> Piece {
        Piece { attempt: 1, offset, data: data.to_vec() }
    }

    #[test]
    fn lines_come_whole_and_once() {
        let mut seen = Seen::begin(1);
        let first = seen.take(&[piece(0, b"one\ntw")], false);
        assert!(first.contains("id=\"L1\"") && !first.contains("tw"), "{first}");
        let second = seen.take(&[piece(0, b"one\ntwo\n<b>")], false);
        assert!(
            second.contains("id=\"L2\"") && second.contains(">two<") && !second.contains("one"),
            "{second}"
        );
        assert!(seen.take(&[], true).contains("&lt;b&gt;"));
    }

    #[test]
    fn what_is_not_kept_is_said_and_lines_after_it_have_no_number() {
        let html = Seen::begin(1).take(&[piece(100, b"later\n")], false);
        assert!(html.contains("100 bytes are not kept") && !html.contains("id=\"L"), "{html}");
    }
}
