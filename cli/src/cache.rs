use std::io::IsTerminal;

use clap::{Args, Subcommand};
use harmonia_service::settings::Settings;
use harmonia_signer::Signer;

use crate::outcome::Failure;

/// Change what the cache has; with a signer's configuration
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Unpublishes store paths, or all that a node built; what is wanted is built again
    Forget {
        /// Store paths
        #[arg(required_unless_present = "built_by")]
        paths: Vec<String>,
        /// A node's name, or pool/name
        #[arg(long, value_name = "NODE")]
        built_by: Option<String>,
    },
    /// Signs everything again with the keys of today
    Resign,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let signer = Signer::connect(&Settings::load()?).await?;
    match arguments.verb {
        Verb::Forget { paths, built_by } => {
            let forgotten = signer.forget(&paths, built_by.as_deref()).await?;
            for path in &forgotten {
                println!("{path}");
            }
            eprintln!("{} forgotten", forgotten.len());
        }
        Verb::Resign => {
            let terminal = std::io::stderr().is_terminal();
            let count = signer
                .resign(|done| {
                    if terminal {
                        eprint!("\r{done} signed");
                    }
                })
                .await?;
            if terminal {
                eprintln!();
            }
            println!("{count} narinfos signed again");
        }
    }
    Ok(())
}
