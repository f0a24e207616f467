//! A real client substitutes what we signed, and nothing else.

use std::fs;
use std::path::Path;
use std::process::Output;

use harmonia_nix::database::Database;
use harmonia_nix::key::SecretKey;
use harmonia_nix::narinfo::{self, Record};
use harmonia_nix::{Sha256, StorePath, store_path};
use harmonia_tests::nixes::{Expression, Nix, Version};

/// Writes a built path and what it needs into a cache, signed with these keys.
fn publish(nix: &Nix, path: &str, cache: &Path, keys: &[SecretKey]) {
    fs::create_dir_all(cache.join("nar")).unwrap();
    fs::write(cache.join("nix-cache-info"), "StoreDir: /nix/store\n").unwrap();
    let closure = nix.run("nix-store", &["--query", "--requisites", path]);
    let paths: Vec<StorePath> = closure.lines().map(|path| store_path::parse(path).unwrap()).collect();
    for (path, info) in Database::open(nix.database()).unwrap().path_infos(&paths).unwrap() {
        let nar =
            nix.command("nix-store").args(["--dump", nix.real(&path.to_string()).to_str().unwrap()]).output();
        let file = zstd::encode_all(nar.unwrap().stdout.as_slice(), 3).unwrap();
        let url = format!("nar/{}.nar.zst", info.nar_hash.nix32());
        fs::write(cache.join(&url), &file).unwrap();
        let record = Record {
            nar_hash: info.nar_hash,
            nar_size: info.nar_size,
            references: info.references,
            deriver: None,
            ca: info.ca.map(|ca| ca.parse().unwrap()),
            url,
            file_hash: Sha256::of(&file),
            file_size: file.len() as u64,
            path,
        };
        let text = narinfo::write(&record, keys).unwrap();
        fs::write(cache.join(narinfo::object_name(&record.path)), text).unwrap();
    }
}

/// A client with an empty store that trusts one key realises a path from a cache.
fn substitute(version: Version, cache: &Path, trusted: &SecretKey, path: &str) -> (Nix, Output) {
    let settings = format!(
        "substituters = file://{}\ntrusted-public-keys = {}\nrequire-sigs = true",
        cache.display(),
        trusted.public_text()
    );
    let nix = Nix::start_with(version, &settings);
    let output = nix.command("nix-store").args(["--realise", path]).output().unwrap();
    (nix, output)
}

#[test]
fn a_client_substitutes_what_one_of_its_keys_signed() {
    let maker = Nix::start(Version::Old);
    let path = maker.build(&Expression::two_outputs("signed"));
    let keys = ["old-1", "new-1"].map(|name| SecretKey::generate(name).unwrap());
    let cache = maker.root().join("cache");
    publish(&maker, &path, &cache, &keys);
    for version in Version::ALL {
        for key in &keys {
            let (nix, output) = substitute(version, &cache, key, &path);
            assert!(
                output.status.success(),
                "{version:?} {key:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            assert_eq!(fs::read(nix.real(&path).join("file")).unwrap(), b"signed\n");
        }
    }
}

#[test]
fn a_client_refuses_what_another_key_signed() {
    let maker = Nix::start(Version::Old);
    let path = maker.build(&Expression::trivial("forged"));
    let cache = maker.root().join("cache");
    publish(&maker, &path, &cache, &[SecretKey::generate("same-1").unwrap()]);
    for version in Version::ALL {
        let (nix, output) = substitute(version, &cache, &SecretKey::generate("same-1").unwrap(), &path);
        assert!(!output.status.success(), "{version:?}");
        assert!(!nix.real(&path).exists(), "{version:?}");
    }
}
