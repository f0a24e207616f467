//! What a machine is told that it lacks.

use std::collections::BTreeMap;
use std::process::Command;

use crate::machine::Machine;

/// What was found, by what was looked at.
fn findings(machine: &Machine, command: &mut Command) -> (Option<i32>, BTreeMap<String, (String, String)>) {
    let output = machine.run(command.args(["-o", "json"]));
    let list: Vec<BTreeMap<String, String>> = serde_json::from_slice(&output.stdout).unwrap();
    let finding = |mut one: BTreeMap<String, String>| {
        let mut take = |key| one.remove(key).unwrap();
        (take("check"), (take("state"), take("text")))
    };
    (output.status.code(), list.into_iter().map(finding).collect())
}

#[tokio::test]
async fn a_machine_that_has_everything_is_well() {
    let machine = Machine::new();
    let (code, findings) = findings(&machine, &mut machine.command("doctor"));
    assert_eq!(code, Some(0), "{findings:?}");
    for check in ["nix", "sandbox", "confined", "postgres", "git", "disk", "port"] {
        assert_eq!(findings[check].0, "ok", "{:?}", findings[check]);
    }
    assert!(!machine.data().exists(), "it only looks");
}

#[tokio::test]
async fn what_is_missing_comes_with_what_to_do() {
    let machine = Machine::new();
    let (code, findings) = findings(&machine, machine.command("doctor").env("PATH", "/nowhere"));
    assert_eq!(code, Some(1));
    assert_eq!(findings["nix"].0, "missing");
    assert!(findings["nix"].1.contains("apt-get install nix-bin"), "{:?}", findings["nix"]);
    let (state, confined) = &findings["confined"];
    assert!(state == "note" && confined.contains("without namespaces: names of processes"), "{confined}");
}

#[tokio::test]
async fn data_of_a_postgres_that_is_not_here_is_missing_it() {
    let machine = Machine::new();
    std::fs::create_dir_all(machine.data().join("postgres")).unwrap();
    std::fs::write(machine.data().join("postgres/PG_VERSION"), "1000\n").unwrap();
    let (_, findings) = findings(&machine, &mut machine.command("doctor"));
    let (state, text) = &findings["postgres"];
    assert!(state == "missing" && text.contains("made by PostgreSQL 1000"), "{text}");
}

#[tokio::test]
async fn a_taken_port_is_found() {
    let machine = Machine::new();
    let _taken = crate::machine::take(machine.listen);
    let (code, findings) = findings(&machine, &mut machine.command("doctor"));
    assert_eq!((code, findings["port"].0.as_str()), (Some(1), "missing"));
}

#[tokio::test]
async fn a_running_farm_is_found() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let (code, findings) = findings(&machine, &mut machine.command("doctor"));
    assert_eq!((code, findings["farm"].0.as_str()), (Some(0), "ok"), "{findings:?}");
}
