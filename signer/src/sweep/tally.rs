//! What a sweep removed, or would.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// So many, with so many bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// Bytes in the bucket.
    pub bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }
}

impl From<(i64, i64)> for Tally {
    fn from((count, bytes): (i64, i64)) -> Self {
        Self { count: count.unsigned_abs(), bytes: bytes.unsigned_abs() }
    }
}

/// What became of a sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Swept {
    /// Paths whose grace was over, with the bytes of their NARs: removed.
    pub paths: Tally,
    /// Paths that nobody needs and whose grace goes on.
    pub waiting: Tally,
    /// Objects that belong to nothing, by what they are: removed.
    pub leftovers: BTreeMap<&'static str, Tally>,
    /// Narinfos of which the database knows nothing: left, for `resync` to adopt.
    pub unknown: Tally,
    /// Objects that were looked at.
    pub objects: Tally,
}

impl Swept {
    /// All that was removed.
    pub fn removed(&self) -> Tally {
        let tallies = self.leftovers.values().chain([&self.paths]);
        tallies.fold(Tally::default(), |sum, one| Tally {
            count: sum.count + one.count,
            bytes: sum.bytes + one.bytes,
        })
    }
}

impl fmt::Display for Swept {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (paths, removed) = (self.paths.count, self.removed());
        let leftovers = removed.count - paths;
        write!(to, "{paths} paths and {leftovers} leftovers removed, {} bytes", removed.bytes)
    }
}
