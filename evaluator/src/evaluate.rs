//! From a source to derivations: in one pass, and one more after each attribute that Nix cannot go on from.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::time::Duration;

use harmonia_nix::store_path;
use harmonia_service::nearest::{distance, nearest};
use thiserror::Error;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::attr;
use crate::child::{self, Bounds, ChildError};
use crate::config::Limits;
use crate::event::{self, Event};
use crate::expression::{Expression, Root, Walk};
use crate::nix::Workplace;
use crate::words::{Words, nix_error};

/// Attributes that throw are evaluated again, each alone, to hear what they say; no more of them than this.
const HEARD: usize = 100;

/// What is to be evaluated.
#[derive(Debug)]
pub struct Task {
    /// The source.
    pub expression: Expression,
    /// As flakes are.
    pub pure: bool,
    /// Attributes; the empty path is all of it.
    pub attrs: Vec<Vec<String>>,
    /// How places in the source are shown, up to their paths there.
    pub shown_as: Vec<String>,
}

/// An attribute that is a derivation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its path.
    pub attr: String,
    /// The derivation.
    pub drv: String,
}

/// Why nothing is known of the source.
#[derive(Debug, Error)]
pub enum EvaluateError {
    /// Nix says so.
    #[error("this source cannot be evaluated\n{0}")]
    Whole(String),
    /// There are too many attributes.
    #[error(
        "the source has more than {most} attributes, {within} alone has {count}: ask for some of them with --attr, or set \
         HARMONIA_CI_EVAL_MAX_ATTRS to a higher number"
    )]
    Many {
        /// The limit.
        most: usize,
        /// The set that was too much.
        within: String,
        /// How many it has.
        count: usize,
    },
    /// It takes too long.
    #[error(
        "evaluating {at} was stopped, because evaluations end after {} s: something in it may never end; if it only needs \
         longer, set HARMONIA_CI_EVAL_TIMEOUT", limit.as_secs()
    )]
    Time {
        /// What was being evaluated.
        at: String,
        /// The limit.
        limit: Duration,
    },
    /// It takes too much.
    #[error(
        "evaluating {at} was stopped, because it took {} MiB of memory and evaluations may take {}: ask for fewer attributes \
         with --attr, or set HARMONIA_CI_EVAL_MEMORY to a higher number", bytes >> 20, limit >> 20
    )]
    Memory {
        /// What was being evaluated.
        at: String,
        /// What it took.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Nix cannot be run.
    #[error(transparent)]
    Child(ChildError),
    /// The expression cannot be written.
    #[error(transparent)]
    Write(#[from] serde_json::Error),
}

/// Evaluates a task. Derivations are told as they are found; the errors of attributes at the end.
pub async fn evaluate(
    place: &Workplace,
    task: &Task,
    limits: Limits,
    until: Instant,
    found: &UnboundedSender<Found>,
) -> Result<BTreeMap<String, String>, EvaluateError> {
    let mut evaluation = Evaluation {
        place,
        task,
        limits,
        until,
        found,
        counts: HashMap::new(),
        total: 0,
        threw: Vec::new(),
        errors: BTreeMap::new(),
    };
    let mut roots: Vec<Root> = task.attrs.iter().cloned().map(Root::new).collect();
    while let Some((at, words)) = evaluation.pass(&roots, true).await? {
        let error = nix_error(&words, &task.shown_as);
        roots = resume(roots, &at).ok_or_else(|| EvaluateError::Whole(error.clone()))?;
        evaluation.errors.insert(attr::show(&at), error);
    }
    evaluation.hear_those_that_threw().await;
    Ok(evaluation.errors)
}

struct Evaluation<'a> {
    place: &'a Workplace,
    task: &'a Task,
    limits: Limits,
    until: Instant,
    found: &'a UnboundedSender<Found>,
    /// How many attributes each set has.
    counts: HashMap<Vec<String>, usize>,
    total: usize,
    threw: Vec<Vec<String>>,
    errors: BTreeMap<String, String>,
}

impl Evaluation<'_> {
    /// One child. If it fails: at which attribute, and what it said.
    async fn pass(
        &mut self,
        roots: &[Root],
        catch: bool,
    ) -> Result<Option<(Vec<String>, Words)>, EvaluateError> {
        let mark = format!("{:032x} ", rand::random::<u128>());
        // The systems and what is in them: `checks.x86_64-linux.unit`.
        let levels = if self.task.pure { 3 } else { 1 };
        let walk = Walk { mark: &mark, roots, levels, calls: !self.task.pure, catch };
        let text = self.task.expression.walked(&walk)?;
        let mut command = self.place.nix("nix-instantiate");
        command.args(["--eval", "--read-write-mode", "--show-trace"]);
        command.args(["--option", "pure-eval", if self.task.pure { "true" } else { "false" }, "-"]);
        let bounds = Bounds { until: self.until, memory: self.limits.memory };
        let (mut at, mut words, mut many) = (Vec::new(), Words::default(), None);
        let ended = child::run(command, text.as_bytes(), bounds, |line| match event::read(line, &mark) {
            Some(Event::At(path)) => {
                at = path;
                words = Words::default();
                ControlFlow::Continue(())
            }
            Some(event) => self.hear(event).map_break(|error| many = Some(error)),
            None => {
                words.push(line);
                ControlFlow::Continue(())
            }
        });
        match (ended.await, many) {
            (_, Some(many)) => Err(many),
            (Ok(ended), None) if ended.success => Ok(None),
            (Ok(_), None) => Ok(Some((at, words))),
            (Err(ChildError::Time), None) => {
                Err(EvaluateError::Time { at: named(&at), limit: self.limits.timeout })
            }
            (Err(ChildError::Memory(bytes)), None) => {
                Err(EvaluateError::Memory { at: named(&at), bytes, limit: self.limits.memory })
            }
            (Err(error), None) => Err(EvaluateError::Child(error)),
        }
    }

    fn hear(&mut self, event: Event) -> ControlFlow<EvaluateError> {
        match event {
            Event::At(_) => {}
            Event::Found { path, drv } => match derivation(&drv) {
                // Nobody who left would want to know.
                Some(drv) => drop(self.found.send(Found { attr: attr::show(&path), drv })),
                None => {
                    self.fails(&path, format!("its drvPath is {drv}, which is not the path of a derivation"))
                }
            },
            Event::Within { path, count } => {
                let within = named(&path);
                // A pass that resumes enters a set once more.
                self.total += count - self.counts.insert(path, count).unwrap_or(0).min(count);
                if self.total > self.limits.attrs {
                    return ControlFlow::Break(EvaluateError::Many {
                        most: self.limits.attrs,
                        within,
                        count,
                    });
                }
            }
            Event::Threw(path) => self.threw.push(path),
            Event::Other { path, r#type } => {
                self.fails(&path, format!("it is a {type}, neither a derivation nor a set of derivations"))
            }
            Event::Missing { path, within, names } => {
                let error = missing(&path, &within, &names);
                self.fails(&path, error);
            }
        }
        ControlFlow::Continue(())
    }

    fn fails(&mut self, path: &[String], error: String) {
        self.errors.insert(attr::show(path), error);
    }

    /// What is known is not lost if there is no time left for this.
    async fn hear_those_that_threw(&mut self) {
        for (heard, path) in std::mem::take(&mut self.threw).into_iter().enumerate() {
            let failed = match heard < HEARD {
                true => self.pass(&[Root::new(path.clone())], false).await.unwrap_or_default(),
                false => None,
            };
            let error = failed.map_or_else(
                || "it throws, or an assertion in it fails: evaluate it alone to see why".to_owned(),
                |(_, words)| nix_error(&words, &self.task.shown_as),
            );
            self.fails(&path, error);
        }
    }
}

/// What is left after the attribute that failed. None: it was the whole.
fn resume(roots: Vec<Root>, failed: &[String]) -> Option<Vec<Root>> {
    let at = roots.iter().position(|root| failed.starts_with(&root.path))?;
    let mut left = roots.into_iter().skip(at);
    let first = left.next()?;
    let after = failed[first.path.len()..].to_vec();
    match (first.path.is_empty(), after.is_empty()) {
        (true, true) => None,
        (false, true) => Some(left.collect()),
        _ => Some(std::iter::once(Root { path: first.path, after }).chain(left).collect()),
    }
}

fn derivation(drv: &serde_json::Value) -> Option<String> {
    let drv = drv.as_str().filter(|path| path.ends_with(".drv"))?;
    store_path::parse(drv).is_ok().then(|| drv.to_owned())
}

fn named(path: &[String]) -> String {
    if path.is_empty() { "the source".to_owned() } else { attr::show(path) }
}

/// Says what is there instead; a name that is nearly the same was meant.
fn missing(path: &[String], within: &[String], names: &[String]) -> String {
    let Some(name) = path.get(within.len()) else { return "there is no such attribute".to_owned() };
    let whose = named(within);
    let near = nearest(name, names.iter().map(String::as_str))
        .filter(|near| distance(near, name) <= 1 + name.len() / 3);
    match (near, names.len()) {
        (Some(near), _) => format!("{whose} has no attribute {name}; did you mean {near}?"),
        (None, 0) => format!("{whose} has no attributes, so there is no {name} in it"),
        (None, 1..=20) => format!("{whose} has no attribute {name}; it has: {}", names.join(", ")),
        (None, _) => format!("{whose} has no attribute {name}; it has many: {}, …", names[..20].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn root(path: &str, after: &str) -> Root {
        Root { path: words(path), after: words(after) }
    }

    #[test]
    fn the_next_pass_begins_after_what_failed() {
        assert_eq!(resume(vec![root("", "")], &words("a b")), Some(vec![root("", "a b")]));
        let roots = || vec![root("x", ""), root("checks", "m"), root("y", "")];
        assert_eq!(resume(roots(), &words("checks m z")), Some(vec![root("checks", "m z"), root("y", "")]));
        assert_eq!(resume(roots(), &words("checks")), Some(vec![root("y", "")]));
    }

    #[test]
    fn what_fails_as_a_whole_is_not_tried_again() {
        assert_eq!(resume(vec![root("", "")], &[]), None);
        assert_eq!(resume(vec![root("a", "")], &words("b")), None);
    }

    #[test]
    fn a_name_that_is_missing_is_answered_with_the_nearest() {
        let names = words("checks packages");
        assert!(missing(&words("chekcs"), &[], &names).ends_with("did you mean checks?"));
        assert!(missing(&words("zzzzzzzz"), &[], &names).ends_with("it has: checks, packages"));
        assert!(missing(&words("checks x"), &words("checks"), &[]).contains("checks has no attributes"));
    }

    #[test]
    fn only_a_derivation_of_the_store_is_one() {
        let path = "/nix/store/vbb1lilif8558y8qx1m16hz3yn7zpax5-above.drv";
        assert_eq!(derivation(&path.into()), Some(path.to_owned()));
        for other in
            ["/etc/passwd", "/nix/store/../x.drv", "/nix/store/vbb1lilif8558y8qx1m16hz3yn7zpax5-above"]
        {
            assert_eq!(derivation(&other.into()), None);
        }
    }
}
