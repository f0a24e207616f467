use std::path::PathBuf;
use std::time::Duration;

use nix_derivation::StorePath;

use super::delete::Freed;
use super::{Connection, Options, Result};

/// A daemon's socket, and a connection to it while there is one.
#[derive(Debug)]
pub struct Daemon {
    socket: PathBuf,
    options: Options,
    connection: Option<Connection>,
    connections: u64,
}

impl Daemon {
    /// Does not connect yet.
    pub fn new(socket: impl Into<PathBuf>, options: Options) -> Self {
        Self { socket: socket.into(), options, connection: None, connections: 0 }
    }

    /// The connection, made again if there is none, or if the last operation on it was not completed, or if the
    /// daemon has left it.
    pub async fn connection(&mut self) -> Result<&mut Connection> {
        // Lets the runtime hear of a socket that was closed while nobody looked.
        tokio::task::yield_now().await;
        let connection = match self.connection.take().filter(Connection::is_idle) {
            Some(connection) => connection,
            None => {
                self.connections += 1;
                Connection::connect(&self.socket, &self.options).await?
            }
        };
        Ok(self.connection.insert(connection))
    }

    /// How often it tried to connect. What is bound to a connection, such as temporary roots, has to be asked for
    /// again when this has changed.
    pub fn connections(&self) -> u64 {
        self.connections
    }

    /// As [`Connection::delete_with_referrers`], on a connection of its own for which outputs do not hold their
    /// derivations nor derivations their outputs. A path that is a temporary root of any connection is held.
    pub async fn delete_with_referrers(&self, path: &StorePath, limit: Duration) -> Result<Freed> {
        let options = self.options.clone().with("keep-outputs", "false").with("keep-derivations", "false");
        Connection::connect(&self.socket, &options).await?.delete_with_referrers(path, limit).await
    }
}
