use clap::Args;

use crate::outcome::Failure;
use crate::role;

/// Run a signer: gives upload slots to builders, publishes and signs what they store
///
/// Configured by HARMONIA_CI_CONFIG, a TOML file, or by variables: HARMONIA_CI_DATABASE_URL, HARMONIA_CI_S3_ENDPOINT,
/// HARMONIA_CI_S3_BUCKET, HARMONIA_CI_SIGNING_KEY_FILES and others, see docs/cache.md. Stops on SIGTERM.
#[derive(Args)]
pub struct Arguments {}

pub async fn run(Arguments {}: Arguments) -> Result<(), Failure> {
    let settings = role::prepare()?;
    Ok(harmonia_signer::run(&settings, role::stop()).await?)
}
