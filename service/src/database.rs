//! The database that the settings name.

use std::convert::Infallible;
use std::time::Duration;

use harmonia_queue::Db;
use harmonia_queue::listen::Address;

use crate::secret::Secret;
use crate::sentence::sentence;
use crate::settings::{Settings, SettingsError};

/// Up to so many connections, unless the settings say more. Where a direct URL is set too, the ordinary one leads to a
/// pooler.
pub fn connect(settings: &Settings, connections: u32) -> Result<Db, SettingsError> {
    let url = settings.require_secret("database_url")?.read()?;
    let pooled = settings.secret("database_direct_url")?.is_some();
    let connect = if pooled { Db::pooled } else { Db::direct };
    connect(&url, settings.parse("database_connections")?.unwrap_or(connections))
        .map_err(|_| SettingsError::Database)
}

/// Where LISTEN works.
pub fn direct(settings: &Settings) -> Result<Secret, SettingsError> {
    match settings.secret("database_direct_url")? {
        Some(direct) => Ok(direct),
        None => settings.require_secret("database_url"),
    }
}

impl Address for Secret {
    fn url(&self) -> Option<String> {
        self.read().ok()
    }
}

/// How often a file with the URL is looked at.
const LOOK: Duration = Duration::from_secs(10);

/// Follows the URL where it is in a file that changes.
pub async fn follow(settings: &Settings, db: &Db) -> Infallible {
    let read = || settings.require_secret("database_url").and_then(|secret| Ok(secret.read()?));
    let mut known = read().ok();
    loop {
        tokio::time::sleep(LOOK).await;
        let renewed = match read() {
            Ok(url) if known.as_ref() == Some(&url) => continue,
            Ok(url) => db.renew(&url).map_err(|_| SettingsError::Database).map(|()| known = Some(url)),
            Err(error) => Err(error),
        };
        match renewed {
            Ok(()) => tracing::info!("the database's URL has changed"),
            Err(error) => tracing::warn!(error = sentence(&error), "the database's URL cannot be read again"),
        }
    }
}
