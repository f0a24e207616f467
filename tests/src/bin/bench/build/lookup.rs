//! Checking the inputs of a build against as many bare look-ups in the same database.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use harmonia_builder::inputs::{Closure, Plan, plan};
use harmonia_builder::store::Store;
use harmonia_nix::daemon::Options;
use harmonia_nix::{Sha256, StorePath, store_path};
use harmonia_tests::nixes::{Nix, Version};

use crate::measure::median;

const PATHS: usize = 3000;
const ROUNDS: usize = 20;

/// Time of the check over that of the look-ups.
pub async fn against_point_lookups() -> f64 {
    let nix = Nix::start(Version::New);
    let paths = add_files(&nix);
    let store = Arc::new(Store::new(nix.socket(), nix.root().to_owned(), Options::default()));
    let hashes: HashMap<StorePath, Sha256> = store.hashes(paths.clone()).await.expect("hashes");
    let closure: Closure = hashes.iter().map(|(path, hash)| (path.clone(), Some(*hash))).collect();
    assert_eq!(closure.len(), PATHS);
    let bare = rusqlite::Connection::open(nix.database()).expect("open the database");
    let mut bare = bare.prepare("SELECT hash FROM ValidPaths WHERE path = ?1").expect("a statement");
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for path in &paths {
            let hash: String = bare.query_row([path.to_string()], |row| row.get(0)).expect("a path");
            assert!(!hash.is_empty());
        }
        let theirs = start.elapsed();
        let start = Instant::now();
        let local = store.hashes(closure.keys().cloned().collect()).await.expect("hashes");
        assert_eq!(plan(&closure, &local), Plan::default());
        ratios.push(start.elapsed().as_secs_f64() / theirs.as_secs_f64());
    }
    median(ratios)
}

fn add_files(nix: &Nix) -> Vec<StorePath> {
    let directory = tempfile::tempdir().expect("a directory");
    let files: Vec<PathBuf> = (0..PATHS).map(|n| directory.path().join(format!("file-{n}"))).collect();
    for (n, file) in files.iter().enumerate() {
        std::fs::write(file, n.to_string()).expect("write a file");
    }
    let files: Vec<&str> = files.iter().filter_map(|file| file.to_str()).collect();
    let added = nix.run("nix-store", &[&["--add"], &files[..]].concat());
    added.lines().map(|path| store_path::parse(path).expect("a store path")).collect()
}
