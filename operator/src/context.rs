//! What every reconcile needs.

use std::sync::Arc;

use harmonia_queue::Db;
use harmonia_service::secret::SecretError;
use kube::Client;
use kube::runtime::events::Recorder;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cache::Caches;
use crate::count::Counts;
use crate::database::Database;
use crate::installation::config::Installation;
use crate::ready::Readiness;
use crate::scope::Scope;
use crate::secrets::Secrets;
use crate::standing::Standing;

/// Shared by all controllers.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// Tells of decisions; see [`Context::publish`].
    pub recorder: Recorder,
    /// The operator's own namespace.
    pub namespace: String,
    /// Where custom resources are looked for.
    pub scopes: Vec<Scope>,
    /// What the API server has.
    pub caches: Caches,
    /// Contents of Secrets that we make or that a Project names.
    pub secrets: Secrets,
    /// As the chart wrote it down.
    pub installation: Arc<Installation>,
    /// What `/readyz` says.
    pub ready: Readiness,
    /// What `/metrics` says.
    pub counts: Counts,
    /// Whether Kubernetes nodes may be watched. None: not known yet.
    pub sees_nodes: watch::Sender<Option<bool>>,
    /// Ends the controllers.
    pub stop: CancellationToken,
    pub(crate) database: Database,
    pub(crate) standing: watch::Receiver<Standing>,
}

/// The right to write to the database.
#[derive(Debug, Clone)]
pub struct Lead {
    /// The queue, as the operator.
    pub db: Db,
    /// Goes with every leader-only write.
    pub generation: i64,
}

impl Context {
    /// Kubernetes nodes are watched, or may not be.
    pub fn see_nodes(&self, sees: bool) {
        let news = self.sees_nodes.send_if_modified(|known| known.replace(sees) != Some(sees));
        if news {
            self.counts.watches_nodes(sees);
            self.caches.touch_all();
        }
        if news && !sees {
            tracing::warn!(
                "the operator may not watch nodes: a cordon drains nothing, builders hear of a drain by SIGTERM"
            );
        }
    }

    /// What this replica may write now.
    pub fn standing(&self) -> Standing {
        *self.standing.borrow()
    }

    /// Ends whenever the standing has changed.
    pub fn standings(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// The database, for a leader. None: nothing may be written there now.
    pub fn lead(&self) -> Option<Lead> {
        let generation = self.standing().generation()?;
        Some(Lead { db: self.database.db.clone(), generation })
    }

    /// The database, to read from: whoever may write or not.
    pub fn db(&self) -> &Db {
        &self.database.db
    }

    /// Whoever may make logins. None: a person makes them.
    pub fn admin_url(&self) -> Result<Option<String>, SecretError> {
        self.database.admin_url()
    }

    /// The operator's own URL, whose host and port others use too.
    pub fn database_url(&self) -> Result<String, SecretError> {
        self.database.url()
    }
}
