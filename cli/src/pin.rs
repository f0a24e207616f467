//! `harmonia-ci pin`

use clap::Args;
use harmonia_service::api::Changed;
use reqwest::Method;

use crate::client::Farm;
use crate::outcome::Failure;

/// Keep an evaluation, and all it built, for good; it outlives its project's retention
#[derive(Args)]
pub struct Arguments {
    /// The evaluation's number
    #[arg(value_name = "EVAL")]
    evaluation: i64,

    /// Let it go again when its time is over
    #[arg(long)]
    undo: bool,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let (client, id) = (arguments.farm.client()?, arguments.evaluation);
    let method = if arguments.undo { Method::DELETE } else { Method::POST };
    let Changed { changed } = client.send(method, &format!("evals/{id}/pin"), None::<&()>).await?;
    let end = match (arguments.undo, changed > 0) {
        (false, true) => "is pinned",
        (false, false) => "was pinned already",
        (true, true) => "is not pinned any more",
        (true, false) => "was not pinned",
    };
    println!("evaluation {id} {end}");
    Ok(())
}
