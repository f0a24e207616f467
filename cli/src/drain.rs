//! `harmonia-ci drain`

use std::time::{Duration, Instant};

use clap::Args;
use harmonia_service::api::{Changed, Drain, Node};
use harmonia_service::quantity::Span;
use reqwest::{Method, StatusCode};

use crate::client::{ApiError, Client, Farm};
use crate::outcome::Failure;
use crate::wait::PATIENCE;

/// How often the farm is asked whether a node is idle.
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
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with_all = ["now", "undo"])]
    deadline: Option<String>,

    /// Let it claim again
    #[arg(long)]
    undo: bool,

    /// Wait until it holds nothing
    #[arg(long, conflicts_with = "undo")]
    wait: bool,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    let name = arguments.node.unwrap_or_else(harmonia_builder::machine_name);
    let node = named(&client, &name).await?;
    let path = format!("nodes/{}/drain", node.id);
    if arguments.undo {
        let Changed { changed } = client.send(Method::DELETE, &path, None::<&()>).await?;
        println!("{name} {}", if changed > 0 { "claims again" } else { "was not drained by hand" });
        return Ok(());
    }
    let drain = Drain { deadline: arguments.deadline, now: arguments.now };
    let _: Changed = client.send(Method::POST, &path, Some(&drain)).await?;
    println!("{name} drains");
    if arguments.wait {
        wait(&client, node.id).await?;
        println!("{name} holds nothing");
    }
    Ok(())
}

async fn named(client: &Client, name: &str) -> Result<Node, ApiError> {
    let mut nodes: Vec<Node> = client.get("nodes").await?;
    nodes.retain(|node| node.name == name || format!("{}/{}", node.pool, node.name) == name);
    let refused = |status, detail| Err(ApiError::Refused { status, detail });
    match nodes.len() {
        1 => Ok(nodes.remove(0)),
        0 => {
            refused(StatusCode::NOT_FOUND, format!("there is no node {name}: `harmonia-ci nodes` lists them"))
        }
        pools => {
            refused(StatusCode::CONFLICT, format!("{pools} pools have a node {name}: write pool/{name}"))
        }
    }
}

async fn wait(client: &Client, id: i32) -> Result<(), ApiError> {
    let mut heard = Instant::now();
    loop {
        match client.get::<Vec<Node>>("nodes").await {
            Ok(nodes) => {
                heard = Instant::now();
                let node = nodes.iter().find(|node| node.id == id);
                if node.is_none_or(|node| node.building + node.uploading == 0) {
                    return Ok(());
                }
            }
            Err(error) if error.is_away() && heard.elapsed() < PATIENCE => {}
            Err(error) => return Err(error),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Found wrong here rather than at the other end.
fn time(text: &str) -> Result<String, String> {
    text.parse::<Span>().map(|_| text.to_owned()).map_err(|error| error.to_string())
}
