//! The API against requests that are made up from its own description.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use harmonia_queue::builder::Failure;
use harmonia_queue::ingest::Attr;
use harmonia_tests::farm::{Farm, derivation, drv_path};
use harmonia_tests::{PATIENCE, cache, skip};
use tokio::process::Command;

use super::desk::Desk;

/// `./dev test api` installs it where there is Python.
fn schemathesis() -> Option<PathBuf> {
    Some(cache().join("schemathesis-4.32.5/bin/schemathesis")).filter(|program| program.exists())
}

/// Evaluations with attributes, builds in several states, an archived log.
async fn furnish(desk: &Desk) {
    let mut ingest = desk.farm.begin("main").await;
    let nodes = vec![derivation("a", &[]), derivation("b", &["a"]), derivation("c", &[])];
    ingest.add(nodes).await.unwrap();
    let attr = |name: &str| Attr { name: name.to_owned(), drv_path: Some(drv_path(name)), error: None };
    ingest.complete(&[attr("a"), attr("b"), attr("c")]).await.unwrap();
    desk.farm.settle().await;
    let claim = desk.farm.claim(&desk.node).await;
    desk.archive(&claim.drv_path, claim.fence.attempt, b"exit 1\n").await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    desk.farm.settle().await;
}

/// A run of schemathesis with the operations that these options choose.
async fn fuzz(program: &Path, options: &[&str]) {
    let key = [("public_keys", "cache-1:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=")];
    let desk = Desk::with(Farm::new().await, &key).await;
    furnish(&desk).await;
    let directory = tempfile::tempdir().unwrap();
    let settings = format!("headers = {{ Authorization = \"Bearer {}\" }}\n", desk.admin);
    std::fs::write(directory.path().join("schemathesis.toml"), settings).unwrap();
    let mut command = Command::new(program);
    command
        .current_dir(directory.path())
        .args(["run", &format!("{}/api/openapi.json", desk.url)])
        .args(["--phases", "examples,coverage,fuzzing", "--checks", "all"])
        // A description cannot say everything: 3.0 is no number of builds, and only a new project needs a name.
        .args(["--exclude-checks", "positive_data_acceptance"])
        // One worker: the parser of Python 3.11, which it uses while it works, fails now and then in two threads.
        .args(["--max-examples", "30", "--seed", "1", "--workers", "1"])
        .args(["--request-timeout", "120", "--no-color"])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let run = tokio::time::timeout(10 * PATIENCE, command.output());
    let output = run.await.expect("schemathesis ends").unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    desk.farm.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_fits_or_does_not_fit_the_description_is_answered_as_it_says() {
    let Some(program) = schemathesis() else {
        return skip("there is no schemathesis; `./dev test api` installs it where there is Python");
    };
    // Streams that do not end have tests of their own.
    let streams = ["--exclude-operation-id", "listen", "--exclude-operation-id", "read_log"];
    // It would find its own token in the list, and revoke it.
    let revoking = ["revoke_token", "revoke_token_by_name"];
    let others = ["--exclude-operation-id", revoking[0], "--exclude-operation-id", revoking[1]];
    fuzz(&program, &[streams, others].concat()).await;
    fuzz(&program, &["--include-operation-id", revoking[0], "--include-operation-id", revoking[1]]).await;
}
