use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::query::Query;
use sqlx::{Connection, PgConnection, PgPool, Postgres};
use tokio::time::timeout;

use crate::Result;
use crate::error::no_answer;

/// A connection idle for longer may have been lost.
const FRESH: Duration = Duration::from_secs(1);
/// It has so long to say that it is not.
const ROUND_TRIP: Duration = Duration::from_secs(5);
/// Whoever has not answered for so long does not any more: a host that vanished says nothing. Longer than any call takes that a
/// builder makes, which the database ends after 30 s.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same for the few calls that read whole tables of any size.
pub(crate) const LONG: Duration = Duration::from_secs(900);
/// A client that vanished, or was frozen, within its transaction keeps what it locked for no longer.
const BEGIN: &str = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// A way to the database. Calls work through a transaction-mode pooler too: there each runs in a transaction of its
/// own and leaves no prepared statement behind.
#[derive(Debug, Clone)]
pub struct Db {
    pool: PgPool,
    pooled: bool,
    patience: Duration,
    /// Pools of [`Self::alone`], which have to hear of a new password too.
    kin: Arc<Mutex<Vec<PgPool>>>,
}

impl Db {
    /// Connects straight to PostgreSQL with up to `connections` connections, made when they are needed.
    pub fn direct(url: &str, connections: u32) -> Result<Self> {
        Self::connect(url, connections, false)
    }

    /// Connects through a pooler in transaction mode.
    pub fn pooled(url: &str, connections: u32) -> Result<Self> {
        Self::connect(url, connections, true)
    }

    fn connect(url: &str, connections: u32, pooled: bool) -> Result<Self> {
        let mut options: PgConnectOptions = url.parse()?;
        if pooled {
            options = options.extra_float_digits(None);
        }
        Ok(Self { pool: pool(options, connections), pooled, patience: PATIENCE, kin: Arc::default() })
    }

    /// New connections are made by this URL from now on; those that are open stay.
    pub fn renew(&self, url: &str) -> Result<()> {
        let mut options: PgConnectOptions = url.parse()?;
        if self.pooled {
            options = options.extra_float_digits(None);
        }
        let kin = self.kin.lock().unwrap_or_else(PoisonError::into_inner);
        for pool in kin.iter().chain([&self.pool]) {
            pool.set_connect_options(options.clone());
        }
        Ok(())
    }

    /// The same database by one connection of its own. PostgreSQL plans a function's statements anew on every connection:
    /// whoever calls the same one again and again keeps to one.
    pub fn alone(&self) -> Self {
        let pool = pool((*self.pool.connect_options()).clone(), 1);
        self.kin.lock().unwrap_or_else(PoisonError::into_inner).push(pool.clone());
        Self { pool, pooled: self.pooled, patience: self.patience, kin: Arc::default() }
    }

    /// The same connections for calls that are waited for longer, or not as long.
    pub fn within(&self, patience: Duration) -> Self {
        Self { patience, ..self.clone() }
    }

    /// The same database by an existing pool of direct connections.
    pub fn from_pool(pool: PgPool) -> Self {
        Self { pool, pooled: false, patience: PATIENCE, kin: Arc::default() }
    }

    pub(crate) async fn rows(&self, query: Query<'_, Postgres, PgArguments>) -> Result<Vec<PgRow>> {
        let mut held = Held { connection: self.pool.acquire().await?, spoilt: self.pooled };
        let answer = timeout(self.patience, self.ask(&mut held.connection, query)).await;
        held.spoilt = answer.is_err();
        answer.unwrap_or_else(|_| Err(no_answer(self.patience).into()))
    }

    /// Through a pooler PostgreSQL may see the parts of one exchange on different connections unless a transaction holds
    /// them together, and a named statement of one client is visible to the next.
    async fn ask(
        &self,
        connection: &mut PgConnection,
        query: Query<'_, Postgres, PgArguments>,
    ) -> Result<Vec<PgRow>> {
        if !self.pooled {
            return Ok(query.fetch_all(connection).await?);
        }
        let mut transaction = connection.begin_with(BEGIN).await?;
        let rows = query.persistent(false).fetch_all(&mut *transaction).await;
        match &rows {
            Ok(_) => transaction.commit().await?,
            Err(_) => transaction.rollback().await?,
        }
        Ok(rows?)
    }

    pub(crate) async fn row(&self, query: Query<'_, Postgres, PgArguments>) -> Result<PgRow> {
        let rows = self.rows(query).await?;
        Ok(rows.into_iter().next().ok_or(sqlx::Error::RowNotFound)?)
    }

    pub(crate) async fn value<T>(&self, query: Query<'_, Postgres, PgArguments>) -> Result<T>
    where
        T: for<'r> sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
    {
        use sqlx::Row;
        Ok(self.row(query).await?.try_get(0)?)
    }

    pub(crate) async fn column<T>(&self, query: Query<'_, Postgres, PgArguments>) -> Result<Vec<T>>
    where
        T: for<'r> sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
    {
        use sqlx::Row;
        let rows = self.rows(query).await?;
        Ok(rows.iter().map(|row| row.try_get(0)).collect::<std::result::Result<_, _>>()?)
    }
}

/// A connection in use, closed if it does not answer or, with a transaction, if whoever waits for it goes away: sqlx forgets a
/// BEGIN that was not yet answered, and a pooler would keep a connection to PostgreSQL for that transaction for ever.
struct Held {
    connection: PoolConnection<Postgres>,
    spoilt: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.spoilt {
            self.connection.close_on_drop();
        }
    }
}

fn pool(options: PgConnectOptions, connections: u32) -> PgPool {
    // A connection fresh from use needs no ping, which would be a second round trip for every call.
    PgPoolOptions::new()
        .max_connections(connections)
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                Ok(meta.idle_for < FRESH
                    || matches!(timeout(ROUND_TRIP, connection.ping()).await, Ok(Ok(()))))
            })
        })
        .connect_lazy_with(options)
}
