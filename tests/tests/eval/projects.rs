//! What a project's owner sets: where its code is, what of it is built, and what a push does.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use harmonia_nix::Sha256;
use harmonia_nix::key::SecretKey;
use harmonia_nix::narinfo::{self, Record};
use harmonia_nix::store_path;
use harmonia_queue::branches::{self, ProjectSource, Push};
use harmonia_queue::evaluations::{self, Filter, Stage};
use harmonia_queue::people::Project;
use harmonia_service::netrc;
use harmonia_service::settings::Settings;
use harmonia_tests::document;
use harmonia_tests::eventually;
use harmonia_tests::farm::SYSTEM;
use harmonia_tests::nixes::Version;

use crate::scene::Scene;

fn push<'a>(url: &'a str, branch: &'a str, commit: &'a str) -> Push<'a> {
    Push { project: "main", source: url, branch, commit, untrusted: false, attrs: &[], pull_request: None }
}

#[tokio::test]
async fn a_repository_says_what_is_built_of_it() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", "{ wanted = make \"wanted\"; other = make \"other\"; }");
    scene.write(".harmonia-ci.toml", "attrs = [ \"wanted\" ]\neval-timeout = \"10m\"\nretention = \"30d\"");
    scene.commit();
    let url = format!("file://{}", scene.path());
    let evaluation = scene.evaluate(&url, &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["wanted"]);
    let asked = scene.evaluate(&url, &["other"]).await;
    assert_eq!(scene.built(&asked).await, ["other"], "who asks knows better");
    scene.write(".harmonia-ci.toml", "attributes = [ \"wanted\" ]");
    scene.commit();
    let error = scene.refused(&url).await;
    assert!(error.contains("a key attributes, which does not exist; the nearest is attrs"), "{error}");
}

#[tokio::test]
async fn what_is_evaluated_by_hand_does_not_wait_for_the_projects_own_repository() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", "{ a = make \"a\"; }");
    scene.commit();
    let away = ProjectSource::git("http://127.0.0.1:1/away.git".to_owned());
    branches::put_source(&scene.press.farm.frontend, "main", Some(&away)).await.unwrap();
    let evaluation = scene.evaluate(&format!("file://{}", scene.path()), &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["a"]);
}

#[tokio::test]
async fn a_storm_of_pushes_ends_with_one_evaluation_of_the_last() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", "{ a = make \"a\"; }");
    let commit = scene.commit();
    let url = format!("file://{}", scene.path());
    for n in 0..499 {
        let commit = format!("{n:040x}");
        branches::push(&scene.press.farm.frontend, &push(&url, "main", &commit)).await.unwrap();
    }
    let last =
        branches::push(&scene.press.farm.frontend, &push(&url, "main", &commit)).await.unwrap().unwrap();
    let evaluation = scene.press.evaluated(last).await;
    assert_eq!(scene.built(&evaluation).await, ["a"]);
    let filter = Filter { project: Some("main"), ..Filter::default() };
    let all = evaluations::list(&scene.press.farm.frontend, &filter, 1000).await.unwrap();
    let complete: Vec<i64> = all.iter().filter(|e| e.stage == Stage::Complete).map(|e| e.id).collect();
    assert!(all.len() == 500 && complete == [last], "{complete:?}");
    assert!(all.iter().all(|e| !matches!(e.stage, Stage::Queued | Stage::Evaluating)));
}

#[tokio::test]
async fn a_repository_is_followed_and_no_push_is_missed() {
    let scene = Scene::start(Version::Old).await;
    let db = &scene.press.farm.frontend;
    scene.write("default.nix", "{ a = make \"a\"; }");
    let first = scene.commit();
    let source = ProjectSource {
        branch: Some("main".to_owned()),
        poll_interval: Duration::from_secs(1),
        ..ProjectSource::git(format!("file://{}", scene.path()))
    };
    branches::put_source(db, "main", Some(&source)).await.unwrap();
    let evaluated = |commit: String| async move {
        let filter = Filter { project: Some("main"), branch: Some("main"), ..Filter::default() };
        let all = evaluations::list(db, &filter, 10).await.unwrap();
        all.iter().any(|e| e.commit.as_ref() == Some(&commit) && e.stage == Stage::Complete)
    };
    eventually("the first commit is found", || evaluated(first.clone())).await;
    scene.write("default.nix", "{ b = make \"b\"; }");
    let second = scene.commit();
    eventually("the second commit is found", || evaluated(second.clone())).await;
    scene.git(&["checkout", "--quiet", "-b", "elsewhere"]);
    scene.git(&["branch", "--quiet", "-D", "main"]);
    eventually("why nothing is found is told", || async {
        let told = branches::source(db, "main").await.unwrap().unwrap().1;
        told.is_some_and(|told| told.contains("has no"))
    })
    .await;
}

#[tokio::test]
async fn files_that_were_evaluated_are_not_evaluated_again() {
    let scene = Scene::start(Version::Old).await;
    // Another derivation each time that it is evaluated.
    scene.write("default.nix", "{ a = make \"a-${toString builtins.currentTime}\"; }");
    let first = scene.commit();
    scene.git(&["commit", "--quiet", "--allow-empty", "--message", "y"]);
    let second = scene.git(&["rev-parse", "HEAD"]);
    let url = format!("file://{}", scene.path());
    let db = &scene.press.farm.frontend;
    let evaluation = branches::push(db, &push(&url, "main", &first)).await.unwrap().unwrap();
    scene.press.evaluated(evaluation).await;
    let jobs = scene.jobs().await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let again = branches::push(db, &push(&url, "next", &second)).await.unwrap().unwrap();
    let evaluation = scene.press.evaluated(again).await;
    assert_eq!(scene.built(&evaluation).await, ["a"]);
    assert_eq!(scene.jobs().await, jobs);
    scene.press.farm.assert_sound().await;
}

#[tokio::test]
async fn what_comes_from_outside_is_built_only_where_it_may() {
    let scene = Scene::start(Version::Old).await;
    let farm = &scene.press.farm;
    let (inside, outside) =
        (farm.pool("inside", &[SYSTEM], 9).await, farm.pool("outside", &[SYSTEM], 9).await);
    farm.put_project(Project { untrusted_pools: vec!["outside".to_owned()], ..Project::new("main") }).await;
    let nodes = [farm.node(&inside, "inside").await, farm.node(&outside, "outside").await];
    scene.write("default.nix", "{ a = make \"a\"; }");
    let commit = scene.commit();
    let url = format!("file://{}", scene.path());
    let fork = Push { untrusted: true, pull_request: Some(7), ..push(&url, "main", &commit) };
    let evaluation = branches::push(&farm.frontend, &fork).await.unwrap().unwrap();
    assert!(scene.press.evaluated(evaluation).await.untrusted);
    farm.settle().await;
    let claimed = [farm.claim_names(&nodes[0], 9).await, farm.claim_names(&nodes[1], 9).await];
    assert_eq!((claimed[0].len(), claimed[1].len()), (0, 1), "{claimed:?}");
}

#[tokio::test]
async fn several_processes_find_what_one_finds() {
    let text = "builtins.listToAttrs (builtins.genList (i: { name = \"a${toString i}\"; value = \
                if i == 7 then throw \"seven\" else if i == 9 then { }.missing else make \"n${toString i}\"; }) 23) \
                // { set = { recurseForDerivations = true; x = make \"x\"; y = make \"y\"; }; }";
    let mut seen = Vec::new();
    for processes in ["1", "3"] {
        let scene = Scene::with(Version::Old, |settings| settings.with("eval_processes", processes)).await;
        scene.write("default.nix", text);
        let evaluation = scene.evaluate(scene.path(), &[]).await;
        let attributes = scene.press.attributes(evaluation.id).await;
        assert_eq!(attributes.values().filter(|error| error.is_some()).count(), 2, "{attributes:?}");
        assert!(attributes["a7"].as_ref().is_some_and(|error| error.contains("seven")));
        seen.push((attributes.into_keys().collect::<Vec<_>>(), scene.jobs().await));
    }
    assert_eq!(seen[0], seen[1]);
}

/// A substituter that has one path, signed by this key.
async fn substituter(path: &str, key: &SecretKey) -> String {
    let record = Record {
        path: store_path::parse(path).unwrap(),
        nar_hash: Sha256([7; 32]),
        nar_size: 120,
        references: BTreeSet::new(),
        deriver: None,
        ca: None,
        url: "nar/x.nar.zst".to_owned(),
        file_hash: Sha256([7; 32]),
        file_size: 120,
    };
    let text = narinfo::write(&record, std::slice::from_ref(key)).unwrap();
    let routes =
        Router::new().route(&format!("/{}", narinfo::object_name(&record.path)), get(|| async { text }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

#[tokio::test]
async fn what_a_substituter_has_is_not_built_if_a_trusted_key_signed_it() {
    let output = "SELECT path FROM ci.output WHERE job_id > $1";
    let state = "SELECT state::text FROM ci.job WHERE id > $1";
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", "{ a = make \"a\"; }");
    scene.evaluate(scene.path(), &[]).await;
    let path: String = scene.press.farm.value(output, 0).await;
    let (trusted, other) =
        (SecretKey::generate("upstream-1").unwrap(), SecretKey::generate("upstream-1").unwrap());
    let url = substituter(&path, &trusted).await;
    for (key, becomes) in [(&trusted, "succeeded"), (&other, "open")] {
        let more = |settings: Settings| {
            settings.with("substituters", &*url).with("trusted_public_keys", key.public_text())
        };
        let scene = Scene::with(Version::Old, more).await;
        scene.write("default.nix", "{ a = make \"a\"; }");
        scene.evaluate(scene.path(), &[]).await;
        scene.press.farm.settle().await;
        assert_eq!(scene.press.farm.value::<String>(state, 0).await, becomes);
        scene.press.farm.assert_sound().await;
    }
}

/// What the page for owners shows is what happens.
#[tokio::test]
async fn every_example_of_the_page_on_projects_does_what_it_says() {
    let page = "projects.md";
    let scene = Scene::start(Version::Old).await;
    for text in document::examples(page, "nix") {
        let name = text.lines().next().and_then(|line| line.strip_prefix("# ")).expect("the name of a file");
        let expected = match name {
            "flake.nix" => &["checks.x86_64-linux.unit"][..],
            "ci.nix" => &["hello", "more.world"],
            other => panic!("nobody knows what {other} offers"),
        };
        fs::write(scene.directory.path().join(name), &text).unwrap();
        let evaluation = scene.evaluate(scene.path(), &[]).await;
        assert_eq!(scene.built(&evaluation).await, expected, "{name}");
        if name == "flake.nix" {
            for text in document::examples(page, "toml") {
                fs::write(scene.directory.path().join(".harmonia-ci.toml"), text).unwrap();
                let evaluation = scene.evaluate(scene.path(), &[]).await;
                let both = ["checks.x86_64-linux.unit", "packages.x86_64-linux.tool"];
                assert_eq!(scene.built(&evaluation).await, both);
            }
            fs::remove_file(scene.directory.path().join(".harmonia-ci.toml")).unwrap();
        }
    }
    for text in document::examples(page, "netrc") {
        let hosts: Vec<String> =
            netrc::parse(&text).unwrap().into_iter().map(|machine| machine.host).collect();
        assert_eq!(hosts, ["git.example.org", "github.com"]);
    }
    // `yaml` and kubectl: tier apiserver; harmonia-ci: tier up.
    let known = ["nix", "toml", "netrc", "yaml", "sh"];
    let unknown = document::blocks(page).into_iter().find(|block| !known.contains(&block.language.as_str()));
    assert_eq!(unknown, None, "it is run by no test");
}
