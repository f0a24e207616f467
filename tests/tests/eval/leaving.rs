//! Evaluators that go away, and evaluations that are not wanted any more.

use std::fs;
use std::sync::Arc;

use harmonia_queue::evaluations::{self, Stage};
use harmonia_queue::people::{self, Ending};
use harmonia_tests::desk::RunningEvaluator;
use harmonia_tests::eventually;
use harmonia_tests::nixes::Version;

use crate::scene::{ENDLESS, Scene, unchanged};

/// An evaluation that has found one attribute and does not come to the next, while there is a file `wait`.
async fn begun(scene: &Scene) -> i64 {
    let wait = format!("if builtins.pathExists ./wait then {ENDLESS} else 0");
    scene.write("default.nix", &format!("{{ a = make \"a\"; b = builtins.seq ({wait}) (make \"b\"); }}"));
    scene.write("wait", "");
    let id = scene.press.ask(scene.path(), &[]).await;
    eventually("the first attribute is known", || async { !scene.jobs().await.is_empty() }).await;
    id
}

/// Whether any process works in a directory of the evaluator's.
fn child_runs(scene: &Scene) -> bool {
    let work = scene.evaluator.state().join("work");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut places = processes.filter_map(|process| fs::read_link(process.path().join("cwd")).ok());
    places.any(|place| place.starts_with(&work))
}

#[tokio::test]
async fn what_is_found_is_in_the_queue_while_the_rest_is_evaluated() {
    let scene = Scene::start(Version::Old).await;
    let id = begun(&scene).await;
    assert_eq!(scene.press.evaluation(id).await.stage, Stage::Evaluating);
    assert!(child_runs(&scene));
}

#[tokio::test]
async fn a_cancelled_evaluation_kills_its_child_and_stays_cancelled() {
    let scene = Scene::start(Version::Old).await;
    let id = begun(&scene).await;
    people::end_evaluation(&scene.press.farm.frontend, id, Ending::Cancelled, Some("by hand")).await.unwrap();
    evaluations::tell(&scene.press.farm.frontend, id).await;
    eventually("the child is gone", || async { !child_runs(&scene) && scene.workplaces().is_empty() }).await;
    let evaluation = scene.press.evaluation(id).await;
    assert_eq!((evaluation.stage, evaluation.error.as_deref()), (Stage::Cancelled, Some("by hand")));
}

#[tokio::test]
async fn an_evaluator_that_stops_gives_back_what_it_has() {
    let mut scene = Scene::start(Version::Old).await;
    let id = begun(&scene).await;
    let other = RunningEvaluator::start(&scene.press, Arc::clone(&scene.nix), "two", unchanged).await;
    std::mem::replace(&mut scene.evaluator, other).stop().await;
    fs::remove_file(scene.directory.path().join("wait")).unwrap();
    // The other one may have begun before the file was gone.
    let other = RunningEvaluator::start(&scene.press, Arc::clone(&scene.nix), "three", unchanged).await;
    std::mem::replace(&mut scene.evaluator, other).stop().await;
    let evaluation = scene.press.evaluated(id).await;
    assert_eq!(scene.built(&evaluation).await, ["a", "b"]);
    let attempts: i32 = scene.press.farm.value("SELECT attempt FROM ci.evaluation WHERE id = $1", id).await;
    assert_eq!(attempts, 1, "giving back costs no attempt");
}

#[tokio::test]
async fn an_evaluator_that_vanishes_is_taken_over_and_the_result_is_the_same() {
    let mut scene = Scene::start(Version::Old).await;
    let id = begun(&scene).await;
    let before = scene.jobs().await;
    let other = RunningEvaluator::start(&scene.press, Arc::clone(&scene.nix), "two", unchanged).await;
    std::mem::replace(&mut scene.evaluator, other).kill().await;
    fs::remove_file(scene.directory.path().join("wait")).unwrap();
    scene
        .press
        .farm
        .database
        .execute("UPDATE ci.evaluation SET lease_until = ci.clock() - interval '1 second'")
        .await;
    evaluations::tell(&scene.press.farm.frontend, id).await;
    let evaluation = scene.press.evaluated(id).await;
    assert_eq!(scene.built(&evaluation).await, ["a", "b"]);
    let jobs = scene.jobs().await;
    assert!(jobs.len() == 2 && before.iter().all(|job| jobs.contains(job)), "{before:?} {jobs:?}");
    scene.press.farm.assert_sound().await;
}

#[tokio::test]
async fn a_new_process_of_the_same_name_begins_anew_at_once() {
    let mut scene = Scene::start(Version::Old).await;
    let id = begun(&scene).await;
    let idle = RunningEvaluator::start(&scene.press, Arc::clone(&scene.nix), "idle", unchanged).await;
    std::mem::replace(&mut scene.evaluator, idle).kill().await;
    fs::remove_file(scene.directory.path().join("wait")).unwrap();
    let anew = RunningEvaluator::start(&scene.press, Arc::clone(&scene.nix), "one", unchanged).await;
    let evaluation = scene.press.evaluated(id).await;
    assert_eq!(scene.built(&evaluation).await, ["a", "b"]);
    let attempts: i32 = scene.press.farm.value("SELECT attempt FROM ci.evaluation WHERE id = $1", id).await;
    assert_eq!(attempts, 2, "a life that ended badly counts");
    anew.stop().await;
}

#[tokio::test]
async fn a_nix_daemon_that_begins_anew_spoils_nothing() {
    let scene = Scene::start(Version::Old).await;
    // Some seconds between the two.
    let while_ = "let l = builtins.genList (x: x) 100000; m = builtins.genList (x: x) 300; in \
                  builtins.foldl' (a: _: builtins.foldl' (b: _: b) a l) 0 m";
    scene.write("default.nix", &format!("{{ a = make \"a\"; b = builtins.seq ({while_}) (make \"b\"); }}"));
    let id = scene.press.ask(scene.path(), &[]).await;
    eventually("the first attribute is known", || async { !scene.jobs().await.is_empty() }).await;
    assert_eq!(scene.press.evaluation(id).await.stage, Stage::Evaluating);
    scene.nix.kill_daemon();
    scene.nix.start_daemon();
    let evaluation = scene.press.evaluated(id).await;
    assert_eq!(scene.built(&evaluation).await, ["a", "b"]);
    let attempts: i32 = scene.press.farm.value("SELECT attempt FROM ci.evaluation WHERE id = $1", id).await;
    assert_eq!(attempts, 1, "it costs no attempt");
}

#[tokio::test]
async fn what_is_being_written_is_held_and_what_was_is_collected_when_the_disk_is_low() {
    // No disk has so much left.
    let scene = Scene::with(Version::Old, |settings| settings.with("min_free", "1000TiB")).await;
    let id = begun(&scene).await;
    let derivation = scene.nix.real(&scene.jobs().await[0]);
    scene.nix.run("nix-store", &["--gc"]);
    assert!(derivation.exists(), "its evaluation is not at its end");
    people::end_evaluation(&scene.press.farm.frontend, id, Ending::Cancelled, None).await.unwrap();
    evaluations::tell(&scene.press.farm.frontend, id).await;
    eventually("garbage is collected", || async { !derivation.exists() && scene.workplaces().is_empty() })
        .await;
    fs::remove_file(scene.directory.path().join("wait")).unwrap();
    let next = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&next).await, ["a", "b"]);
}
