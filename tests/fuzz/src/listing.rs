use std::ffi::OsStr;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use harmonia_nix::pack::{Options, pack};
use nix_archive::nar::{CaseHack, hash_path};
use serde_json::Value;

/// The most files of a tree.
const MOST: usize = 64;
/// The most directories in one another. A NAR may have 64, but the JSON parser used here reads no more.
const DEEPEST: usize = 60;

/// A tree that a build made, with names of any bytes: its listing is JSON that has every file, within the NAR.
pub fn read(input: &[u8]) {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("root");
    let files = plant(&root, input);
    let (size, hash) = hash_path(&root, CaseHack::Disabled).expect("a tree").into_parts();
    let mut compressed = Vec::new();
    let packed = pack(&root, &Options::for_nar(size), |part| {
        compressed.extend_from_slice(&part.bytes);
        ControlFlow::Continue(())
    })
    .expect("a tree is packed");
    assert_eq!(packed.nar_hash.0, hash);
    let nar = zstd::decode_all(&compressed[..]).expect("a NAR");
    assert_eq!(nar.len() as u64, size);
    let json = zstd::decode_all(&packed.listing.bytes[..]).expect("a listing");
    let listing: Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(count(&listing["root"], size), files);
}

/// Makes the tree that the input describes, and says how many files it has below its root.
fn plant(root: &Path, input: &[u8]) -> usize {
    let mut input = input.iter().copied();
    fs::create_dir(root).expect("a root");
    let mut here = root.to_owned();
    let mut depth = 0;
    let mut files = 0;
    while let Some(kind) = input.next()
        && files < MOST
    {
        if kind % 4 == 0 {
            if depth > 0 {
                here.pop();
                depth -= 1;
            }
            continue;
        }
        let path = here.join(OsStr::from_bytes(&bytes(&mut input, 40)));
        if path.file_name().is_none() || path.parent() != Some(&here) || path.symlink_metadata().is_ok() {
            continue;
        }
        match kind % 4 {
            1 => {
                fs::create_dir(&path).expect("a directory");
                if depth < DEEPEST {
                    here = path;
                    depth += 1;
                }
            }
            2 => symlink(PathBuf::from(OsStr::from_bytes(&bytes(&mut input, 40))), &path).expect("a link"),
            _ => {
                fs::write(&path, bytes(&mut input, 255)).expect("a file");
                let mode = if kind & 4 == 0 { 0o444 } else { 0o555 };
                fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("a mode");
            }
        }
        files += 1;
    }
    files
}

/// Between one byte and `most`, none of which a file's name cannot have.
fn bytes(input: &mut impl Iterator<Item = u8>, most: usize) -> Vec<u8> {
    let length = 1 + usize::from(input.next().unwrap_or_default()) % most;
    let mut bytes: Vec<u8> = input.take(length).filter(|byte| !b"\0/".contains(byte)).collect();
    if bytes.is_empty() {
        bytes.push(b'x');
    }
    bytes
}

/// The files below a node of a listing, whose contents lie within the NAR.
fn count(node: &Value, nar_size: u64) -> usize {
    match node["type"].as_str() {
        Some("directory") => {
            let entries = node["entries"].as_object().expect("entries");
            entries.values().map(|entry| 1 + count(entry, nar_size)).sum()
        }
        Some("regular") => {
            let number = |name: &str| node[name].as_u64().expect(name);
            assert!(number("narOffset") + number("size") <= nar_size);
            0
        }
        Some("symlink") => {
            assert!(node["target"].is_string());
            0
        }
        other => panic!("{other:?} is no type"),
    }
}
