//! From a source to derivations: by one or several processes that share its attributes, each in one pass, and one more after each
//! attribute that Nix cannot go on from, and whenever it has taken so much memory that it had better begin anew.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::time::Duration;

use futures::FutureExt;
use futures::future::try_join_all;
use harmonia_nix::store_path;
use harmonia_service::nearest::{distance, nearest};
use thiserror::Error;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::attr;
use crate::child::{self, Bounds, ChildError, Heard};
use crate::config::Limits;
use crate::event::{self, At, Event};
use crate::expression::{Expression, Root, Walk};
use crate::jobs;
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
    /// Whether something may be built to go on.
    pub allow_ifd: bool,
}

impl Task {
    /// How far down sets are entered whatever they say: in a flake to the systems and what is in them, `checks.x86_64-linux.unit`.
    pub fn levels(&self) -> usize {
        if self.pure { 3 } else { 1 }
    }
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

/// Evaluates a task, by nix-eval-jobs where it is installed. Derivations are told as they are found; the errors of attributes at the
/// end.
pub async fn evaluate(
    place: &Workplace,
    task: &Task,
    limits: Limits,
    until: Instant,
    processes: usize,
    found: &UnboundedSender<Found>,
) -> Result<BTreeMap<String, String>, EvaluateError> {
    if place.has(jobs::PROGRAM) {
        return jobs::evaluate(place, task, limits, until, processes, found).await;
    }
    let roots = || task.attrs.iter().cloned().map(Root::new).collect();
    let new = |part, parts| Evaluation {
        place,
        task,
        limits,
        until,
        part,
        parts,
        found,
        counts: HashMap::new(),
        total: 0,
        threw: BTreeSet::new(),
        large: BTreeMap::new(),
        errors: BTreeMap::new(),
    };
    let all = try_join_all((0..processes).map(|part| new(part, processes).run(roots()).boxed())).await?;
    let mut together = new(0, 1);
    all.into_iter().for_each(|evaluation| together.take(evaluation));
    for root in alone(std::mem::take(&mut together.large)) {
        tracing::debug!(attr = attr::show(&root.path), "evaluated alone");
        together.take(new(0, 1).run(vec![root]).boxed().await?);
    }
    together.hear_those_that_threw().await;
    Ok(together.errors)
}

struct Evaluation<'a> {
    place: &'a Workplace,
    task: &'a Task,
    limits: Limits,
    until: Instant,
    part: usize,
    parts: usize,
    found: &'a UnboundedSender<Found>,
    /// How many attributes each set has.
    counts: HashMap<Vec<String>, usize>,
    total: usize,
    threw: BTreeSet<Vec<String>>,
    /// Attributes that took all of one process's part of the memory, and whether somebody asked for them.
    large: BTreeMap<Vec<String>, bool>,
    errors: BTreeMap<String, String>,
}

/// What was set aside, without what lies in something else that was.
fn alone(large: BTreeMap<Vec<String>, bool>) -> Vec<Root> {
    let mut roots: Vec<Root> = Vec::new();
    for (path, asked) in large {
        // Whatever a path begins with comes before it.
        if !roots.last().is_some_and(|last| path.starts_with(&last.path)) {
            roots.push(Root { asked, ..Root::new(path) });
        }
    }
    roots
}

/// How a child ended.
enum Pass {
    /// All is looked at.
    Done,
    /// At this attribute, with these words.
    Failed(Option<At>, Words),
    /// It has taken its part of the memory, and has come so far.
    Full(At),
    /// At this attribute, which took its part of the memory alone: so many bytes.
    Large(At, u64),
}

impl Evaluation<'_> {
    /// One child after the other, until all is looked at.
    async fn run(mut self, mut roots: Vec<Root>) -> Result<Self, EvaluateError> {
        loop {
            match self.pass(&roots, true).await? {
                Pass::Done => return Ok(self),
                Pass::Full(done) => {
                    tracing::debug!(after = attr::show(&done.path), "a child begins anew");
                    roots = resume(roots, &done).unwrap_or_default();
                }
                Pass::Large(at, bytes) if self.parts == 1 => {
                    let limit = self.limits.memory;
                    return Err(EvaluateError::Memory { at: named(&at.path), bytes, limit });
                }
                Pass::Large(at, _) => {
                    let asked = at.index.is_empty() && roots.get(at.root).is_none_or(|root| root.asked);
                    roots = resume(roots, &at).unwrap_or_default();
                    self.large.insert(at.path, asked);
                }
                Pass::Failed(at, words) => {
                    let error = explained(nix_error(&words, &self.task.shown_as));
                    let whole = || EvaluateError::Whole(error.clone());
                    let at = at.ok_or_else(whole)?;
                    roots = resume(roots, &at).ok_or_else(whole)?;
                    self.errors.insert(attr::show(&at.path), error);
                }
            }
        }
    }

    /// What another one found out.
    fn take(&mut self, other: Self) {
        self.threw.extend(other.threw);
        self.large.extend(other.large);
        self.errors.extend(other.errors);
    }

    async fn pass(&mut self, roots: &[Root], catch: bool) -> Result<Pass, EvaluateError> {
        let mark = event::mark();
        let levels = self.task.levels();
        let (parts, part) = (self.parts, self.part);
        let walk = Walk { mark: &mark, roots, levels, calls: !self.task.pure, catch, parts, part };
        let text = self.task.expression.walked(&walk)?;
        let mut command = self.place.nix("nix-instantiate");
        command.args(["--eval", "--read-write-mode", "--show-trace"]);
        command.args(["--option", "pure-eval", truth(self.task.pure)]);
        command.args(["--option", "allow-import-from-derivation", truth(self.task.allow_ifd), "-"]);
        let memory = self.limits.memory / u64::try_from(self.parts).unwrap_or(1);
        let bounds = Bounds { until: self.until, memory };
        let (mut at, mut words, mut many, mut done) = (None::<At>, Words::default(), None, None);
        let ended = child::run(command, text.as_bytes(), bounds, Heard::Errors, |line| {
            match event::read(line, &mark) {
                Some(Event::At(next)) => {
                    at = Some(next);
                    words = Words::default();
                    ControlFlow::Continue(())
                }
                Some(event) => {
                    if event.is_last() {
                        done.clone_from(&at);
                    }
                    self.hear(event).map_break(|error| many = Some(error))
                }
                None => {
                    words.push(line);
                    ControlFlow::Continue(())
                }
            }
        });
        match (ended.await, many) {
            (_, Some(many)) => Err(many),
            (Ok(ended), None) if ended.success => Ok(Pass::Done),
            (Ok(_), None) => Ok(Pass::Failed(at, words)),
            (Err(ChildError::Time), None) => {
                let at = at.unwrap_or_default();
                Err(EvaluateError::Time { at: named(&at.path), limit: self.limits.timeout })
            }
            (Err(ChildError::Memory(bytes)), None) => match done {
                Some(done) if resume(roots.to_vec(), &done).is_some() => Ok(Pass::Full(done)),
                _ => Ok(Pass::Large(at.unwrap_or_default(), bytes)),
            },
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
            Event::Threw(path) => drop(self.threw.insert(path)),
            Event::Other { path, r#type } => self.fails(&path, other(&r#type)),
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
                true => self.pass(&[Root::new(path.clone())], false).await.ok(),
                false => None,
            };
            let error = match failed {
                Some(Pass::Failed(_, words)) => nix_error(&words, &self.task.shown_as),
                _ => "it throws, or an assertion in it fails: evaluate it alone to see why".to_owned(),
            };
            self.fails(&path, error);
        }
    }
}

/// As Nix's options are written.
pub fn truth(truth: bool) -> &'static str {
    if truth { "true" } else { "false" }
}

/// With what to do, where Nix's words leave that open.
pub fn explained(error: String) -> String {
    if !error.contains("allow-import-from-derivation") {
        return error;
    }
    format!(
        "it needs the result of a build to be evaluated (import from derivation), which is off here: build it otherwise, or write \
         allow-ifd = true into {} of the default branch\n{error}",
        crate::wishes::FILE
    )
}

/// What is left after the attribute that failed. None: it was the whole.
fn resume(roots: Vec<Root>, failed: &At) -> Option<Vec<Root>> {
    let mut left = roots.into_iter().skip(failed.root);
    let first = left.next()?;
    match (first.path.is_empty(), failed.index.is_empty()) {
        (true, true) => None,
        (false, true) => Some(left.collect()),
        _ => Some(std::iter::once(Root { after: failed.index.clone(), ..first }).chain(left).collect()),
    }
}

/// The path of a derivation, if it is one.
pub fn derivation(drv: &serde_json::Value) -> Option<String> {
    let drv = drv.as_str().filter(|path| path.ends_with(".drv"))?;
    store_path::parse(drv).is_ok().then(|| drv.to_owned())
}

/// What people call an attribute.
pub fn named(path: &[String]) -> String {
    if path.is_empty() { "the source".to_owned() } else { attr::show(path) }
}

/// Says that what somebody named cannot be built.
pub fn other(kind: &str) -> String {
    format!("it is a {kind}, neither a derivation nor a set of derivations")
}

/// Says what is there instead; a name that is nearly the same was meant.
pub fn missing(path: &[String], within: &[String], names: &[String]) -> String {
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

    fn root(path: &str, after: &[usize]) -> Root {
        Root { after: after.to_vec(), ..Root::new(words(path)) }
    }

    fn at(root: usize, index: &[usize]) -> At {
        At { root, index: index.to_vec(), path: Vec::new() }
    }

    #[test]
    fn the_next_pass_begins_after_what_failed() {
        assert_eq!(resume(vec![root("", &[])], &at(0, &[0, 1])), Some(vec![root("", &[0, 1])]));
        let roots = || vec![root("x", &[]), root("checks", &[3]), root("y", &[])];
        assert_eq!(resume(roots(), &at(1, &[3, 9])), Some(vec![root("checks", &[3, 9]), root("y", &[])]));
        assert_eq!(resume(roots(), &at(1, &[])), Some(vec![root("y", &[])]));
    }

    #[test]
    fn what_fails_as_a_whole_is_not_tried_again() {
        assert_eq!(resume(vec![root("", &[])], &at(0, &[])), None);
        assert_eq!(resume(vec![root("a", &[])], &at(1, &[])), None);
    }

    #[test]
    fn what_lies_in_something_that_is_evaluated_alone_is_not_evaluated_beside_it() {
        let large = [(words("a"), true), (words("a b"), false), (words("ab"), false), (words("c d"), false)];
        let paths: Vec<_> = alone(large.into()).into_iter().map(|root| (root.path, root.asked)).collect();
        assert_eq!(paths, [(words("a"), true), (words("ab"), false), (words("c d"), false)]);
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
