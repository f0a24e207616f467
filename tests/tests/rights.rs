//! The operator has the rights that it uses and no others: the chart's rules against what API servers wrote down while the tiers
//! apiserver and cluster ran.

use std::collections::BTreeSet;
use std::process::Command;

use harmonia_tests::kube::{Request, requests};
use serde_json::Value;

/// Group, resource with its subresource, verb.
type Right = (String, String, String);

const RELEASE: &str = "harmonia-ci";

#[test]
fn every_right_of_the_operator_was_used() {
    let used: BTreeSet<Right> = operators().iter().flat_map(rights).collect();
    let unused: Vec<Right> = granted().into_iter().filter(|right| !used.contains(right)).collect();
    assert!(unused.is_empty(), "granted and never used: {unused:#?}");
}

#[test]
fn nothing_was_forbidden_to_the_operator() {
    // Nodes apart: the chart's watchNodes leaves that right out, and tests show what an operator does without it.
    let refused = |request: &Request| request.code == 403 && request.resource != "nodes";
    let forbidden: Vec<Request> = operators().into_iter().filter(refused).collect();
    assert!(forbidden.is_empty(), "asked for and not granted: {forbidden:#?}");
}

/// What operators asked for, of whatever release they were.
fn operators() -> Vec<Request> {
    let found = requests(|user| user.starts_with("system:serviceaccount:") && user.ends_with("-operator"));
    assert!(!found.is_empty(), "no operator was seen: run `./dev test cluster`");
    found
}

/// To apply an object that is not there is a patch that needs the right to create too.
fn rights(request: &Request) -> Vec<Right> {
    let resource = match request.subresource.as_str() {
        "" => request.resource.clone(),
        sub => format!("{}/{sub}", request.resource),
    };
    let verbs = match (request.verb.as_str(), request.code) {
        ("patch", 201) => vec!["patch", "create"],
        (verb, _) => vec![verb],
    };
    verbs.into_iter().map(|verb| (request.group.clone(), resource.clone(), verb.to_owned())).collect()
}

/// What the chart gives to the operator.
fn granted() -> BTreeSet<Right> {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/harmonia-ci");
    let output = Command::new("helm")
        .args(["template", RELEASE, chart, "--set", "quickstart.enabled=true"])
        .output()
        .expect("helm, which `./dev test` puts into PATH");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rendered = String::from_utf8(output.stdout).unwrap();
    let documents = rendered.split("\n---\n").filter(|text| text.contains("rbac.authorization.k8s.io"));
    let documents = documents.map(|text| serde_saphyr::from_str::<Value>(text).unwrap());
    let roles = documents.filter(|document| document["rules"].is_array());
    let words = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut granted = BTreeSet::new();
    for role in roles {
        for rule in role["rules"].as_array().unwrap() {
            for group in words(&rule["apiGroups"]) {
                for resource in words(&rule["resources"]) {
                    granted.extend(
                        words(&rule["verbs"]).into_iter().map(|verb| (group.clone(), resource.clone(), verb)),
                    );
                }
            }
        }
    }
    assert!(granted.len() > 20, "{granted:#?}");
    granted
}
