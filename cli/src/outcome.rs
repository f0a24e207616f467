//! How a verb ends, in words and as an exit code.

use std::error::Error;
use std::process::ExitCode;

use harmonia_frontend::FrontendError;
use harmonia_queue::migrate::MigrateError;
use harmonia_service::settings::SettingsError;
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
    Queue(#[from] harmonia_queue::Error),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Frontend(#[from] FrontendError),
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
        Failure::NoDatabase | Failure::UrlFile(_) | Failure::Settings(_) => USAGE,
        Failure::Frontend(
            FrontendError::Settings(_) | FrontendError::Secret(_) | FrontendError::Database(_),
        ) => USAGE,
        Failure::Connect(error) | Failure::Migrate(MigrateError::Connect(error)) => match error {
            sqlx::Error::Configuration(_) => USAGE,
            _ => UNREACHABLE,
        },
        Failure::Query(sqlx::Error::Io(_)) | Failure::Queue(harmonia_queue::Error::Unreachable(_)) => {
            UNREACHABLE
        }
        Failure::Reported
        | Failure::Query(_)
        | Failure::Migrate(_)
        | Failure::Queue(_)
        | Failure::Frontend(_) => FAILED,
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
