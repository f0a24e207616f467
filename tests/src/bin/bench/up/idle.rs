//! A farm with nothing to do.

use std::time::Duration;

use harmonia_tests::pg::{Options, Server};

use super::farm::Up;
use crate::measure::{cpu_of_process, rss_mb_of};

const SETTLED: Duration = Duration::from_secs(10);
const WATCHED: Duration = Duration::from_secs(60);

/// Memory and percent of a core of all processes of ours, PostgreSQL and Nix apart.
pub async fn of_all_processes() -> (f64, f64) {
    let database = Server::start(Options::default()).empty_database().await;
    let up = Up::start(&["--database".to_owned(), database.url()]).await;
    tokio::time::sleep(SETTLED).await;
    let all = ours(up.id());
    let used = || all.iter().map(|&pid| cpu_of_process(pid)).sum::<f64>();
    let before = used();
    tokio::time::sleep(WATCHED).await;
    let percent = 100.0 * (used() - before) / WATCHED.as_secs_f64();
    let megabytes = all.iter().map(|&pid| rss_mb_of(pid)).sum();
    up.stop().await;
    (megabytes, percent)
}

/// A process and those of its children that are the same program.
fn ours(pid: u32) -> Vec<u32> {
    let program = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let mut all = vec![pid];
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|word| word.parse().ok());
        all.extend(children.filter(|&child| program(child) == program(pid)));
    }
    all
}
