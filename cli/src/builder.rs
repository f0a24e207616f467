use clap::Args;
use harmonia_service::serve;

use crate::outcome::Failure;
use crate::role;

/// Run a builder: claims jobs, builds them with this machine's Nix daemon, uploads what they make
///
/// Configured by HARMONIA_CI_CONFIG, a TOML file, or by variables: HARMONIA_CI_DATABASE_URL (the pool's login),
/// HARMONIA_CI_STATE_DIR, HARMONIA_CI_SLOTS, HARMONIA_CI_NIX_DAEMON and others, see docs/builder.md. The daemon must trust this
/// user. On SIGTERM it claims no more and ends when what it builds is published; on a second one it gives everything back.
#[derive(Args)]
pub struct Arguments {}

pub async fn run(Arguments {}: Arguments) -> Result<(), Failure> {
    let settings = role::prepare()?;
    let stops = serve::stops().map_err(Failure::Signals)?;
    Ok(harmonia_builder::run(&settings, stops).await?)
}
