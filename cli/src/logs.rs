//! `harmonia-ci logs`

use std::time::Duration;

use clap::Args;
use harmonia_service::api::LogPiece;
use reqwest::{Response, header};
use tokio::time::{sleep, timeout};

use crate::client::{ApiError, Client, Farm};
use crate::outcome::Failure;
use crate::output::is_unheard;
use crate::sse::{Event, Reader};
use crate::{style, target};
use harmonia_service::ansi::Filter;

/// Whoever does not follow has heard all there is when nothing more comes for so long.
const QUIET: Duration = Duration::from_millis(1500);
/// Before a lost connection is made again, so often in a row without a word.
const AGAIN: Duration = Duration::from_secs(1);
const TRIES: u32 = 60;

/// Print the log of a build
#[derive(Args)]
pub struct Arguments {
    /// A build's number, an attribute of the latest evaluation, a .drv path or an output path
    target: String,

    /// Go on until the build has ended, through all its attempts; wait for the first one if there is none yet
    #[arg(short, long)]
    follow: bool,

    /// That of this attempt; else of the last one
    #[arg(long, value_name = "N", conflicts_with = "follow")]
    attempt: Option<i64>,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    let build = target::find(&client, &arguments.target).await?;
    let mut printer = Printer::new(&client, arguments.follow);
    let path = match (arguments.follow, arguments.attempt) {
        (true, _) => format!("builds/{}/log?follow=true", build.id),
        (false, Some(attempt)) => format!("builds/{}/log?attempt={attempt}", build.id),
        (false, None) => format!("builds/{}/log", build.id),
    };
    let mut tries = 0;
    loop {
        let before = printer.after.clone();
        let outcome = printer.print(&path).await;
        tries = if printer.after == before { tries + 1 } else { 0 };
        let again = arguments.follow && tries < TRIES;
        match outcome {
            Ok(()) if printer.is_over || !arguments.follow => break,
            // A frontend that stops closes its streams in the middle.
            Ok(()) if !again => return Err(client.cut_off().into()),
            Err(error) if !error.is_away() || !again => return Err(error.into()),
            _ => sleep(AGAIN).await,
        }
    }
    if printer.runs_on {
        eprintln!("build {} still runs: `harmonia-ci logs -f {}` follows it", build.id, build.id);
    }
    Ok(())
}

struct Printer<'a> {
    client: &'a Client,
    follow: bool,
    filter: Filter,
    /// The attempt that was printed last, and where its next byte is expected.
    place: Option<(i64, u64)>,
    /// Where to go on after a lost connection.
    after: Option<String>,
    /// It was not followed, and had not ended.
    runs_on: bool,
    /// Nothing more comes.
    is_over: bool,
}

impl<'a> Printer<'a> {
    fn new(client: &'a Client, follow: bool) -> Self {
        let filter = Filter::new(style::is_wanted());
        Self { client, follow, filter, place: None, after: None, runs_on: false, is_over: false }
    }

    async fn print(&mut self, path: &str) -> Result<(), ApiError> {
        let answer = self.client.open(path, self.after.as_deref()).await?;
        let kind = answer.headers().get(header::CONTENT_TYPE);
        match kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
            true => self.live(answer).await,
            false => self.archived(answer).await,
        }
    }

    async fn archived(&mut self, mut answer: Response) -> Result<(), ApiError> {
        let mut rest = Vec::new();
        while !is_unheard()
            && let Some(bytes) = answer.chunk().await.map_err(|error| self.client.lost(error))?
        {
            rest.extend_from_slice(&bytes);
            let whole = whole_characters(&rest);
            let text: Vec<u8> = rest.drain(..whole).collect();
            self.show(&String::from_utf8_lossy(&text));
        }
        self.show(&String::from_utf8_lossy(&rest));
        self.is_over = true;
        Ok(())
    }

    async fn live(&mut self, mut answer: Response) -> Result<(), ApiError> {
        let mut reader = Reader::default();
        loop {
            let chunk = match self.follow {
                true => answer.chunk().await,
                false => match timeout(QUIET, answer.chunk()).await {
                    Ok(chunk) => chunk,
                    Err(_) => {
                        self.runs_on = true;
                        return Ok(());
                    }
                },
            };
            let Some(bytes) = chunk.map_err(|error| self.client.lost(error))? else { return Ok(()) };
            for event in reader.read(&bytes) {
                self.hear(&event);
            }
            if is_unheard() {
                return Ok(());
            }
        }
    }

    fn hear(&mut self, event: &Event) {
        // One without a place of its own leaves the last one as it was.
        if event.id.is_some() {
            self.after.clone_from(&event.id);
        }
        self.is_over |= event.kind == "end";
        let Ok(piece) = serde_json::from_str::<LogPiece>(&event.data) else { return };
        match self.place {
            Some((attempt, _)) if attempt != piece.attempt => {
                self.show(&format!("\n--- attempt {} ---\n", piece.attempt));
            }
            Some((_, next)) if piece.offset > next => {
                self.show(&format!("\n[... {} bytes are in the whole log]\n", piece.offset - next));
            }
            None if piece.offset > 0 => {
                self.show(&format!("[... the first {} bytes are in the whole log]\n", piece.offset));
            }
            _ => {}
        }
        self.place = Some((piece.attempt, piece.offset + piece.text.len() as u64));
        self.show(&piece.text);
    }

    fn show(&mut self, text: &str) {
        print!("{}", self.filter.pass(text));
        self.is_over |= is_unheard();
    }
}

/// How many of these bytes end with a whole character, as far as it can be told.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_that_is_cut_is_waited_for() {
        let bytes = "aé".as_bytes();
        assert_eq!(whole_characters(bytes), 3);
        assert_eq!(whole_characters(&bytes[..2]), 1);
        assert_eq!(whole_characters(b"a\xff"), 2);
    }
}
