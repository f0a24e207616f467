//! What is uploaded: real paths of a real store, built from files that are the same in every run.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use harmonia_nix::database::{Database, PathInfo};
use harmonia_nix::store_path::{self, StorePath};
use harmonia_tests::nixes::{Expression, Nix, Version};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

const FILES: usize = 20_000;
/// Sizes are spread evenly up to it: 25 KB on average, 500 MB together.
const LONGEST_FILE: usize = 50_000;
const SMALL_PATHS: usize = 500;
const SMALL_SIZE: usize = 10_000;

/// A store with something to publish in it.
pub struct Goods {
    pub nix: Nix,
    /// The derivation to evaluate.
    pub drv: String,
    /// What is published in the measured time, as the store's database knows it.
    pub paths: HashMap<StorePath, PathInfo>,
}

impl Goods {
    /// One path with many files, half of them random, half of them text.
    pub fn tree() -> Self {
        let nix = store_with(|seed| {
            for n in 0..FILES {
                let directory = seed.join((n / 100).to_string());
                fs::create_dir_all(&directory).expect("make a directory");
                let mut random = SmallRng::seed_from_u64(n as u64);
                let size = random.random_range(1..LONGEST_FILE);
                fs::write(directory.join(n.to_string()), content(&mut random, n, size))
                    .expect("write a file");
            }
        });
        Self::build(nix, &Expression::new("tree", "cp -r /seed $out"), |path| path.name() == "tree")
    }

    /// Many paths of one small file each, which one more derivation needs.
    pub fn small() -> Self {
        let nix = store_with(|seed| {
            for n in 0..SMALL_PATHS {
                let mut random = SmallRng::seed_from_u64(n as u64);
                fs::write(seed.join(n.to_string()), content(&mut random, n, SMALL_SIZE))
                    .expect("write a file");
            }
        });
        let all = (0..SMALL_PATHS).fold(Expression::trivial("all"), |all, n| {
            let one = Expression::new(&format!("small-{n}"), "cp /seed/$n $out");
            all.input(&format!("input{n}"), &one.attribute("n", &n.to_string()))
        });
        let is_small = |path: &StorePath| path.name().starts_with("small-") && !path.name().ends_with(".drv");
        Self::build(nix, &all, is_small)
    }

    /// One file that no compression makes smaller.
    pub fn huge() -> Self {
        let nix = Nix::start(Version::New);
        Self::build(nix, &Expression::new("huge", "head -c 4000000000 /dev/urandom >$out"), |path| {
            path.name() == "huge"
        })
    }

    fn build(nix: Nix, expression: &Expression, published: impl Fn(&StorePath) -> bool) -> Self {
        let drv = nix.instantiate(expression);
        nix.run("nix-store", &["--realise", &drv]);
        let all = nix.run("nix-store", &["--query", "--requisites", "--include-outputs", &drv]);
        let all = all.lines().map(|path| store_path::parse(path).expect("a store path"));
        let paths: Vec<StorePath> = all.filter(|path| published(path)).collect();
        let mut database = Database::open(nix.database()).expect("open the store's database");
        let paths = database.path_infos(&paths).expect("ask the store's database");
        Self { nix, drv, paths }
    }
}

/// An empty store whose builds see these files as `/seed`.
fn store_with(write: impl FnOnce(&Path)) -> Nix {
    let nix = Nix::start(Version::New);
    let seed = nix.root().join("seed");
    fs::create_dir(&seed).expect("make a directory");
    write(&seed);
    let file = nix.root().join("conf/nix.conf");
    let settings = fs::read_to_string(&file).expect("read nix.conf");
    fs::write(file, format!("{settings}sandbox-paths = /seed={}\n", seed.display())).expect("write nix.conf");
    nix.kill_daemon();
    nix.start_daemon();
    nix
}

/// Random bytes, or, every second time, words.
fn content(random: &mut SmallRng, n: usize, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    if n.is_multiple_of(2) {
        random.fill_bytes(&mut bytes);
        return bytes;
    }
    bytes.clear();
    while bytes.len() < size {
        // Of 4,096 words the first are the most frequent, as in a language.
        let rank = 4096_f64.powf(random.random()) as u64;
        let word = rank.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let letters = 2 + (word >> 61) as usize;
        bytes.extend(word.to_le_bytes().iter().take(letters).map(|byte| b'a' + byte % 26));
        bytes.push(b' ');
    }
    bytes.truncate(size);
    bytes
}
