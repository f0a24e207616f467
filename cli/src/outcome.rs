//! How a verb ends, in words and as an exit code.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use harmonia_nix::key::KeyError;
use harmonia_queue::migrate::MigrateError;
use harmonia_service::settings::SettingsError;
use harmonia_signer::SignerError;
use thiserror::Error;

/// Why a verb did not succeed.
#[derive(Debug, Error)]
pub enum Failure {
    /// Everything has been said already.
    #[error("failed")]
    Reported,
    #[error(
        "no database was named: give --database, HARMONIA_CI_DATABASE_URL or HARMONIA_CI_DATABASE_URL_FILE"
    )]
    NoDatabase,
    #[error("failed to read the file that holds the database URL")]
    UrlFile(#[source] std::io::Error),
    #[error("failed to connect to the database")]
    Connect(#[source] sqlx::Error),
    #[error("failed to ask the database")]
    Query(#[source] sqlx::Error),
    #[error(transparent)]
    Migrate(#[from] MigrateError),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Signer(#[from] SignerError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("the key file {} cannot be used", file.display())]
    KeyFile { file: PathBuf, source: std::io::Error },
}

const FAILED: u8 = 1;
const USAGE: u8 = 2;
const UNREACHABLE: u8 = 3;

/// Prints the failure, if any, and gives the process's exit code.
pub fn exit_code(outcome: Result<(), Failure>) -> ExitCode {
    let Err(failure) = outcome else {
        return ExitCode::SUCCESS;
    };
    if !matches!(failure, Failure::Reported) {
        eprintln!("harmonia-ci: {}", chain(&failure));
    }
    ExitCode::from(match &failure {
        Failure::NoDatabase
        | Failure::UrlFile(_)
        | Failure::Settings(_)
        | Failure::Key(_)
        | Failure::KeyFile { .. }
        | Failure::Signer(SignerError::Settings(_) | SignerError::Keys(_) | SignerError::Path(_)) => USAGE,
        Failure::Signer(SignerError::Queue(harmonia_queue::Error::Unreachable(_))) => UNREACHABLE,
        Failure::Signer(SignerError::Bucket(error)) if error.is_transient() => UNREACHABLE,
        Failure::Connect(error) | Failure::Migrate(MigrateError::Connect(error)) => match error {
            sqlx::Error::Configuration(_) => USAGE,
            _ => UNREACHABLE,
        },
        Failure::Query(sqlx::Error::Io(_)) => UNREACHABLE,
        Failure::Reported | Failure::Query(_) | Failure::Migrate(_) | Failure::Signer(_) => FAILED,
    })
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        // Some libraries repeat their source in their own text.
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}
