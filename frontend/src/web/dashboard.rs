//! `/`: projects, what runs now, how much is built, and who uses how much of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use harmonia_queue::builds::{self, Build};
use harmonia_queue::evaluations::{self, Evaluation};
use harmonia_queue::order::{self, Figures};
use harmonia_queue::pages::{self, Minute};
use harmonia_queue::projects::{self, Project};
use harmonia_service::problem::Problem;
use maud::{Markup, html};

use super::Web;
use super::frame::{Page, Trouble};
use super::parts::{badge, build_link, evaluations as rows, number, project_link, running, table, up_to};
use super::picture;
use super::visitor::Looking;

/// Figures are counted up to this.
const COUNTED: i64 = 100_000;
/// Evaluations and running builds that are listed.
const LISTED: i64 = 12;

/// What it shows.
pub struct Overview {
    figures: Figures,
    projects: Vec<Project>,
    minutes: Vec<Minute>,
    running: Vec<Build>,
    latest: Vec<i64>,
}

async fn find(web: Arc<Web>) -> Result<Overview, Problem> {
    let db = web.db().await;
    Ok(Overview {
        figures: order::figures(&db).await?,
        projects: projects::list(&db).await?,
        minutes: pages::throughput(&db).await?,
        running: builds::running(&db, LISTED + 1).await?,
        latest: evaluations::numbers(&db, &evaluations::Filter::default(), LISTED).await?,
    })
}

/// The page.
pub async fn show(Looking(visitor): Looking, State(web): State<Arc<Web>>) -> Result<Response, Trouble> {
    let version = web.live.version();
    let told = web.overview.get((), version, || find(web.clone())).await?;
    let latest = web.evaluations(&told.value.latest, version).await?;
    let content = html! {
        h1 { "Dashboard" }
        (figures(&told.value.figures))
        div.columns {
            section { h2 { "Running now" } (running_now(&told.value.running)) }
            section { h2 { "The last hour" } (throughput(&told.value.minutes)) }
        }
        section { h2 { "Projects" } (shares(&told.value.projects)) }
        section { h2 { "Latest evaluations" } (rows(&latest, true)) }
    };
    let rest = html! {};
    let page = Page {
        title: "Dashboard",
        place: "/",
        visitor: &visitor,
        again: Some("/"),
        stale: told.stale,
        content,
        rest,
    };
    Ok(page.into_response())
}

impl Web {
    /// Evaluations with their counts. What has ended is counted anew only now and then: it hardly changes.
    pub async fn evaluations(&self, ids: &[i64], version: u64) -> Result<Vec<Arc<Evaluation>>, Problem> {
        let settled = |evaluation: &Evaluation| evaluation.status().is_final();
        let known: Vec<_> = ids.iter().filter_map(|id| self.evaluations.peek(id, version, settled)).collect();
        let lacking = |id: &&i64| known.iter().all(|evaluation| evaluation.id != **id);
        let missing: Vec<i64> = ids.iter().filter(lacking).copied().collect();
        let mut all = known.clone();
        if !missing.is_empty() {
            let begun = Instant::now();
            for evaluation in evaluations::of(&*self.db().await, &missing).await? {
                let evaluation = Arc::new(evaluation);
                self.evaluations.learn(evaluation.id, evaluation.clone(), version, begun);
                all.push(evaluation);
            }
        }
        all.sort_by_key(|evaluation| std::cmp::Reverse(evaluation.id));
        Ok(all)
    }
}

fn figures(figures: &Figures) -> Markup {
    let ready: i64 = figures.ready.iter().map(|(_, count)| count).sum();
    let busy = figures.building + figures.uploading + figures.accepted;
    html! {
        dl.figures {
            div { dt { "Running" } dd { (number(busy)) } }
            div { dt { "Ready" } dd { (up_to(ready, COUNTED)) } }
            div { dt { "Blocked" } dd { (up_to(figures.blocked, COUNTED)) } }
            div { dt { "Nodes" } dd { (number(figures.nodes)) } }
            div { dt { "Slots in use" } dd { (number(figures.building)) "/" (number(figures.slots)) } }
            div { dt { "Longest wait" } dd { (harmonia_service::moment::short(Duration::from_secs(figures.oldest.unsigned_abs()))) } }
        }
    }
}

fn running_now(builds: &[Build]) -> Markup {
    let room = usize::try_from(LISTED).unwrap_or(0);
    html! {
        (table("Running now", html! {
            thead { tr { th { "Build" } th { "State" } th { "Node" } th.number { "For" } } }
            tbody {
                @for build in builds.iter().take(room) {
                    tr {
                        td { (build_link(build.id, &build.drv_path)) }
                        td { (badge(&build.state)) }
                        td { @if let Some(node) = &build.node { (node) } }
                        td.number { (running(Duration::try_from_secs_f64(build.running_for.unwrap_or(0.0)).unwrap_or_default())) }
                    }
                } @if builds.is_empty() { tr { td colspan="4" { "Nothing runs." } } }
            }
        }))
        @if builds.len() > room { p { a href="/queue" { "All that runs" } } }
    }
}

fn throughput(minutes: &[Minute]) -> Markup {
    let (good, bad) =
        minutes.iter().fold((0, 0), |(good, bad), minute| (good + minute.succeeded, bad + minute.failed));
    html! {
        (picture::throughput(minutes))
        p.legend { span.key.good { (number(good)) " succeeded" } " " span.key.bad { (number(bad)) " failed" } " · by minute, now on the right" }
    }
}

fn shares(projects: &[Project]) -> Markup {
    let shares: f64 = projects.iter().map(|project| f64::from(project.shares)).sum();
    let used: f64 = projects.iter().map(|project| project.used).sum();
    table(
        "Projects",
        html! {
            thead { tr {
                th { "Project" } th.number { "Running" } th.number { "Ready" } th { "Builders' time used, and owed (▏)" } th.number { "Used" } th.number { "Owed" }
            } }
            tbody {
                @for project in projects {
                    @let owed = f64::from(project.shares) / shares.max(1.0);
                    @let part = if used > 0.0 { project.used / used } else { 0.0 };
                    tr {
                        td { (project_link(&project.name)) @if project.paused { " " span.badge.warn { "paused" } } }
                        td.number { (number(project.running)) }
                        td.number { (number(project.ready)) }
                        td.grow { (picture::share(&project.name, part, owed)) }
                        td.number { (format!("{:.0} %", part * 100.0)) }
                        td.number { (format!("{:.0} %", owed * 100.0)) }
                    }
                } @if projects.is_empty() { tr { td colspan="6" { "There is no project yet: " code { "harmonia-ci project add NAME" } " makes one." } } }
            }
        },
    )
}
