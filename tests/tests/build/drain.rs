//! Builders that are told to stop, by SIGTERM or from afar.

use std::time::Duration;

use harmonia_queue::people;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Version};
use harmonia_tests::press::RunningSigner;
use harmonia_tests::proxy::Fault;
use harmonia_tests::yard::waiting;

use crate::stage::{Scene, runs, unchanged};

fn seconds(seconds: u64) -> Option<Duration> {
    Some(Duration::from_secs(seconds))
}

async fn drain(scene: &Scene, node: &str, within: Option<Duration>) {
    let node = scene.node(node).await;
    people::drain(&scene.press.farm.operator, node, "test", within).await.expect("drain");
}

/// The builder has asked the queue after this was called.
async fn asks(scene: &Scene, node: &str) {
    let node = i64::from(scene.node(node).await);
    let farm = &scene.press.farm;
    let last = "SELECT max(last_seen)::text FROM ci.session WHERE node_id = $1";
    let before: String = farm.value(last, node).await;
    scene.hint().await;
    eventually("the builder asks", async || farm.value::<String>(last, node).await != before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_builds_end_and_nothing_is_claimed() {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, &waiting("running")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("running").await;
    builder.term();
    asks(&scene, "one").await;
    let later = scene.queue_one(&signer, &waiting("later")).await;
    scene.gates.open("running");
    builder.ended().await.expect("it ends well");
    assert_eq!(scene.end(&drv).await.state, "succeeded");
    assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
    assert!(scene.sessions("one").await.iter().all(|(_, ended)| *ended));
    scene.press.becomes(&later, "ready").await;
    scene.press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_gives_everything_back_at_once() {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, &waiting("running")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("running").await;
    builder.term();
    builder.term();
    builder.ended().await.expect("it ends well");
    assert!(scene.sessions("one").await.iter().all(|(_, ended)| *ended));
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted"]);
    scene.gates.open("running");
    let other = scene.builder(Version::Old, "two", unchanged).await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted", "succeeded"]);
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_is_given_back_ends() {
    for version in Version::ALL {
        let (scene, signer) = Scene::new().await;
        // A number that no other process sleeps for.
        let length = (2_000_000 + u64::from(std::process::id())).to_string();
        let sleeper = Expression::new("sleeper", &format!("sleep {length}"));
        let drv = scene.queue_one(&signer, &sleeper).await;
        let builder = scene.builder(version, "one", unchanged).await;
        eventually("it is being built", async || runs(&length)).await;
        let nix = builder.nix.clone();
        builder.term();
        builder.term();
        builder.ended().await.expect("it ends well");
        eventually("the daemon ends it", async || !runs(&length)).await;
        assert_eq!(scene.press.outcomes(&drv).await, ["interrupted"]);
        drop(nix);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_with_little_time_gives_back_what_may_not_end() {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, &waiting("running")).await;
    let builder = scene.builder(Version::New, "one", |set| set.with("grace", "20s")).await;
    scene.gates.arrived("running").await;
    builder.term();
    builder.ended().await.expect("it ends well");
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted"]);
    assert!(scene.sessions("one").await.iter().all(|(_, ended)| *ended));
    scene.press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_builder_ends_its_builds_and_waits_to_be_resumed() {
    let (scene, signer) = Scene::new().await;
    let running = scene.queue_one(&signer, &waiting("running")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("running").await;
    drain(&scene, "one", None).await;
    let later = scene.queue_one(&signer, &waiting("later")).await;
    scene.gates.open("later");
    scene.gates.open("running");
    assert_eq!(scene.end(&running).await.state, "succeeded");
    asks(&scene, "one").await;
    scene.press.becomes(&later, "ready").await;
    let node = scene.node("one").await;
    people::resume(&scene.press.farm.operator, node, "test").await.expect("resume");
    scene.press.ends_well().await;
    assert_eq!(scene.sessions("one").await.len(), 1);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_comes_nearer_gives_a_build_back() {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, &waiting("running")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("running").await;
    drain(&scene, "one", seconds(3600)).await;
    asks(&scene, "one").await;
    scene.press.becomes(&drv, "building").await;
    drain(&scene, "one", seconds(25)).await;
    scene.press.becomes(&drv, "ready").await;
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted"]);
    scene.gates.open("running");
    let other = scene.builder(Version::New, "two", unchanged).await;
    scene.press.ends_well().await;
    other.stop().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_moves_away_lets_a_build_go_on() {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, &waiting("running")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("running").await;
    // A build of which nothing is known is given back a quarter of a minute from now.
    drain(&scene, "one", seconds(45)).await;
    drain(&scene, "one", seconds(3600)).await;
    asks(&scene, "one").await;
    tokio::time::sleep(Duration::from_secs(16)).await;
    scene.gates.open("running");
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_usually_takes_longer_is_given_back_at_once() {
    let (scene, signer) = Scene::new().await;
    let known = "INSERT INTO ci.duration (name, recent, p50) VALUES ('slow', '{1000}', 1000)";
    scene.press.farm.database.execute(known).await;
    let drvs = scene.press.want(&signer, &[waiting("slow"), waiting("unknown")]).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("slow").await;
    scene.gates.arrived("unknown").await;
    drain(&scene, "one", seconds(600)).await;
    scene.press.becomes(&drvs[0], "ready").await;
    scene.press.becomes(&drvs[1], "building").await;
    scene.gates.open("unknown");
    assert_eq!(scene.end(&drvs[1]).await.state, "succeeded");
    assert_eq!(scene.press.outcomes(&drvs[0]).await, ["interrupted"]);
    assert_eq!(scene.press.outcomes(&drvs[1]).await, ["succeeded"]);
    scene.press.check().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_are_the_last_to_be_given_back() {
    let (scene, first) = Scene::new().await;
    let drvs = scene.press.want(&first, &[waiting("built"), waiting("building")]).await;
    let (bucket, database) = (scene.press.before_bucket(), scene.press.before_database());
    let signer =
        RunningSigner::start(&scene.press.farm, scene.press.settings_by(&bucket, &database).await).await;
    let builder = scene.builder(Version::New, "one", |set| set.with("margin", "600s")).await;
    scene.gates.arrived("built").await;
    scene.gates.arrived("building").await;
    // From here on only the signer whose slots lead through the proxy.
    first.stop().await;
    asks(&scene, "one").await;
    let (release, held) = Fault::hold();
    bucket.on_matching(1, |name| name.starts_with("PUT /bucket/nar/"), held);
    scene.gates.open("built");
    scene.press.becomes(&drvs[0], "uploading").await;
    drain(&scene, "one", seconds(500)).await;
    scene.press.becomes(&drvs[1], "ready").await;
    scene.press.becomes(&drvs[0], "uploading").await;
    drop(release);
    assert_eq!(scene.end(&drvs[0]).await.state, "succeeded");
    assert_eq!(scene.press.outcomes(&drvs[0]).await, ["succeeded"]);
    assert_eq!(scene.press.outcomes(&drvs[1]).await, ["interrupted"]);
    scene.press.check().await;
    builder.stop().await;
    signer.stop().await;
}
