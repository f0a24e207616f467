//! `harmonia-ci status`

use clap::Args;
use harmonia_service::api::{Attribute, Build, BuildCounts, Evaluation, EvaluationDetail, Page};

use crate::client::{ApiError, Client, Farm};
use crate::outcome::Failure;
use crate::output::Output;
use crate::table::{self, table};
use crate::{style, wait};
use harmonia_service::moment::ago;

/// Evaluations in the list.
const LATEST: usize = 20;
/// What failed is named up to this many times.
const NAMED: usize = 20;
/// Attributes in one answer, as many as the API gives.
const PAGE: &str = "200";

/// Show the latest evaluations, or what has become of one
#[derive(Args)]
pub struct Arguments {
    /// The evaluation's number; without it, the latest ones
    evaluation: Option<i64>,

    /// Only those of this project
    #[arg(long, value_name = "NAME", conflicts_with = "evaluation")]
    project: Option<String>,

    /// Wait until nothing more will come of it; exit 1 if something failed
    #[arg(long, requires = "evaluation")]
    wait: bool,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    match arguments.evaluation {
        Some(id) if arguments.wait => wait::until_done(&client, id, arguments.output).await,
        Some(id) => print(&client, id, arguments.output).await,
        None => {
            let limit = LATEST.to_string();
            let mut query = vec![("limit", limit.as_str())];
            query.extend(arguments.project.as_deref().map(|project| ("project", project)));
            let page: Page<Evaluation> = client.find("evals", &query).await?;
            arguments.output.print(&page.items, || list(&page.items));
            Ok(())
        }
    }
}

/// One evaluation: with what failed of it for people, with all its attributes for programs.
pub async fn print(client: &Client, id: i64, output: Output) -> Result<(), Failure> {
    let (detail, failed) = match output {
        Output::Table => {
            let detail = read(client, id, "true", named).await?;
            let failed = failed_builds(client, &detail.evaluation).await?;
            (detail, failed)
        }
        Output::Json => (read(client, id, "false", |_| false).await?, Vec::new()),
    };
    output.print(&detail, || describe(&detail, &failed, style::is_wanted()));
    Ok(())
}

/// With as many pages of its attributes, or of those that failed, as it takes until there is enough of them.
async fn read(
    client: &Client,
    id: i64,
    failed: &str,
    enough: fn(&EvaluationDetail) -> bool,
) -> Result<EvaluationDetail, ApiError> {
    let path = format!("evals/{id}");
    let mut detail: EvaluationDetail = client.find(&path, &[("limit", PAGE), ("failed", failed)]).await?;
    while !enough(&detail)
        && let Some(after) = detail.attribute_page.next.take()
    {
        let query = [("limit", PAGE), ("failed", failed), ("after", &after)];
        let more: EvaluationDetail = client.find(&path, &query).await?;
        detail.attribute_page.items.extend(more.attribute_page.items);
        detail.attribute_page.next = more.attribute_page.next;
    }
    Ok(detail)
}

/// Whether all that is said of attributes that cannot be evaluated is known.
fn named(detail: &EvaluationDetail) -> bool {
    let wanted = usize::try_from(detail.evaluation.attribute_errors).map_or(0, |errors| errors.min(NAMED));
    detail.attribute_page.items.iter().filter_map(broken).count() >= wanted
}

async fn failed_builds(client: &Client, evaluation: &Evaluation) -> Result<Vec<Build>, ApiError> {
    if evaluation.builds.failed == 0 {
        return Ok(Vec::new());
    }
    let query =
        [("evaluation", &*evaluation.id.to_string()), ("state", "failed"), ("limit", &NAMED.to_string())];
    Ok(client.find::<Page<Build>>("builds", &query).await?.items)
}

fn list(evaluations: &[Evaluation]) -> String {
    if evaluations.is_empty() {
        return "nothing was evaluated yet: `harmonia-ci eval SOURCE` begins\n".to_owned();
    }
    let row = |evaluation: &Evaluation| {
        vec![
            evaluation.id.to_string(),
            evaluation.project.clone(),
            evaluation.status.as_str().to_owned(),
            counts(evaluation),
            ago(&evaluation.created_at),
            what(evaluation),
        ]
    };
    let rows: Vec<Vec<String>> = evaluations.iter().map(row).collect();
    table(&["EVAL", "PROJECT", "STATUS", "BUILDS", "AGE", "SOURCE"], &rows, table::width())
}

/// Built of all, and what failed.
fn counts(evaluation: &Evaluation) -> String {
    let builds = &evaluation.builds;
    let failed = builds.failed + builds.dep_failed + builds.cancelled;
    let done = builds.succeeded + builds.cached;
    let all = done + failed + builds.running + builds.waiting;
    match failed {
        0 => format!("{done}/{all}"),
        _ => format!("{done}/{all}, {failed} failed"),
    }
}

/// The source, with what of it was taken.
fn what(evaluation: &Evaluation) -> String {
    let commit =
        evaluation.commit.as_deref().map(|commit| format!(" @ {}", commit.get(..12).unwrap_or(commit)));
    format!("{}{}", evaluation.source, commit.unwrap_or_default())
}

fn describe(detail: &EvaluationDetail, failed: &[Build], colours: bool) -> String {
    let evaluation = &detail.evaluation;
    let builds = &evaluation.builds;
    let status = style::state(evaluation.status.as_str(), colours);
    let pinned = if evaluation.pinned { ", pinned" } else { "" };
    let mut text =
        format!("evaluation {} of {}: {status}{pinned}\n", evaluation.id, style::plain(&what(evaluation)));
    if *builds != BuildCounts::default() {
        text += &format!(
            "{} built, {} failed, {} not tried, {} cached, {} running, {} queued, {} cancelled\n",
            builds.succeeded,
            builds.failed,
            builds.dep_failed,
            builds.cached,
            builds.running,
            builds.waiting,
            builds.cancelled
        );
    }
    if evaluation.attribute_errors > 0 {
        let (errors, all) = (evaluation.attribute_errors, evaluation.attributes);
        text += &format!("{errors} of {all} attributes cannot be evaluated\n");
    }
    if let Some(error) = &evaluation.error {
        text += &format!("\n{}\n", style::plain(error.trim_end()));
    }
    let broken: Vec<_> = detail.attribute_page.items.iter().filter_map(broken).take(NAMED).collect();
    for (name, error) in &broken {
        text += &format!("\n{} cannot be evaluated:\n{}\n", style::plain(name), indent(error));
    }
    text += &rest(evaluation.attribute_errors, broken.len(), "attributes cannot be evaluated");
    for build in failed {
        let error = build.error.as_deref().unwrap_or("no reason is known");
        text += &format!("\nbuild {} ({}) failed:\n{}\n", build.id, style::plain(&build.name), indent(error));
        text += &format!("  `harmonia-ci logs {}` shows its log\n", build.id);
    }
    text += &rest(builds.failed, failed.len(), "builds failed");
    text
}

/// What is not named.
fn rest(all: i64, named: usize, what: &str) -> String {
    match i64::try_from(named).map_or(0, |named| all - named) {
        more @ 1.. => format!("\n{more} more {what}; its web page lists them\n"),
        _ => String::new(),
    }
}

fn broken(attribute: &Attribute) -> Option<(&str, &str)> {
    Some((&attribute.name, attribute.error.as_deref()?))
}

fn indent(text: &str) -> String {
    let lines: Vec<String> = style::plain(text.trim_end()).lines().map(|line| format!("  {line}")).collect();
    lines.join("\n")
}
