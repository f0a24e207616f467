//! Waiting for an evaluation: one live line on a terminal, plain lines elsewhere; beside what a program reads.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use harmonia_service::api::{Evaluation, EvaluationDetail, EvaluationStatus};
use harmonia_service::moment::short;

use crate::client::Client;
use crate::outcome::Failure;
use crate::output::Output;
use crate::{status, table};

/// How often the farm is asked.
const LOOK: Duration = Duration::from_millis(500);
/// How long it may be away before waiting for it is given up.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until nothing more will come of it, and says what has.
pub async fn until_done(client: &Client, id: i64, output: Output) -> Result<(), Failure> {
    let evaluation = follow(client, id, Line::new(output)).await?;
    status::print(client, id, output).await?;
    match evaluation.status {
        EvaluationStatus::Succeeded => Ok(()),
        _ => Err(Failure::Reported),
    }
}

async fn follow(client: &Client, id: i64, mut line: Line) -> Result<Evaluation, Failure> {
    let begun = Instant::now();
    let mut heard = Instant::now();
    loop {
        match client.get::<EvaluationDetail>(&format!("evals/{id}?limit=1")).await {
            Ok(EvaluationDetail { evaluation, .. }) => {
                heard = Instant::now();
                if evaluation.status.is_final() {
                    line.clear();
                    return Ok(evaluation);
                }
                line.draw(&progress(&evaluation), begun.elapsed());
            }
            Err(error) if error.is_away() && heard.elapsed() < PATIENCE => {
                line.draw("the farm does not answer", begun.elapsed());
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// How far it is.
fn progress(evaluation: &Evaluation) -> String {
    let builds = &evaluation.builds;
    let counts = [
        ("built", builds.succeeded),
        ("failed", builds.failed + builds.dep_failed + builds.cancelled),
        ("cached", builds.cached),
        ("running", builds.running),
        ("queued", builds.waiting),
    ];
    let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {word}")).collect();
    format!("evaluation {} {}: {}", evaluation.id, evaluation.status.as_str(), counts.join(", "))
}

/// A line that is drawn over itself, or lines that follow each other when something changed.
struct Line {
    /// On the standard error: JSON is on the output.
    aside: bool,
    live: bool,
    last: String,
}

impl Line {
    fn new(output: Output) -> Self {
        let aside = output == Output::Json;
        let live = if aside { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        Self { aside, live, last: String::new() }
    }

    fn draw(&mut self, text: &str, elapsed: Duration) {
        if self.live {
            let text = format!("{text}, {}", short(elapsed));
            let width = table::width().unwrap_or(80).saturating_sub(1);
            let shown: String = text.chars().take(width).collect();
            self.put(&format!("\r\u{1b}[K{shown}"));
        } else if self.last != text {
            self.put(&format!("{text}, {}\n", short(elapsed)));
            text.clone_into(&mut self.last);
        }
    }

    fn clear(&self) {
        if self.live {
            self.put("\r\u{1b}[K");
        }
    }

    fn put(&self, text: &str) {
        if self.aside { eprint!("{text}") } else { print!("{text}") }
    }
}
