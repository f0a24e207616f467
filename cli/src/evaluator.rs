use clap::Args;

use crate::outcome::Failure;
use crate::role;

/// Runs an evaluator: fetches what is to be evaluated, evaluates it with Nix, writes the graph of its builds
///
/// Configured by HARMONIA_CI_CONFIG, a TOML file, or by variables: HARMONIA_CI_DATABASE_URL, HARMONIA_CI_STATE_DIR,
/// HARMONIA_CI_NIX_DAEMON, HARMONIA_CI_LOCAL_SOURCES and others, see docs/evaluator.md. On SIGTERM it ends at once; another evaluator,
/// or the next one, begins anew what it was at.
#[derive(Args)]
pub struct Arguments {}

pub async fn run(Arguments {}: Arguments) -> Result<(), Failure> {
    let settings = role::prepare()?;
    Ok(harmonia_evaluator::run(&settings, role::stop()).await?)
}
