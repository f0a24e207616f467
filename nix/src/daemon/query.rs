use std::collections::BTreeSet;
use std::time::Duration;

use nix_derivation::{DerivedPath, StoreDir, StorePath};

use super::wire::{
    self, Acknowledged, Answer, Input, MAX_PATH, MAX_WORD, Op, Request, flag, number, optional_path, paths,
    word, words,
};
use super::{Connection, Result, Sink};
use crate::Sha256;

/// What a store knows of a valid path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathInfo {
    /// The derivation that made it, if one did.
    pub deriver: Option<StorePath>,
    /// The hash of its NAR.
    pub nar_hash: Sha256,
    /// The paths that it refers to, itself included if it does.
    pub references: BTreeSet<StorePath>,
    /// When it became valid, in seconds since 1970.
    pub registration_time: u64,
    /// The size of its NAR.
    pub nar_size: u64,
    /// Whether it was built here.
    pub ultimate: bool,
    /// Its signatures, `name:base64`.
    pub signatures: BTreeSet<String>,
    /// What its path follows from, if from its content.
    pub content_address: Option<String>,
}

impl Answer for PathInfo {
    async fn read<R: Input>(input: &mut R, _: u8) -> wire::Result<Self> {
        Ok(Self {
            deriver: optional_path(input).await?,
            nar_hash: hash(&word(input, "a NAR hash", MAX_WORD).await?)?,
            references: paths(input).await?,
            registration_time: number(input).await?,
            nar_size: number(input).await?,
            ultimate: flag(input).await?,
            signatures: words(input, "the signatures of a path").await?,
            content_address: Some(word(input, "a content address", MAX_PATH).await?)
                .filter(|ca| !ca.is_empty()),
        })
    }
}

fn hash(text: &str) -> wire::Result<Sha256> {
    text.parse().map_err(|_| wire::Error::unexpected("a NAR hash", text))
}

/// None for a path that is not valid.
impl Answer for Option<PathInfo> {
    async fn read<R: Input>(input: &mut R, minor: u8) -> wire::Result<Self> {
        Ok(if flag(input).await? { Some(PathInfo::read(input, minor).await?) } else { None })
    }
}

/// What it takes to have some paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Derivations that have to be built.
    pub will_build: BTreeSet<StorePath>,
    /// Paths that substituters have.
    pub will_substitute: BTreeSet<StorePath>,
    /// Paths that nobody knows how to get.
    pub unknown: BTreeSet<StorePath>,
    /// Bytes to fetch.
    pub download_size: u64,
    /// Bytes of NAR that they become.
    pub nar_size: u64,
}

impl Answer for Missing {
    async fn read<R: Input>(input: &mut R, _: u8) -> wire::Result<Self> {
        Ok(Self {
            will_build: paths(input).await?,
            will_substitute: paths(input).await?,
            unknown: paths(input).await?,
            download_size: number(input).await?,
            nar_size: number(input).await?,
        })
    }
}

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

    /// What is known of the path, or None if it is not valid.
    pub async fn query_path_info(&mut self, path: &StorePath) -> Result<Option<PathInfo>> {
        self.ask(Request::new(Op::QueryPathInfo).path(path)).await
    }

    /// The valid paths that refer to the path, itself included if it does.
    pub async fn query_referrers(&mut self, path: &StorePath) -> Result<BTreeSet<StorePath>> {
        self.ask(Request::new(Op::QueryReferrers).path(path)).await
    }

    /// What it takes to have the targets.
    pub async fn query_missing(&mut self, targets: &[DerivedPath]) -> Result<Missing> {
        let store = StoreDir::default();
        let request = Request::new(Op::QueryMissing)
            .list(targets, |request, target| request.string(target.render_legacy(&store)));
        self.ask(request).await
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
