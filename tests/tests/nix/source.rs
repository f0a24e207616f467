//! Sources are named as Nix names them.

use std::fs;

use harmonia_nix::database::{Database, PathInfo};
use harmonia_nix::{StorePath, source, store_path};
use harmonia_tests::nixes::{Nix, Version};

/// A path that Nix printed, and what it knows about it.
fn known(nix: &Nix, path: &str) -> (StorePath, PathInfo) {
    let path = store_path::parse(path.trim_matches('"')).unwrap();
    let infos = Database::open(nix.database()).unwrap().path_infos(std::slice::from_ref(&path)).unwrap();
    let info = infos.get(&path).unwrap_or_else(|| panic!("{path} is not valid")).clone();
    (path, info)
}

fn evaluate(nix: &Nix, expression: &str) -> String {
    nix.run("nix-instantiate", &["--eval", "--read-write-mode", "--expr", expression])
}

#[test]
fn what_is_added_from_files_follows_from_its_nar() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let directory = nix.root().join("a+b?c=d._e");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), "hello\n").unwrap();
        let directory = directory.to_str().unwrap();
        for path in [
            nix.run("nix-store", &["--add", directory]),
            nix.run("nix-store", &["--add-fixed", "--recursive", "sha256", directory]),
            evaluate(&nix, &format!("builtins.path {{ path = {directory:?}; name = \"named\"; }}")),
            evaluate(&nix, &format!("builtins.filterSource (path: type: true) {directory:?}")),
        ] {
            let (path, info) = known(&nix, &path);
            let ca = source::prove_nar(&path, info.nar_hash, &info.references);
            assert_eq!(ca.map(|ca| ca.to_string()).ok(), info.ca, "{version:?} {path}");
        }
    }
}

#[test]
fn what_is_written_as_text_follows_from_its_contents() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let file = nix.root().join("flat");
        fs::write(&file, "hello\n").unwrap();
        for path in [
            evaluate(&nix, "builtins.toFile \"text\" \"hello\\n\""),
            evaluate(&nix, "builtins.toFile \"refers\" \"see ${builtins.toFile \"text\" \"hello\\n\"}\""),
            nix.run("nix-store", &["--add-fixed", "sha256", file.to_str().unwrap()]),
        ] {
            let (path, info) = known(&nix, &path);
            let contents = fs::read(nix.real(&path.to_string())).unwrap();
            let ca = source::prove_file(&path, &contents, info.nar_hash, &info.references);
            assert_eq!(ca.map(|ca| ca.to_string()).ok(), info.ca, "{version:?} {path}");
            assert_eq!(source::nar_of_file(&contents), (info.nar_hash, info.nar_size), "{version:?} {path}");
        }
    }
}
