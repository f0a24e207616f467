//! Derivations by value, made from their text.

use std::collections::BTreeSet;

use harmonia_nix::daemon::{BasicDerivation, BasicOutput, Unresolved};
use nix_derivation::{Derivation, StorePath};

const INPUT: &str = "/nix/store/11111111111111111111111111111111-input";
const SOURCE: &str = "/nix/store/22222222222222222222222222222222-source";
const OUT: &str = "/nix/store/00000000000000000000000000000000-a";

fn derivation(outputs: &str, environment: &str) -> Derivation {
    let text = format!(
        r#"Derive([{outputs}],[("{INPUT}.drv",["out"])],["{SOURCE}"],"x86_64-linux","/bin/sh",["-c","true"],[{environment}])"#
    );
    Derivation::from_aterm_bytes(text.as_bytes(), "a").unwrap()
}

fn resolve(derivation: &Derivation) -> Result<BasicDerivation, Unresolved> {
    BasicDerivation::resolve(derivation, [INPUT.parse().unwrap()])
}

#[test]
fn inputs_are_sources_and_outputs_of_inputs() {
    let derivation = derivation(&format!(r#"("out","{OUT}","","")"#), r#"("name","a")"#);
    let basic = resolve(&derivation).unwrap();
    let inputs: BTreeSet<StorePath> = [INPUT, SOURCE].map(|path| path.parse().unwrap()).into();
    assert_eq!(basic.inputs, inputs);
    assert_eq!(basic.outputs["out"], BasicOutput { path: OUT.parse().ok(), ..BasicOutput::default() });
    assert_eq!((basic.system.as_str(), basic.builder.as_str()), ("x86_64-linux", "/bin/sh"));
    assert_eq!(basic.args, ["-c", "true"]);
    assert_eq!(basic.env["name"], b"a");
}

#[test]
fn structured_attributes_are_one_variable() {
    let derivation = derivation(
        &format!(r#"("out","{OUT}","","")"#),
        r#"("__json","{\"deep\":[1,2]}"),("out","/nix/store/00000000000000000000000000000000-a")"#,
    );
    assert_eq!(resolve(&derivation).unwrap().env["__json"], br#"{"deep":[1,2]}"#);
}

#[test]
fn a_floating_output_has_a_method_and_no_path() {
    let derivation = derivation(r#"("out","","r:sha256","")"#, "");
    let expected = BasicOutput { method: "r:sha256".to_owned(), ..BasicOutput::default() };
    assert_eq!(resolve(&derivation).unwrap().outputs["out"], expected);
}

#[test]
fn an_output_that_waits_for_its_inputs_is_refused() {
    let derivation = derivation(r#"("out","","","")"#, "");
    assert!(matches!(resolve(&derivation), Err(Unresolved::Deferred { output, .. }) if output == "out"));
}
