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

/// What a key of the bucket is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object<'a> {
    /// A NAR of a path, by its hash part, and of its contents.
    Nar(&'a str, &'a str),
    /// What is said about a path.
    NarInfo(&'a str),
    /// The listing that counts.
    Listing(&'a str),
    /// The listing that an attempt made.
    ListingOfAttempt(&'a str, i64),
    /// The log of a derivation.
    Log(&'a str),
    /// The log of an attempt at it.
    LogOfAttempt(&'a str, i64),
    /// What an output of a derivation came out as.
    Trace(&'a str),
    /// The same under a name that does not tell the derivation.
    Realisation,
    /// A try whether the bucket is fit.
    Probe,
    /// None of ours, or no one's but the cache's own.
    Other,
}

/// Reads a key: the reverse of the functions above.
pub fn read(key: &str) -> Object<'_> {
    let is_hash = |text: &str| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_derivation = |name: &str| name.ends_with(".drv");
    let object = match key.split_once('/') {
        None => match key.rsplit_once('.') {
            Some((hash, "narinfo")) if is_hash(hash) => Some(Object::NarInfo(hash)),
            Some((hash, "ls")) if is_hash(hash) => Some(Object::Listing(hash)),
            _ => None,
        },
        Some(("nar", name)) => {
            let hashes = name.strip_suffix(".nar.zst").and_then(|name| name.split_once('-'));
            hashes.filter(|(hash, _)| is_hash(hash)).map(|(hash, nar)| Object::Nar(hash, nar))
        }
        Some(("listings", name)) => {
            let parts = name.strip_suffix(".ls").and_then(|name| name.split_once('-'));
            parts.and_then(|(hash, attempt)| Some(Object::ListingOfAttempt(hash, attempt.parse().ok()?)))
        }
        // The embedded server cuts long keys: what is left of one does not tell the derivation, which may well be known.
        Some(("log", drv)) => is_derivation(drv).then_some(Object::Log(drv)),
        Some(("log-attempts", name)) => name
            .rsplit_once('.')
            .filter(|(drv, _)| is_derivation(drv))
            .and_then(|(drv, attempt)| Some(Object::LogOfAttempt(drv, attempt.parse().ok()?))),
        Some(("build-trace-v2", name)) => name.split_once('/').map(|(drv, _)| Object::Trace(drv)),
        Some(("realisations", _)) => Some(Object::Realisation),
        Some(("probe", _)) => Some(Object::Probe),
        Some(_) => None,
    };
    object.unwrap_or(Object::Other)
}

/// Whether a builder stored it, packed and without a word about that: a presigned request says no more than it must.
pub fn is_of_attempt(key: &str) -> bool {
    key.starts_with("log-attempts/") || key.starts_with("listings/")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_written() {
        let path: StorePath = "/nix/store/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a".parse().unwrap();
        let drv: StorePath = "/nix/store/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a.b.drv".parse().unwrap();
        let (hash, name) = (hash_part(&path).to_string(), "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a.b.drv");
        let nar_hash = Sha256::of("nar");
        assert_eq!(read(&nar(&path, &nar_hash)), Object::Nar(&hash, &nar_hash.nix32()));
        assert_eq!(read(&narinfo(&path)), Object::NarInfo(&hash));
        assert_eq!(read(&listing(&path)), Object::Listing(&hash));
        assert_eq!(read(&listing_of_attempt(&path, 7)), Object::ListingOfAttempt(&hash, 7));
        assert_eq!(read(&log(&drv)), Object::Log(name));
        assert_eq!(read(&log_of_attempt(&drv, 7)), Object::LogOfAttempt(name, 7));
        assert_eq!(read(&format!("build-trace-v2/{name}/out.doi")), Object::Trace(name));
        assert_eq!(read("realisations/sha256:00!out.doi"), Object::Realisation);
        assert_eq!(read("probe/0"), Object::Probe);
    }

    #[test]
    fn a_key_that_was_cut_is_nothing_of_ours() {
        let cut = format!("7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-{}~{}", "x".repeat(43), "0".repeat(64));
        for prefix in ["log", "log-attempts"] {
            assert_eq!(read(&format!("{prefix}/{cut}")), Object::Other);
        }
        // A name with a dot, as if what follows were the number of an attempt.
        assert_eq!(read("log-attempts/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a-1.0"), Object::Other);
    }

    #[test]
    fn what_is_not_ours_is_read_as_nothing_of_ours() {
        for key in [CACHE_INFO, PUBLIC_KEYS, "index.html", "nar/x", "listings/x", "debuginfo/0", "x.narinfo"]
        {
            assert_eq!(read(key), Object::Other, "{key}");
        }
    }
}
