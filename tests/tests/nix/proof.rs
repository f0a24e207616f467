//! What we prove of derivations is what Nix says of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use harmonia_nix::database::Database;
use harmonia_nix::proof::{Answer, Promise, Proven, Prover};
use harmonia_nix::{StorePath, store_path};
use harmonia_tests::nixes::{Expression, Nix, Version};

const FEATURES: &str = "experimental-features = nix-command ca-derivations impure-derivations";

fn start(version: Version) -> Nix {
    match version {
        Version::Old => Nix::start_with(version, FEATURES),
        Version::New => Nix::start_with(version, &format!("{FEATURES} dynamic-derivations blake3-hashes")),
    }
}

fn prove(nix: &Nix, goal: &StorePath) -> Proven {
    let mut prover = Prover::new(goal.clone());
    while !prover.is_finished() {
        for path in prover.needs(100) {
            let text = fs::read(nix.real(&path.to_string())).unwrap();
            prover.supply(&path, Answer::Text(text)).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
    }
    prover.take_proven().pop().unwrap().1
}

#[test]
fn every_kind_of_derivation_has_the_outputs_that_nix_says() {
    let graph = Path::new(env!("CARGO_MANIFEST_DIR")).join("../nix/tests/data/graph.nix");
    for (version, name) in [(Version::Old, "2.8"), (Version::New, "2.34")] {
        let nix = start(version);
        let tops = nix.run("nix-instantiate", &[graph.to_str().unwrap(), "--argstr", "version", name]);
        let tops: Vec<&str> = tops.lines().map(|line| line.split('!').next().unwrap()).collect();
        let closure = nix.run("nix-store", &[&["--query", "--requisites"], tops.as_slice()].concat());
        let derivations: Vec<&str> = closure.lines().filter(|path| path.ends_with(".drv")).collect();
        assert!(derivations.len() > 20, "{closure}");
        for derivation in derivations {
            let proven = prove(&nix, &store_path::parse(derivation).unwrap());
            let promised: BTreeSet<String> =
                proven.outputs.values().filter_map(|promise| Some(promise.path()?.to_string())).collect();
            if promised.is_empty() {
                continue;
            }
            let said = nix.run("nix-store", &["--query", "--outputs", derivation]);
            assert_eq!(promised, said.lines().map(str::to_owned).collect(), "{version:?} {derivation}");
        }
    }
}

#[test]
fn a_floating_output_follows_from_what_nix_built() {
    for version in Version::ALL {
        let nix = start(version);
        let expression = Expression::new("floating", "echo hello >$dev; echo see $dev >$out")
            .outputs(&["out", "dev"])
            .attribute("__contentAddressed", "true")
            .attribute("outputHashMode", "\"recursive\"")
            .attribute("outputHashAlgo", "\"sha256\"");
        let derivation = nix.instantiate(&expression);
        let proven = prove(&nix, &store_path::parse(derivation.split('!').next().unwrap()).unwrap());
        assert!(proven.outputs.values().all(|promise| matches!(promise, Promise::Floating { .. })));

        let built = nix
            .run("nix-build", &["--no-out-link", "--attr", "all", nix.write(&expression).to_str().unwrap()]);
        let built: Vec<StorePath> = built.lines().map(|path| store_path::parse(path).unwrap()).collect();
        let infos = Database::open(nix.database()).unwrap().path_infos(&built).unwrap();
        assert_eq!(infos.len(), 2, "{built:?}");
        for (path, info) in infos {
            let output = if path.name().ends_with("-dev") { "dev" } else { "out" };
            let ca = proven.check_built(output, &path, info.nar_hash, &info.references);
            assert_eq!(ca.unwrap().map(|ca| ca.to_string()), info.ca, "{version:?} {path}");
        }
    }
}
