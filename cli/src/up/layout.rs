//! The data directory: what is where, which release wrote it, and who uses it.
//!
//! ```text
//! version            the layout's number
//! config.toml        settings that the person has chosen
//! lock               held while `up` runs; its process id
//! token              the person's admin token
//! secrets/           passwords, keys, the URLs of the database: for the owner only
//! postgres/          the private PostgreSQL
//! s3/cache/, s3-port the bucket, and where its server listens
//! nix/               the private Nix store, where the machine's daemon cannot be used
//! builder/, evaluator/   what these roles keep
//! log/               one file for each part
//! run/               sockets
//! ```

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::error::{UpError, file};
use super::secrets;

/// Raised when a release can no longer read what an older one wrote, or the other way round.
const VERSION: u32 = 1;
/// Less is free: PostgreSQL would soon stop.
const LEAST_FREE: u64 = 1 << 30;
/// A socket's whole path, without the byte that ends it.
const SOCKET_LIMIT: usize = 107;
/// The longest name below `run`: `postgres/.s.PGSQL.5432`, and what its lock adds.
const SOCKET_NAME: usize = 32;

/// A data directory that is this process's own for as long as this lives.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    run: PathBuf,
    _lock: File,
}

impl Layout {
    /// Makes what is missing of it, unless another process uses it or a newer release wrote it.
    pub fn open(root: &Path) -> Result<Self, UpError> {
        make_passage(root)?;
        let root = root.canonicalize().map_err(file(root))?;
        let lock = take_lock(&root)?;
        check_version(&root)?;
        let run = run_directory(&root);
        let layout = Self { root, run, _lock: lock };
        for path in ["secrets", "s3", "s3/cache", "log", "builder", "evaluator"] {
            make_directory(&layout.path(path))?;
        }
        make_own(&layout.run)?;
        Ok(layout)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub fn secret(&self, name: &str) -> PathBuf {
        self.root.join("secrets").join(name)
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.root.join("log").join(format!("{name}.log"))
    }

    /// The person's own settings.
    pub fn config(&self) -> PathBuf {
        self.path("config.toml")
    }

    /// Where sockets are: `name` is a directory of its own for each owner.
    pub fn sockets(&self, name: &str) -> PathBuf {
        self.run.join(name)
    }
}

/// Where a person's data is. PostgreSQL does not run as root, and its account may not enter root's home.
pub fn default_root() -> Result<PathBuf, UpError> {
    let set = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = match set {
        Some(base) => base,
        None if geteuid().is_root() => PathBuf::from("/var/lib"),
        None => std::env::home_dir().ok_or(UpError::NoHome)?.join(".local/share"),
    };
    Ok(base.join("harmonia-ci"))
}

/// How much is free for the data, unless it is too little.
pub fn check_disk(data: &Path) -> Result<u64, UpError> {
    let data = std::path::absolute(data).map_err(file(data))?;
    // What does not exist yet will be on the disk of what does.
    let existing = data.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let free = harmonia_builder::store::free_bytes(existing).map_err(file(existing))?;
    if free < LEAST_FREE {
        return Err(UpError::DiskFull { data, free: free >> 20, least: LEAST_FREE >> 20 });
    }
    Ok(free)
}

/// For its owner only.
pub fn make_directory(path: &Path) -> Result<(), UpError> {
    make(path, 0o700)
}

/// The same; but root's may be passed through by PostgreSQL's account.
fn make_passage(path: &Path) -> Result<(), UpError> {
    make(path, if geteuid().is_root() { 0o711 } else { 0o700 })
}

fn make(path: &Path, mode: u32) -> Result<(), UpError> {
    DirBuilder::new().recursive(true).mode(mode).create(path).map_err(file(path))
}

/// In a directory that others write to somebody else may have been here first.
fn make_own(path: &Path) -> Result<(), UpError> {
    make_passage(path)?;
    let found = fs::symlink_metadata(path).map_err(file(path))?;
    if !found.is_dir() || found.uid() != geteuid().as_raw() {
        let source = std::io::Error::new(std::io::ErrorKind::PermissionDenied, "it belongs to somebody else");
        return Err(file(path)(source));
    }
    Ok(())
}

fn take_lock(root: &Path) -> Result<File, UpError> {
    let path = root.join("lock");
    let mut options = File::options();
    let mut lock =
        options.read(true).write(true).create(true).truncate(false).open(&path).map_err(file(&path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            lock.read_to_string(&mut pid).map_err(file(&path))?;
            return Err(UpError::Runs { data: root.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(TryLockError::Error(error)) => return Err(file(&path)(error)),
    }
    let write = |lock: &mut File| {
        lock.set_len(0)?;
        lock.rewind()?;
        writeln!(lock, "{}", std::process::id())
    };
    write(&mut lock).map_err(file(&path))?;
    Ok(lock)
}

fn check_version(root: &Path) -> Result<(), UpError> {
    let path = root.join("version");
    match fs::read_to_string(&path) {
        Ok(found) if found.trim() == VERSION.to_string() => Ok(()),
        Ok(found) => {
            Err(UpError::Newer { data: root.to_owned(), found: found.trim().to_owned(), known: VERSION })
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            secrets::write(&path, &VERSION.to_string())
        }
        Err(error) => Err(file(path)(error)),
    }
}

/// The directory of the sockets: in the data, or somewhere shorter where their paths would be too long.
fn run_directory(root: &Path) -> PathBuf {
    let own = root.join("run");
    if fits(&own) {
        return own;
    }
    let user = geteuid().as_raw();
    let name = format!(
        "harmonia-ci-{user}-{}",
        &harmonia_nix::Sha256::of(root.as_os_str().as_encoded_bytes()).nix32()[..12]
    );
    let runtime = PathBuf::from(format!("/run/user/{user}"));
    let parent = if runtime.is_dir() { runtime } else { PathBuf::from("/tmp") };
    parent.join(name)
}

fn fits(run: &Path) -> bool {
    run.as_os_str().len() + 1 + SOCKET_NAME <= SOCKET_LIMIT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_one_is_told_who_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let _first = Layout::open(directory.path()).unwrap();
        let error = Layout::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    }

    #[test]
    fn what_a_newer_release_wrote_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("version"), "2\n").unwrap();
        let error = Layout::open(directory.path()).unwrap_err();
        assert!(matches!(error, UpError::Newer { .. }), "{error}");
        assert!(!directory.path().join("secrets").exists());
    }

    #[test]
    fn sockets_of_a_long_path_go_elsewhere() {
        let short = PathBuf::from("/home/somebody/.local/share/harmonia-ci");
        assert_eq!(run_directory(&short), short.join("run"));
        let long = PathBuf::from("/").join("long".repeat(30));
        assert!(fits(&run_directory(&long)), "{:?}", run_directory(&long));
        assert_ne!(run_directory(&long), run_directory(&long.join("another")));
    }
}
