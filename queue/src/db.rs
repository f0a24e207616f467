use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::query::Query;
use sqlx::{Connection, PgPool, Postgres};

use crate::Result;

/// A connection idle for longer may have been lost.
const FRESH: Duration = Duration::from_secs(1);

/// A way to the database. Calls work through a transaction-mode pooler too: there each runs in a transaction of its
/// own and leaves no prepared statement behind.
#[derive(Debug, Clone)]
pub struct Db {
    pool: PgPool,
    pooled: bool,
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
        Ok(Self { pool: pool(options, connections), pooled, kin: Arc::default() })
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
        Self { pool, pooled: self.pooled, kin: Arc::default() }
    }

    /// The same database by an existing pool of direct connections.
    pub fn from_pool(pool: PgPool) -> Self {
        Self { pool, pooled: false, kin: Arc::default() }
    }

    /// Through a pooler PostgreSQL may see the parts of one exchange on different connections unless a transaction holds
    /// them together, and a named statement of one client is visible to the next.
    pub(crate) async fn rows(&self, query: Query<'_, Postgres, PgArguments>) -> Result<Vec<PgRow>> {
        if !self.pooled {
            return Ok(query.fetch_all(&self.pool).await?);
        }
        let mut held = Held { connection: self.pool.acquire().await?, open: true };
        let mut transaction = held.connection.begin().await?;
        let rows = query.persistent(false).fetch_all(&mut *transaction).await;
        match &rows {
            Ok(_) => transaction.commit().await?,
            Err(_) => transaction.rollback().await?,
        }
        held.open = false;
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

/// A connection with a transaction, closed if whoever waits for it goes away: sqlx forgets a BEGIN that was not yet
/// answered, and a pooler would keep a connection to PostgreSQL for that transaction for ever.
struct Held {
    connection: PoolConnection<Postgres>,
    open: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.open {
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
            Box::pin(async move { Ok(meta.idle_for < FRESH || connection.ping().await.is_ok()) })
        })
        .connect_lazy_with(options)
}
