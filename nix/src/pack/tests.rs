use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// Bytes that compress by half or so and follow from `seed`.
fn noise(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(size + 16);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
        bytes.extend_from_slice(b"harmonia");
    }
    bytes.truncate(size);
    bytes
}

/// A tree with everything that a NAR can hold and names that trip up others.
fn odd_tree(at: &Path) {
    fs::create_dir_all(at.join("empty")).unwrap();
    fs::create_dir_all(at.join("deep/er")).unwrap();
    fs::write(at.join("nothing"), "").unwrap();
    fs::write(at.join("a+b?c=d"), "odd name").unwrap();
    fs::write(at.join("A"), "before a").unwrap();
    fs::write(at.join("new\nline \"quoted\" \\"), "x").unwrap();
    fs::write(at.join("größe"), "12345678").unwrap();
    fs::write(at.join("deep/er/large"), noise(1, 5 << 20)).unwrap();
    fs::write(at.join("deep/chunk"), noise(2, 2 * CHUNK)).unwrap();
    fs::write(at.join("run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(at.join("run"), Permissions::from_mode(0o755)).unwrap();
    fs::write(at.join("run-by-others"), "not Nix's idea of executable").unwrap();
    fs::set_permissions(at.join("run-by-others"), Permissions::from_mode(0o655)).unwrap();
    symlink("../no/where", at.join("dangling")).unwrap();
    symlink("deep", at.join("link")).unwrap();
}

fn add_foreign_names(at: &Path) {
    fs::write(at.join(OsStr::from_bytes(b"l\xf6we")), "latin-1").unwrap();
    fs::write(at.join(OsStr::from_bytes(b"l\xe4we")), "the same, lossily").unwrap();
    symlink(OsStr::from_bytes(b"\xff\xfe"), at.join("to-foreign")).unwrap();
}

/// What Nix makes of a path.
fn nix_dump(path: &Path) -> Vec<u8> {
    let dump = Command::new("nix-store").arg("--dump").arg(path).output().expect("nix-store is installed");
    assert!(dump.status.success());
    dump.stdout
}

fn collect(root: &Path, options: &Options) -> Result<(Packed, Vec<Part>), PackError> {
    let mut parts = Vec::new();
    let packed = pack(root, options, |part| {
        parts.push(part);
        ControlFlow::Continue(())
    })?;
    Ok((packed, parts))
}

fn joined(parts: &[Part]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.bytes.iter().copied()).collect()
}

fn tree() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    odd_tree(&root);
    (dir, root)
}

/// Packs with small parts and compares everything that is said with Nix's NAR.
fn packs_like_nix(root: &Path) {
    let nar = nix_dump(root);
    let options = Options { part_size: 1 << 20, ..Options::for_nar(nar.len() as u64) };
    let (packed, parts) = collect(root, &options).unwrap();
    assert_eq!(packed.nar_hash, Sha256::of(&nar));
    assert_eq!(packed.nar_size, nar.len() as u64);
    let file = joined(&parts);
    assert_eq!(packed.file, Digest { size: file.len() as u64, sha256: Sha256::of(&file) });
    assert!(zstd::decode_all(&file[..]).unwrap() == nar, "the parts decompress to Nix's NAR");
    for (number, (part, digest)) in (1..).zip(parts.iter().zip(&packed.parts)) {
        assert_eq!(part.number, number);
        assert_eq!(part.last, number as usize == packed.parts.len());
        assert_eq!(*digest, Digest { size: part.bytes.len() as u64, sha256: Sha256::of(&part.bytes) });
        assert!(part.last || part.bytes.len() == options.part_size);
        assert_eq!(part.sha256, digest.sha256);
    }
    assert_eq!(parts.len(), packed.parts.len());
}

#[test]
fn a_tree_with_odd_names_packs_like_nix() {
    let (_dir, root) = tree();
    add_foreign_names(&root);
    packs_like_nix(&root);
}

#[test]
fn a_file_a_link_and_an_empty_directory_pack_like_nix() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "contents").unwrap();
    symlink("file", at("link")).unwrap();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("nothing"), "").unwrap();
    for name in ["file", "link", "empty", "nothing"] {
        packs_like_nix(&at(name));
    }
}

/// The length of a file moves the end of the NAR over every kind of edge: of a chunk, of a read, of a job.
#[test]
fn sizes_around_every_edge_pack_like_nix() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    for edge in [CHUNK, 2 * CHUNK, 512 << 10, 2 << 20] {
        for size in [edge - 200, edge - 112, edge - 1, edge, edge + 1] {
            fs::write(&file, noise(3, size)).unwrap();
            packs_like_nix(&file);
        }
    }
}

#[test]
fn zstd_itself_reads_the_file() {
    let (dir, root) = tree();
    let nar = nix_dump(&root);
    let (_, parts) = collect(&root, &Options::for_nar(nar.len() as u64)).unwrap();
    let file = dir.path().join("nar.zst");
    fs::write(&file, joined(&parts)).unwrap();
    let unpacked = Command::new("zstd").args(["-d", "-c"]).arg(&file).output().expect("zstd is installed");
    assert!(unpacked.stdout == nar);
}

#[test]
fn the_listing_is_what_nix_lists() {
    let (dir, root) = tree();
    let nar = nix_dump(&root);
    let file = dir.path().join("nar");
    fs::write(&file, &nar).unwrap();
    let list = Command::new("nix")
        .args(["--extra-experimental-features", "nix-command", "nar", "ls", "--json", "--recursive"])
        .args([file.as_os_str(), OsStr::new("/")])
        .env("HOME", dir.path())
        .output()
        .expect("nix is installed");
    let nix: Value = serde_json::from_slice(&list.stdout).unwrap();
    let (packed, _) = collect(&root, &Options::for_nar(nar.len() as u64)).unwrap();
    assert_eq!(listing(&packed), json!({ "version": 1, "root": nix }));
}

#[test]
fn a_name_that_is_not_utf8_is_listed_with_its_true_offset() {
    let dir = tempfile::tempdir().unwrap();
    add_foreign_names(dir.path());
    let nar = nix_dump(dir.path());
    let (packed, _) = collect(dir.path(), &Options::for_nar(nar.len() as u64)).unwrap();
    let listing = listing(&packed);
    let entries = &listing["root"]["entries"];
    assert_eq!(entries.as_object().unwrap().len(), 3);
    assert_eq!(entries["to-foreign"]["target"], "\u{fffd}\u{fffd}");
    for (name, contents) in [("l\u{fffd}we", "the same, lossily"), ("l\u{fffd}we2", "latin-1")] {
        let offset = entries[name]["narOffset"].as_u64().unwrap() as usize;
        assert_eq!(&nar[offset..offset + contents.len()], contents.as_bytes());
    }
}

fn listing(packed: &Packed) -> Value {
    assert_eq!(packed.listing.sha256, Sha256::of(&packed.listing.bytes));
    serde_json::from_slice(&zstd::decode_all(&packed.listing.bytes[..]).unwrap()).unwrap()
}

#[test]
fn the_bytes_follow_from_the_nar_alone() {
    let (_dir, root) = tree();
    let options = Options::for_nar(nix_dump(&root).len() as u64);
    let files = [1, 1, 2, 3].map(|workers| {
        let options = Options { workers, part_size: 8 << 20, ..options.clone() };
        collect(&root, &options).unwrap().0.file
    });
    assert!(files.iter().all(|file| *file == files[0]), "{files:?}");
}

#[test]
fn a_sink_that_breaks_ends_the_pass_and_its_threads() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, noise(4, 32 << 20)).unwrap();
    let options = Options { part_size: 1 << 20, ..Options::for_nar((32 << 20) + 112) };
    let calls = AtomicUsize::new(0);
    let result = pack(&file, &options, |_| {
        calls.fetch_add(1, Ordering::Relaxed);
        ControlFlow::Break(())
    });
    // All threads are scoped: that it returned says that they ended.
    assert!(matches!(result, Err(PackError::Stopped)), "{result:?}");
    assert_eq!(calls.into_inner(), 1);
}

/// How far this process has read an open file.
fn position(file: &Path) -> u64 {
    let open = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let fd = open.into_iter().find(|fd| fs::read_link(fd).is_ok_and(|target| target == file)).unwrap();
    let info = fs::read_to_string(Path::new("/proc/self/fdinfo").join(fd.file_name().unwrap())).unwrap();
    info.lines().find_map(|line| line.strip_prefix("pos:")).unwrap().trim().parse().unwrap()
}

#[test]
fn the_reader_is_never_far_ahead_of_the_sink() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().canonicalize().unwrap().join("file");
    fs::write(&file, noise(5, 96 << 20)).unwrap();
    let options = Options { part_size: 1 << 20, ..Options::for_nar((96 << 20) + 112) };
    let (mut handed, mut furthest) = (0, 0);
    pack(&file, &options, |part| {
        handed += part.bytes.len() as u64;
        // The last parts come when the file is closed.
        if handed < 32 << 20 {
            // Half of it compresses to nothing.
            furthest = furthest.max(position(&file).saturating_sub(2 * handed));
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    // Everything that the table in the module's documentation holds of the NAR.
    assert!(furthest > 0 && furthest < 40 << 20, "{furthest}");
}

#[test]
fn a_nar_of_another_size_than_the_database_says_is_an_error() {
    let (_dir, root) = tree();
    let size = nix_dump(&root).len() as u64;
    for wrong in [0, 96, CHUNK as u64, size - 8, size + 8] {
        let result = collect(&root, &Options { part_size: 8 << 20, ..Options::for_nar(wrong) });
        assert!(matches!(result, Err(PackError::Size { expected, .. }) if expected == wrong), "{result:?}");
    }
}

#[test]
fn what_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gone");
    let error = collect(&path, &Options::for_nar(96)).unwrap_err();
    assert!(matches!(&error, PackError::Read { path: named, .. } if *named == path), "{error:?}");
}

#[test]
fn a_special_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _socket = UnixListener::bind(&path).unwrap();
    for size in [1 << 10, 1 << 30] {
        let error = collect(dir.path(), &Options::for_nar(size)).unwrap_err();
        assert!(matches!(&error, PackError::Special { path: named } if *named == path), "{error:?}");
    }
}

/// `/proc` has regular files of size 0 with contents: to a reader, a file that grew after it was measured.
#[test]
fn a_file_that_has_not_its_size_is_named() {
    let path = Path::new("/proc/version");
    let error = collect(path, &Options::for_nar(1 << 10)).unwrap_err();
    assert!(matches!(&error, PackError::Changed { path: named } if named == path), "{error:?}");
}

#[test]
fn a_tree_that_is_too_deep_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut path = dir.path().to_owned();
    path.extend(std::iter::repeat_n("d", 70));
    fs::create_dir_all(path).unwrap();
    let error = collect(dir.path(), &Options::for_nar(1 << 20)).unwrap_err();
    assert!(matches!(error, PackError::Archive { .. }), "{error:?}");
}

#[test]
fn parts_stay_below_ten_thousand() {
    assert_eq!(part_size(0), 8 << 20);
    assert_eq!(part_size(9000 * (8 << 20)), 8 << 20);
    assert_eq!(part_size(9000 * (8 << 20) + 1), (8 << 20) + 1);
    let five_terabytes = 5_u64 << 40;
    assert!(five_terabytes.div_ceil(part_size(five_terabytes) as u64) <= 9000);
}

#[test]
fn a_log_compresses_the_same_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let log = noise(6, 300_000);
    fs::write(dir.path().join("log"), &log).unwrap();
    for compressed in [compress(&log, LEVEL).unwrap(), compress_file(&dir.path().join("log"), LEVEL).unwrap()]
    {
        assert!(zstd::decode_all(&compressed.bytes[..]).unwrap() == log);
        assert_eq!(compressed.sha256, Sha256::of(&compressed.bytes));
    }
}

/// Nix 2.34, for one, reads no NAR with more than 64 directories in one another.
#[test]
fn a_tree_that_is_deeper_than_nix_reads_is_refused() {
    let root = TempDir::new().unwrap();
    let pack_at = |depth: usize| {
        fs::create_dir_all(root.path().join("d/".repeat(depth))).unwrap();
        pack(root.path(), &Options::for_nar(SMALL), |_| ControlFlow::Continue(()))
    };
    // Not for its depth: nobody said its size.
    assert!(matches!(pack_at(62), Err(PackError::Size { .. })));
    assert!(matches!(pack_at(64), Err(PackError::Archive { .. })));
}
