//! `/builds/{id}/log/live`: the lines of a log as they are written, as HTML. However many watch however many builds, the database
//! is asked for all of them at once, and each line is painted once.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use harmonia_queue::builds::{self, Build, News, Piece, Place};
use harmonia_service::problem::Problem;
use maud::html;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};

use super::Web;
use super::ansi::{Line, Painter};
use super::ask::Numbered;
use super::frame::Trouble;
use super::log::line;
use super::visitor::Looking;
use crate::api::known_build;

/// How often the database is asked. A builder sends what was printed every two seconds, and half a second more is what a reader
/// should wait at most.
const LOOK: Duration = Duration::from_millis(400);
/// Lines that are kept for whoever comes later,
const KEPT: usize = 2000;
/// and bytes of them, at most: more than that many lines of any log that a person would read.
const ROOM: usize = 4 << 20;
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
    /// Bytes of `lines`.
    size: usize,
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
        self.size += html.len();
        self.lines.extend(fresh);
        while (self.lines.len() > KEPT || self.size > ROOM)
            && let Some(oldest) = self.lines.pop_front()
        {
            self.size -= oldest.len();
        }
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
        fresh.push(line(self.number, self.painter.line(&Line::of(&self.held))).into_string());
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

    /// Up to where its readers are.
    fn place(&self, build: i64) -> Place {
        let seen = self.lock();
        Place { build, attempt: seen.attempt, offset: i64::try_from(seen.offset).unwrap_or(i64::MAX) }
    }

    /// Tells its readers what is new. True: nothing more will come.
    fn tell(&self, news: &News) -> bool {
        let Some(attempt) = news.attempt else { return !news.open };
        let mut seen = self.lock();
        let another = seen.attempt != Some(attempt);
        if another {
            *seen = Seen::begin(attempt);
        }
        let lines = seen.take(&news.pieces, false);
        if another {
            let _ = self.told.send(Told::Whole);
        } else if !lines.is_empty() {
            let _ = self.told.send(Told::Lines(lines.into()));
        }
        false
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
    let Joined { watch, begin, live, alone } = web.watches.join(id);
    if alone {
        tokio::spawn(keep(web.clone()));
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

/// Somebody watches a build.
struct Joined {
    watch: Arc<Watch>,
    begin: Event,
    live: Receiver<Told>,
    /// Nobody else watches anything: nobody asks yet.
    alone: bool,
}

impl Watches {
    /// Under one lock, so that whoever comes as others leave is not overlooked.
    fn join(&self, build: i64) -> Joined {
        let mut watches = self.lock();
        let alone = watches.is_empty();
        let fresh = || Arc::new(Watch { seen: Mutex::default(), told: Sender::new(AHEAD) });
        let watch = watches.entry(build).or_insert_with(fresh).clone();
        let (begin, live) = watch.join();
        Joined { watch, begin, live, alone }
    }

    fn all(&self) -> Vec<(i64, Arc<Watch>)> {
        self.lock().iter().map(|(build, watch)| (*build, watch.clone())).collect()
    }

    /// Its readers hear that nothing more comes.
    fn end(&self, build: i64, watch: &Watch) {
        self.lock().remove(&build);
        let _ = watch.told.send(Told::End);
    }

    /// Forgets what nobody watches any more. True: nothing is left.
    fn tidy(&self) -> bool {
        let mut watches = self.lock();
        watches.retain(|_, watch| watch.told.receiver_count() > 0);
        watches.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Arc<Watch>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for all logs that are watched, for as long as any is.
async fn keep(web: Arc<Web>) {
    while !web.watches.tidy() {
        // A database that is away comes back; until then nothing is told.
        let _ = look(&web).await;
        tokio::time::sleep(LOOK).await;
    }
}

async fn look(web: &Web) -> Result<(), Problem> {
    let watched = web.watches.all();
    let places: Vec<Place> = watched.iter().map(|(build, watch)| watch.place(*build)).collect();
    let news = builds::news(&*web.db().await, &places).await?;
    for (build, watch) in watched {
        if news.get(&build).is_none_or(|news| watch.tell(news)) {
            web.watches.end(build, &watch);
        }
    }
    Ok(())
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
    fn what_is_kept_for_later_is_bounded_however_long_the_lines() {
        let mut seen = Seen::begin(1);
        let line = [&[b'<'; 10_000][..], b"\n"].concat();
        for n in 0..1000 {
            seen.take(&[piece(n * line.len() as i64, &line)], false);
        }
        assert!(seen.lines.iter().map(String::len).sum::<usize>() <= ROOM && seen.lines.len() > 10);
    }

    #[test]
    fn what_is_not_kept_is_said_and_lines_after_it_have_no_number() {
        let html = Seen::begin(1).take(&[piece(100, b"later\n")], false);
        assert!(html.contains("100 bytes are not kept") && !html.contains("id=\"L"), "{html}");
    }
}
