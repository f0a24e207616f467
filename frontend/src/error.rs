use harmonia_service::secret::SecretError;
use harmonia_service::settings::SettingsError;
use thiserror::Error;

/// Why a frontend does not start, or ended.
#[derive(Debug, Error)]
pub enum FrontendError {
    /// It is not configured well.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A secret is not there.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The database's URL is none.
    #[error("the setting database_url cannot be used: write postgres://user:password@host:port/name")]
    Database(#[from] harmonia_queue::Error),
    /// The port is taken, or not ours.
    #[error("cannot listen on {address}: choose another address in the setting listen")]
    Bind {
        /// What was to be listened on.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It cannot take connections any more.
    #[error("the frontend cannot take connections any more")]
    Serve(#[source] std::io::Error),
}

/// All that is known about an error, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |cause| cause.source())
        .fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
