//! `harmonia-ci cancel`

use clap::Args;
use harmonia_service::api::Changed;

use crate::client::Farm;
use crate::outcome::Failure;
use crate::target;

/// Cancel a build, and with it what needs it; or a whole evaluation
#[derive(Args)]
pub struct Arguments {
    /// A build's number, an attribute of the latest evaluation, a .drv path or an output path
    #[arg(required_unless_present = "evaluation")]
    target: Option<String>,

    /// This evaluation, and all builds that only it wants
    #[arg(long = "eval", value_name = "EVAL", conflicts_with = "target")]
    evaluation: Option<i64>,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    if let Some(id) = arguments.evaluation {
        let Changed { changed } = client.post(&format!("evals/{id}/cancel")).await?;
        println!("evaluation {id} {}", if changed > 0 { "is cancelled" } else { "had ended already" });
        return Ok(());
    }
    let build = target::find(&client, arguments.target.as_deref().unwrap_or_default()).await?;
    let Changed { changed } = client.post(&format!("builds/{}/cancel", build.id)).await?;
    let end = if changed > 0 { "is cancelled" } else { "had ended already" };
    println!("build {} ({}) {end}", build.id, build.name);
    Ok(())
}
