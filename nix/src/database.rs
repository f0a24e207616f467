//! The database of the local store, which Nix keeps in SQLite: what it knows about a path, without hashing anything.
//!
//! It is read while daemons write. They keep a write-ahead log beside the database, which every reader has to see, so it
//! is never opened as immutable. A reader needs the log's two files (`-wal` and `-shm`), and SQLite removes them when the
//! last process closes the database. Who may write to the directory makes them again. Who may not can only read while
//! somebody else has the database open; a connection to the Nix daemon, open for as long, does that: the daemon's child
//! opens the database.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix_derivation::StorePath;
use rusqlite::{Connection, ErrorCode, OpenFlags, Row, Transaction, TransactionBehavior};
use thiserror::Error;

use crate::Sha256;

/// How long a reader waits for a lock. Readers and writers do not exclude each other, but the first and the last to use
/// the log hold it alone for a moment.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the local store does not answer.
#[derive(Debug, Error)]
pub enum DatabaseError {
    /// The file is not there.
    #[error("there is no Nix database {}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The files of the log are not there and cannot be made.
    #[error(
        "the Nix database {} cannot be read: nobody has it open, and this user may not make the files -wal and -shm \
         beside it. Keep a connection to the Nix daemon open meanwhile, or let this user write to the directory",
        path.display()
    )]
    NoLog {
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// Anything else that SQLite said.
    #[error("the Nix database {} cannot be read", path.display())]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// A value that no Nix writes.
    #[error("the Nix database says {value:?} for the {field} of {path}")]
    Damaged {
        /// The store path.
        path: String,
        /// What is damaged.
        field: &'static str,
        /// What stands there.
        value: String,
    },
}

/// What the local store knows about a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathInfo {
    /// Hash of its NAR.
    pub nar_hash: Sha256,
    /// Bytes of its NAR.
    pub nar_size: u64,
    /// The paths it refers to, itself too if it does.
    pub references: BTreeSet<StorePath>,
    /// Its content address, as Nix writes it.
    pub ca: Option<String>,
}

/// A reader of one store's database. If the file is replaced by another, the next question goes to that one.
#[derive(Debug)]
pub struct Database {
    path: PathBuf,
    file: File,
    connection: Connection,
}

/// Which file it is, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct File {
    device: u64,
    inode: u64,
}

impl Database {
    /// Opens a database, usually `/nix/var/nix/db/db.sqlite`.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, DatabaseError> {
        let path = path.into();
        // Looked at before it is opened: a file that takes its place in between is noticed at the next question.
        let file = file_at(&path)?;
        let connection = match connect(&path) {
            Ok(connection) => connection,
            Err(source) => return Err(DatabaseError::Sqlite { path, source }),
        };
        Ok(Self { path, file, connection })
    }

    /// What is known about each of the paths that are valid, as of one moment.
    pub fn path_infos(&mut self, paths: &[StorePath]) -> Result<HashMap<StorePath, PathInfo>, DatabaseError> {
        self.ask(|transaction| {
            let mut infos: HashMap<String, PathInfo> = HashMap::with_capacity(paths.len());
            let wanted = as_json(paths);
            let mut found = transaction.prepare_cached(
                "SELECT p.path, p.hash, p.narSize, p.ca \
                 FROM json_each(?1) wanted JOIN ValidPaths p ON p.path = wanted.value",
            )?;
            let mut rows = found.query([&wanted])?;
            while let Some(row) = rows.next()? {
                infos.insert(row.get(0)?, path_info(row)?);
            }
            let mut references = transaction.prepare_cached(
                "SELECT p.path, r.path FROM json_each(?1) wanted JOIN ValidPaths p ON p.path = wanted.value \
                 JOIN Refs ON Refs.referrer = p.id JOIN ValidPaths r ON r.id = Refs.reference",
            )?;
            let mut rows = references.query([&wanted])?;
            while let Some(row) = rows.next()? {
                let path: String = row.get(0)?;
                let reference = store_path(&path, "references", row.get(1)?)?;
                if let Some(info) = infos.get_mut(&path) {
                    info.references.insert(reference);
                }
            }
            by_path(infos)
        })
    }

    /// The NAR hash of each of the paths that are valid, as of one moment.
    pub fn hashes_of(&mut self, paths: &[StorePath]) -> Result<HashMap<StorePath, Sha256>, DatabaseError> {
        self.ask(|transaction| {
            let mut hashes = HashMap::with_capacity(paths.len());
            let mut found = transaction.prepare_cached(
                "SELECT p.path, p.hash FROM json_each(?1) wanted JOIN ValidPaths p ON p.path = wanted.value",
            )?;
            let mut rows = found.query([as_json(paths)])?;
            while let Some(row) = rows.next()? {
                let path: String = row.get(0)?;
                let hash = nar_hash(&path, row.get(1)?)?;
                hashes.insert(path, hash);
            }
            by_path(hashes)
        })
    }

    fn ask<T>(
        &mut self,
        question: impl FnOnce(&Transaction<'_>) -> Result<T, Trouble>,
    ) -> Result<T, DatabaseError> {
        if file_at(&self.path)? != self.file {
            *self = Self::open(&self.path)?;
        }
        let answer = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Deferred)
            .map_err(Trouble::from)
            .and_then(|transaction| question(&transaction));
        answer.map_err(|trouble| match trouble {
            Trouble::Sqlite(source) => sqlite_error(&self.path, source),
            Trouble::Damaged(error) => error,
        })
    }
}

/// What goes wrong inside a question, where the file's name is not at hand.
enum Trouble {
    Sqlite(rusqlite::Error),
    Damaged(DatabaseError),
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

fn damaged(path: &str, field: &'static str, value: String) -> Trouble {
    Trouble::Damaged(DatabaseError::Damaged { path: path.to_owned(), field, value })
}

fn file_at(path: &Path) -> Result<File, DatabaseError> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(File { device: metadata.dev(), inode: metadata.ino() }),
        Err(source) => Err(DatabaseError::Missing { path: path.to_owned(), source }),
    }
}

fn connect(path: &Path) -> Result<Connection, rusqlite::Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(PATIENCE)?;
    Ok(connection)
}

fn sqlite_error(path: &Path, source: rusqlite::Error) -> DatabaseError {
    let path = path.to_owned();
    match source.sqlite_error_code() {
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen) => DatabaseError::NoLog { path, source },
        _ => DatabaseError::Sqlite { path, source },
    }
}

/// One argument, however many paths: the number of a statement's arguments is limited.
fn as_json(paths: &[StorePath]) -> String {
    serde_json::Value::from_iter(paths.iter().map(StorePath::to_string)).to_string()
}

fn path_info(row: &Row<'_>) -> Result<PathInfo, Trouble> {
    let path: String = row.get(0)?;
    let size: Option<i64> = row.get(2)?;
    // An old Nix wrote no size, a new one writes 0 if it does not know it.
    let nar_size = u64::try_from(size.unwrap_or_default())
        .map_err(|_| damaged(&path, "NAR size", size.unwrap_or_default().to_string()))?;
    let ca: Option<String> = row.get(3)?;
    Ok(PathInfo {
        nar_hash: nar_hash(&path, row.get(1)?)?,
        nar_size,
        references: BTreeSet::new(),
        ca: ca.filter(|ca| !ca.is_empty()),
    })
}

fn nar_hash(path: &str, value: String) -> Result<Sha256, Trouble> {
    value.parse().map_err(|_| damaged(path, "NAR hash", value))
}

fn store_path(path: &str, field: &'static str, value: String) -> Result<StorePath, Trouble> {
    value.parse().map_err(|_| damaged(path, field, value))
}

fn by_path<T>(values: HashMap<String, T>) -> Result<HashMap<StorePath, T>, Trouble> {
    values.into_iter().map(|(path, value)| Ok((store_path(&path, "path", path.clone())?, value))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    /// As Nix 2.8 makes them; newer ones have more tables.
    const SCHEMA: &str = "
        PRAGMA journal_mode = wal;
        CREATE TABLE ValidPaths (
            id integer primary key autoincrement not null, path text unique not null, hash text not null,
            registrationTime integer not null, deriver text, narSize integer, ultimate integer, sigs text, ca text
        );
        CREATE TABLE Refs (referrer integer not null, reference integer not null, primary key (referrer, reference));";

    struct Store {
        directory: tempfile::TempDir,
        writer: Connection,
    }

    impl Store {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let writer = Self::create(&directory.path().join("db.sqlite"));
            Self { directory, writer }
        }

        fn create(path: &Path) -> Connection {
            let writer = Connection::open(path).unwrap();
            writer.execute_batch(SCHEMA).unwrap();
            writer
        }

        fn path(&self) -> PathBuf {
            self.directory.path().join("db.sqlite")
        }

        fn add(&self, name: &str, hash: &str) -> StorePath {
            add(&self.writer, name, hash)
        }
    }

    fn add(writer: &Connection, name: &str, hash: &str) -> StorePath {
        let path = StorePath::from_parts([7; 20], name).unwrap();
        writer
            .execute(
                "INSERT INTO ValidPaths (path, hash, registrationTime, narSize) VALUES (?1, ?2, 17, 120)",
                [&path.to_string(), hash],
            )
            .unwrap();
        path
    }

    fn hash() -> Sha256 {
        Sha256::of("x")
    }

    #[test]
    fn everything_is_read() {
        let store = Store::new();
        let [path, other] = ["a", "b"].map(|name| store.add(name, &format!("sha256:{}", hash().hex())));
        store
            .writer
            .execute_batch(&format!(
                "UPDATE ValidPaths SET ca = 'fixed:sha256:x' WHERE path = '{path}';
                 INSERT INTO Refs SELECT p.id, r.id FROM ValidPaths p, ValidPaths r WHERE p.path = '{path}';"
            ))
            .unwrap();
        let infos = Database::open(store.path()).unwrap().path_infos(std::slice::from_ref(&path)).unwrap();
        let info = PathInfo {
            nar_hash: hash(),
            nar_size: 120,
            references: [path.clone(), other].into(),
            ca: Some("fixed:sha256:x".to_owned()),
        };
        assert_eq!(infos, [(path, info)].into());
    }

    #[test]
    fn what_is_absent_is_left_out_of_the_record() {
        let store = Store::new();
        let path = store.add("a", &hash().hex());
        let infos = Database::open(store.path()).unwrap().path_infos(std::slice::from_ref(&path)).unwrap();
        let info = &infos[&path];
        assert!(info.ca.is_none() && info.references.is_empty());
    }

    #[test]
    fn a_hash_is_read_in_every_form() {
        let store = Store::new();
        let forms = [
            hash().hex(),
            format!("sha256:{}", hash().hex()),
            format!("sha256:{}", hash().nix32()),
            hash().to_string(),
        ];
        let paths: Vec<StorePath> =
            forms.iter().enumerate().map(|(index, form)| store.add(&format!("p{index}"), form)).collect();
        let hashes = Database::open(store.path()).unwrap().hashes_of(&paths).unwrap();
        assert_eq!(hashes, paths.into_iter().map(|path| (path, hash())).collect());
    }

    #[test]
    fn a_path_that_is_not_valid_has_no_answer() {
        let store = Store::new();
        let path = StorePath::from_parts([9; 20], "absent").unwrap();
        let mut database = Database::open(store.path()).unwrap();
        assert!(database.hashes_of(std::slice::from_ref(&path)).unwrap().is_empty());
        assert!(database.path_infos(&[path]).unwrap().is_empty());
        assert!(database.path_infos(&[]).unwrap().is_empty());
    }

    #[test]
    fn many_paths_are_one_question() {
        let store = Store::new();
        store.writer.execute_batch("BEGIN").unwrap();
        let paths: Vec<StorePath> = (0..40_000).map(|n| store.add(&format!("p{n}"), &hash().hex())).collect();
        store.writer.execute_batch("COMMIT").unwrap();
        assert_eq!(Database::open(store.path()).unwrap().hashes_of(&paths).unwrap().len(), paths.len());
    }

    #[test]
    fn a_hash_that_is_none_is_named() {
        let store = Store::new();
        let path = store.add("a", "md5:0");
        let answer = Database::open(store.path()).unwrap().hashes_of(&[path]);
        assert!(matches!(answer, Err(DatabaseError::Damaged { field: "NAR hash", .. })));
    }

    #[test]
    fn what_is_written_meanwhile_is_seen_at_the_next_question() {
        let store = Store::new();
        let mut database = Database::open(store.path()).unwrap();
        let first = store.add("a", &hash().hex());
        assert_eq!(database.hashes_of(std::slice::from_ref(&first)).unwrap().len(), 1);
        let second = store.add("b", &hash().hex());
        assert_eq!(database.hashes_of(&[first, second]).unwrap().len(), 2);
    }

    #[test]
    fn a_writer_in_the_middle_of_a_transaction_does_not_stop_a_reader() {
        let store = Store::new();
        let path = store.add("a", &hash().hex());
        store.writer.execute_batch("BEGIN IMMEDIATE").unwrap();
        let hidden = store.add("b", &hash().hex());
        let hashes = Database::open(store.path()).unwrap().hashes_of(&[path.clone(), hidden]).unwrap();
        assert_eq!(hashes, [(path, hash())].into());
    }

    #[test]
    fn writers_that_come_and_go_do_not_stop_a_reader() {
        let Store { directory, writer } = Store::new();
        let path = add(&writer, "a", &hash().hex());
        drop(writer);
        let file = directory.path().join("db.sqlite");
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // The last to close removes the log.
                for n in 0..100 {
                    let writer = Connection::open(&file).unwrap();
                    writer.busy_timeout(PATIENCE).unwrap();
                    add(&writer, &format!("p{n}"), &hash().hex());
                }
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) {
                let answer = Database::open(&file).unwrap().hashes_of(std::slice::from_ref(&path)).unwrap();
                assert_eq!(answer.len(), 1);
            }
        });
    }

    #[test]
    fn a_file_that_was_replaced_is_opened_anew() {
        let store = Store::new();
        let old = store.add("old", &hash().hex());
        let mut database = Database::open(store.path()).unwrap();
        assert_eq!(database.hashes_of(std::slice::from_ref(&old)).unwrap().len(), 1);
        let other = store.directory.path().join("other.sqlite");
        let writer = Store::create(&other);
        let new = add(&writer, "new", &hash().hex());
        drop((writer, store.writer));
        for ending in ["-wal", "-shm"] {
            let _ = std::fs::remove_file(store.directory.path().join(format!("db.sqlite{ending}")));
        }
        std::fs::rename(&other, store.directory.path().join("db.sqlite")).unwrap();
        assert_eq!(database.hashes_of(&[old, new.clone()]).unwrap(), [(new, hash())].into());
    }

    #[test]
    fn a_store_without_database_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("db.sqlite");
        assert!(matches!(Database::open(missing), Err(DatabaseError::Missing { .. })));
    }

    #[test]
    fn the_reader_can_move_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Database>();
    }
}
