//! Where things are in the bucket. No key is a directory of another: servers on file systems could not hold both.

use harmonia_nix::Sha256;
use harmonia_nix::store_path::{StorePath, hash_part};

use crate::bucket::Kind;

/// What every Nix client asks for first.
pub const CACHE_INFO: &str = "nix-cache-info";
/// The keys that sign, one in a line.
pub const PUBLIC_KEYS: &str = "public-keys";

/// Plain text.
pub const TEXT: Kind = Kind { content_type: "text/plain; charset=utf-8", encoding: None };
/// A narinfo.
pub const NARINFO: Kind = Kind { content_type: "text/x-nix-narinfo", encoding: None };
/// What an output came out as.
pub const REALISATION: Kind = Kind { content_type: "application/json", encoding: None };
/// A listing, as builders send it.
pub const LISTING: Kind = Kind { content_type: "application/json", encoding: Some("zstd") };
/// A log, as builders send it.
pub const LOG: Kind = Kind { content_type: "text/plain; charset=utf-8", encoding: Some("zstd") };

/// A NAR: bound to path and contents.
pub fn nar(path: &StorePath, nar_hash: &Sha256) -> String {
    format!("nar/{}-{}.nar.zst", hash_part(path), nar_hash.nix32())
}

/// What is said about a path.
pub fn narinfo(path: &StorePath) -> String {
    harmonia_nix::narinfo::object_name(path)
}

/// The listing of the NAR that counts.
pub fn listing(path: &StorePath) -> String {
    format!("{}.ls", hash_part(path))
}

/// The listing that an attempt made.
pub fn listing_of_attempt(path: &StorePath, attempt: i64) -> String {
    format!("listings/{}-{attempt}.ls", hash_part(path))
}

/// The log that counts.
pub fn log(drv: &StorePath) -> String {
    format!("log/{}", drv.to_basename())
}

/// The log of an attempt.
pub fn log_of_attempt(drv: &StorePath, attempt: i64) -> String {
    format!("log-attempts/{}.{attempt}", drv.to_basename())
}

/// Whether a builder stored it, packed and without a word about that: a presigned request says no more than it must.
pub fn is_of_attempt(key: &str) -> bool {
    key.starts_with("log-attempts/") || key.starts_with("listings/")
}
