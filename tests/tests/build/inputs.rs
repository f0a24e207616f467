//! Inputs that are not what was published, or not there.

use std::os::unix::fs::symlink;

use harmonia_nix::store_path;
use harmonia_service::layout;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::shared_nix;
use harmonia_tests::proxy::Fault;
use harmonia_tests::yard::{Gates, waiting};

use crate::scene::{Scene, build_here, is_nar, local_hash, paths_of};

/// What this store built of it is what the cache has. Its own inputs are published too.
async fn publish(scene: &Scene, nix: &Nix, expression: &Expression) {
    nix.build(expression);
    let drv = scene.want(&[expression]).await.remove(0);
    let uploader = scene.press.uploader(&[&scene.signer.url]);
    assert!(scene.press.publish_all(nix, &uploader).await.contains(&drv));
}

fn top_of(base: &Expression) -> Expression {
    Expression::new("top", "cp $base/file $out").input("base", base)
}

/// `top` was built from what the cache has of `base`, which the store has now too.
async fn assert_built_on_published(scene: &Scene, nix: &Nix, base: &Expression) {
    let published = scene.press.check().await;
    let path = &paths_of(base)[0];
    assert_eq!(published[path].nar_hash().digest_as_bytes(), local_hash(nix, path).unwrap().0);
    let read = |nix: &Nix, path: &str| std::fs::read(nix.real(path)).unwrap();
    assert_eq!(read(nix, &paths_of(&top_of(base))[0]), read(shared_nix(), &format!("{path}/file")));
}

/// One output, another one whenever it is built.
fn random(name: &str) -> Expression {
    Expression::new(name, "mkdir $out; head -c 32 /dev/urandom | od >$out/file")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_differs_is_replaced() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let base = random("base");
        publish(&scene, shared_nix(), &base).await;
        let nix = scene.nix(version);
        build_here(&nix, &base);
        let drv = scene.want(&[&top_of(&base)]).await.remove(0);
        let builder = scene.builder(&nix, "one").await;
        scene.press.ends_well().await;
        assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
        assert_built_on_published(&scene, &nix, &base).await;
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_differs_goes_with_what_was_built_from_it() {
    let scene = Scene::start().await;
    let base = random("base-referred-to");
    publish(&scene, shared_nix(), &base).await;
    let nix = scene.nix(Version::New);
    let referrer = Expression::new("referrer", "ln -s $base $out").input("base", &base);
    let indirect = Expression::new("indirect", "ln -s $referrer $out").input("referrer", &referrer);
    let left = [build_here(&nix, &referrer), build_here(&nix, &indirect)];
    scene.want(&[&top_of(&base)]).await;
    let builder = scene.builder(&nix, "one").await;
    scene.press.ends_well().await;
    assert_built_on_published(&scene, &nix, &base).await;
    for path in left {
        assert_eq!(local_hash(&nix, &path), None, "{path} stays");
    }
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_differs_and_is_held_is_never_built_on() {
    let scene = Scene::start().await;
    let base = random("base-held");
    publish(&scene, shared_nix(), &base).await;
    let nix = scene.nix(Version::New);
    let path = build_here(&nix, &base);
    let root = nix.root().join("nix/var/nix/gcroots/held");
    symlink(&path, &root).unwrap();
    let drv = scene.want(&[&top_of(&base)]).await.remove(0);
    let builder = scene.builder(&nix, "one").await;
    scene.press.becomes(&drv, "building").await;
    // Other jobs go on meanwhile.
    let other = scene.want(&[&Expression::trivial("other")]).await.remove(0);
    scene.press.becomes(&other, "succeeded").await;
    let outcomes = scene.press.outcomes(&drv).await;
    assert!(outcomes.len() <= 1, "it is tried again and again: {outcomes:?}");
    assert_eq!(local_hash(&nix, &paths_of(&top_of(&base))[0]), None, "it was built");
    std::fs::remove_file(root).unwrap();
    scene.press.ends_well().await;
    assert_built_on_published(&scene, &nix, &base).await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_differs_and_cannot_be_replaced_is_tried_elsewhere() {
    let scene = Scene::start().await;
    let base = random("base-of-two-caches");
    publish(&scene, shared_nix(), &base).await;
    // Another cache, which this store asks first, has other contents under the same path.
    let (other, cache) = (scene.nix(Version::New), tempfile::tempdir().unwrap());
    let url = format!("file://{}?priority=1", cache.path().display());
    other.run("nix", &["copy", "--to", &url, &build_here(&other, &base)]);
    let settings = format!("extra-substituters = {url}\nrequire-sigs = false\n");
    let one = scene.builder(&scene.nix_with(Version::New, &settings), "one").await;
    let drv = scene.want(&[&top_of(&base)]).await.remove(0);
    assert_eq!(scene.after_attempts(&drv, 1).await, ["stale_input"]);
    one.stop().await;
    let nix = scene.nix(Version::New);
    let two = scene.builder(&nix, "two").await;
    scene.hurry().await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["stale_input", "succeeded"]);
    assert_built_on_published(&scene, &nix, &base).await;
    two.stop().await;
}

/// Removes what the bucket has of a path.
async fn lose(scene: &Scene, path: &str, narinfo_too: bool) {
    let key = layout::narinfo(&store_path::parse(path).unwrap());
    let info = harmonia_nix::narinfo::parse(&scene.press.object(&key).await).unwrap();
    let keys = [Some(info.url().to_owned()), narinfo_too.then_some(key)];
    for key in keys.into_iter().flatten() {
        let client = scene.press.s3.client();
        client.delete_object().bucket(&scene.press.s3.bucket).key(key).send().await.unwrap();
    }
}

async fn lost_is_built_again(version: Version, narinfo_too: bool) {
    let scene = Scene::start().await;
    let base = Expression::new("base", "mkdir $out; echo base >$out/file");
    publish(&scene, shared_nix(), &base).await;
    lose(&scene, &paths_of(&base)[0], narinfo_too).await;
    let drv = scene.want(&[&top_of(&base)]).await.remove(0);
    let nix = scene.nix(version);
    let builder = scene.builder(&nix, "one").await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["input_missing", "succeeded"]);
    assert_built_on_published(&scene, &nix, &base).await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_the_bucket_lost_is_built_again() {
    for version in Version::ALL {
        lost_is_built_again(version, true).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_whose_contents_the_bucket_lost_is_built_again() {
    for version in Version::ALL {
        lost_is_built_again(version, false).await;
    }
}

/// Of two that do not come the one is built again that the cache has lost, and not the one that refers to it.
async fn the_lost_one_is_named(version: Version, narinfo_too: bool) {
    let scene = Scene::start().await;
    let base = Expression::new("base", "mkdir $out; echo base >$out/file");
    // Whether the one is looked at before the other is up to their hashes.
    let middles: Vec<Expression> = (0..3)
        .map(|number| Expression::new(&format!("middle-{number}"), "ln -s $base $out").input("base", &base))
        .collect();
    for middle in &middles {
        publish(&scene, shared_nix(), middle).await;
    }
    lose(&scene, &paths_of(&base)[0], narinfo_too).await;
    let top = middles.iter().enumerate().fold(
        Expression::new("top", "cat $middle_0/file $middle_1/file $middle_2/file >$out"),
        |top, (number, middle)| top.input(&format!("middle_{number}"), middle),
    );
    let drv = scene.want(&[&top]).await.remove(0);
    let builder = scene.builder(&scene.nix(version), "one").await;
    scene.press.ends_well().await;
    // It may come again before the lost one is there, which costs it nothing.
    let history = scene.press.history().await;
    let missed: Vec<_> = history.iter().filter(|(_, outcome, _)| outcome == "input_missing").collect();
    let named = missed.iter().all(|(_, _, path)| path.as_ref().is_some_and(|path| path.ends_with("-base")));
    assert!(named && !missed.is_empty(), "{version:?}: {history:#?}");
    assert!(scene.press.outcomes(&drv).await.iter().all(|outcome| outcome != "network"), "{history:#?}");
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_of_an_input_that_the_bucket_lost_is_built_again() {
    for version in Version::ALL {
        the_lost_one_is_named(version, true).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_of_an_input_whose_contents_the_bucket_lost_is_built_again() {
    for version in Version::ALL {
        the_lost_one_is_named(version, false).await;
    }
}

/// A node whose Nix takes nothing from the cache fails with these words, and another goes on.
async fn goes_on_elsewhere(version: Version, settings: &str, outcomes: &[&str], words: &[&str]) {
    let scene = Scene::start().await;
    let base = random("base");
    publish(&scene, shared_nix(), &base).await;
    let drv = scene.want(&[&top_of(&base)]).await.remove(0);
    let one = scene.builder(&scene.nix_with(version, settings), "one").await;
    eventually("attempts end", || async {
        scene.hurry().await;
        scene.press.outcomes(&drv).await.len() >= outcomes.len()
    })
    .await;
    let history = scene.press.history().await;
    assert_eq!(scene.press.outcomes(&drv).await, outcomes, "{version:?}: {history:#?}");
    one.stop().await;
    let message = history.into_iter().next_back().and_then(|(_, _, message)| message).unwrap();
    for words in words {
        assert!(message.contains(words), "{version:?}: {message}");
    }
    let two = scene.builder(&scene.nix(Version::New), "two").await;
    scene.hurry().await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await.last().unwrap(), "succeeded");
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_trust_the_caches_key_says_so() {
    let settings = "trusted-public-keys = cache.nixos.org-1:6NCHdD59X431o0gWypbMrAURkbJ16ZPMQFGspcDShjY=\n";
    let words = ["not signed by any of the keys in 'trusted-public-keys'"];
    for version in Version::ALL {
        goes_on_elsewhere(version, settings, &["network"], &words).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_ask_the_cache_says_so_in_the_end() {
    let outcomes = ["input_missing", "input_missing", "input_missing", "network"];
    let words = ["looked for 4 times on this node", "substituters, trusted-public-keys and netrc-file"];
    goes_on_elsewhere(Version::New, "substituters =\n", &outcomes, &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_with_other_contents_than_its_narinfo_says_is_told() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let (base, other) = (random("base"), random("other"));
        for expression in [&base, &other] {
            publish(&scene, shared_nix(), expression).await;
        }
        let [from, to] = [&other, &base]
            .map(|expression| layout::narinfo(&store_path::parse(&paths_of(expression)[0]).unwrap()));
        let url = async |key| {
            let info = harmonia_nix::narinfo::parse(&scene.press.object(key).await).unwrap();
            info.url().to_owned()
        };
        let (from, to) = (url(&from).await, url(&to).await);
        let body = scene.press.object(&from).await;
        let (client, bucket) = (scene.press.s3.client(), &scene.press.s3.bucket);
        client.put_object().bucket(bucket).key(to).body(body.into()).send().await.unwrap();
        let drv = scene.want(&[&top_of(&base)]).await.remove(0);
        let builder = scene.builder(&scene.nix(version), "one").await;
        assert_eq!(scene.after_attempts(&drv, 1).await, ["network"], "{version:?}");
        let message = scene.press.history().await.into_iter().next_back().and_then(|end| end.2).unwrap();
        assert!(message.contains("hash mismatch importing path"), "{version:?}: {message}");
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_input_that_the_queue_does_not_know_fails_with_a_sentence() {
    let scene = Scene::start().await;
    let base = random("base");
    publish(&scene, shared_nix(), &base).await;
    lose(&scene, &paths_of(&base)[0], true).await;
    let refuses = "CREATE OR REPLACE FUNCTION ci.input_missing(p_session bigint, p_secret text, p_job bigint, \
                   p_attempt bigint, p_path text) RETURNS bool LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN \
                   PERFORM ci.refuse('HC002', format('%s is no input of job %s', p_path, p_job)); END $$";
    scene.press.farm.database.execute(refuses).await;
    let drv = scene.want(&[&top_of(&base)]).await.remove(0);
    let builder = scene.builder(&scene.nix(Version::New), "one").await;
    assert_eq!(scene.after_attempts(&drv, 1).await, ["network"]);
    let message = scene.press.history().await.into_iter().next_back().and_then(|end| end.2).unwrap();
    assert!(
        message.contains("-base cannot be had here") && message.contains("is no input of job"),
        "{message}"
    );
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_store_remembers_of_the_cache_does_not_hide_what_was_published_since() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let base = random("base");
        publish(&scene, shared_nix(), &base).await;
        let path = paths_of(&base).remove(0);
        let first = scene.press.check().await[&path].nar_hash().digest_as_bytes().to_vec();
        // This store has seen the first one, and has it no more.
        let nix = scene.nix(version);
        nix.run("nix-store", &["--realise", &path]);
        nix.run("nix-store", &["--delete", &path]);
        lose(&scene, &path, true).await;
        scene.want(&[&top_of(&base)]).await;
        let other = scene.builder(&scene.nix(Version::New), "other").await;
        scene.press.ends_well().await;
        other.stop().await;
        let second = scene.press.check().await[&path].nar_hash().digest_as_bytes().to_vec();
        assert_ne!(first, second);
        let next = Expression::new("next", "cp $base/file $out").input("base", &base);
        let drv = scene.want(&[&next]).await.remove(0);
        let builder = scene.builder(&nix, "one").await;
        scene.press.ends_well().await;
        assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
        assert_eq!(local_hash(&nix, &path).unwrap().0.to_vec(), second);
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_and_outputs_of_a_running_build_survive_a_collection() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let base = Expression::new("base", "mkdir $out; echo base >$out/file");
        let slow = Gates::before("slow", "cat $base/file >$out").input("base", &base);
        let drv = scene.want(&[&slow]).await.remove(0);
        let nix = scene.nix(version);
        let builder = scene.builder(&nix, "one").await;
        scene.reached("slow").await;
        nix.run("nix-store", &["--gc"]);
        assert!(local_hash(&nix, &paths_of(&base)[0]).is_some());
        scene.gates.open("slow");
        scene.press.ends_well().await;
        assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_uploaded_survives_a_collection_and_a_new_daemon() {
    let scene = Scene::start().await;
    let expression = waiting("late");
    let path = paths_of(&expression).remove(0);
    let drv = scene.want(&[&expression]).await.remove(0);
    let nix = scene.nix(Version::New);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("late").await;
    let (release, held) = Fault::hold();
    scene.bucket.on_matching(1, is_nar, held);
    scene.gates.open("late");
    scene.press.becomes(&drv, "uploading").await;
    nix.run("nix-store", &["--gc"]);
    assert!(local_hash(&nix, &path).is_some());
    nix.kill_daemon();
    nix.start_daemon();
    eventually("the new daemon is told what to keep", || async {
        nix.run("nix-store", &["--query", "--roots", &path]).contains("{temp:")
    })
    .await;
    nix.run("nix-store", &["--gc"]);
    assert!(local_hash(&nix, &path).is_some());
    drop(release);
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
    builder.stop().await;
}
