use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use harmonia_nix::key::SecretKey;

use crate::outcome::Failure;

/// Make signing keys, in Nix's own format
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Makes a key and prints its public half
    Generate {
        /// Its name, by which clients know it: a host and a number, as in cache.example.org-1
        name: String,
        /// Where to write it; must not exist. Only its owner may read it
        file: PathBuf,
    },
    /// Prints the public halves of keys, as `trusted-public-keys` wants them
    Public {
        /// Files that hold keys
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

pub fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.verb {
        Verb::Generate { name, file } => {
            let key = SecretKey::generate(&name)?;
            let failed = |source| Failure::KeyFile { file: file.clone(), source };
            let mut out =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file).map_err(failed)?;
            writeln!(out, "{}", *key.to_text()).map_err(failed)?;
            println!("{}", key.public_text());
        }
        Verb::Public { files } => {
            for file in files {
                let text = fs::read_to_string(&file)
                    .map_err(|source| Failure::KeyFile { file: file.clone(), source })?;
                println!("{}", SecretKey::parse(text.trim())?.public_text());
            }
        }
    }
    Ok(())
}
