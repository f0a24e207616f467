//! What all roles do the same: settings, logs, SIGTERM.

use std::io::IsTerminal;

use harmonia_service::serve;
use harmonia_service::settings::Settings;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

use crate::outcome::Failure;

/// The settings of this process, with its log set up: lines for people on a terminal, JSON elsewhere.
pub fn prepare() -> Result<Settings, Failure> {
    let filter = EnvFilter::try_from_env("HARMONIA_CI_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        log.init();
    } else {
        log.json().init();
    }
    Ok(Settings::load()?)
}

/// Ends with SIGTERM or Ctrl-C.
pub async fn stop() {
    if let Err(error) = serve::stopped().await {
        tracing::error!(%error, "signals cannot be heard");
    }
}
