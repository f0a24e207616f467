//! How a verb ends, in words and as an exit code.

use std::path::PathBuf;
use std::process::ExitCode;

use harmonia_builder::BuilderError;
use harmonia_crds::YamlError;
use harmonia_evaluator::{ConfineError, EvaluatorError};
use harmonia_frontend::FrontendError;
use harmonia_nix::key::KeyError;
use harmonia_operator::OperatorError;
use harmonia_queue::migrate::MigrateError;
use harmonia_service::sentence::sentence;
use harmonia_service::settings::SettingsError;
use harmonia_signer::SignerError;
use reqwest::StatusCode;
use thiserror::Error;

use crate::client::ApiError;
use crate::up::UpError;

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
    #[error(transparent)]
    Signer(#[from] SignerError),
    #[error(transparent)]
    Builder(#[from] BuilderError),
    #[error(transparent)]
    Operator(#[from] OperatorError),
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Up(#[from] UpError),
    #[error("cannot serve S3 on {address}")]
    S3 { address: String, source: std::io::Error },
    #[error(transparent)]
    Evaluator(#[from] EvaluatorError),
    #[error(transparent)]
    Confine(#[from] ConfineError),
    #[error("the bucket is being swept, by a signer or by another command: try again when that is done")]
    Sweeping,
    #[error("signals cannot be heard")]
    Signals(#[source] std::io::Error),
    #[error(transparent)]
    Yaml(#[from] YamlError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("{} cannot be written", file.display())]
    Write { file: PathBuf, source: std::io::Error },
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
        eprintln!("harmonia-ci: {}", sentence(&failure));
    }
    ExitCode::from(match &failure {
        Failure::NoDatabase
        | Failure::UrlFile(_)
        | Failure::Settings(_)
        | Failure::Key(_)
        | Failure::KeyFile { .. }
        | Failure::Builder(BuilderError::Settings(_) | BuilderError::State { .. })
        | Failure::Operator(
            OperatorError::Settings(_)
            | OperatorError::Installation { .. }
            | OperatorError::Shape { .. }
            | OperatorError::Cluster(_),
        )
        | Failure::Evaluator(EvaluatorError::Settings(_) | EvaluatorError::State { .. })
        | Failure::Frontend(FrontendError::Settings(_))
        | Failure::Signer(SignerError::Settings(_) | SignerError::Keys(_) | SignerError::Path(_)) => USAGE,
        Failure::Up(error) if error.is_usage() => USAGE,
        Failure::Signer(SignerError::Queue(harmonia_queue::Error::Unreachable(_))) => UNREACHABLE,
        Failure::Signer(SignerError::Bucket(error)) if error.is_transient() => UNREACHABLE,
        Failure::Operator(OperatorError::Api(_)) => UNREACHABLE,
        Failure::Connect(error) | Failure::Migrate(MigrateError::Connect(error)) => match error {
            sqlx::Error::Configuration(_) => USAGE,
            _ => UNREACHABLE,
        },
        Failure::Query(sqlx::Error::Io(_)) | Failure::Queue(harmonia_queue::Error::Unreachable(_)) => {
            UNREACHABLE
        }
        Failure::Api(error) => match error {
            ApiError::Nonsense { .. } => UNREACHABLE,
            error if error.is_away() => UNREACHABLE,
            // It was there, but not in the state for what was asked.
            ApiError::Refused { status: StatusCode::CONFLICT | StatusCode::UNPROCESSABLE_ENTITY, .. } => {
                FAILED
            }
            _ => USAGE,
        },
        Failure::Reported
        | Failure::Sweeping
        | Failure::Yaml(_)
        | Failure::Query(_)
        | Failure::Migrate(_)
        | Failure::Queue(_)
        | Failure::Builder(_)
        | Failure::Operator(_)
        | Failure::Evaluator(_)
        | Failure::Confine(_)
        | Failure::Signals(_)
        | Failure::Write { .. }
        | Failure::Up(_)
        | Failure::S3 { .. }
        | Failure::Frontend(_)
        | Failure::Signer(_) => FAILED,
    })
}
