//! Where outputs are of which only a build shows it, and what Nix says about them in a cache.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use harmonia_nix::key::SecretKey;
use harmonia_nix::proof::{Answer, Proven, Prover};
use harmonia_nix::realisation::{Name, Realisation, There};
use harmonia_nix::{StorePath, resolve, store_path};
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::repository::{FEATURES, Repository};

/// What Nix has built, and how it names it in a cache.
struct Nixes {
    nix: Nix,
    /// Derivations by attribute.
    drvs: BTreeMap<String, String>,
    /// Outputs by derivation and name.
    outputs: BTreeMap<(String, String), StorePath>,
    cache: tempfile::TempDir,
    key: SecretKey,
}

impl Nixes {
    fn build(version: Version) -> Nixes {
        let (cache, key) = (tempfile::tempdir().unwrap(), SecretKey::generate("test-1").unwrap());
        let key_file = cache.path().join("key");
        fs::write(&key_file, key.to_text().as_bytes()).unwrap();
        let nix = Nix::start_with(version, &format!("{FEATURES}secret-key-files = {}\n", key_file.display()));
        let repository = Repository::generate(3);
        let drvs = nix.instantiate_all(&repository.text);
        let file = nix.write_text(&repository.text);
        let to = format!("file://{}", cache.path().display());
        let mut outputs = BTreeMap::new();
        for (attribute, drv) in &drvs {
            for output in outputs_of(&nix, drv) {
                let file = file.to_str().unwrap();
                let one = format!("{attribute}.{output}");
                let path = nix.run("nix-build", &["--no-out-link", file, "--attr", &one]);
                outputs.insert((drv.clone(), output), store_path::parse(&path).unwrap());
            }
        }
        for attribute in &repository.realised {
            nix.run("nix", &["copy", "--to", &to, "--file", file.to_str().unwrap(), attribute]);
        }
        Nixes { nix, drvs, outputs, cache, key }
    }

    fn text(&self, drv: &str) -> Vec<u8> {
        fs::read(self.nix.real(drv)).unwrap()
    }

    fn prove(&self, drv: &str) -> Proven {
        let mut prover = Prover::new(store_path::parse(drv).unwrap());
        while !prover.is_finished() {
            for path in prover.needs(100) {
                prover.supply(&path, Answer::Text(self.text(&path.to_string()))).unwrap();
            }
        }
        prover.take_proven().pop().unwrap().1
    }
}

fn outputs_of(nix: &Nix, drv: &str) -> Vec<String> {
    let path = store_path::parse(drv).unwrap();
    let text = fs::read(nix.real(drv)).unwrap();
    harmonia_nix::proof::named_outputs(&path, &text).unwrap().into_keys().collect()
}

#[test]
fn deferred_outputs_are_where_nix_puts_them() {
    for version in Version::ALL {
        let built = Nixes::build(version);
        for attribute in ["deferred", "deferred-above", "deferred-structured"] {
            let drv = &built.drvs[attribute];
            let path_of = |input: &StorePath, output: &str| {
                // `tools` is no attribute; its path is in its text.
                let key = (input.to_string(), output.to_owned());
                built.outputs.get(&key).cloned().or_else(|| {
                    let text = built.text(&key.0);
                    harmonia_nix::proof::named_outputs(input, &text).unwrap().remove(output).flatten()
                })
            };
            let path = store_path::parse(drv).unwrap();
            let ways = resolve::deferred_paths(&path, &built.text(drv), path_of).unwrap();
            let of_drv = built.outputs.iter().filter(|((of, _), _)| of == drv);
            let nixs: BTreeMap<String, StorePath> =
                of_drv.map(|((_, output), path)| (output.clone(), path.clone())).collect();
            assert!(ways.contains(&nixs), "{version:?} {attribute}: {ways:?} {nixs:?}");
        }
    }
}

#[test]
fn realisations_are_named_and_signed_as_nix_does() {
    for version in Version::ALL {
        let built = Nixes::build(version);
        for attribute in Repository::generate(3).realised {
            let drv = &built.drvs[&attribute];
            let proven = built.prove(drv);
            let path = built.outputs[&(drv.clone(), "out".to_owned())].clone();
            let said = proven.realised_as.iter().find_map(|hash| {
                let realisation =
                    Realisation { name: Name::Hash(*hash), output: "out".to_owned(), path: path.clone() };
                let text = fs::read(built.cache.path().join(realisation.object_name())).ok()?;
                Some((realisation, text))
            });
            let names = listing(&built.cache.path().join("realisations"));
            let (realisation, text) = said.unwrap_or_else(|| panic!("{version:?} {attribute}: {names:?}"));
            let there = realisation.compare(&text, &[built.key.public()]);
            assert_eq!(there, There::Same, "{version:?} {attribute}");
            // An old Nix says what it depends on too, which it can do without.
            if version == Version::New {
                assert_eq!(realisation.write(std::slice::from_ref(&built.key)), text, "{attribute}");
            }
        }
    }
}

fn listing(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
