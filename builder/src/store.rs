//! The local store: its daemon, its database, its files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use harmonia_nix::daemon::{Connection, Daemon, Options};
use harmonia_nix::database::{Database, DatabaseError, PathInfo};
use harmonia_nix::{Sha256, StorePath};
use rustix::fs::StatVfs;
use thiserror::Error;
use tokio::task::spawn_blocking;

/// Why the local store does not answer.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The daemon.
    #[error(transparent)]
    Daemon(#[from] harmonia_nix::daemon::Error),
    /// The database.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// A path was collected, or never was.
    #[error("{0} is not in the local store")]
    Gone(StorePath),
    /// The process ends.
    #[error("the builder is stopping")]
    Stopping,
}

/// A store with a daemon in front of it.
#[derive(Debug)]
pub struct Store {
    socket: PathBuf,
    root: PathBuf,
    options: Options,
    database: Mutex<Option<Database>>,
}

impl Store {
    /// Nothing is opened yet.
    pub fn new(socket: PathBuf, root: PathBuf, options: Options) -> Self {
        Self { socket, root, options, database: Mutex::default() }
    }

    /// What connections are told unless they say otherwise.
    pub fn options(&self) -> Options {
        self.options.clone()
    }

    /// A new connection.
    pub async fn connect(&self, options: &Options) -> Result<Connection, StoreError> {
        Ok(Connection::connect(&self.socket, options).await?)
    }

    /// A handle that connects when it is used.
    pub fn daemon(&self) -> Daemon {
        Daemon::new(&self.socket, self.options())
    }

    /// Where a path's files are.
    pub fn real_path(&self, path: &StorePath) -> PathBuf {
        let path = path.to_string();
        self.root.join(path.trim_start_matches('/'))
    }

    /// The directory whose disk fills up.
    pub fn directory(&self) -> PathBuf {
        self.root.join("nix/store")
    }

    /// The NAR hashes of those of the paths that are valid.
    pub async fn hashes(
        self: &Arc<Self>,
        paths: Vec<StorePath>,
    ) -> Result<HashMap<StorePath, Sha256>, StoreError> {
        self.ask(move |database| database.hashes_of(&paths)).await
    }

    /// What is known about paths, all of which must be valid.
    pub async fn infos(
        self: &Arc<Self>,
        paths: Vec<StorePath>,
    ) -> Result<Vec<(StorePath, PathInfo)>, StoreError> {
        let wanted = paths.clone();
        let mut infos = self.ask(move |database| database.path_infos(&wanted)).await?;
        let info = |path: StorePath| match infos.remove(&path) {
            Some(info) => Ok((path, info)),
            None => Err(StoreError::Gone(path)),
        };
        paths.into_iter().map(info).collect()
    }

    async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        question: impl Fn(&mut Database) -> Result<T, DatabaseError> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        let question = Arc::new(question);
        match self.read(Arc::clone(&question)).await {
            // An unprivileged user reads it only while somebody else has it open: the daemon does for every connection. Once
            // it is open here, it stays so.
            Err(StoreError::Database(DatabaseError::NoLog { .. })) => {
                let _open = self.connect(&self.options).await?;
                self.read(question).await
            }
            answer => answer,
        }
    }

    async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        question: Arc<impl Fn(&mut Database) -> Result<T, DatabaseError> + Send + Sync + 'static>,
    ) -> Result<T, StoreError> {
        let store = Arc::clone(self);
        let answer = spawn_blocking(move || {
            let mut database = store.database.lock().unwrap_or_else(PoisonError::into_inner);
            let open = match database.take() {
                Some(open) => open,
                None => Database::open(store.root.join("nix/var/nix/db/db.sqlite"))?,
            };
            question(database.insert(open))
        });
        Ok(answer.await.map_err(|_| StoreError::Stopping)??)
    }
}

/// Bytes that are free for ordinary users on the disk of a directory.
pub fn free_bytes(directory: &Path) -> std::io::Result<u64> {
    Ok(free(&rustix::fs::statvfs(directory)?))
}

/// None where the disk can hold hardly any more files. Some disks do not count them.
fn free(disk: &StatVfs) -> u64 {
    match disk.f_files > 0 && disk.f_favail < disk.f_files / 100 {
        true => 0,
        false => disk.f_bavail.saturating_mul(disk.f_frsize),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_can_hold_no_more_files_is_full() {
        let disk = rustix::fs::statvfs("/").unwrap();
        let disk = |f_files, f_favail| StatVfs { f_bavail: 10, f_frsize: 4096, f_files, f_favail, ..disk };
        assert_eq!(free(&disk(1000, 500)), 40_960);
        assert_eq!(free(&disk(1000, 9)), 0);
        assert_eq!(free(&disk(0, 0)), 40_960);
    }
}
