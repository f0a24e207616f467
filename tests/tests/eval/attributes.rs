//! Which attributes are found, and that one that fails hides no other.

use harmonia_queue::evaluations::{Stage, Status};
use harmonia_tests::nixes::Version;

use crate::scene::Scene;

#[tokio::test]
async fn one_that_fails_says_nixs_own_words_and_hides_no_other() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        scene.write(
            "default.nix",
            r#"{
              a = make "a";
              asserts = assert 1 == 2; make "asserts";
              aborts = builtins.abort "never";
              below = { recurseForDerivations = true; bad = { }.missing; good = make "good"; };
              deep = let f = n: 1 + f (n + 1); in f 0;
              m = make "m";
              misses = (make "misses").nothing;
              recurses = let x = x; in x;
              throws = throw "not for you";
              lies = { type = "derivation"; drvPath = "/etc/passwd"; };
              z = make "z";
            }"#,
        );
        let evaluation = scene.evaluate(scene.path(), &[]).await;
        assert_eq!((evaluation.stage, evaluation.error), (Stage::Complete, None), "{version:?}");
        let attributes = scene.press.attributes(evaluation.id).await;
        let good: Vec<&str> =
            attributes.iter().filter(|(_, error)| error.is_none()).map(|(name, _)| name.as_str()).collect();
        assert_eq!(good, ["a", "below.good", "m", "z"], "{version:?}");
        for (name, words) in [
            ("aborts", "never"),
            ("asserts", "default.nix:5:"),
            ("below.bad", "attribute 'missing' missing"),
            ("deep", "stack overflow"),
            ("lies", "not the path of a derivation"),
            ("misses", "attribute 'nothing' missing"),
            ("recurses", "infinite recursion encountered"),
            ("throws", "not for you"),
        ] {
            let error = attributes[name].as_deref().unwrap();
            assert!(error.contains(words), "{version:?} {name}: {error}");
            assert!(!error.contains("«stdin»") && !error.contains('\u{1b}'), "{version:?} {name}: {error}");
        }
        assert!(attributes["throws"].as_deref().unwrap().contains("at default.nix:12:"), "{attributes:?}");
        scene.press.farm.assert_sound().await;
    }
}

#[tokio::test]
async fn a_name_that_is_no_text_hides_no_other() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        scene.write("default.nix", "NAMES");
        let file = scene.directory.path().join("default.nix");
        let names: [&[u8]; 6] = [
            b"{ a = make \"a\"; ",
            b"\"b\xff\" = make \"b\"; ",
            b"\"c\xfe\" = throw \"not for you\"; ",
            b"\"d\xfd\" = { }.missing; ",
            b"\"e\\n\\t\" = make \"e\"; ",
            b"z = make \"z\"; }",
        ];
        let text = std::fs::read(&file).unwrap();
        let before = text.strip_suffix(b"NAMES\n").unwrap();
        std::fs::write(&file, [before, &names.concat()].concat()).unwrap();
        let evaluation = scene.evaluate(scene.path(), &[]).await;
        assert_eq!((evaluation.stage, evaluation.error), (Stage::Complete, None), "{version:?}");
        let attributes = scene.press.attributes(evaluation.id).await;
        let (bad, good): (Vec<_>, Vec<_>) = attributes.iter().partition(|(_, error)| error.is_some());
        let names = |some: &[(&String, &Option<String>)]| {
            some.iter().map(|(name, _)| (*name).clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&good), ["\"e\n\t\"", "a", "b\u{fffd}", "z"], "{version:?}");
        assert_eq!(names(&bad), ["c\u{fffd}", "d\u{fffd}"], "{version:?}");
        scene.press.farm.assert_sound().await;
    }
}

#[tokio::test]
async fn a_syntax_error_fails_the_whole_with_its_place() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        scene.write("default.nix", "{ a = ; }");
        let error = scene.refused(scene.path()).await;
        assert!(
            error.starts_with("this source cannot be evaluated") && error.contains("syntax error"),
            "{error}"
        );
        assert!(error.contains("at default.nix:3:"), "{error}");
    }
}

#[tokio::test]
async fn sets_are_entered_where_they_say_so_and_functions_called_where_they_need_nothing() {
    let scene = Scene::start(Version::Old).await;
    scene.write(
        "default.nix",
        r#"{ suffix ? "x" }: {
          plain = make "plain-${suffix}";
          called = { name ? "called" }: make name;
          entered = { recurseForDerivations = true; inner."a.b" = make "not"; more = make "more"; };
          left = { out = make "left"; };
          library = { name }: make name;
          text = "text";
        }"#,
    );
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["called", "entered.more", "plain"]);
    let named = scene.evaluate(scene.path(), &["left", "entered.inner", "plain"]).await;
    assert_eq!(scene.built(&named).await, ["entered.inner.\"a.b\"", "left.out", "plain"]);
}

#[tokio::test]
async fn an_attribute_that_is_not_there_is_an_error_of_its_own() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", r#"{ hello = make "hello"; text = "x"; }"#);
    let evaluation = scene.evaluate(scene.path(), &["hello", "helo", "text", "hello.name.x"]).await;
    let attributes = scene.press.attributes(evaluation.id).await;
    assert_eq!(attributes["hello"], None);
    assert!(attributes["helo"].as_deref().unwrap().contains("did you mean hello?"), "{attributes:?}");
    assert!(attributes["text"].as_deref().unwrap().contains("it is a string"), "{attributes:?}");
    assert!(attributes["hello.name.x"].as_deref().unwrap().contains("no attributes"), "{attributes:?}");
    let malformed = scene.evaluate(scene.path(), &["a..b"]).await;
    assert!(malformed.error.unwrap().contains("not a path of attributes"));
}

#[tokio::test]
async fn a_flake_without_checks_says_what_it_has() {
    let scene = Scene::start(Version::New).await;
    scene.write("flake.nix", "{ outputs = _: { packages = { }; }; }");
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    assert_eq!(evaluation.status(), Status::Failed);
    let error = scene.press.attributes(evaluation.id).await["checks"].clone().unwrap();
    assert!(error.contains("has no attribute checks") && error.contains("packages"), "{error}");
}
