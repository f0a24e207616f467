//! `harmonia-ci nodes`

use clap::Args;
use harmonia_queue::nodes::{self, Node};
use serde_json::json;

use crate::database::Database;
use crate::outcome::Failure;
use crate::output::Output;

/// List the builders: what they do, how fast they are against the others, why they drain
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    database: Database,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let nodes = nodes::list(&arguments.database.queue().await?).await?;
    match arguments.output {
        Output::Json => println!("{}", nodes.iter().map(object).collect::<serde_json::Value>()),
        Output::Table => print!("{}", table(&nodes)),
    }
    Ok(())
}

fn object(node: &Node) -> serde_json::Value {
    json!({
        "id": node.id,
        "name": node.name,
        "pool": node.pool,
        "state": node.state(),
        "slots": node.slots,
        "building": node.building,
        "uploading": node.uploading,
        "speed": node.speed,
        "drains": node.drains,
        "kube_node": node.kube_node,
        "version": node.version,
        "seen_seconds_ago": node.seen.map(|seen| seen.as_secs()),
    })
}

fn table(nodes: &[Node]) -> String {
    let width = |name: fn(&Node) -> &str| {
        nodes.iter().map(|node| name(node).chars().count()).max().unwrap_or(0).max(4)
    };
    let (name, pool) = (width(|node| &node.name), width(|node| &node.pool));
    let head = format!("{:name$}  {:pool$}  {:8}  BUSY   UPLOADS  SPEED  WHY\n", "NAME", "POOL", "STATE");
    nodes.iter().fold(head, |text, node| {
        let busy = format!("{}/{}", node.building, node.slots);
        format!(
            "{text}{:name$}  {:pool$}  {:8}  {busy:5}  {:7}  {:5}  {}\n",
            node.name,
            node.pool,
            node.state(),
            node.uploading,
            format!("{:.2}", node.speed),
            node.drains.join(", "),
        )
        .trim_end()
        .to_owned()
            + "\n"
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_table_fits_its_names() {
        let node = Node {
            id: 1,
            name: "builder-x86-0".into(),
            pool: "x86".into(),
            slots: 4,
            building: 3,
            uploading: 1,
            speed: 1.5,
            drains: vec!["cordoned".into()],
            kube_node: None,
            version: None,
            seen: Some(Duration::from_secs(3)),
        };
        let table = table(&[node]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "NAME           POOL  STATE     BUSY   UPLOADS  SPEED  WHY");
        assert_eq!(lines[1], "builder-x86-0  x86   draining  3/4          1  1.50   cordoned");
    }
}
