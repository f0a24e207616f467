//! What a forge is told of an evaluation: two statuses, each a state and a sentence.
//!
//! A status that waits says the same all the time: forges keep each one for ever, and GitHub takes no more than a thousand for a commit.

use harmonia_queue::evaluations::{Evaluation, Stage, Status as Outcome};

/// GitHub takes no more.
const LONGEST: usize = 140;

/// A status of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Which of the two.
    pub context: String,
    /// In one word.
    pub state: State,
    /// In a sentence.
    pub description: String,
}

/// A word that all forges know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// More will come.
    Pending,
    /// All is well.
    Success,
    /// The code is at fault.
    Failure,
    /// There is no telling.
    Error,
}

impl State {
    /// As forges write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Error => "error",
        }
    }
}

impl Status {
    /// All that a forge is told, to see whether it was told that before.
    pub fn words(&self, evaluation: Option<i64>) -> String {
        let Self { context, state, description } = self;
        format!("{} {context} {} {description}", evaluation.unwrap_or_default(), state.as_str())
    }
}

/// What went wrong first.
#[derive(Debug, Clone, Default)]
pub struct First {
    /// The attribute that could not be evaluated.
    pub error: Option<String>,
    /// The derivation that could not be built.
    pub failure: Option<String>,
}

/// The status of the evaluation itself, and that of its builds. `project`: its name, where others have the same repository.
pub fn statuses(project: Option<&str>, evaluation: &Evaluation, first: &First) -> [Status; 2] {
    both(project, [of_evaluation(evaluation, first), of_builds(evaluation, first)])
}

/// The same of a commit that nobody has looked at yet.
pub fn waiting(project: Option<&str>) -> [Status; 2] {
    both(project, std::array::from_fn(|_| (State::Pending, "waits for a collaborator's /ci run".to_owned())))
}

fn both(project: Option<&str>, said: [(State, String); 2]) -> [Status; 2] {
    let [eval, build] = said;
    let status = |which: &str, (state, description): (State, String)| Status {
        context: match project {
            Some(project) => format!("harmonia-ci/{project}/{which}"),
            None => format!("harmonia-ci/{which}"),
        },
        state,
        description: shortened(&description),
    };
    [status("nix-eval", eval), status("nix-build", build)]
}

fn of_evaluation(evaluation: &Evaluation, first: &First) -> (State, String) {
    let why = evaluation.error.as_deref().unwrap_or_default();
    match evaluation.stage {
        Stage::Queued => (State::Pending, "waiting for an evaluator".to_owned()),
        Stage::Evaluating => (State::Pending, "evaluating".to_owned()),
        Stage::Aborted => (State::Error, format!("cannot be evaluated: {why}")),
        Stage::Cancelled => (State::Error, format!("cancelled: {why}")),
        Stage::Complete if evaluation.attribute_errors > 0 => {
            let (bad, all) = (evaluation.attribute_errors, evaluation.attributes);
            (
                State::Failure,
                named(format!("{bad} of {all} attributes cannot be evaluated"), first.error.as_deref()),
            )
        }
        Stage::Complete => (State::Success, count(evaluation.attributes, "attribute")),
    }
}

fn of_builds(evaluation: &Evaluation, first: &First) -> (State, String) {
    let builds = &evaluation.builds;
    let left = builds.waiting + builds.running;
    match evaluation.stage {
        Stage::Queued | Stage::Evaluating => (State::Pending, "waiting for the evaluation".to_owned()),
        Stage::Aborted => (State::Error, "not evaluated".to_owned()),
        Stage::Cancelled => (State::Error, "cancelled".to_owned()),
        Stage::Complete if left > 0 => (State::Pending, "building".to_owned()),
        Stage::Complete => {
            let numbers = [
                (builds.succeeded, "built"),
                (builds.cached, "there before"),
                (builds.cancelled, "cancelled"),
                (builds.dep_failed, "not tried"),
                (builds.failed, "failed"),
            ];
            let told: Vec<String> = numbers
                .into_iter()
                .filter(|(builds, _)| *builds > 0)
                .map(|(builds, what)| format!("{builds} {what}"))
                .collect();
            let told = if told.is_empty() { "nothing to build".to_owned() } else { told.join(", ") };
            let bad = builds.failed + builds.dep_failed + builds.cancelled;
            let name = first.failure.as_deref().map(name);
            (if bad > 0 { State::Failure } else { State::Success }, named(told, name))
        }
    }
}

/// Whether nothing more will come by itself, and whether it went well.
pub fn is_over(evaluation: &Evaluation) -> Option<bool> {
    let status = evaluation.status();
    status.is_final().then_some(status == Outcome::Succeeded)
}

fn named(sentence: String, name: Option<&str>) -> String {
    name.map_or(sentence.clone(), |name| format!("{sentence}: {name}"))
}

fn count(number: i64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// `hello-2.12` of `/nix/store/…-hello-2.12.drv`.
fn name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split_once('-').map_or(file, |(_, name)| name).trim_end_matches(".drv")
}

/// One line, as long as forges take it.
fn shortened(text: &str) -> String {
    let line: String =
        text.lines().next().unwrap_or_default().chars().filter(|char| !char.is_control()).collect();
    if line.chars().count() <= LONGEST {
        return line;
    }
    line.chars().take(LONGEST - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use harmonia_queue::evaluations::Counts;

    use super::*;

    fn evaluation(stage: Stage, builds: Counts) -> Evaluation {
        Evaluation {
            id: 17,
            project: "dots".to_owned(),
            source: "https://h/x".to_owned(),
            branch: None,
            commit: None,
            attrs: Vec::new(),
            untrusted: false,
            stage,
            error: None,
            pinned: false,
            created_at: String::new(),
            started_at: None,
            ended_at: None,
            builds,
            attributes: 3,
            attribute_errors: 0,
        }
    }

    fn told(evaluation: &Evaluation, first: &First) -> [(&'static str, String); 2] {
        statuses(None, evaluation, first).map(|status| (status.state.as_str(), status.description))
    }

    #[test]
    fn projects_of_one_repository_have_their_own_statuses() {
        let evaluation = evaluation(Stage::Queued, Counts::default());
        let contexts =
            |project| statuses(project, &evaluation, &First::default()).map(|status| status.context);
        assert_eq!(contexts(None), ["harmonia-ci/nix-eval", "harmonia-ci/nix-build"]);
        assert_eq!(contexts(Some("dots")), ["harmonia-ci/dots/nix-eval", "harmonia-ci/dots/nix-build"]);
        assert_eq!(waiting(Some("dots")).map(|status| status.context), contexts(Some("dots")));
    }

    #[test]
    fn what_was_built_and_what_failed_first_is_said() {
        let builds = Counts { succeeded: 12, failed: 1, ..Counts::default() };
        let first = First { failure: Some("/nix/store/7h7q-hello-2.12.drv".to_owned()), error: None };
        let [eval, build] = told(&evaluation(Stage::Complete, builds), &first);
        assert_eq!(eval, ("success", "3 attributes".to_owned()));
        assert_eq!(build, ("failure", "12 built, 1 failed: hello-2.12".to_owned()));
    }

    #[test]
    fn what_waits_says_the_same_however_far_it_is() {
        let one = evaluation(Stage::Complete, Counts { waiting: 9, running: 1, ..Counts::default() });
        let two =
            evaluation(Stage::Complete, Counts { running: 1, succeeded: 8, failed: 1, ..Counts::default() });
        assert_eq!(told(&one, &First::default()), told(&two, &First::default()));
    }

    #[test]
    fn an_attribute_that_cannot_be_evaluated_is_a_failure_of_the_evaluation_alone() {
        let mut evaluation = evaluation(Stage::Complete, Counts { succeeded: 2, ..Counts::default() });
        evaluation.attribute_errors = 1;
        let first = First { error: Some("checks.broken".to_owned()), failure: None };
        let [eval, build] = told(&evaluation, &first);
        assert_eq!(eval, ("failure", "1 of 3 attributes cannot be evaluated: checks.broken".to_owned()));
        assert_eq!(build, ("success", "2 built".to_owned()));
        assert_eq!(is_over(&evaluation), Some(false));
    }

    #[test]
    fn an_error_is_one_short_line() {
        let mut evaluation = evaluation(Stage::Aborted, Counts::default());
        evaluation.error = Some(format!("no\u{1b}[31m flake\n{}", "x".repeat(500)));
        assert_eq!(told(&evaluation, &First::default())[0].1, "cannot be evaluated: no[31m flake");
        evaluation.error = Some("é".repeat(500));
        assert_eq!(told(&evaluation, &First::default())[0].1.chars().count(), LONGEST);
    }

    #[test]
    fn everything_has_a_state() {
        for (stage, states) in [
            (Stage::Queued, ["pending", "pending"]),
            (Stage::Evaluating, ["pending", "pending"]),
            (Stage::Aborted, ["error", "error"]),
            (Stage::Cancelled, ["error", "error"]),
            (Stage::Complete, ["success", "success"]),
        ] {
            let evaluation = evaluation(stage, Counts::default());
            assert_eq!(told(&evaluation, &First::default()).map(|(state, _)| state), states);
        }
    }
}
