use std::collections::BTreeSet;
use std::time::Duration;

use nix_derivation::StorePath;

use super::wire::{Acknowledged, Op, Request};
use super::{Connection, Result, Sink};

impl Connection {
    /// Whether the path is valid.
    pub async fn is_valid_path(&mut self, path: &StorePath) -> Result<bool> {
        self.ask(Request::new(Op::IsValidPath).path(path)).await
    }

    /// Which of the paths are valid; with `substitute`, after those that substituters have were fetched.
    pub async fn query_valid_paths(
        &mut self,
        paths: &BTreeSet<StorePath>,
        substitute: bool,
        limit: Duration,
        sink: &mut impl Sink,
    ) -> Result<BTreeSet<StorePath>> {
        let request = Request::new(Op::QueryValidPaths).paths(paths).flag(substitute);
        self.run(request, limit, sink).await
    }

    /// Which of the paths substituters have. Only those are asked that say of themselves that they want so many questions
    /// at once (`WantMassQuery`).
    pub async fn query_substitutable_paths(
        &mut self,
        paths: &BTreeSet<StorePath>,
    ) -> Result<BTreeSet<StorePath>> {
        self.ask(Request::new(Op::QuerySubstitutablePaths).paths(paths)).await
    }

    /// The valid paths that refer to the path, itself included if it does.
    pub async fn query_referrers(&mut self, path: &StorePath) -> Result<BTreeSet<StorePath>> {
        self.ask(Request::new(Op::QueryReferrers).path(path)).await
    }

    /// Makes the path valid by substitution, with everything that it refers to, unless it is.
    pub async fn ensure_path(
        &mut self,
        path: &StorePath,
        limit: Duration,
        sink: &mut impl Sink,
    ) -> Result<()> {
        let Acknowledged = self.run(Request::new(Op::EnsurePath).path(path), limit, sink).await?;
        Ok(())
    }

    /// Keeps the path, and everything that it refers to, from being collected while this connection lasts. It need
    /// not be valid yet.
    pub async fn add_temp_root(&mut self, path: &StorePath) -> Result<()> {
        let Acknowledged = self.ask(Request::new(Op::AddTempRoot).path(path)).await?;
        Ok(())
    }
}
