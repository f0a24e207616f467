//! The control plane's own work, which in a cluster the operator does: `up` is a replica, and its janitor.

use harmonia_queue::leader::{self, Office};
use harmonia_queue::replica::Replica;
use harmonia_queue::{Db, janitor, nodes};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::error::{UpError, file};
use super::layout::Layout;
use super::prepare::SELF;
use super::roles::url_file;

/// Leads, unless another does, until it leaves.
pub struct Leader {
    db: Db,
    replica: Replica,
    work: JoinHandle<()>,
}

impl Leader {
    /// Registers as a replica, which others reach at the frontend.
    pub fn start(layout: &Layout, frontend: &str) -> Result<Self, UpError> {
        let path = layout.secret(&url_file(SELF));
        let url = std::fs::read_to_string(&path).map_err(file(path))?.trim().to_owned();
        // One for the janitor, one to say that it lives and to count builds.
        let db = Db::direct(&url, 2)?;
        let replica = Replica { id: Uuid::now_v7(), role: SELF.to_owned(), url: frontend.to_owned() };
        let work = tokio::spawn(lead(db.clone(), url, replica.clone()));
        Ok(Self { db, replica, work })
    }

    /// What the builders hold. None: nobody can be asked.
    pub async fn builds_left(&self) -> Option<i64> {
        let nodes = nodes::list(&self.db).await.ok()?;
        Some(nodes.iter().map(|node| node.building + node.uploading).sum())
    }

    /// Signs off.
    pub async fn leave(&self) {
        self.work.abort();
        if let Err(error) = self.replica.leave(&self.db).await {
            tracing::debug!(%error, "could not sign off");
        }
    }
}

async fn lead(db: Db, url: String, replica: Replica) {
    let work = |generation| janitor::run(&db, generation);
    tokio::join!(replica.keep_beating(&db), leader::campaign(&db, &url, Office::Janitor, replica.id, work),);
}
