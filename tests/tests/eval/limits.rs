//! What takes too long, too much or is too many ends with a sentence, and disturbs nothing else.

use harmonia_service::settings::Settings;
use harmonia_tests::nixes::Version;

use crate::scene::{ENDLESS, Scene};

#[tokio::test]
async fn an_evaluation_that_never_ends_is_stopped() {
    let scene = Scene::with(Version::Old, |settings| settings.with("eval_timeout", "20s")).await;
    scene.write(
        "default.nix",
        &format!("{{ a = make \"a\"; endless = builtins.seq {ENDLESS} (make \"b\"); }}"),
    );
    let error = scene.refused(scene.path()).await;
    assert!(
        error.contains("evaluating endless was stopped") && error.contains("HARMONIA_CI_EVAL_TIMEOUT"),
        "{error}"
    );
    assert!(scene.workplaces().is_empty());
    scene.write("default.nix", r#"{ b = make "b"; }"#);
    let next = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&next).await, ["b"]);
}

#[tokio::test]
async fn an_evaluation_that_eats_memory_is_stopped() {
    for version in Version::ALL {
        let scene = Scene::with(version, |settings| settings.with("eval_memory", "300MiB")).await;
        let hog = "builtins.deepSeq (builtins.genList (i: builtins.genList (j: i + j) 100000) 100000)";
        scene.write("default.nix", &format!("{{ a = make \"a\"; hog = {hog} (make \"b\"); }}"));
        let error = scene.refused(scene.path()).await;
        assert!(
            error.contains("evaluating hog was stopped") && error.contains("HARMONIA_CI_EVAL_MEMORY"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn too_many_attributes_are_refused_before_they_are_evaluated() {
    let scene = Scene::start(Version::Old).await;
    let many = "builtins.listToAttrs (builtins.genList (i: { name = \"a${toString i}\"; value = throw \"x\"; }) 100000)";
    scene.write("default.nix", many);
    let error = scene.refused(scene.path()).await;
    assert!(error.contains("100000") && error.contains("HARMONIA_CI_EVAL_MAX_ATTRS"), "{error}");
}

#[tokio::test]
async fn one_attribute_may_take_what_several_processes_share() {
    let more = |settings: Settings| settings.with("eval_memory", "900MiB").with("eval_processes", "3");
    let scene = Scene::with(Version::Old, more).await;
    // More than a third, and less than all.
    let hog = "builtins.deepSeq (builtins.genList (i: builtins.genList (j: i + j) 100000) 30)";
    let large = |name: &str| format!("{name} = {hog} (make \"{name}\");");
    scene.write(
        "default.nix",
        &format!("{{ a = make \"a\"; {} {} z = make \"z\"; }}", large("b"), large("c")),
    );
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["a", "b", "c", "z"]);
}

#[tokio::test]
async fn several_processes_that_eat_memory_together_end_in_one_sentence() {
    let more = |settings: Settings| settings.with("eval_memory", "600MiB").with("eval_processes", "3");
    let scene = Scene::with(Version::Old, more).await;
    let hog = "builtins.deepSeq (builtins.genList (i: builtins.genList (j: i + j) 100000) 100000)";
    scene.write(
        "default.nix",
        &format!("{{ a = {hog} (make \"a\"); b = {hog} (make \"b\"); c = {hog} (make \"c\"); }}"),
    );
    let error = scene.refused(scene.path()).await;
    assert_eq!(error.matches("was stopped").count(), 1, "{error}");
    assert!(error.contains("HARMONIA_CI_EVAL_MEMORY"), "{error}");
    assert!(scene.workplaces().is_empty());
}
