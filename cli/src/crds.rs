//! `harmonia-ci crds`

use std::path::PathBuf;

use clap::Args;

use crate::outcome::Failure;

/// Print the custom resource definitions as YAML, for `kubectl apply --server-side -f -`
#[derive(Args)]
pub struct Arguments {
    /// Write each into a file of this directory instead
    #[arg(long)]
    directory: Option<PathBuf>,
}

pub fn run(arguments: Arguments) -> Result<(), Failure> {
    for (number, crd) in harmonia_crds::all().iter().enumerate() {
        let text = harmonia_crds::yaml(crd)?;
        match &arguments.directory {
            Some(directory) => {
                let file = directory.join(format!("{}.yaml", crd.spec.names.plural));
                std::fs::write(&file, text).map_err(|source| Failure::Write { file, source })?;
            }
            None if number == 0 => print!("{text}"),
            None => print!("---\n{text}"),
        }
    }
    Ok(())
}
