//! `./dev bench operator`: what an operator costs at a real API server, whose nodes and pods kwok plays, and how well it scales pools, in
//! simulated days.

mod running;
mod scaling;

use std::time::{Duration, Instant};

use harmonia_queue::listen::{self, Channel};
use harmonia_tests::kube::{eventually, kubectl, requests};
use harmonia_tests::operator::Release;

use crate::measure::{cpu_of_process, latency, rss_mb_of};
use crate::report::Report;
use running::{Kwok, Operator};

const POOLS: usize = 200;
const PROJECTS: usize = 800;
/// How long everything may take on any machine.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long an operator that has done everything is left alone before it is looked at, and then looked at,
const SETTLED: Duration = Duration::from_secs(20);
/// for longer than a watch lasts: the API server ends each after about five minutes.
const WATCHED: Duration = Duration::from_secs(360);
/// Builds that become ready one after the other.
const READY: usize = 200;

const STEADY: [&str; 3] = ["steady_api_requests_per_min", "steady_cpu_percent", "operator_rss_mb"];
const AT_WORK: [&str; 3] = ["reconcile_1000", "scale_up_latency_ms", "failover_s"];

/// Measures what is asked for.
pub async fn run(report: &mut Report<'_>) {
    if report.wants(&scaling::FIGURES) {
        scaling::three_days(report);
    }
    if report.wants(&AT_WORK) || report.wants(&STEADY) {
        at_work(report).await;
    }
}

async fn at_work(report: &mut Report<'_>) {
    let release = Release::prepare("bench", &[]).await;
    release.make_secrets().await;
    let _kwok = Kwok::start().await;
    let first = Operator::start(&release).await;
    eventually("it leads", PATIENCE, async || first.leads().await).await;
    report.put("reconcile_1000", reconcile_all(&release).await);
    tokio::time::sleep(SETTLED).await;
    if report.wants(&STEADY) {
        steady(&release, &first, report).await;
    }
    if report.wants(&["scale_up_latency_ms"]) {
        report.put("scale_up_latency_ms", scale_up(&release).await);
    }
    if report.wants(&["failover_s"]) {
        report.put("failover_s", failover(&release, first).await);
    }
}

/// The time until all is observed, over the time that it took to say it all.
async fn reconcile_all(release: &Release) -> f64 {
    let pool = |number| {
        format!(
            "apiVersion: ci.harmonia.dev/v1alpha1\nkind: BuilderPool\nmetadata: {{name: pool-{number}}}\nspec:\n  systems: [x86_64-linux]\n  \
             store: {{mode: EmptyDir, size: 2Gi}}\n  slots: 1\n  scaling: {{min: 0, max: 5}}\n---\n"
        )
    };
    let project = |number| {
        format!(
            "apiVersion: ci.harmonia.dev/v1alpha1\nkind: Project\nmetadata: {{name: project-{number}}}\n\
             spec: {{source: {{git: {{url: 'https://example.org/{number}.git'}}}}}}\n---\n"
        )
    };
    let all: String = (0..POOLS).map(pool).chain((0..PROJECTS).map(project)).collect();
    let begun = Instant::now();
    release.namespace.apply(&all).await;
    let said = begun.elapsed();
    eventually("everything is observed", PATIENCE, async || unobserved(release).await == 0).await;
    let took = begun.elapsed();
    eprintln!("   applied after {:.1} s, observed after {:.1} s", said.as_secs_f64(), took.as_secs_f64());
    took.as_secs_f64() / said.as_secs_f64()
}

/// Pools and projects without a status of what they say now.
async fn unobserved(release: &Release) -> usize {
    let columns = "--output=custom-columns=A:.metadata.generation,B:.status.observedGeneration";
    let words = ["get", "builderpools,projects", "--no-headers", columns];
    let table = release.namespace.kubectl(&words).await;
    let differ = |line: &&str| {
        let mut words = line.split_whitespace();
        words.next() != words.next()
    };
    table.lines().filter(differ).count()
}

/// An operator with nothing to do.
async fn steady(release: &Release, operator: &Operator, report: &mut Report<'_>) {
    let user = release.user();
    let asked = || requests(|found| found == user).len();
    let (before, used) = (asked(), cpu_of_process(operator.id()));
    tokio::time::sleep(WATCHED).await;
    let minutes = WATCHED.as_secs_f64() / 60.0;
    report.put("steady_api_requests_per_min", (asked() - before) as f64 / minutes);
    let percent = 100.0 * (cpu_of_process(operator.id()) - used) / WATCHED.as_secs_f64();
    report.put("steady_cpu_percent", percent);
    report.put("operator_rss_mb", rss_mb_of(operator.id()));
}

/// From a build that is ready to a pool that grows for it.
async fn scale_up(release: &Release) -> f64 {
    release.farm.project("main").await;
    let mut growth = running::Growth::watch(release).await;
    let mut took = Vec::new();
    for number in 0..READY {
        release.farm.queue("main", &[(&format!("ready-{number}"), &[])]).await;
        let ready = Instant::now();
        listen::notify(&release.farm.operator, Channel::Ready, "").await.expect("a wake-up");
        growth.next().await;
        took.push(ready.elapsed());
    }
    eprintln!("   median {:.0} ms", 1000.0 * latency(&took, 0.5));
    1000.0 * latency(&took, 0.99)
}

/// From the end of the one that leads, without a word, to the first thing that the other does.
async fn failover(release: &Release, first: Operator) -> f64 {
    let second = Operator::start(release).await;
    eventually("it waits", PATIENCE, async || second.answers().await).await;
    let begun = Instant::now();
    first.kill().await;
    let late = "apiVersion: ci.harmonia.dev/v1alpha1\nkind: BuilderPool\nmetadata: {name: late}\nspec:\n  systems: [x86_64-linux]\n  \
                store: {mode: EmptyDir, size: 2Gi}\n  scaling: {min: 0, max: 5}\n";
    release.namespace.apply(late).await;
    let here = ["--namespace", release.namespace.name()];
    let wait =
        ["wait", "--for=jsonpath={.status.observedGeneration}=1", "--timeout=120s", "builderpool/late"];
    kubectl(&[&here[..], &wait].concat()).await;
    begun.elapsed().as_secs_f64()
}
