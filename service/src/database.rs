//! The database that the settings name.

use harmonia_queue::Db;

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
