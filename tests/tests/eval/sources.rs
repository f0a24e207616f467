//! Where sources come from, and the sentences when they do not.

use harmonia_tests::nixes::Version;

use crate::scene::Scene;

const FLAKE: &str = r#"{
  outputs = { self }: let make = name: derivation {
    inherit name; system = "x86_64-linux"; builder = "/bin/sh"; src = ./.; commit = self.rev or "none";
  }; in {
    checks.x86_64-linux.unit = make "unit";
    checks.aarch64-linux.other = make "other";
    packages.x86_64-linux.default = make "package";
  };
}"#;

#[tokio::test]
async fn a_directory_is_evaluated_as_it_is_with_uncommitted_changes() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", r#"{ one = make "one"; }"#);
    scene.commit();
    scene.write("default.nix", r#"{ two = make "two"; }"#);
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["two"]);
    assert_eq!(scene.evaluate(&format!("path:{}", scene.path()), &[]).await.error, None);
}

#[tokio::test]
async fn a_repository_is_evaluated_at_a_branch_a_tag_or_a_commit() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", r#"{ first = make "first"; }"#);
    let first = scene.commit();
    scene.git(&["tag", "v1"]);
    scene.git(&["tag", "--annotate", "--message", "in words", "v1.0"]);
    scene.git(&["checkout", "--quiet", "-b", "next"]);
    scene.write("default.nix", r#"{ second = make "second"; }"#);
    let second = scene.commit();
    scene.git(&["checkout", "--quiet", "main"]);
    scene.write("default.nix", r#"{ third = make "third"; }"#);
    let third = scene.commit();
    let url = format!("file://{}", scene.path());
    for (at, name, commit) in [
        ("", "third", &third),
        ("?ref=next", "second", &second),
        ("?ref=refs/heads/next", "second", &second),
        ("?ref=v1", "first", &first),
        ("?ref=v1.0", "first", &first),
        ("?ref=refs/tags/v1.0", "first", &first),
        (&format!("?rev={first}"), "first", &first),
    ] {
        let evaluation = scene.evaluate(&format!("git+{url}{at}"), &[]).await;
        assert_eq!(scene.built(&evaluation).await, [name], "{at}");
        assert_eq!(evaluation.commit.as_ref(), Some(commit), "{at}");
    }
    assert!(scene.workplaces().is_empty());
}

#[tokio::test]
async fn the_same_commit_gives_the_same_derivations_whenever_it_is_fetched() {
    let scene = Scene::start(Version::Old).await;
    scene.write(
        "default.nix",
        r#"{ all = derivation { name = "all"; system = "x86_64-linux"; builder = "/bin/sh"; src = ./.; }; }"#,
    );
    scene.commit();
    let url = format!("file://{}", scene.path());
    scene.evaluate(&url, &[]).await;
    let jobs = scene.jobs().await;
    scene.evaluate(&url, &[]).await;
    assert_eq!((scene.jobs().await, jobs.len()), (jobs.clone(), 1));
}

#[tokio::test]
async fn a_flake_offers_its_checks_for_every_system() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        scene.write("flake.nix", FLAKE);
        let checks = ["checks.aarch64-linux.other", "checks.x86_64-linux.unit"];
        let evaluation = scene.evaluate(scene.path(), &[]).await;
        assert_eq!(scene.built(&evaluation).await, checks, "{version:?}: a directory");
        scene.commit();
        // Of a commit with a history only the commit is fetched.
        let commit = scene.commit();
        let repository = scene.evaluate(&format!("file://{}", scene.path()), &[]).await;
        assert_eq!(scene.built(&repository).await, checks, "{version:?}: a repository");
        assert_eq!(repository.commit, Some(commit.clone()));
        let reference = format!("git+file://{}?dir=.", scene.path());
        let reference = scene.evaluate(&reference, &["packages.x86_64-linux"]).await;
        assert_eq!(
            scene.built(&reference).await,
            ["packages.x86_64-linux.default"],
            "{version:?}: a reference"
        );
        assert_eq!(reference.commit, Some(commit.clone()));
        scene.write("flake.nix", &format!("{FLAKE} # changed"));
        let dirty = scene.evaluate(scene.path(), &[]).await;
        assert_eq!(scene.built(&dirty).await, checks, "{version:?}: uncommitted changes");
        scene.press.check().await;
    }
}

#[tokio::test]
async fn a_flake_is_evaluated_purely() {
    let scene = Scene::start(Version::New).await;
    scene.write(
        "flake.nix",
        r#"{ outputs = _: { checks.x86_64-linux.x = builtins.readFile "/etc/passwd"; }; }"#,
    );
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    let error = scene.press.attributes(evaluation.id).await["checks.x86_64-linux.x"].clone().unwrap();
    assert!(error.contains("forbidden in pure eval"), "{error}");
}

#[tokio::test]
async fn a_ci_nix_comes_before_a_flake_and_a_flake_before_a_default_nix() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", r#"{ classic = make "classic"; }"#);
    scene.write("flake.nix", FLAKE);
    let flake = scene.evaluate(scene.path(), &["packages"]).await;
    assert_eq!(scene.built(&flake).await, ["packages.x86_64-linux.default"]);
    scene.write("ci.nix", r#"{ ci = make "ci"; }"#);
    let ci = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&ci).await, ["ci"]);
}

#[tokio::test]
async fn what_is_on_another_machine_is_refused_with_what_to_do() {
    let scene = Scene::with(Version::Old, |settings| settings.with("local_sources", "false")).await;
    scene.write("default.nix", r#"{ one = make "one"; }"#);
    scene.commit();
    for kind in ["", "path:", "file://", "git+file://"] {
        let error = scene.refused(&format!("{kind}{}", scene.path())).await;
        assert!(
            error.contains("push it to a repository") && error.contains("HARMONIA_CI_LOCAL_SOURCES"),
            "{kind}: {error}"
        );
    }
}

#[tokio::test]
async fn what_is_not_there_is_said_in_one_sentence() {
    let scene = Scene::start(Version::Old).await;
    let empty = scene.refused(scene.path()).await;
    assert!(empty.contains("add a ci.nix, a flake.nix or a default.nix"), "{empty}");
    let nowhere = scene.refused("/nowhere/at/all").await;
    assert!(nowhere.contains("there is no directory /nowhere/at/all"), "{nowhere}");
    let repository = scene.refused("file:///nowhere/at/all").await;
    assert!(repository.contains("file:///nowhere/at/all cannot be fetched"), "{repository}");
    let commit = scene.commit();
    let url = format!("file://{}", scene.path());
    let nothing = scene.refused(&url).await;
    assert!(nothing.contains("has nothing to evaluate"), "{nothing}");
    let branch = scene.refused(&format!("{url}?ref=missing")).await;
    assert!(branch.contains("has no branch or tag missing"), "{branch}");
    let other = commit.chars().rev().collect::<String>();
    let unknown = scene.refused(&format!("{url}?rev={other}")).await;
    assert!(unknown.contains(&format!("has no commit {other}")), "{unknown}");
    let word = scene.refused("hello").await;
    assert!(word.contains("is not a source"), "{word}");
    let closed = scene.refused("https://me:secret@127.0.0.1:1/x").await;
    assert!(
        closed.contains("https://127.0.0.1:1/x cannot be fetched") && !closed.contains("secret"),
        "{closed}"
    );
}
