//! `harmonia-ci rebuild`

use clap::Args;
use harmonia_service::api::Changed;

use crate::client::Farm;
use crate::outcome::Failure;
use crate::target;

/// Build something that failed or was cancelled again, before everything else
#[derive(Args)]
pub struct Arguments {
    /// A build's number, an attribute of the latest evaluation, a .drv path or an output path
    #[arg(required_unless_present = "evaluation")]
    target: Option<String>,

    /// All that failed of this evaluation
    #[arg(long = "eval", value_name = "EVAL", conflicts_with = "target")]
    evaluation: Option<i64>,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    if let Some(id) = arguments.evaluation {
        let Changed { changed } = client.post(&format!("evals/{id}/rebuild-failed")).await?;
        println!("{changed} builds of evaluation {id} are tried again");
        return Ok(());
    }
    let build = target::find(&client, arguments.target.as_deref().unwrap_or_default()).await?;
    let Changed { changed } = client.post(&format!("builds/{}/rebuild", build.id)).await?;
    match changed {
        0 => println!("build {} ({}) is {}: there is nothing to rebuild", build.id, build.name, build.state),
        _ => println!("build {} ({}) is next", build.id, build.name),
    }
    Ok(())
}
