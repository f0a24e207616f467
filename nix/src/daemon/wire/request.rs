use nix_derivation::StorePath;

use super::padding;

/// The operations that are used here, with their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Op {
    /// Whether a path is valid.
    IsValidPath = 1,
    /// Which paths refer to a path.
    QueryReferrers = 6,
    /// Substitute a path, unless it is valid.
    EnsurePath = 10,
    /// Keep a path while the connection lasts.
    AddTempRoot = 11,
    /// What holds which path.
    FindRoots = 14,
    /// The settings of this connection.
    SetOptions = 19,
    /// Delete what is dead, or the given paths.
    CollectGarbage = 20,
    /// Which of the given paths are valid.
    QueryValidPaths = 31,
    /// Which of the given paths substituters have.
    QuerySubstitutablePaths = 32,
    /// Build a derivation that is given by value.
    BuildDerivation = 36,
}

impl Op {
    /// For sentences.
    pub(in crate::daemon) fn name(self) -> &'static str {
        match self {
            Self::IsValidPath => "IsValidPath",
            Self::QueryReferrers => "QueryReferrers",
            Self::EnsurePath => "EnsurePath",
            Self::AddTempRoot => "AddTempRoot",
            Self::FindRoots => "FindRoots",
            Self::SetOptions => "SetOptions",
            Self::CollectGarbage => "CollectGarbage",
            Self::QueryValidPaths => "QueryValidPaths",
            Self::QuerySubstitutablePaths => "QuerySubstitutablePaths",
            Self::BuildDerivation => "BuildDerivation",
        }
    }
}

/// An operation and its arguments, as they travel.
#[derive(Debug, Clone)]
pub struct Request {
    pub(in crate::daemon) op: Op,
    pub(in crate::daemon) bytes: Vec<u8>,
}

impl Request {
    /// The operation, without arguments yet.
    pub fn new(op: Op) -> Self {
        Self { op, bytes: (op as u64).to_le_bytes().to_vec() }
    }

    /// A number.
    pub fn number(mut self, number: u64) -> Self {
        self.bytes.extend(number.to_le_bytes());
        self
    }

    /// A yes or no.
    pub fn flag(self, flag: bool) -> Self {
        self.number(flag.into())
    }

    /// A string, of any bytes.
    pub fn string(self, string: impl AsRef<[u8]>) -> Self {
        let string = string.as_ref();
        let mut this = self.number(string.len() as u64);
        this.bytes.extend(string);
        this.bytes.extend(std::iter::repeat_n(0, padding(string.len() as u64) as usize));
        this
    }

    /// A store path.
    pub fn path(self, path: &StorePath) -> Self {
        self.string(path.to_string())
    }

    /// A store path, or none.
    pub fn optional_path(self, path: Option<&StorePath>) -> Self {
        self.string(path.map(ToString::to_string).unwrap_or_default())
    }

    /// A list, each item written by `write`.
    pub fn list<T, I>(self, items: I, write: impl FnMut(Self, T) -> Self) -> Self
    where
        I: IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    {
        let items = items.into_iter();
        let counted = self.number(items.len() as u64);
        items.fold(counted, write)
    }

    /// A list of store paths.
    pub fn paths<'a>(
        self,
        paths: impl IntoIterator<Item = &'a StorePath, IntoIter: ExactSizeIterator>,
    ) -> Self {
        self.list(paths, Self::path)
    }
}
