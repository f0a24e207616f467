use std::collections::BTreeSet;
use std::time::Duration;

use nix_derivation::StorePath;

use super::wire::{
    self, Answer, Input, MAX_PATH, MAX_PATHS, Op, Request, length, number, path, sentence, word,
};
use super::{Connection, Error, Quiet, Result};

/// What to collect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Garbage {
    /// What nothing holds, until that many bytes are free.
    Dead {
        /// So many bytes are enough.
        max_freed: u64,
    },
    /// These paths. One that is held, or that another than these refers to, is an error of the daemon.
    Paths(BTreeSet<StorePath>),
}

/// What was collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freed {
    /// The store paths that are gone.
    pub paths: BTreeSet<StorePath>,
    /// The bytes that are free now.
    pub bytes: u64,
}

impl Answer for Freed {
    async fn read<R: Input>(input: &mut R, _: u8) -> wire::Result<Self> {
        let mut paths = BTreeSet::new();
        for _ in 0..length(input, "the number of collected paths", MAX_PATHS).await? {
            // Leftovers in the store's directory are collected and named too, and may have any name.
            paths.extend(word(input, "a collected path", MAX_PATH).await?.parse::<StorePath>());
        }
        let bytes = number(input).await?;
        // An obsolete word.
        number(input).await?;
        Ok(Self { paths, bytes })
    }
}

/// What holds which path.
struct Roots(Vec<(String, StorePath)>);

impl Answer for Roots {
    async fn read<R: Input>(input: &mut R, _: u8) -> wire::Result<Self> {
        // 64 bytes of each link, were there as many as there may be.
        let mut room = 64 << 20;
        let mut roots = Vec::new();
        for _ in 0..length(input, "the number of roots", MAX_PATHS).await? {
            roots.push((sentence(input, &mut room).await?, path(input).await?));
        }
        Ok(Self(roots))
    }
}

impl Connection {
    /// Collects garbage.
    pub async fn collect_garbage(&mut self, garbage: &Garbage, limit: Duration) -> Result<Freed> {
        let nothing = BTreeSet::new();
        let (action, paths, max_freed) = match garbage {
            Garbage::Dead { max_freed } => (2, &nothing, *max_freed),
            Garbage::Paths(paths) => (3, paths, u64::MAX),
        };
        let request = Request::new(Op::CollectGarbage)
            .number(action)
            .paths(paths)
            // Whether to ignore what holds a path, which no daemon allows.
            .flag(false)
            .number(max_freed)
            // Three obsolete words.
            .number(0)
            .number(0)
            .number(0);
        self.run(request, limit, &mut Quiet).await
    }

    /// Deletes a path with everything that refers to it, directly or not. If any of that is held, nothing is deleted
    /// and the error names it.
    ///
    /// A daemon with `keep-outputs` or `keep-derivations` also counts the links between outputs and their
    /// derivations: [`super::Daemon::delete_with_referrers`] turns that off for the occasion.
    pub async fn delete_with_referrers(&mut self, path: &StorePath, limit: Duration) -> Result<Freed> {
        let closure = self.referrers_closure(path).await?;
        let Roots(roots) = self.run(Request::new(Op::FindRoots), limit, &mut Quiet).await?;
        if let Some((root, alive)) = roots.into_iter().find(|(_, alive)| closure.contains(alive)) {
            return Err(Error::Alive { path: path.clone(), alive, root });
        }
        self.collect_garbage(&Garbage::Paths(closure), limit).await
    }

    async fn referrers_closure(&mut self, path: &StorePath) -> Result<BTreeSet<StorePath>> {
        let mut closure = BTreeSet::from([path.clone()]);
        let mut unasked = vec![path.clone()];
        while let Some(path) = unasked.pop() {
            for referrer in self.query_referrers(&path).await? {
                if closure.insert(referrer.clone()) {
                    unasked.push(referrer);
                }
            }
        }
        Ok(closure)
    }
}
