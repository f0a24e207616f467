//! The local store's database says what Nix says, also while a daemon writes to it.

use std::collections::BTreeSet;
use std::fs;
use std::sync::mpsc;
use std::thread;

use harmonia_nix::database::Database;
use harmonia_nix::{Sha256, StorePath, store_path};
use harmonia_tests::nixes::{Expression, Nix, Version};

#[test]
fn a_built_path_is_known_as_nix_knows_it() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let expression = Expression::two_outputs("built").input("other", &Expression::trivial("other"));
        let paths = nix.build_all(&expression);
        let said = |question: &str, path: &str| nix.run("nix-store", &["--query", question, path]);
        let parsed: Vec<StorePath> = paths.iter().map(|path| store_path::parse(path).unwrap()).collect();
        let infos = Database::open(nix.database()).unwrap().path_infos(&parsed).unwrap();
        for (text, path) in paths.iter().zip(&parsed) {
            let info = &infos[path];
            assert_eq!(info.nar_hash, said("--hash", text).parse().unwrap());
            assert_eq!(info.nar_size.to_string(), said("--size", text));
            let references: BTreeSet<String> = info.references.iter().map(StorePath::to_string).collect();
            assert_eq!(references, said("--references", text).lines().map(str::to_owned).collect());
            assert!(info.ca.is_none());
        }
    }
}

#[test]
fn what_a_daemon_adds_is_seen_as_soon_as_it_says_so() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let first = nix.run("nix-store", &["--add", nix.root().join("conf").to_str().unwrap()]);
        let first = store_path::parse(&first).unwrap();
        let mut database = Database::open(nix.database()).unwrap();
        let (added, next) = mpsc::channel();
        thread::scope(|scope| {
            let nix = &nix;
            scope.spawn(move || {
                for number in 0..20 {
                    let file = nix.root().join(format!("file{number}"));
                    fs::write(&file, number.to_string()).unwrap();
                    let path = nix.run("nix-store", &["--add", file.to_str().unwrap()]);
                    added.send((number, store_path::parse(&path).unwrap())).unwrap();
                }
            });
            // Every question meets the daemon at another point of its work.
            let mut seen = 0;
            while seen < 20 {
                assert!(database.hashes_of(std::slice::from_ref(&first)).unwrap().contains_key(&first));
                for (number, path) in next.try_iter() {
                    let hash: Sha256 = harmonia_nix::source::nar_of_file(number.to_string().as_bytes()).0;
                    let hashes = database.hashes_of(std::slice::from_ref(&path)).unwrap();
                    assert_eq!(hashes.get(&path), Some(&hash), "{version:?}");
                    seen += 1;
                }
            }
        });
    }
}
