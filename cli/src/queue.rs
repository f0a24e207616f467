//! `harmonia-ci queue`

use std::time::Duration;

use clap::Args;
use harmonia_service::api::{Build, Queue, Ready};

use crate::client::Farm;
use crate::outcome::Failure;
use crate::output::Output;
use crate::table::{self, table};
use harmonia_service::moment::short;

/// Show what runs and what comes next, in the order in which builders take it
#[derive(Args)]
pub struct Arguments {
    /// How many of each to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: u32,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    let queue: Queue = client.find("queue", &[("limit", &arguments.limit.to_string())]).await?;
    arguments.output.print(&queue, || describe(&queue, table::width()));
    Ok(())
}

fn describe(queue: &Queue, width: Option<usize>) -> String {
    let mut text =
        format!("{} running, {} ready, {} waiting for others\n", queue.running, queue.ready, queue.blocked);
    if !queue.now.is_empty() {
        let rows: Vec<Vec<String>> = queue.now.iter().map(running).collect();
        text += &format!("\n{}", table(&["BUILD", "STATE", "FOR", "NODE", "NAME"], &rows, width));
    }
    if !queue.next.is_empty() {
        let rows: Vec<Vec<String>> =
            (1..).zip(&queue.next).map(|(place, ready)| waiting(place, ready)).collect();
        text += &format!(
            "\n{}",
            table(&["NEXT", "BUILD", "PROJECT", "EVAL", "CHAIN", "READY FOR", "NAME"], &rows, width)
        );
    }
    text
}

fn running(build: &Build) -> Vec<String> {
    vec![
        build.id.to_string(),
        build.state.clone(),
        seconds(build.running_for.unwrap_or_default()),
        build.node.clone().unwrap_or_default(),
        build.name.clone(),
    ]
}

fn waiting(place: usize, ready: &Ready) -> Vec<String> {
    let name = if ready.manual { format!("{} (asked for)", ready.name) } else { ready.name.clone() };
    vec![
        place.to_string(),
        ready.id.to_string(),
        ready.project.clone(),
        ready.evaluation.to_string(),
        ready.height.to_string(),
        seconds(ready.waited),
        name,
    ]
}

fn seconds(seconds: f64) -> String {
    short(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_farm_has_one_line() {
        let queue = Queue { blocked: 0, ready: 0, running: 0, now: Vec::new(), next: Vec::new() };
        assert_eq!(describe(&queue, None), "0 running, 0 ready, 0 waiting for others\n");
    }

    #[test]
    fn what_comes_next_has_its_place() {
        let ready = Ready {
            id: 17,
            name: "hello".to_owned(),
            drv_path: String::new(),
            project: "main".to_owned(),
            evaluation: 3,
            manual: true,
            height: 2,
            waited: 75.0,
        };
        let queue = Queue { blocked: 4, ready: 1, running: 0, now: Vec::new(), next: vec![ready] };
        let text = describe(&queue, None);
        let last = text.lines().last().unwrap_or_default();
        assert_eq!(last, "1     17     main     3     2      1m 15s     hello (asked for)");
    }
}
