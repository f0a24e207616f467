//! The database, as this process reaches it.

use harmonia_queue::Db;
use harmonia_queue::migrate::{MigrateError, migrate};
use harmonia_service::secret::{Secret, SecretError};
use harmonia_service::settings::{Settings, SettingsError};
use thiserror::Error;

/// Eight pools at once, and what is asked for all of them.
const CONNECTIONS: u32 = 10;

/// Why nothing can be asked of the database.
#[derive(Debug, Error)]
pub enum DatabaseError {
    /// A URL's file cannot be read.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The schema cannot be made.
    #[error("the database cannot be migrated")]
    Migrate(#[from] MigrateError),
    /// The queue said no, or cannot be asked.
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
}

/// Ways to the database. They may be away: nothing is asked before it is needed.
#[derive(Debug, Clone)]
pub struct Database {
    /// The queue, as the operator.
    pub db: Db,
    url: Secret,
    direct: Option<Secret>,
    admin: Option<Secret>,
}

impl Database {
    /// As the settings say. Where only the admin's URL is given, the operator uses that for everything.
    pub fn connect(settings: &Settings) -> Result<Self, SettingsError> {
        let admin = settings.secret("database_admin_url")?;
        let url = match settings.secret("database_url")?.or_else(|| admin.clone()) {
            Some(url) => url,
            None => settings.require_secret("database_url")?,
        };
        let direct = settings.secret("database_direct_url")?;
        let open = if direct.is_some() { Db::pooled } else { Db::direct };
        let connections = settings.parse("database_connections")?.unwrap_or(CONNECTIONS);
        let db = open(&url.read()?, connections).map_err(|_| SettingsError::Database)?;
        Ok(Self { db, url, direct, admin })
    }

    /// Past a pooler, for locks.
    pub fn direct_url(&self) -> Result<String, SecretError> {
        self.direct().read()
    }

    /// The same for whoever reads it anew for each connection.
    pub fn direct(&self) -> Secret {
        self.direct.as_ref().unwrap_or(&self.url).clone()
    }

    /// As whoever may make logins. None: a person makes them.
    pub fn admin_url(&self) -> Result<Option<String>, SecretError> {
        self.admin.as_ref().map(Secret::read).transpose()
    }

    /// What new connections use, where it is in a file that changes.
    pub fn url(&self) -> Result<String, SecretError> {
        self.url.read()
    }

    /// Brings the schema to this release. False: that is another's task.
    pub async fn migrate(&self) -> Result<bool, DatabaseError> {
        let Some(url) = self.admin_url()? else { return Ok(false) };
        let report = migrate(&url).await?;
        for file in report.applied {
            tracing::info!(file, "migrated");
        }
        if let Some(schema) = report.newer {
            tracing::warn!(
                schema,
                "the schema is of the next release, for which this one still works: it stays as it is"
            );
        }
        for sentence in report.open {
            tracing::warn!(sentence, "the database's login may not close this");
        }
        Ok(true)
    }
}
