//! This replica in the registry, and whether it is ready.

use std::convert::Infallible;
use std::time::Duration;

use harmonia_queue::Db;
use harmonia_queue::replica::Replica;
use harmonia_service::bucket::Bucket;
use harmonia_service::health::Health;
use uuid::Uuid;

use harmonia_service::sentence::sentence;

const DATABASE: &str = "database";
const BUCKET: &str = "bucket";
/// What must have been seen once before requests are sent here. Not more than once: all replicas share the database and the
/// bucket, so that taking one out of service later would help nobody, and what is in memory can still be answered.
pub const CONDITIONS: [&str; 2] = [DATABASE, BUCKET];

/// Until it is ready it looks this often.
const RETRY: Duration = Duration::from_secs(1);
/// A database that does not answer by then is away.
const PATIENCE: Duration = Duration::from_secs(3);
/// The end of a process waits no longer for the registry.
const FAREWELL: Duration = Duration::from_secs(2);

/// This process, as the registry knows it.
pub struct Registration {
    replica: Replica,
    db: Db,
    bucket: Bucket,
    health: Health,
}

impl Registration {
    /// Not registered yet.
    pub fn new(url: String, db: Db, bucket: Bucket, health: Health) -> Self {
        let replica = Replica { id: Uuid::now_v7(), role: "frontend".to_owned(), url };
        Self { replica, db, bucket, health }
    }

    /// Becomes ready, and says for ever that it lives.
    pub async fn keep(&self) -> Infallible {
        let beating = async {
            self.find_database().await;
            loop {
                self.replica.keep_beating(&self.db).await;
            }
        };
        tokio::join!(beating, self.find_bucket()).0
    }

    /// Signs off, if the database can be told.
    pub async fn leave(&self) {
        if !matches!(tokio::time::timeout(FAREWELL, self.replica.leave(&self.db)).await, Ok(Ok(()))) {
            tracing::warn!(replica = %self.replica.id, "could not sign off; the registry forgets it by itself");
        }
    }

    async fn find_database(&self) {
        loop {
            let beat = tokio::time::timeout(PATIENCE, self.replica.beat(&self.db)).await;
            let state = match beat {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(sentence(&error)),
                Err(_) => Err("the database does not answer".to_owned()),
            };
            if self.met(DATABASE, state).await {
                return;
            }
        }
    }

    async fn find_bucket(&self) {
        loop {
            let state = self.bucket.unreadable().await.map_or(Ok(()), Err);
            if self.met(BUCKET, state).await {
                return;
            }
        }
    }

    async fn met(&self, condition: &'static str, state: Result<(), String>) -> bool {
        let met = state.is_ok();
        self.health.set(condition, state);
        if !met {
            tokio::time::sleep(RETRY).await;
        }
        met
    }
}
