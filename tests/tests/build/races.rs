//! Two builders at the same derivation, whose outputs differ whenever they are built.

use harmonia_queue::people;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::proxy::Fault;
use harmonia_tests::yard::RunningBuilder;
use tokio::sync::oneshot;

use crate::scene::{Scene, gated_pair, is_nar, local_hash, paths_of};

/// The first builder's uploads are held up; it loses its lease, and the second one publishes.
async fn overtaken(scene: &Scene, expression: &Expression) -> Overtaken {
    let drv = scene.want(&[expression]).await.remove(0);
    let slow = scene.builder(&scene.nix(Version::Old), "slow").await;
    scene.reached("pair").await;
    scene.bucket.reset();
    let uploads = [(), ()].map(|()| {
        let (release, held) = Fault::hold();
        scene.bucket.on_matching(1, is_nar, held);
        release
    });
    scene.gates.open("pair");
    scene.sends_nars(2).await;
    scene.press.becomes(&drv, "uploading").await;
    let node: i32 = scene.press.farm.value("SELECT id FROM ci.node WHERE name = 'slow' AND $1 = 0", 0).await;
    people::drain(&scene.press.farm.operator, node, "test", None).await.unwrap();
    let quick = scene.builder(&scene.nix(Version::New), "quick").await;
    scene.end_leases().await;
    scene.press.becomes(&drv, "succeeded").await;
    Overtaken { drv, node, slow, quick, uploads }
}

struct Overtaken {
    drv: String,
    node: i32,
    slow: RunningBuilder,
    quick: RunningBuilder,
    /// What the first builder's uploads wait for.
    uploads: [oneshot::Sender<()>; 2],
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_of_two_attempts_are_never_mixed() {
    let scene = Scene::start().await;
    let expression = gated_pair("pair");
    let Overtaken { drv, slow, quick, uploads, .. } = overtaken(&scene, &expression).await;
    drop(uploads);
    scene.press.ends_well().await;
    // It ends by itself, when the signer has refused what it uploaded late.
    let (slow_nix, quick_nix) = (slow.nix.clone(), quick.nix.clone());
    slow.stop().await;
    quick.stop().await;
    assert_eq!(
        scene.press.outcomes(&drv).await,
        ["interrupted", "succeeded"],
        "{:#?}",
        scene.press.history().await
    );
    let published = scene.press.check().await;
    for path in paths_of(&expression) {
        let hash = published[&path].nar_hash().digest_as_bytes();
        assert_eq!(hash, local_hash(&quick_nix, &path).unwrap().0, "{path}");
        assert_ne!(hash, local_hash(&slow_nix, &path).unwrap().0, "{path} is reproducible after all");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_another_slot_still_uploads_differently_is_waited_for() {
    let scene = Scene::start().await;
    let expression = gated_pair("pair");
    let Overtaken { node, slow, quick, uploads, .. } = overtaken(&scene, &expression).await;
    let quick_nix = quick.nix.clone();
    quick.stop().await;
    let top = Expression::new("top", "cp $pair/file $out").input("pair", &expression);
    let drv = scene.want(&[&top]).await.remove(0);
    people::resume(&scene.press.farm.operator, node, "test").await.unwrap();
    scene.press.becomes(&drv, "building").await;
    drop(uploads);
    scene.press.ends_well().await;
    let outcomes = scene.press.outcomes(&drv).await;
    assert!(outcomes.len() <= 2, "{outcomes:?}");
    let content = |nix: &Nix, path: &str| std::fs::read(nix.real(path)).unwrap();
    let pair = paths_of(&expression).into_iter().find(|path| path.ends_with("-pair")).unwrap();
    let built = content(&slow.nix, &paths_of(&top)[0]);
    assert_eq!(built, content(&quick_nix, &format!("{pair}/file")));
    slow.stop().await;
}
