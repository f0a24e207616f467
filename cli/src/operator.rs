use clap::Args;
use harmonia_service::serve;

use crate::outcome::Failure;
use crate::role;

/// Run an operator: makes a farm from BuilderPools and Projects in a Kubernetes cluster, and keeps it so
///
/// Configured by HARMONIA_CI_CONFIG, a TOML file, or by variables: HARMONIA_CI_INSTALLATION, HARMONIA_CI_DATABASE_ADMIN_URL,
/// HARMONIA_CI_NAMESPACE, HARMONIA_CI_WATCH_NAMESPACES and others, see docs/operator.md. The cluster is the one that it runs in, or
/// that of KUBECONFIG. Stops on SIGTERM.
#[derive(Args)]
pub struct Arguments {
    /// Stop the operators of the installation, remove what keeps BuilderPools and Projects from being deleted without them, and
    /// do nothing else. What was made stays
    #[arg(long)]
    release: bool,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let settings = role::prepare()?;
    if arguments.release {
        return Ok(harmonia_operator::release(&settings).await?);
    }
    let stops = serve::stops().map_err(Failure::Signals)?;
    Ok(harmonia_operator::run(&settings, stops).await?)
}
