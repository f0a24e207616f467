use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

type Texts = HashMap<StorePath, Vec<u8>>;

/// All derivations of `tests/data`, as Nix wrote them.
static DERIVATIONS: LazyLock<Texts> = LazyLock::new(|| {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/derivations");
    std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let path = StorePath::from_basename(entry.file_name().as_encoded_bytes()).unwrap();
            (path, std::fs::read(entry.path()).unwrap())
        })
        .collect()
});

fn derivations() -> &'static Texts {
    &DERIVATIONS
}

fn path(text: &str) -> StorePath {
    text.parse().unwrap()
}

/// By hash part, for the names are not unique.
fn named<'a>(texts: &'a Texts, start: &str) -> (&'a StorePath, &'a Vec<u8>) {
    let mut found =
        texts.iter().filter(|(path, _)| path.to_basename().starts_with(start) || path.name() == start);
    let one = found.next().unwrap();
    assert!(found.next().is_none(), "{start} is not unique");
    one
}

/// Proves with all inputs from the data.
fn prove_with(texts: &Texts, goal: &StorePath, text: &[u8]) -> Result<Proven, ProofError> {
    let mut prover = Prover::new(goal.clone());
    prover.supply(goal, Answer::Text(text.to_vec()))?;
    while !prover.is_finished() {
        for path in prover.needs(2) {
            prover.supply(&path, Answer::Text(texts[&path].clone()))?;
        }
    }
    Ok(prover.take_proven().pop().unwrap().1)
}

fn prove_named(start: &str) -> Proven {
    let texts = derivations();
    let (path, text) = named(texts, start);
    prove_with(texts, path, text).unwrap()
}

/// Changes a word in a text and gives it the path that it then has.
fn forged(start: &str, word: &str, other: &str) -> Result<Proven, ProofError> {
    let texts = derivations();
    let (old, text) = named(texts, start);
    let text = String::from_utf8(text.clone()).unwrap();
    assert!(text.contains(word), "{word} is not in {text}");
    let text = text.replacen(word, other, 1).into_bytes();
    prove_with(texts, &path_of(old, &text), &text)
}

fn path_of(old: &StorePath, text: &[u8]) -> StorePath {
    let derivation = Derivation::from_aterm_bytes(text, old.name().trim_end_matches(".drv")).unwrap();
    let references = derivation.input_derivations().keys().chain(derivation.input_sources());
    store_path::build_text_path(old.name(), text, references).unwrap()
}

#[test]
fn every_derivation_of_both_versions_is_proven() {
    let texts = derivations();
    for (path, text) in texts {
        if let Err(error) = prove_with(texts, path, text) {
            panic!("{path}: {error}");
        }
    }
}

#[test]
fn every_path_that_a_text_names_is_promised() {
    let texts = derivations();
    for (path, text) in texts {
        let proven = prove_with(texts, path, text).unwrap();
        let derivation = read(path, text).unwrap();
        for (name, output) in derivation.outputs() {
            let named = output.path(derivation.name(), name).unwrap();
            assert_eq!(proven.outputs[name].path(), named.as_ref(), "{path} {name}");
        }
    }
}

#[test]
fn what_is_not_known_before_the_build_is_not_promised() {
    for (name, promise) in [
        ("deferred.drv", Promise::Deferred),
        ("above-deferred.drv", Promise::Deferred),
        ("dynamic.drv", Promise::Deferred),
        ("impure.drv", Promise::Impure),
    ] {
        assert_eq!(prove_named(name).outputs, [("out".to_owned(), promise)].into());
    }
}

#[test]
fn what_can_be_realised_has_a_name_for_that() {
    for (name, known) in [
        ("floating.drv", true),
        ("deferred.drv", true),
        ("above-deferred.drv", true),
        ("above.drv", false),
        ("dynamic.drv", false),
        ("impure.drv", false),
    ] {
        let proven = prove_named(name);
        assert_eq!(proven.realised_as.len(), usize::from(known), "{name}");
        assert_eq!(matches!(proven.hash, InputHash::Deferred(_)), known, "{name}");
    }
}

#[test]
fn a_fixed_output_counts_by_its_contents_only() {
    let texts = derivations();
    let mut hashes = texts
        .iter()
        .filter(|(path, _)| path.name() == "fixed-recursive-sha256.drv")
        .map(|(path, text)| prove_with(texts, path, text).unwrap().hash);
    let first = hashes.next().unwrap();
    assert!(matches!(first, InputHash::Fixed(_)));
    assert!(hashes.all(|hash| hash == first));
}

#[test]
fn a_text_under_another_path_is_refused() {
    let texts = derivations();
    let (path, _) = named(texts, "above-deferred.drv");
    let (actual, text) = named(texts, "impure.drv");
    match prove_with(texts, path, text) {
        Err(ProofError::WrongPath { claimed, .. }) => {
            assert_eq!((&claimed, claimed == *actual), (path, false))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_path_without_the_ending_is_refused() {
    let source = path("/nix/store/q3laishhmk84vl44j1973qpzkyhmr90c-text");
    assert!(matches!(prove(&source, b"", &|_| None), Err(ProofError::NotADerivation(_))));
}

#[test]
fn a_text_without_end_is_refused() {
    let path = path("/nix/store/q3laishhmk84vl44j1973qpzkyhmr90c-x.drv");
    let text = vec![b'a'; LARGEST_TEXT + 1];
    assert!(matches!(prove(&path, &text, &|_| None), Err(ProofError::TooLarge { .. })));
}

#[test]
fn another_derivations_output_cannot_be_claimed() {
    let texts = derivations();
    let victim = prove_named("with-sources.drv").outputs["out"].path().unwrap().to_string();
    for name in ["above.drv", "two-fixed-urls.drv"] {
        let (path, text) = named(texts, name);
        let own = prove_with(texts, path, text).unwrap().outputs["out"].path().unwrap().to_string();
        let text = String::from_utf8(text.clone()).unwrap().replace(&own, &victim).into_bytes();
        match prove_with(texts, &path_of(path, &text), &text) {
            Err(ProofError::WrongOutput { claimed, .. }) => assert_eq!(claimed, victim),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn another_path_of_a_fixed_output_is_refused() {
    let proven = prove_named("fixed-flat-md5.drv");
    let own = proven.outputs["out"].path().unwrap();
    let other = StorePath::from_parts([1; 20], own.name()).unwrap().to_string();
    match forged("fixed-flat-md5.drv", &own.to_string(), &other) {
        Err(ProofError::WrongOutput { claimed, actual, .. }) => {
            assert_eq!((claimed, actual), (other, own.to_string()));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_builder_told_another_path_is_refused() {
    for name in ["above.drv", "fixed-flat-md5.drv"] {
        let own = prove_named(name).outputs["out"].path().unwrap().to_string();
        let (word, other) = (format!("(\"out\",\"{own}\")"), format!("(\"out\",\"{own} /tmp/more\")"));
        assert!(matches!(forged(name, &word, &other), Err(ProofError::Misled { .. })), "{name}");
    }
}

#[test]
fn a_path_before_it_can_be_known_is_refused() {
    let claim = format!("(\"out\",\"/nix/store/{}-deferred\",\"\",\"\")", "0".repeat(32));
    let proof = forged("deferred.drv", "(\"out\",\"\",\"\",\"\")", &claim);
    assert!(matches!(proof, Err(ProofError::TooEarly { .. })), "{proof:?}");
    let proof = forged("dynamic.drv", "(\"out\",\"\",\"\",\"\")", &claim.replace("deferred", "dynamic"));
    assert!(matches!(proof, Err(ProofError::TooEarly { .. })), "{proof:?}");
}

#[test]
fn a_text_that_nix_would_write_otherwise_is_refused() {
    let swapped = forged(
        "impure.drv",
        "(\"builder\",\"/bin/sh\"),(\"name\",\"impure\")",
        "(\"name\",\"impure\"),(\"builder\",\"/bin/sh\")",
    );
    assert!(matches!(swapped, Err(ProofError::Unusual { .. })), "{swapped:?}");
    let twice = forged("impure.drv", "(\"name\",\"impure\")", "(\"name\",\"x\"),(\"name\",\"impure\")");
    assert!(matches!(twice, Err(ProofError::Unusual { .. })), "{twice:?}");
}

#[test]
fn what_a_fixed_output_does_not_have_cannot_be_used_of_it() {
    let proof = forged("two-fixed-urls.drv", "[\"out\"]", "[\"dev\"]");
    assert!(matches!(proof, Err(ProofError::NoSuchOutput { .. })), "{proof:?}");
}

#[test]
fn an_input_without_proof_is_named() {
    let texts = derivations();
    let (path, text) = named(texts, "above.drv");
    match prove(path, text, &|_| None) {
        Err(ProofError::MissingInput { input, .. }) => assert!(texts.contains_key(&input)),
        other => panic!("{other:?}"),
    }
}

/// The library for derivations keeps the outputs of the last of equal inputs, as Nix 2.35 does.
fn as_nix_2_35(texts: &Texts, path: &StorePath, text: &[u8]) -> StorePath {
    let derivation = Derivation::from_aterm_bytes(text, path.name().trim_end_matches(".drv")).unwrap();
    let hash = derivation.hash_output_path_modulo(|input| {
        match prove_with(texts, input, &texts[input]).unwrap().hash {
            InputHash::Regular(hashes) => nix_derivation::InputDerivationHash::regular(hashes[2].0),
            InputHash::Fixed(hash) => nix_derivation::InputDerivationHash::fixed_output(hash.0),
            InputHash::Deferred(_) | InputHash::Unknown => nix_derivation::InputDerivationHash::Deferred,
        }
    });
    store_path::build_output_path(hash.unwrap().into_ready().unwrap(), "out", derivation.name()).unwrap()
}

#[test]
fn inputs_of_one_hash_may_be_united_or_the_last_may_win() {
    let texts = derivations();
    let (path, text) = named(texts, "two-urls-two-outputs.drv");
    let united = prove_with(texts, path, text).unwrap().outputs["out"].path().unwrap().to_string();
    let last = as_nix_2_35(texts, path, text).to_string();
    assert_ne!(united, last);
    let text = String::from_utf8(text.clone()).unwrap().replace(&united, &last).into_bytes();
    let proven = prove_with(texts, &path_of(path, &text), &text).unwrap();
    assert_eq!(proven.outputs["out"].path().unwrap().to_string(), last);
}

#[test]
fn a_dependent_of_a_derivation_with_several_hashes_is_proven_under_any() {
    let texts = derivations();
    let (path, text) = named(texts, "above.drv");
    let united = prove_with(texts, path, text).unwrap();
    assert!(matches!(united.hash, InputHash::Regular([first, _, last]) if first != last));
    let united = united.outputs["out"].path().unwrap().to_string();
    let last = as_nix_2_35(texts, path, text).to_string();
    assert_ne!(united, last);
    let text = String::from_utf8(text.clone()).unwrap().replace(&united, &last).into_bytes();
    assert!(prove_with(texts, &path_of(path, &text), &text).is_ok());
}

#[test]
fn structured_attributes_written_by_an_old_nix_have_the_path_that_a_new_one_computes() {
    let texts = derivations();
    let (path, text) = named(texts, "ll6i91mk6njvjr1zjrkwchhvfpqq5w91");
    let derivation = read(path, text).unwrap();
    let inputs: Vec<InputHash> = needed_inputs(&derivation)
        .into_iter()
        .map(|input| prove_with(texts, input, &texts[input]).unwrap().hash)
        .collect();
    let outputs = modulo::hashes(&derivation, &inputs)
        .unwrap()
        .map(|hashes| store_path::build_output_path(hashes.masked.0.into(), "dev", "structured").unwrap());
    // As 2.34 said when it refused to import the text of 2.8.
    let new = "/nix/store/pwrxn52a2yfv1wsb0krchf3yifr4b27i-structured-dev";
    let old = "/nix/store/gaxrragljqdf8v6wrv1crcjzkv4dbh8c-structured-dev";
    assert_eq!(outputs.map(|path| path.to_string()), [old, new, new]);
}

/// Built by Nix 2.34: `echo hello > $dev; echo see $dev > $out`.
fn floating() -> Proven {
    prove_named("floating.drv")
}
const DEV: (&str, &str) = (
    "/nix/store/yndr0gyxnaqh51pfyg3w1war85cgp9i8-floating-dev",
    "sha256:04zwf782yjwnh3q6hz5izfd6jyip8kgw6g6yj43fiqhbyhdd0dqw",
);
const OUT: (&str, &str) = (
    "/nix/store/ka8rv1nj44ydsd6pr62yg1gbjkl6r9hi-floating",
    "sha256:1ml7bhdiay7jnhh78i0h6nkvj1r1d4gggqlz9xab3ccaxwxgp1jr",
);

#[test]
fn a_floating_output_follows_from_what_was_built() {
    let check = |output, (path, hash): (&str, &str), references: &[StorePath]| {
        let references = references.iter().cloned().collect();
        floating().check_built(output, &self::path(path), hash.parse().unwrap(), &references)
    };
    assert!(matches!(check("dev", DEV, &[]), Ok(Some(CAHash::Nar(_)))));
    assert!(matches!(check("out", OUT, &[path(DEV.0)]), Ok(Some(CAHash::Nar(_)))));
    assert!(matches!(check("out", OUT, &[]), Err(BuiltError::NotItsContents { .. })));
    assert!(matches!(check("out", DEV, &[]), Err(BuiltError::NotItsContents { .. })));
    assert!(matches!(check("lib", DEV, &[]), Err(BuiltError::NoSuchOutput(_))));
}

#[test]
fn a_floating_output_that_refers_to_itself_is_refused_with_that_reason() {
    let own = path(OUT.0);
    let built = floating().check_built("out", &own, OUT.1.parse().unwrap(), &[own.clone()].into());
    assert!(matches!(built, Err(BuiltError::SelfReference { .. })));
}

#[test]
fn a_deferred_output_is_where_its_inputs_put_it() {
    let (drv, text) = named(derivations(), "deferred.drv");
    let with = |input: &str| {
        let input = path(input);
        crate::resolve::deferred_paths(drv, text, |_, _| Some(input.clone())).unwrap().remove(0)
    };
    let (own, other) = (with(DEV.0), with(OUT.0));
    assert_ne!(own, other);
    let proven = prove_named("deferred.drv").resolved(std::slice::from_ref(&own), &other);
    let check = |path: &StorePath| proven.check_built("out", path, Sha256::of("x"), &BTreeSet::new());
    assert!(matches!(check(&own["out"]), Ok(None)));
    assert!(matches!(check(&other["out"]), Err(BuiltError::OtherPath { .. })));
}

#[test]
fn a_derivation_with_an_input_that_is_nowhere_is_not_resolved() {
    use crate::resolve::{ResolveError, deferred_paths};
    let resolve = |name: &str| {
        let (drv, text) = named(derivations(), name);
        deferred_paths(drv, text, |_, _| None)
    };
    assert!(matches!(resolve("deferred.drv"), Err(ResolveError::NoPath { output, .. }) if output == "dev"));
    assert!(matches!(resolve("dynamic.drv"), Err(ResolveError::Dynamic(_))));
    assert_eq!(resolve("floating.drv").unwrap(), []);
}

#[test]
fn a_fixed_output_with_another_nar_is_refused() {
    let proven = prove_named("fixed-recursive-sha512.drv");
    let own = proven.outputs["out"].path().unwrap();
    assert!(proven.check_built("out", own, Sha256::of("x"), &BTreeSet::new()).is_ok());
    let proven = prove_with_hash("contents");
    let own = proven.outputs["out"].path().unwrap();
    assert!(proven.check_built("out", own, Sha256::of("contents"), &BTreeSet::new()).is_ok());
    let built = proven.check_built("out", own, Sha256::of("x"), &BTreeSet::new());
    assert!(matches!(built, Err(BuiltError::OtherContents { .. })));
}

fn prove_with_hash(contents: &str) -> Proven {
    let ca = CAHash::Nar(NixHash::Sha256(Sha256::of(contents).0));
    let path = store_path::build_ca_path("x", &ca, [], false).unwrap();
    let outputs = [("out".to_owned(), Promise::Fixed { path, ca })].into();
    Proven { hash: InputHash::Unknown, outputs, realised_as: Vec::new() }
}

#[test]
fn another_path_than_the_promised_one_is_refused() {
    let proven = prove_named("above.drv");
    let own = proven.outputs["out"].path().unwrap();
    let nar_hash = Sha256::of("x");
    assert!(matches!(proven.check_built("out", own, nar_hash, &BTreeSet::new()), Ok(None)));
    let built = proven.check_built("out", &path(OUT.0), nar_hash, &BTreeSet::new());
    assert!(matches!(built, Err(BuiltError::OtherPath { .. })));
}

#[test]
fn what_cannot_be_checked_is_refused() {
    for name in ["deferred.drv", "impure.drv", "producer.drv.drv"] {
        let built = prove_named(name).check_built("out", &path(OUT.0), Sha256::of("x"), &BTreeSet::new());
        assert!(matches!(built, Err(BuiltError::Uncheckable { .. })), "{name}");
    }
}

fn chain(length: usize) -> Vec<(StorePath, Vec<u8>)> {
    let mut made: Vec<(StorePath, Vec<u8>)> = Vec::with_capacity(length);
    let mut hash: Option<String> = None;
    for index in 0..length {
        let name = format!("n{index}");
        let write = |output: &str, inputs: &str| {
            format!(
                "Derive([(\"out\",\"{output}\",\"\",\"\")],[{inputs}],[],\"s\",\"/b\",[],[(\"out\",\"{output}\")])"
            )
        };
        let modulo = hash.map(|hash| format!("(\"{hash}\",[\"out\"])")).unwrap_or_default();
        let masked = Sha256::of(write("", &modulo));
        let output = store_path::build_output_path(masked.0.into(), "out", &name).unwrap().to_string();
        hash = Some(Sha256::of(write(&output, &modulo)).hex());
        let below = made.last().map(|(path, _)| path);
        let inputs = below.map(|path| format!("(\"{path}\",[\"out\"])")).unwrap_or_default();
        let text = write(&output, &inputs).into_bytes();
        made.push((store_path::build_text_path(&format!("{name}.drv"), &text, below).unwrap(), text));
    }
    made
}

#[test]
fn a_closure_as_deep_as_it_is_large_is_proven() {
    // Far deeper than a stack of 2 MiB would allow.
    let chain = chain(20_000);
    let goal = &chain.last().unwrap().0;
    let mut prover = Prover::new(goal.clone());
    for (path, text) in chain.iter().rev() {
        assert_eq!(prover.needs(10), std::slice::from_ref(path));
        prover.supply(path, Answer::Text(text.clone())).unwrap();
    }
    assert!(prover.is_finished());
    assert_eq!(prover.take_proven().last().map(|(path, _)| path), Some(goal));
}

#[test]
fn what_is_known_is_not_looked_into() {
    let chain = chain(3);
    let [(bottom, text), (middle, _), (top, top_text)] = chain.as_slice() else { panic!() };
    let below = prove(bottom, text, &|_| None).unwrap().hash;
    let known = prove(middle, &chain[1].1, &|_| Some(below)).unwrap().hash;
    let mut prover = Prover::new(top.clone());
    prover.supply(top, Answer::Text(top_text.clone())).unwrap();
    prover.supply(middle, Answer::Known(known)).unwrap();
    assert!(prover.is_finished());
}

#[test]
fn answers_may_come_in_any_order_and_twice() {
    let chain = chain(20);
    let goal = &chain[19].0;
    let mut prover = Prover::new(goal.clone());
    for (path, text) in chain.iter().step_by(2).chain(&chain).chain(&chain) {
        prover.supply(path, Answer::Text(text.clone())).unwrap();
    }
    assert!(prover.is_finished() && prover.needs(1).is_empty());
    assert_eq!(prover.take_proven().len(), 20);
}

#[test]
fn inputs_of_a_fixed_output_are_not_asked_for() {
    let texts = derivations();
    let (goal, text) = named(texts, "fixed.drv");
    let mut prover = Prover::new(goal.clone());
    prover.supply(goal, Answer::Text(text.clone())).unwrap();
    assert!(prover.is_finished());
}

#[test]
fn more_text_than_may_wait_is_refused() {
    let chain = chain(3);
    let goal = &chain[2].0;
    let mut prover = Prover::with_limit(goal.clone(), chain[2].1.len());
    prover.supply(goal, Answer::Text(chain[2].1.clone())).unwrap();
    let second = prover.supply(&chain[1].0, Answer::Text(chain[1].1.clone()));
    assert!(matches!(second, Err(ProofError::TooMuch { .. })));
}

proptest! {
    #[test]
    fn hashes_are_read_back(
        hashes in any::<[[u8; 32]; 3]>(),
        kind in 0..6,
    ) {
        let [first, ..] = hashes.map(Sha256);
        let hash = match kind {
            0 => InputHash::Unknown,
            1 => InputHash::Fixed(first),
            2 => InputHash::Regular([first; 3]),
            3 => InputHash::Deferred([first; 3]),
            4 => InputHash::Deferred(hashes.map(Sha256)),
            _ => InputHash::Regular(hashes.map(Sha256)),
        };
        prop_assert_eq!(InputHash::from_bytes(&hash.to_bytes()), Some(hash));
    }

    #[test]
    fn any_bytes_are_a_hash_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        if let Some(hash) = InputHash::from_bytes(&bytes) {
            prop_assert_eq!(InputHash::from_bytes(&hash.to_bytes()), Some(hash));
        }
    }

    #[test]
    fn no_text_makes_it_panic(index in any::<prop::sample::Index>(), byte in any::<u8>(), name in 0_usize..31) {
        let texts = derivations();
        let mut paths: Vec<&StorePath> = texts.keys().collect();
        paths.sort();
        let path = paths[name];
        let mut text = texts[path].clone();
        let at = index.index(text.len());
        if text[at] != byte {
            text[at] = byte;
            prop_assert!(prove(path, &text, &|_| None).is_err());
        }
    }
}
