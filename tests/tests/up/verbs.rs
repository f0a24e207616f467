//! What people type, against a farm that runs.

use std::process::{Command, Stdio};

use harmonia_tests::document;
use harmonia_tests::eventually;

use crate::machine::{self, Machine, errors};

fn demo() -> String {
    machine::demo().to_str().unwrap().to_owned()
}

/// All of these are in what was printed.
fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
}

/// The words of the row of a table that begins with this one.
fn row<'a>(table: &'a str, first: &str) -> Vec<&'a str> {
    let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.find(|row| row.first() == Some(&first)).unwrap_or_else(|| panic!("no {first} in:\n{table}"))
}

#[tokio::test]
async fn what_is_built_is_read_back() {
    let machine = Machine::new();
    let _up = machine.up().await;
    has(&machine.does(&["eval", &demo(), "--wait"]), &["evaluation 1", "succeeded", "39 built"]);
    has(&machine.does(&["status"]), &["EVAL", "default", "succeeded", "39/39"]);
    has(&machine.does(&["logs", "slow"]), &["second 1 of 5\n", "second 5 of 5\n"]);
    has(&machine.does(&["why", "everything"]), &["is succeeded", "It was built"]);
    has(&machine.does(&["queue"]), &["0 running, 0 ready, 0 waiting"]);
    let json: serde_json::Value =
        serde_json::from_str(&machine.does(&["status", "1", "-o", "json"])).unwrap();
    assert_eq!(json["builds"]["succeeded"], 39);
}

#[tokio::test]
async fn what_a_program_reads_is_json_and_nothing_else() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let output = machine.run(machine.bare("eval").args([&demo(), "--attr", "slow", "--wait", "-o", "json"]));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["status"], "succeeded");
    has(&errors(&output), &["evaluation 1"]);
}

#[tokio::test]
async fn an_error_among_many_attributes_is_said() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let repository = machine::repository(
        r#"builtins.listToAttrs (builtins.genList (n: { name = "a${toString n}"; value = derivation (make "a" "echo >$out"); }) 250)
           // { zero = throw "nothing is left"; }"#,
    );
    let (text, code) = machine.verb(&["eval", repository.path().to_str().unwrap(), "--wait"]);
    assert_eq!(code, 1, "{text}");
    has(&text, &["1 of 251 attributes cannot be evaluated", "zero cannot be evaluated", "nothing is left"]);
}

#[tokio::test]
async fn who_has_read_enough_hears_of_no_panic() {
    let machine = Machine::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = machine.command("doctor").stdin(Stdio::null()).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), errors(&output)), (Some(0), String::new()));
}

#[tokio::test]
async fn what_nobody_reads_of_a_failure_is_a_failure_all_the_same() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut eval = machine.bare("eval");
    eval.args([&demo(), "--attr", "broken", "--wait"]).stdin(Stdio::null()).stdout(writer);
    assert_eq!(eval.output().unwrap().status.code(), Some(1));
}

#[tokio::test]
async fn an_option_wins_over_a_variable() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let token = machine.data().join("token");
    let mut list = machine.bare("token");
    list.args(["list", "--token-file"]).arg(token).env("HARMONIA_CI_TOKEN", "of-another-farm");
    let output = machine.run(&mut list);
    assert!(output.status.success(), "{}", errors(&output));
}

#[tokio::test]
async fn what_fails_is_named_and_rebuilt() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let (text, code) = machine.verb(&["eval", &demo(), "--attr", "broken", "--wait"]);
    assert_eq!(code, 1, "{text}");
    has(&text, &["failed", "culprit", "exit code 3", "harmonia-ci logs"]);
    has(&machine.does(&["why", "victim"]), &["is dep_failed", "culprit.drv", "which failed"]);
    has(&machine.does(&["rebuild", "culprit"]), &["is next"]);
    let (text, code) = machine.verb(&["status", "1", "--wait"]);
    assert_eq!(code, 1, "{text}");
    has(&machine.does(&["rebuild", "--eval", "1"]), &["1 builds of evaluation 1"]);
}

#[tokio::test]
async fn a_drained_node_holds_a_build_until_it_claims_again() {
    let machine = Machine::new();
    let _up = machine.up().await;
    has(&machine.does(&["drain", "--wait"]), &["drains", "holds nothing"]);
    machine.does(&["eval", &demo(), "--attr", "slow"]);
    let mut follow = machine.bare("logs");
    eventually("it is ready", || async { machine.verb(&["why", "slow"]).0.contains("is ready") }).await;
    has(&machine.does(&["why", "slow"]), &["but drains (by hand)", "number 1 in the line"]);
    has(&machine.does(&["nodes"]), &["drained", "by hand"]);
    let follow = follow.args(["-f", "slow"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    has(&machine.does(&["drain", "--undo"]), &["claims again"]);
    let followed = tokio::task::spawn_blocking(move || follow.wait_with_output().unwrap()).await.unwrap();
    has(&String::from_utf8(followed.stdout).unwrap(), &["second 1 of 5\n", "second 5 of 5\n"]);
}

#[tokio::test]
async fn a_cancelled_build_takes_its_dependents_with_it() {
    let machine = Machine::new();
    let _up = machine.up().await;
    machine.does(&["drain", "--wait"]);
    // What depends on nothing stays behind, and with it the evaluation.
    machine.does(&["eval", &demo(), "--attr", "top", "--attr", "slow"]);
    eventually("it is known", || async { machine.verb(&["why", "top"]).0.contains("is blocked") }).await;
    let bottom = machine.does(&["queue", "-o", "json"]);
    let bottom: serde_json::Value = serde_json::from_str(&bottom).unwrap();
    has(&machine.does(&["cancel", &bottom["next"][0]["id"].to_string()]), &["is cancelled"]);
    eventually("it is told", || async { machine.verb(&["why", "top"]).0.contains("was cancelled") }).await;
    has(&machine.does(&["cancel", "--eval", "1"]), &["evaluation 1 is cancelled"]);
    has(&machine.does(&["status"]), &["cancelled"]);
}

#[tokio::test]
async fn projects_and_tokens_come_and_go() {
    let machine = Machine::new();
    let _up = machine.up().await;
    machine.does(&["project", "add", "second", "--shares", "300", "--max-concurrent", "4"]);
    assert_eq!(row(&machine.does(&["project", "list"]), "second")[..3], ["second", "300", "4"]);
    machine.does(&["project", "set", "second", "--max-concurrent", "none", "--paused", "true"]);
    let changed = machine.does(&["project", "list"]);
    assert_eq!(row(&changed, "second")[..3], ["second", "300", "none"]);
    has(&changed, &["paused"]);
    let examples = document::examples("projects.md", "sh").concat();
    let examples = examples.lines().filter_map(|line| line.strip_prefix("harmonia-ci "));
    let examples: Vec<&str> = examples.map(|line| line.split(" #").next().unwrap_or(line).trim()).collect();
    for example in &examples {
        machine.does(&example.split_whitespace().collect::<Vec<_>>());
    }
    assert!(examples.len() > 2 && row(&machine.does(&["project", "list"]), "dots")[0] == "dots");
    machine.does(&["project", "remove", "second"]);
    assert!(!machine.does(&["project", "list"]).contains("second"));
    let secret = machine.does(&["token", "create", "laptop", "--expires-in", "1d"]);
    assert_eq!(secret.trim().len(), 64, "{secret}");
    let elsewhere =
        machine.bare("token").args(["create", "x"]).env("HARMONIA_CI_URL", "http://127.0.0.1:1").output();
    assert_eq!(elsewhere.unwrap().status.code(), Some(3), "the variable names a farm, not a database");
    has(&machine.does(&["token", "list"]), &["laptop", "read"]);
    machine.does(&["token", "revoke", "laptop"]);
    assert!(!machine.does(&["token", "list"]).contains("laptop"));
}

#[tokio::test]
async fn the_house_is_kept_by_hand() {
    let machine = Machine::new();
    let _up = machine.up().await;
    machine.does(&["eval", &demo(), "--attr", "slow", "--wait"]);
    has(&machine.does(&["pin", "1"]), &["evaluation 1 is pinned"]);
    has(&machine.does(&["status", "1"]), &["succeeded, pinned"]);
    has(&machine.does(&["pin", "1", "--undo"]), &["evaluation 1 is not pinned any more"]);

    let would = ["0 B  paths that nobody needs: would be removed", "objects in the bucket"];
    has(&machine.as_signer(&["cache", "sweep", "--dry-run"]), &would);
    has(&machine.as_signer(&["cache", "sweep"]), &["0 B  paths that nobody needs: removed"]);
    has(&machine.as_signer(&["cache", "resign"]), &["narinfos signed again"]);
    has(&machine.as_signer(&["cache", "resign", "--status"]), &["nobody has asked"]);
    has(&machine.as_signer(&["cache", "resign", "--background"]), &["signers will do it"]);
    eventually("the signer has signed everything again", || async {
        machine.as_signer(&["cache", "resign", "--status"]).contains("done at")
    })
    .await;
    let done: serde_json::Value =
        serde_json::from_str(&machine.as_signer(&["resync", "-o", "json"])).unwrap();
    assert!(done["same"].as_u64() > Some(0), "{done}");
    assert_eq!(
        (&done["adopted"], &done["lost"], &done["violations"]),
        (&0.into(), &0.into(), &0.into()),
        "{done}"
    );
}

#[tokio::test]
async fn a_database_is_restored_under_a_bucket_that_went_on() {
    let machine = Machine::new();
    let dump = machine.data().with_extension("dump");
    let url =
        || std::fs::read_to_string(machine.data().join("secrets/database-url")).unwrap().trim().to_owned();
    let postgres = |command: &mut Command| {
        let output = machine.run(command);
        assert!(output.status.success(), "{command:?}: {}", errors(&output));
    };
    let up = machine.up().await;
    machine.does(&["eval", &demo(), "--attr", "slow", "--wait"]);
    postgres(Command::new("pg_dump").args(["--format=custom", "--dbname", &url(), "--file"]).arg(&dump));
    machine.does(&["eval", &demo(), "--attr", "everything", "--wait"]);
    up.kill();
    eventually("everything ends", || async { machine.processes().is_empty() }).await;

    std::fs::remove_dir_all(machine.data().join("postgres")).unwrap();
    let up = machine.up_with(&["--maintenance"]).await;
    postgres(Command::new("psql").args(["--command", "DROP SCHEMA ci CASCADE", &url()]));
    postgres(Command::new("pg_restore").args(["--exit-on-error", "--dbname", &url()]).arg(&dump));
    let done: serde_json::Value =
        serde_json::from_str(&machine.as_signer(&["resync", "-o", "json"])).unwrap();
    assert!(done["adopted"].as_u64() > Some(0), "{done}");
    up.interrupt();
    up.ended().await;
    let _up = machine.up().await;
    has(&machine.does(&["eval", &demo(), "--attr", "everything", "--wait"]), &["evaluation 2", "succeeded"]);
}

#[tokio::test]
async fn an_exit_code_says_whose_fault_it_is() {
    let machine = Machine::new();
    assert_eq!(machine.verb(&["status"]), (UNKNOWN.to_owned(), 2));
    let _up = machine.up().await;
    for (words, code, sentence) in [
        (&["why", "nothing"][..], 2, "there is no build nothing"),
        (&["status", "99"], 2, "there is no evaluation 99"),
        (&["eval", "/nowhere", "--wait"], 1, "there is no directory /nowhere"),
        (&["eval", "/", "--project", "nobody"], 2, "there is no project nobody"),
        (&["status", "--url", "http://127.0.0.1:1"], 3, "cannot be reached"),
        (&["frobnicate"], 2, "unrecognized subcommand"),
    ] {
        let (text, got) = machine.verb(words);
        assert_eq!(got, code, "{words:?}: {text}");
        has(&text, &[sentence]);
    }
}

const UNKNOWN: &str = "harmonia-ci: no farm is known: start one with `harmonia-ci up`, or set HARMONIA_CI_URL and HARMONIA_CI_TOKEN\n";
