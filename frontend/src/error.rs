use harmonia_service::settings::SettingsError;
use thiserror::Error;

/// Why a frontend does not start, or ended.
#[derive(Debug, Error)]
pub enum FrontendError {
    /// It is not configured well.
    #[error(transparent)]
    Settings(#[from] SettingsError),
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
