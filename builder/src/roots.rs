//! What the garbage collector must leave alone. Temporary roots last as long as the connection that asked for them, so one
//! connection is kept, and asked again for everything when it has been made anew. It cannot let go of a single root: where
//! many are of no use any more, another connection takes its place.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harmonia_nix::StorePath;
use harmonia_nix::daemon::Daemon;

use crate::store::{Store, StoreError};

/// So many useless roots are cheaper to keep than to get rid of.
const USELESS: usize = 500;

/// The roots of a builder.
#[derive(Debug)]
pub struct Roots {
    store: Arc<Store>,
    kept: tokio::sync::Mutex<Kept>,
    /// How often each path is wanted.
    wanted: Mutex<HashMap<StorePath, usize>>,
}

#[derive(Debug)]
struct Kept {
    daemon: Daemon,
    /// Which of its connections has the roots.
    connection: u64,
    roots: HashSet<StorePath>,
}

/// Paths that are held until this is dropped.
#[derive(Debug)]
pub struct Hold {
    roots: Arc<Roots>,
    paths: Vec<StorePath>,
}

impl Roots {
    /// None yet.
    pub fn new(store: Arc<Store>) -> Arc<Self> {
        let kept = Kept { daemon: store.daemon(), connection: 0, roots: HashSet::new() };
        Arc::new(Self { store, kept: tokio::sync::Mutex::new(kept), wanted: Mutex::default() })
    }

    /// Holds paths, valid or not yet, with everything that they refer to.
    pub async fn hold(self: &Arc<Self>, paths: Vec<StorePath>) -> Result<Hold, StoreError> {
        {
            let mut wanted = self.wanted();
            for path in &paths {
                *wanted.entry(path.clone()).or_default() += 1;
            }
        }
        let hold = Hold { roots: Arc::clone(self), paths };
        self.keep().await?;
        Ok(hold)
    }

    /// Asks for whatever is wanted and not held: all of it, if the daemon was started again since.
    pub async fn keep(&self) -> Result<(), StoreError> {
        let mut kept = self.kept.lock().await;
        let wanted: Vec<StorePath> = self.wanted().keys().cloned().collect();
        if !wanted.is_empty() {
            kept.ask(&wanted).await?;
        }
        Ok(())
    }

    /// Lets go of everything that is not wanted any more.
    pub async fn tidy(&self, useless: usize) -> Result<(), StoreError> {
        let mut kept = self.kept.lock().await;
        let wanted: Vec<StorePath> = self.wanted().keys().cloned().collect();
        if kept.roots.len() > wanted.len() + useless {
            // The old connection goes only when the new one holds what is wanted.
            let mut next = Kept { daemon: self.store.daemon(), connection: 0, roots: HashSet::new() };
            next.ask(&wanted).await?;
            *kept = next;
        }
        Ok(())
    }

    /// The same where it is worth it.
    pub async fn tidy_now_and_then(&self) -> Result<(), StoreError> {
        self.tidy(USELESS).await
    }

    fn wanted(&self) -> MutexGuard<'_, HashMap<StorePath, usize>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    async fn ask(&mut self, wanted: &[StorePath]) -> Result<(), StoreError> {
        'anew: loop {
            self.daemon.connection().await?;
            if self.daemon.connections() != self.connection {
                self.connection = self.daemon.connections();
                self.roots.clear();
            }
            for path in wanted.iter().filter(|path| !self.roots.contains(*path)).cloned().collect::<Vec<_>>()
            {
                let connection = self.daemon.connection().await?;
                connection.add_temp_root(&path).await?;
                if self.daemon.connections() != self.connection {
                    continue 'anew;
                }
                self.roots.insert(path);
            }
            return Ok(());
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut wanted = self.roots.wanted();
        for path in &self.paths {
            if let Some(times) = wanted.get_mut(path) {
                *times -= 1;
                if *times == 0 {
                    wanted.remove(path);
                }
            }
        }
    }
}
