//! `harmonia-ci frontend`

use clap::Args;
use harmonia_service::serve::stopped;
use harmonia_service::settings::Settings;

use crate::logging;
use crate::outcome::Failure;

/// Run the frontend: the cache gateway
///
/// It is configured by the file that HARMONIA_CI_CONFIG names and by HARMONIA_CI_… variables, and ends with SIGTERM.
#[derive(Args)]
pub struct Arguments {}

pub async fn run(Arguments {}: Arguments) -> Result<(), Failure> {
    logging::init();
    let settings = Settings::load()?;
    let stop = async {
        if let Err(error) = stopped().await {
            tracing::error!(%error, "signals cannot be awaited: stopping at once");
        }
    };
    Ok(harmonia_frontend::run(&settings, stop).await?)
}
