//! `harmonia-ci nodes`

use clap::Args;
use harmonia_service::api::Node;

use crate::client::Farm;
use crate::outcome::Failure;
use crate::output::Output;
use crate::table::{self, table};

/// List the builders: what they do, how fast they are against the others, why they drain
#[derive(Args)]
pub struct Arguments {
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let nodes: Vec<Node> = arguments.farm.client()?.get("nodes").await?;
    arguments.output.print(&nodes, || describe(&nodes, table::width()));
    Ok(())
}

fn describe(nodes: &[Node], width: Option<usize>) -> String {
    if nodes.is_empty() {
        return "no builder has registered yet\n".to_owned();
    }
    let row = |node: &Node| {
        vec![
            node.name.clone(),
            node.pool.clone(),
            node.state.clone(),
            format!("{}/{}", node.building, node.slots),
            node.uploading.to_string(),
            format!("{:.2}", node.speed),
            node.drains.join(", "),
        ]
    };
    let rows: Vec<Vec<String>> = nodes.iter().map(row).collect();
    table(&["NAME", "POOL", "STATE", "BUSY", "UPLOADS", "SPEED", "WHY"], &rows, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_its_names() {
        let node = Node {
            id: 1,
            name: "builder-x86-0".into(),
            pool: "x86".into(),
            state: "draining".into(),
            slots: 4,
            building: 3,
            uploading: 1,
            speed: 1.5,
            drains: vec!["cordoned".into()],
            kube_node: None,
            version: None,
            seen_seconds_ago: Some(3),
        };
        let table = describe(&[node], None);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "NAME           POOL  STATE     BUSY  UPLOADS  SPEED  WHY");
        assert_eq!(lines[1], "builder-x86-0  x86   draining  3/4   1        1.50   cordoned");
    }
}
