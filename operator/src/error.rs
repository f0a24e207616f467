use std::path::PathBuf;

use harmonia_service::settings::SettingsError;
use thiserror::Error;

/// Why the operator does not run.
#[derive(Debug, Error)]
pub enum OperatorError {
    /// It is configured wrongly.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The installation's file cannot be read.
    #[error("the installation in {} cannot be read", file.display())]
    Installation {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The installation's file is not what it should be.
    #[error("the installation in {} cannot be used", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// Where and why.
        #[source]
        source: Box<serde_saphyr::Error>,
    },
    /// There is no cluster.
    #[error("there is no way to a Kubernetes API server")]
    Cluster(#[source] Box<kube::config::InferConfigError>),
    /// The API server said no, or cannot be asked.
    #[error("the Kubernetes API server cannot be asked")]
    Api(#[from] Box<kube::Error>),
    /// The port is taken, for one.
    #[error("cannot serve on {address}")]
    Serve {
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
