//! Daemons that die, and daemons that cannot do what their pool promises.

use std::sync::Arc;
use std::time::Duration;

use harmonia_queue::nodes;
use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Version};
use harmonia_tests::press::shared_nix;
use harmonia_tests::yard::{Gates, RunningBuilder, waiting};

use crate::scene::Scene;

#[tokio::test(flavor = "multi_thread")]
async fn a_build_under_which_the_daemon_dies_alone_is_out_of_memory_and_tried_again() {
    let scene = Scene::start().await;
    let drv = scene.want(&[&waiting("lonely")]).await.remove(0);
    let nix = scene.nix(Version::New);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("lonely").await;
    nix.kill_daemon();
    assert_eq!(scene.after_attempts(&drv, 1).await, ["oom"]);
    nix.start_daemon();
    scene.gates.open("lonely");
    scene.hurry().await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["oom", "succeeded"]);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_stopped_before_its_builder_is_not_the_builds_fault() {
    let scene = Scene::start().await;
    let drv = scene.want(&[&waiting("stopped")]).await.remove(0);
    let nix = scene.nix(Version::New);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("stopped").await;
    builder.term();
    eventually("the queue knows that it stops", async || {
        let nodes = nodes::list(&scene.press.farm.operator).await.unwrap();
        nodes.iter().any(|node| !node.drains.is_empty())
    })
    .await;
    nix.kill_daemon();
    assert_eq!(scene.after_attempts(&drv, 1).await, ["interrupted"]);
    builder.ended().await.expect("it ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn builds_under_which_the_daemon_dies_together_go_on_alone() {
    let scene = Scene::start().await;
    let drvs = scene.want(&[&waiting("left"), &waiting("right")]).await;
    let nix = scene.nix(Version::New);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("left").await;
    scene.reached("right").await;
    nix.kill_daemon();
    nix.start_daemon();
    scene.gates.open("left");
    scene.gates.open("right");
    scene.press.ends_well().await;
    for drv in drvs {
        assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"], "{drv}");
    }
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_claimed_while_a_build_goes_on_alone() {
    let scene = Scene::start().await;
    let drvs = scene.want(&[&waiting("left"), &waiting("right")]).await;
    let nix = scene.nix(Version::New);
    scene.only_builders().await;
    let settings = |settings: Settings| settings.with("slots", "3");
    let builder = RunningBuilder::start_on(&scene.press, Arc::clone(&nix), "one", settings).await;
    scene.reached("left").await;
    scene.reached("right").await;
    nix.kill_daemon();
    nix.start_daemon();
    tokio::select! {
        () = scene.reached("left") => {}
        () = scene.reached("right") => {}
    }
    let late = scene.want(&[&Expression::trivial("late")]).await.remove(0);
    // Asked at once, it would be claimed by now.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(scene.press.farm.state(scene.press.job(&late).await).await, "ready");
    scene.gates.open("left");
    scene.gates.open("right");
    scene.press.ends_well().await;
    for drv in drvs.iter().chain([&late]) {
        assert_eq!(scene.press.outcomes(drv).await, ["succeeded"], "{drv}");
    }
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_twice_under_the_same_build_counts_once_for_that_build() {
    let scene = Scene::start().await;
    let drvs = scene.want(&[&waiting("left"), &waiting("right")]).await;
    let nix = scene.nix(Version::Old);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("left").await;
    scene.reached("right").await;
    nix.kill_daemon();
    nix.start_daemon();
    // One of them is alone at its gate now.
    let alone = tokio::select! {
        () = scene.reached("left") => 0,
        () = scene.reached("right") => 1,
    };
    nix.kill_daemon();
    nix.start_daemon();
    assert_eq!(scene.after_attempts(&drvs[alone], 1).await, ["oom"]);
    scene.gates.open("left");
    scene.gates.open("right");
    scene.press.becomes(&drvs[1 - alone], "succeeded").await;
    scene.hurry().await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drvs[1 - alone]).await, ["succeeded"]);
    assert_eq!(scene.press.outcomes(&drvs[alone]).await, ["oom", "succeeded"]);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_is_killed_beside_another_is_tried_alone_before_it_counts() {
    let scene = Scene::start().await;
    // As the kernel's killer leaves a shell whose child it took.
    let greedy = Gates::before("greedy", "exit 137");
    let drvs = scene.want(&[&waiting("modest"), &greedy]).await;
    let nix = scene.nix(Version::New);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("modest").await;
    scene.reached("greedy").await;
    scene.gates.open("greedy");
    scene.gates.open("modest");
    scene.reached("greedy").await;
    assert_eq!(scene.after_attempts(&drvs[1], 1).await, ["oom"]);
    scene.press.becomes(&drvs[0], "succeeded").await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_away_costs_no_build() {
    let scene = Scene::start().await;
    let first = scene.want(&[&waiting("first")]).await.remove(0);
    let nix = scene.nix(Version::New);
    let builder = scene.builder(&nix, "one").await;
    scene.reached("first").await;
    nix.kill_daemon();
    scene.after_attempts(&first, 1).await;
    let drvs = scene.want(&[&Expression::trivial("second"), &Expression::trivial("third")]).await;
    for drv in &drvs {
        scene.press.becomes(drv, "building").await;
    }
    nix.start_daemon();
    scene.gates.open("first");
    scene.hurry().await;
    scene.press.ends_well().await;
    for drv in &drvs {
        assert_eq!(scene.press.outcomes(drv).await, ["succeeded"], "{drv}");
    }
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_feature_that_the_daemon_lacks_is_not_the_builds_fault() {
    let scene = Scene::start().await;
    let big = Expression::trivial("big").attribute("requiredSystemFeatures", "[ \"big-parallel\" ]");
    let drv = scene.want(&[&big]).await.remove(0);
    for (count, version) in Version::ALL.into_iter().enumerate() {
        let nix = scene.nix_with(version, "system-features =\n");
        let builder = scene.builder(&nix, &format!("{version:?}")).await;
        let outcomes = scene.after_attempts(&drv, count + 1).await;
        assert_eq!(
            outcomes.last().unwrap(),
            "missing_feature",
            "{version:?}: {:#?}",
            scene.press.history().await
        );
        builder.stop().await;
        scene.hurry().await;
    }
    let nix = scene.nix_with(Version::New, "system-features = big-parallel\n");
    let builder = scene.builder(&nix, "able").await;
    scene.press.ends_well().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_system_that_the_daemon_lacks_is_not_the_builds_fault() {
    let scene = Scene::start().await;
    let evaluator = shared_nix();
    let file = evaluator.write(&Expression::trivial("other"));
    let words = ["--option", "system", "i686-linux", file.to_str().unwrap()];
    let drv = evaluator.run("nix-instantiate", &words);
    scene.press.evaluate(evaluator, &scene.signer, &drv).await;
    let tools = evaluator.run("nix-store", &["--query", "--references", &drv]);
    let tools = tools.lines().find(|path| path.ends_with("-tools.drv")).unwrap();
    for (count, version) in Version::ALL.into_iter().enumerate() {
        let nix = scene.nix_with(version, "extra-platforms =\n");
        let builder = scene.builder(&nix, &format!("{version:?}")).await;
        let outcomes = scene.after_attempts(tools, count + 1).await;
        assert_eq!(
            outcomes.last().unwrap(),
            "missing_feature",
            "{version:?}: {:#?}",
            scene.press.history().await
        );
        builder.stop().await;
        scene.hurry().await;
    }
    scene.press.check().await;
}
