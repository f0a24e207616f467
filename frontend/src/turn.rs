//! Who asks the database, and how many at once.

use std::ops::Deref;

use harmonia_queue::Db;
use tokio::sync::{Semaphore, SemaphorePermit};

/// A way to the database for so many at once.
pub struct Turns {
    db: Db,
    asking: Semaphore,
}

/// The right to ask the database.
pub struct Turn<'a> {
    db: &'a Db,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Turns {
    /// For `most` at once.
    pub fn new(db: Db, most: usize) -> Self {
        Self { db, asking: Semaphore::new(most) }
    }

    /// Waits for one.
    pub async fn take(&self) -> Turn<'_> {
        Turn { db: &self.db, _permit: self.asking.acquire().await.ok() }
    }
}

impl Deref for Turn<'_> {
    type Target = Db;

    fn deref(&self) -> &Db {
        self.db
    }
}
