//! `/builds/{id}/log`: a log as lines with numbers and colours, a part of it at a time, and the lines in which something is
//! found. However long it is, one part of it is in memory.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use harmonia_queue::builds::{self, Attempt, Build};
use harmonia_service::problem::Problem;
use maud::{Markup, PreEscaped, html};
use serde::Deserialize;

use super::Web;
use super::ansi::{Line, Painter};
use super::ask::{Asked, Numbered};
use super::frame::{Page, Trouble};
use super::parts::{badge, number};
use super::visitor::Looking;
use crate::api::{known_build, log_object};
use crate::shelf::Plain;

/// Lines on a page.
const LISTED: usize = 1000;
/// Lines of the end, on the page of a build.
pub const END: usize = 300;
/// Found lines, at most.
const FOUND: usize = 200;
/// Bytes of HTML that lines of a page may take: every letter of a log can have a colour of its own.
const PAINTED: usize = 4 << 20;
/// A longer line is cut here and goes on as another one: its bytes are in memory.
const LONGEST: usize = 64 << 10;

/// Which part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The last lines.
    End(usize),
    /// From this line on.
    From(u64),
    /// Lines that contain this, whatever the case.
    With(String),
}

/// A part of a log.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Lines and their numbers.
    pub lines: Vec<(u64, Line)>,
    /// How many lines there are, as far as they were read.
    pub all: u64,
    /// There are further lines like these.
    pub more: bool,
}

/// Reads it.
pub async fn window(mut plain: Plain, part: &Part) -> Window {
    let mut reader = Reader::new(part);
    while let Some(Ok(bytes)) = plain.next().await {
        if !reader.take(&bytes) {
            break;
        }
    }
    reader.done()
}

struct Reader {
    part: Part,
    held: Vec<u8>,
    kept: VecDeque<(u64, Line)>,
    all: u64,
    more: bool,
}

impl Reader {
    fn new(part: &Part) -> Self {
        let part = match part {
            Part::With(words) => Part::With(words.to_lowercase()),
            part => part.clone(),
        };
        Self { part, held: Vec::new(), kept: VecDeque::new(), all: 0, more: false }
    }

    /// False: nothing more is wanted.
    fn take(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.held.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            if !self.line() {
                return false;
            }
        }
        self.held.extend_from_slice(rest);
        self.held.len() < LONGEST || self.line()
    }

    fn line(&mut self) -> bool {
        self.all += 1;
        let wanted = match &self.part {
            Part::End(_) => true,
            Part::From(first) => self.all >= *first,
            Part::With(words) => String::from_utf8_lossy(&self.held).to_lowercase().contains(words),
        };
        if !wanted {
            self.held.clear();
            return true;
        }
        let room = match &self.part {
            Part::End(lines) => *lines,
            Part::From(_) => LISTED,
            Part::With(_) => FOUND,
        };
        if self.kept.len() == room {
            self.more = true;
            match self.part {
                Part::End(_) => drop(self.kept.pop_front()),
                Part::From(_) | Part::With(_) => return false,
            }
        }
        self.kept.push_back((self.all, Line::of(&self.held)));
        self.held.clear();
        true
    }

    fn done(mut self) -> Window {
        if !self.held.is_empty() && (!self.more || matches!(self.part, Part::End(_))) {
            self.line();
        }
        Window { lines: self.kept.into(), all: self.all, more: self.more }
    }
}

impl Web {
    /// A part of what an attempt left, the last one that left something if none is named.
    pub async fn archived(
        &self,
        build: &Build,
        attempts: &[Attempt],
        attempt: Option<i64>,
        part: &Part,
    ) -> Result<Option<(i64, Window)>, Problem> {
        let chosen = attempts.iter().rev().filter(|known| known.outcome.is_some());
        for known in chosen.filter(|known| attempt.is_none_or(|attempt| attempt == known.id)) {
            let Some(object) = log_object(&build.drv_path, known.id) else { continue };
            if let Some(plain) = self.shelf.plain(&object).await? {
                return Ok(Some((known.id, window(plain, part).await)));
            }
        }
        Ok(None)
    }
}

impl Window {
    /// Its lines as HTML. If that is too much, those that are left out are lines of it no more: the first ones of an end, the last
    /// ones of anything else.
    pub fn paint(&mut self, part: &Part, line: impl Fn(u64, &Line, &mut Painter) -> Markup) -> Markup {
        let (mut painter, mut painted, mut size) = (Painter::default(), VecDeque::new(), 0);
        for (n, text) in &self.lines {
            let html = line(*n, text, &mut painter).into_string();
            size += html.len();
            painted.push_back(html);
            if size > PAINTED && !matches!(part, Part::End(_)) {
                painted.pop_back();
                break;
            }
            while size > PAINTED
                && let Some(first) = painted.pop_front()
            {
                size -= first.len();
            }
        }
        let left_out = self.lines.len() - painted.len();
        self.more |= left_out > 0;
        match part {
            Part::End(_) => drop(self.lines.drain(..left_out)),
            _ => self.lines.truncate(painted.len()),
        }
        PreEscaped(Vec::from(painted).concat())
    }

    /// The same, as they are in the log.
    pub fn paint_lines(&mut self, part: &Part) -> Markup {
        self.paint(part, |n, text, painter| line(Some(n), painter.line(text)))
    }
}

/// One line; those of a log whose beginning is not known have no number.
pub fn line(n: Option<u64>, text: Markup) -> Markup {
    html! {
        @match n {
            Some(n) => div.l id=(format!("L{n}")) { a.n href=(format!("#L{n}")) aria-label=(format!("line {n}")) { (n) } span { (text) } },
            None => div.l { span.n {} span { (text) } },
        }
    }
}

/// What is asked for.
#[derive(Deserialize)]
pub struct Which {
    attempt: Option<i64>,
    line: Option<u64>,
    find: Option<String>,
}

/// The page.
pub async fn show(
    Looking(visitor): Looking,
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
    Asked(which): Asked<Which>,
) -> Result<Response, Trouble> {
    let db = web.db().await;
    let build = known_build(&db, id).await?;
    let attempts = builds::attempts(&db, id).await?;
    drop(db);
    let found = which.find.as_deref().map(str::trim).filter(|words| !words.is_empty());
    let part = match (found, which.line) {
        (Some(words), _) => Part::With(words.to_owned()),
        (None, Some(line)) => Part::From(line.saturating_sub(20).max(1)),
        (None, None) => Part::End(LISTED),
    };
    let read = web.archived(&build, &attempts, which.attempt, &part).await?;
    let read = read.map(|(attempt, mut window)| {
        let painted = match part {
            Part::With(_) => window.paint(&part, |n, text, _| hit(id, attempt, n, text)),
            _ => window.paint_lines(&part),
        };
        (attempt, window, painted)
    });
    let address = |attempt: i64, more: &str| format!("/builds/{id}/log?attempt={attempt}{more}");
    let content = html! {
        p.crumbs { a href=(format!("/builds/{id}")) { "Build " (id) } }
        h1 { "Log of " (build.name()) " " (badge(&build.state)) }
        @match &read {
            None => p { "No attempt has left a log yet. " a href=(format!("/builds/{id}#log")) { "The build" } " shows what is being written." },
            Some((attempt, window, painted)) => {
                (tools(id, *attempt, found))
                p.legend {
                    @match &part {
                        Part::With(words) => { (number(window.lines.len() as i64)) @if window.more { " or more" } " lines with “" (words) "”" },
                        Part::End(_) => { "The last " (number(window.lines.len() as i64)) " of " (number(window.all as i64)) " lines" },
                        Part::From(first) => { "From line " (number(*first as i64)) " on" },
                    }
                    " · attempt " (attempt) " · " a href=(format!("/api/builds/{id}/log?attempt={attempt}")) { "plain text" }
                }
                @if let Some((first, _)) = window.lines.first().filter(|(first, _)| *first > 1 && found.is_none()) {
                    p { a href=(address(*attempt, &format!("&line={}", first.saturating_sub(LISTED as u64 - 20).max(1)))) rel="prev" { "Earlier lines" } }
                }
                div.log role="region" aria-label="Log" tabindex="0" { (painted) }
                @if let (Part::From(_), true, Some((last, _))) = (&part, window.more, window.lines.last()) {
                    p.further { a href=(address(*attempt, &format!("&line={}", last + 21))) rel="next" { "Later lines" } }
                }
            }
        }
    };
    let (title, rest) = (format!("Log of {}", build.name()), html! {});
    Ok(Page { title: &title, place: "", visitor: &visitor, again: None, stale: false, content, rest }
        .into_response())
}

/// Searches, jumps.
pub fn tools(build: i64, attempt: i64, found: Option<&str>) -> Markup {
    html! {
        form.search.log-tools action=(format!("/builds/{build}/log")) {
            input type="hidden" name="attempt" value=(attempt);
            input type="search" name="find" value=(found.unwrap_or_default()) aria-label="Find in the log" placeholder="Find in the log" maxlength="200";
            button type="submit" { "Find" }
            input.short type="number" name="line" min="1" aria-label="Go to line" placeholder="Line";
            button type="submit" { "Go" }
        }
    }
}

/// A line that was found; what colours those before it left on is not known.
fn hit(build: i64, attempt: i64, n: u64, text: &Line) -> Markup {
    html! {
        div.l { a.n href=(format!("/builds/{build}/log?attempt={attempt}&line={n}#L{n}")) aria-label=(format!("line {n} and those around it")) { (n) }
            span { (Painter::default().line(text)) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], size: usize, part: Part) -> Window {
        let mut reader = Reader::new(&part);
        for piece in text.chunks(size) {
            if !reader.take(piece) {
                break;
            }
        }
        reader.done()
    }

    fn numbers(window: &Window) -> Vec<u64> {
        window.lines.iter().map(|(n, _)| *n).collect()
    }

    #[test]
    fn lines_are_numbered_wherever_the_bytes_are_cut() {
        for size in 1..9 {
            let window = read(b"one\ntwo\n\nfour", size, Part::End(3));
            assert_eq!(numbers(&window), [2, 3, 4], "{size}");
            assert_eq!((window.lines[2].1.text.as_str(), window.all, window.more), ("four", 4, true));
        }
    }

    #[test]
    fn a_part_begins_where_it_should_and_says_whether_more_follows() {
        let text = (1..=3000).map(|n| format!("line {n}\n")).collect::<String>();
        let window = read(text.as_bytes(), 4096, Part::From(1500));
        assert_eq!((numbers(&window)[0], window.lines.len(), window.more), (1500, LISTED, true));
        let window = read(text.as_bytes(), 4096, Part::From(2999));
        assert_eq!((numbers(&window), window.more), (vec![2999, 3000], false));
        assert_eq!(read(b"", 1, Part::From(1)), Window::default());
    }

    #[test]
    fn what_is_found_is_bounded_and_has_no_case() {
        let text = "Error: a\nfine\nerror b\n".repeat(300);
        let window = read(text.as_bytes(), 1000, Part::With("ERROR".to_owned()));
        assert_eq!((window.lines.len(), window.more), (FOUND, true));
        assert_eq!(numbers(&window)[..3], [1, 3, 4]);
    }

    #[test]
    fn lines_that_take_too_much_html_are_left_out() {
        let text = "\u{1b}[31mx\u{1b}[32my".repeat(700) + "\n";
        let text = text.repeat(1000);
        let part = Part::End(1000);
        let mut window = read(text.as_bytes(), 64 << 10, part.clone());
        let painted = window.paint_lines(&part).into_string();
        assert!(painted.len() <= PAINTED && painted.len() > PAINTED / 2, "{}", painted.len());
        assert!(window.more && window.lines.len() < 1000);
        assert_eq!(numbers(&window).last(), Some(&1000), "the end is shown");
        assert!(painted.contains("id=\"L1000\"") && !painted.contains("id=\"L1\""));
        let part = Part::From(1);
        let mut window = read(text.as_bytes(), 64 << 10, part.clone());
        let painted = window.paint_lines(&part).into_string();
        let last = *numbers(&window).last().unwrap_or(&0);
        assert!(window.more && numbers(&window)[0] == 1 && last < 1000);
        assert!(painted.contains(&format!("id=\"L{last}\"")) && painted.len() <= PAINTED);
    }

    #[test]
    fn a_line_without_an_end_takes_no_memory() {
        // No byte of it is text: each would be three.
        let window = read(&vec![0xff; 10 << 20], 64 << 10, Part::End(5));
        assert!(window.lines.iter().all(|(_, line)| line.text.capacity() <= 8 << 10 && line.more > LONGEST));
        assert_eq!(window.lines.len(), 5);
    }
}
