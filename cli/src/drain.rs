//! `harmonia-ci drain`

use std::time::Duration;

use clap::Args;
use harmonia_queue::{Db, nodes, people};
use harmonia_service::quantity::Span;

use crate::database::Database;
use crate::outcome::Failure;

/// The reason that people give: one of them, whoever asks, so that it is taken back by whoever asks.
const REASON: &str = "by hand";
/// How often the queue is asked whether a node is idle.
const LOOK: Duration = Duration::from_secs(1);

/// Let a builder finish what it has and claim nothing more; it keeps running
#[derive(Args)]
pub struct Arguments {
    /// The builder, as `harmonia-ci nodes` names it; without it, the one with this machine's name
    node: Option<String>,

    /// Give back what it builds instead of waiting for it
    #[arg(long, conflicts_with = "undo")]
    now: bool,

    /// Give back what has not ended by then, such as 2h
    #[arg(long, value_name = "TIME", conflicts_with_all = ["now", "undo"])]
    deadline: Option<Span>,

    /// Let it claim again
    #[arg(long)]
    undo: bool,

    /// Wait until it holds nothing
    #[arg(long, conflicts_with = "undo")]
    wait: bool,

    #[command(flatten)]
    database: Database,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let db = arguments.database.queue().await?;
    let name = arguments.node.unwrap_or_else(harmonia_builder::machine_name);
    let node = nodes::named(&db, &name).await?;
    if arguments.undo {
        let drained = people::resume(&db, node, REASON).await?;
        println!("{name} {}", if drained { "claims again" } else { "was not drained by hand" });
        return Ok(());
    }
    let within = if arguments.now { Some(Duration::ZERO) } else { arguments.deadline.map(|Span(time)| time) };
    people::drain(&db, node, REASON, within).await?;
    println!("{name} drains");
    if arguments.wait {
        wait(&db, &name).await?;
        println!("{name} holds nothing");
    }
    Ok(())
}

async fn wait(db: &Db, name: &str) -> Result<(), Failure> {
    loop {
        let nodes = nodes::list(db).await?;
        match nodes.iter().find(|node| node.name == name) {
            Some(node) if node.building + node.uploading > 0 => tokio::time::sleep(LOOK).await,
            _ => return Ok(()),
        }
    }
}
