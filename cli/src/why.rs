//! `harmonia-ci why`

use clap::Args;
use harmonia_service::api::Reason;

use crate::client::Farm;
use crate::outcome::Failure;
use crate::output::Output;
use crate::target;

/// Say why a build is not running, or why it ended as it did
#[derive(Args)]
pub struct Arguments {
    /// A build's number, an attribute of the latest evaluation, a .drv path or an output path
    target: String,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    let build = target::find(&client, &arguments.target).await?;
    let reasons: Vec<Reason> = client.get(&format!("builds/{}/why", build.id)).await?;
    arguments.output.print(&reasons, || {
        let head = format!("build {} ({}) is {}\n", build.id, build.name, build.state);
        reasons.iter().fold(head, |text, reason| format!("{text}{}\n", reason.sentence))
    });
    Ok(())
}
