//! Which database a verb talks to.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use harmonia_queue::Db;
use sqlx::{Connection, PgConnection};

use crate::outcome::Failure;

/// The options that name a database.
#[derive(Args)]
pub struct Database {
    // Ids of their own: `--url` and its variable name a farm, and an argument of that id is global.
    /// The database, as postgres://user:password@host:port/name
    #[arg(
        id = "database",
        long = "database",
        value_name = "URL",
        env = "HARMONIA_CI_DATABASE_URL",
        hide_env_values = true
    )]
    url: Option<String>,

    /// A file that holds the database's URL
    #[arg(
        id = "database_file",
        long = "database-file",
        value_name = "FILE",
        env = "HARMONIA_CI_DATABASE_URL_FILE",
        hide_env_values = true
    )]
    file: Option<PathBuf>,
}

impl Database {
    /// Whether one was given.
    pub fn is_named(&self) -> bool {
        self.url.is_some() || self.file.is_some()
    }

    /// The URL, wherever it was given.
    pub fn url(&self) -> Result<String, Failure> {
        match (&self.url, &self.file) {
            (Some(url), _) => Ok(url.clone()),
            (None, Some(file)) => Ok(fs::read_to_string(file).map_err(Failure::UrlFile)?.trim().to_owned()),
            (None, None) => Err(Failure::NoDatabase),
        }
    }

    /// One connection.
    pub async fn connect(&self) -> Result<PgConnection, Failure> {
        PgConnection::connect(&self.url()?).await.map_err(Failure::Connect)
    }

    /// The queue in it. Its calls wait for a database that is away, so that is found out first; they are made as a pooler
    /// needs it, for none may be known of.
    pub async fn queue(&self) -> Result<Db, Failure> {
        self.connect().await?.close().await.map_err(Failure::Connect)?;
        Ok(Db::pooled(&self.url()?, 1)?)
    }
}
