//! Small parts of pages.

use std::time::Duration;

use harmonia_queue::builds::name_of;
use harmonia_queue::evaluations::{Counts, Evaluation};
use harmonia_service::moment::{ago, short};
use maud::{Markup, html};

use super::frame::csrf;
use super::visitor::Visitor;
use crate::escape::escape;

/// How far something is, in a word and a colour that says the same.
pub fn badge(state: &str) -> Markup {
    html! { span class=(format!("badge {}", tone(state))) { (words(state)) } }
}

/// What the colours mean.
pub fn tone(state: &str) -> &'static str {
    match state {
        "succeeded" | "active" => "good",
        "cached" => "there",
        "failed" | "broken" | "gone" => "bad",
        "dep_failed" | "drained" => "skipped",
        "building" | "uploading" | "publishing" | "running" | "evaluating" => "busy",
        "cancelled" => "off",
        "draining" => "warn",
        _ => "idle",
    }
}

/// As people say it.
pub fn words(state: &str) -> &str {
    match state {
        "dep_failed" => "not tried",
        "broken" => "cannot be evaluated",
        state => state,
    }
}

/// A moment of the database, as the time that has passed.
pub fn since(moment: &str) -> Markup {
    html! { time.ago datetime=(moment) title=(moment) { (ago(moment)) " ago" } }
}

/// A length of time that goes on.
pub fn running(time: Duration) -> Markup {
    html! { span.ticks data-seconds=(time.as_secs()) { (short(time)) } }
}

/// Seconds, as people say them.
pub fn seconds(seconds: f64) -> String {
    let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    if seconds < 10.0 { format!("{seconds:.1}s") } else { short(time) }
}

/// A number with its thousands apart. What is counted up to a limit says so.
pub fn number(number: i64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        let left = digits.len() - index;
        if index > 0 && left.is_multiple_of(3) && digit.is_ascii_digit() {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count that stops at a limit.
pub fn up_to(count: i64, limit: i64) -> String {
    if count >= limit { format!("{}+", number(limit)) } else { number(count) }
}

/// A build by its name.
pub fn build_link(id: i64, drv_path: &str) -> Markup {
    html! { a href=(format!("/builds/{id}")) title=(drv_path) { (name_of(drv_path)) } }
}

/// A project by its name.
pub fn project_link(name: &str) -> Markup {
    html! { a href=(project_address(name)) { (name) } }
}

/// Where a project is.
pub fn project_address(name: &str) -> String {
    format!("/projects/{}", escape(name))
}

/// A form that is one button.
pub fn button(visitor: &Visitor, action: &str, words: &str, label: &str, tone: &str) -> Markup {
    html! {
        form.act method="post" action=(action) {
            (csrf(visitor))
            button type="submit" class=(tone) aria-label=(label) { (words) }
        }
    }
}

/// The secret of a token that was just made.
pub fn new_secret(name: &str, secret: &str) -> Markup {
    html! {
        section.notice role="status" {
            h2 { "The token " (name) }
            p { "This is its secret. It is shown this once." }
            pre.words.command tabindex="0" { (secret) }
        }
    }
}

/// Where the next part of a list is.
pub fn further(address: Option<String>) -> Markup {
    html! { @if let Some(address) = address { p.further { a href=(address) rel="next" { "Further ones" } } } }
}

/// A table that may be wider than the screen.
pub fn table(label: &str, rows: Markup) -> Markup {
    html! { div.scroll role="region" aria-label=(label) tabindex="0" { table { (rows) } } }
}

/// What an evaluation is of.
pub fn source(evaluation: &Evaluation) -> Markup {
    html! {
        span.source title=(evaluation.source) { (evaluation.source) }
        @if let Some(commit) = &evaluation.commit { " " code.hash { (commit.get(..12).unwrap_or(commit)) } }
        @if evaluation.untrusted { " " span.badge.warn { "from outside" } }
        @if evaluation.pinned { " " span.badge.idle title="It is kept for good" { "pinned" } }
    }
}

/// Builds by state, in the order in which people ask.
pub fn shares(counts: &Counts) -> [(&'static str, i64); 7] {
    [
        ("succeeded", counts.succeeded),
        ("cached", counts.cached),
        ("running", counts.running),
        ("waiting", counts.waiting),
        ("failed", counts.failed),
        ("dep_failed", counts.dep_failed),
        ("cancelled", counts.cancelled),
    ]
}

/// Rows of evaluations.
pub fn evaluations(list: &[std::sync::Arc<Evaluation>], with_project: bool) -> Markup {
    table(
        "Evaluations",
        html! {
            thead { tr {
                th { "Evaluation" }
                @if with_project { th { "Project" } }
                th { "State" } th.number { "Builds" } th.wide { "Progress" } th { "Branch" } th { "Source" } th { "Asked for" }
            } }
            tbody {
                @for evaluation in list {
                    @let all: i64 = shares(&evaluation.builds).iter().map(|(_, count)| count).sum();
                    @let failed = evaluation.builds.failed + evaluation.builds.dep_failed;
                    tr {
                        td { a href=(format!("/evals/{}", evaluation.id)) { (evaluation.id) } }
                        @if with_project { td { (project_link(&evaluation.project)) } }
                        td { (badge(evaluation.status().as_str())) }
                        td.number { (number(evaluation.builds.succeeded + evaluation.builds.cached)) "/" (number(all))
                            @if failed > 0 { " " span.failures { (number(failed)) " failed" } } }
                        td.wide { (super::picture::progress(&shares(&evaluation.builds))) }
                        td { @if let Some(branch) = &evaluation.branch { (branch) } @else { "–" } }
                        td { (source(evaluation)) }
                        td { (since(&evaluation.created_at)) }
                    }
                } @if list.is_empty() {
                    tr { td colspan="8" { "Nothing was evaluated yet: " code { "harmonia-ci eval SOURCE" } " begins." } }
                }
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_apart() {
        for (count, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(number(count), text);
        }
        assert_eq!(up_to(1000, 1000), "1,000+");
    }
}
