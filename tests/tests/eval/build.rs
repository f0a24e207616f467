//! What evaluators write, builders build: sources come from the cache.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use harmonia_queue::evaluations::Status;
use harmonia_tests::eventually;
use harmonia_tests::nixes::Version;
use harmonia_tests::yard::RunningBuilder;

use crate::scene::Scene;

/// Sources of every kind: a directory, a file, a text, and a text that refers to another one.
const REPOSITORY: &str = r#"let
  bb = builtins.path { path = ./bb; name = "bb"; };
  text = builtins.toFile "text" "text\n";
  script = builtins.toFile "script" "read x <${text}; echo $x >$out";
  run = name: more: derivation ({
    inherit name; system = "x86_64-linux"; builder = "${bb}/busybox"; args = [ "sh" script ];
  } // more);
in rec {
  one = run "one" { };
  two = run "two" { inherit one; file = ./file; args = [ "sh" "-c" "read x <$one; read y <$file; echo $x $y >$out" ]; };
}"#;

fn write(scene: &Scene) {
    scene.write("ci.nix", REPOSITORY);
    scene.write("file", "file");
    scene.write("bb/note", "");
    let (busybox, copy) =
        (scene.nix.root().join("expressions/bb/busybox"), scene.directory.path().join("bb/busybox"));
    fs::copy(busybox, &copy).unwrap();
    fs::set_permissions(copy, fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn a_builder_with_an_empty_store_builds_what_was_evaluated() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        write(&scene);
        let _ = scene.press.session.deregister().await;
        let builder = RunningBuilder::start(&scene.press, version, "builder").await;
        let evaluation = scene.evaluate(scene.path(), &[]).await;
        assert_eq!(scene.built(&evaluation).await, ["one", "two"]);
        eventually("all is built", || async {
            scene.press.evaluation(evaluation.id).await.status().is_final()
        })
        .await;
        let status = scene.press.evaluation(evaluation.id).await.status();
        assert_eq!(status, Status::Succeeded, "{version:?} {:#?}", scene.press.history().await);
        scene.press.check().await;
        builder.stop().await;
    }
}

#[tokio::test]
async fn a_second_evaluation_without_a_change_sends_nothing() {
    let scene = Scene::start(Version::Old).await;
    write(&scene);
    let first = scene.evaluate(scene.path(), &[]).await;
    let (jobs, objects) = (scene.jobs().await, written(&scene).await);
    let second = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&second).await, scene.built(&first).await);
    assert_eq!((scene.jobs().await, written(&scene).await), (jobs, objects));
}

/// Everything in the bucket, with the moment it was written.
async fn written(scene: &Scene) -> Vec<(String, String)> {
    let client = scene.press.s3.client();
    let answer = client.list_objects_v2().bucket(&scene.press.s3.bucket).send().await.unwrap();
    let objects = answer.contents().iter();
    objects
        .map(|object| (object.key().unwrap().to_owned(), format!("{:?}", object.last_modified())))
        .collect()
}

#[tokio::test]
async fn what_cannot_be_published_fails_what_needs_it_and_nothing_else() {
    let scene = Scene::start(Version::Old).await;
    // An output that no evaluator may vouch for.
    let made = scene.nix.build(&harmonia_tests::nixes::Expression::trivial("made"));
    scene.write(
        "default.nix",
        &format!(
            "{{ good = make \"good\"; bad = derivation {{ name = \"bad\"; system = \"x86_64-linux\"; builder = \"/bin/sh\"; \
             src = builtins.storePath {made}; }}; }}"
        ),
    );
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    let attributes = scene.press.attributes(evaluation.id).await;
    assert_eq!(attributes["good"], None);
    assert!(attributes["bad"].as_deref().unwrap().contains("cannot be published"), "{attributes:?}");
}
