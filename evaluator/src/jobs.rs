//! From a source to derivations by nix-eval-jobs, where it is installed: it shares attributes among processes of its own, begins them
//! anew above a memory mark, and writes a line of JSON for each attribute.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use serde::Deserialize;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::attr;
use crate::child::{self, Bounds, ChildError, Heard};
use crate::config::Limits;
use crate::evaluate::{EvaluateError, Found, Task, derivation, explained, missing, named, other, truth};
use crate::event::{self, Event};
use crate::expression::Select;
use crate::nix::Workplace;
use crate::words::{Words, nix_error};

/// Its program.
pub const PROGRAM: &str = "nix-eval-jobs";

/// Evaluates a task. Derivations are told as they are found; the errors of attributes at the end.
pub async fn evaluate(
    place: &Workplace,
    task: &Task,
    limits: Limits,
    until: Instant,
    processes: usize,
    found: &UnboundedSender<Found>,
) -> Result<BTreeMap<String, String>, EvaluateError> {
    let mut jobs = Jobs { task, limits, found, total: 0, errors: BTreeMap::new() };
    for path in &task.attrs {
        jobs.pass(place, path, until, processes).await?;
    }
    Ok(jobs.errors)
}

struct Jobs<'a> {
    task: &'a Task,
    limits: Limits,
    found: &'a UnboundedSender<Found>,
    total: usize,
    errors: BTreeMap<String, String>,
}

/// What it says of one attribute.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    attr_path: Vec<String>,
    drv_path: Option<serde_json::Value>,
    error: Option<String>,
}

impl Jobs<'_> {
    /// All below one attribute that was asked for.
    async fn pass(
        &mut self,
        place: &Workplace,
        path: &[String],
        until: Instant,
        processes: usize,
    ) -> Result<(), EvaluateError> {
        let (task, limits) = (self.task, self.limits);
        let mark = event::mark();
        let select =
            Select { mark: &mark, path, levels: task.levels(), calls: !task.pure, most: limits.attrs };
        let text = task.expression.selected(&select)?;
        // Its processes begin anew before the watch over all of them ends the evaluation.
        let share = limits.memory / u64::try_from(processes).unwrap_or(1) / 4 * 3;
        let mut command = place.nix(PROGRAM);
        command.args(["--show-trace", "--workers", &processes.to_string()]);
        command.args(["--max-memory-size", &(share >> 20).max(1).to_string()]);
        command.args(["--option", "pure-eval", truth(task.pure)]);
        command.args(["--option", "allow-import-from-derivation", truth(task.allow_ifd), "--expr", &text]);
        let bounds = Bounds { until, memory: limits.memory };
        let mut stopped = None;
        let ended = child::run(command, b"", bounds, Heard::Output, |line| {
            self.hear(line, path, &mark).map_break(|error| stopped = Some(error))
        });
        match (ended.await, stopped) {
            (_, Some(error)) => Err(error),
            (Ok(ended), None) if ended.success => Ok(()),
            (Ok(ended), None) => Err(EvaluateError::Whole(self.told(&String::from_utf8_lossy(&ended.rest)))),
            (Err(ChildError::Time), None) => {
                Err(EvaluateError::Time { at: named(path), limit: limits.timeout })
            }
            (Err(ChildError::Memory(bytes)), None) => {
                Err(EvaluateError::Memory { at: named(path), bytes, limit: limits.memory })
            }
            (Err(error), None) => Err(EvaluateError::Child(error)),
        }
    }

    fn hear(&mut self, line: &str, root: &[String], mark: &str) -> ControlFlow<EvaluateError> {
        let Ok(Line { attr_path, drv_path, error }) = serde_json::from_str(line) else {
            let error = format!("{PROGRAM} says something that is not understood: {line:.200}");
            return ControlFlow::Break(EvaluateError::Whole(error));
        };
        let path = [root, &attr_path].concat();
        self.total += 1;
        let many = |within: &[String], count| EvaluateError::Many {
            most: self.limits.attrs,
            within: named(within),
            count,
        };
        if self.total > self.limits.attrs {
            return ControlFlow::Break(many(root, self.total));
        }
        let error = match (error, drv_path) {
            (Some(error), _) => match event::within(&error, mark) {
                Some(Event::Within { path, count }) => return ControlFlow::Break(many(&path, count)),
                Some(Event::Missing { path, within, names }) => missing(&path, &within, &names),
                Some(Event::Other { r#type, .. }) => other(&r#type),
                _ => self.told(&error),
            },
            (None, drv) => {
                let drv = drv.unwrap_or_default();
                match derivation(&drv) {
                    // Nobody who left would want to know.
                    Some(drv) => {
                        drop(self.found.send(Found { attr: attr::show(&path), drv }));
                        return ControlFlow::Continue(());
                    }
                    None => format!("its drvPath is {drv}, which is not the path of a derivation"),
                }
            }
        };
        if path.is_empty() {
            return ControlFlow::Break(EvaluateError::Whole(error));
        }
        self.errors.insert(attr::show(&path), error);
        ControlFlow::Continue(())
    }

    fn told(&self, error: &str) -> String {
        let mut words = Words::default();
        error.lines().for_each(|line| words.push(line));
        explained(nix_error(&words, &self.task.shown_as))
    }
}
