//! Whether the Nix daemon was there all the time: what fails because it was not says nothing about what was evaluated.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use harmonia_builder::store::StoreError;
use harmonia_nix::daemon::Connection;
use tokio::time::timeout;

use crate::run::Evaluator;

/// A daemon that takes longer for a word is not there.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection that nobody else uses, and what its socket was when it was made: a daemon may leave its old connections alone when
/// it begins anew.
pub struct Witness {
    connection: Connection,
    socket: PathBuf,
    was: Option<(u64, u64, i64)>,
}

impl Witness {
    /// From now on.
    pub async fn new(evaluator: &Evaluator) -> Result<Self, StoreError> {
        let connection = evaluator.store.connect(&evaluator.store.options()).await?;
        let socket = evaluator.config.daemon.clone();
        Ok(Self { was: identity(&socket), connection, socket })
    }

    /// Whether the daemon went away, even if it is there again.
    pub async fn was_left(&mut self) -> bool {
        if identity(&self.socket) != self.was {
            return true;
        }
        let Ok(any) = harmonia_nix::store_path::parse(ANY) else { return false };
        !matches!(timeout(PATIENCE, self.connection.is_valid_path(&any)).await, Ok(Ok(_)))
    }
}

/// A path that need not be there: any question will do.
const ANY: &str = "/nix/store/00000000000000000000000000000000-any";

fn identity(socket: &Path) -> Option<(u64, u64, i64)> {
    let socket = socket.metadata().ok()?;
    Some((socket.dev(), socket.ino(), socket.ctime()))
}
