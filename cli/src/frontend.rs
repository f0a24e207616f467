use clap::Args;

use crate::outcome::Failure;
use crate::role;

/// Run a frontend: the API and the cache gateway
///
/// Configured by HARMONIA_CI_CONFIG, a TOML file, or by variables: HARMONIA_CI_DATABASE_URL, HARMONIA_CI_S3_ENDPOINT,
/// HARMONIA_CI_S3_BUCKET and others, see docs/cache.md. Stops on SIGTERM.
#[derive(Args)]
pub struct Arguments {}

pub async fn run(Arguments {}: Arguments) -> Result<(), Failure> {
    let settings = role::prepare()?;
    Ok(harmonia_frontend::run(&settings, role::stop()).await?)
}
