//! Builders that are killed, as power failures and kubelets do it.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use harmonia_service::settings::{KNOWN, Settings};
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::proxy::Fault;
use harmonia_tests::yard::{settings, waiting};
use tokio::sync::{oneshot, watch};

use crate::scene::{Scene, build_here, gated_pair, is_nar, local_hash, paths_of};

const PROCESS: &str = "HARMONIA_CI_TEST_BUILDER";

/// A builder as a process of its own, which does not outlive a test that fails.
struct Process(Child);

impl Process {
    async fn start(scene: &Scene, nix: &Nix, name: &str, state: &Path) -> Process {
        scene.only_builders().await;
        let settings = settings(&scene.press, nix, name, state);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "kills::a_builder_as_a_process", "--ignored", "--quiet"]);
        for (name, ..) in KNOWN {
            if let Some(value) = settings.get(name) {
                command.env(format!("HARMONIA_CI_{}", name.to_uppercase()), value);
            }
        }
        Process(command.env(PROCESS, "1").stdout(Stdio::null()).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
#[ignore = "other tests run it as a process of its own"]
async fn a_builder_as_a_process() {
    if std::env::var_os(PROCESS).is_some() {
        let (_stops, stopped) = watch::channel(0);
        harmonia_builder::run(&Settings::load().unwrap(), stopped).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_killed_while_it_builds_begins_again_at_once_as_the_same_node() {
    let scene = Scene::start().await;
    let drv = scene.want(&[&waiting("slow")]).await.remove(0);
    let nix = scene.nix(Version::New);
    let state = tempfile::tempdir().unwrap();
    let mut first = Process::start(&scene, &nix, "one", state.path()).await;
    scene.reached("slow").await;
    first.kill();
    let _second = Process::start(&scene, &nix, "one", state.path()).await;
    scene.reached("slow").await;
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted"]);
    scene.gates.open("slow");
    scene.press.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_builder_built_is_built_by_another_when_its_lease_ends() {
    let scene = Scene::start().await;
    let drv = scene.want(&[&waiting("slow")]).await.remove(0);
    let (state, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let nix = scene.nix(Version::Old);
    let mut first = Process::start(&scene, &nix, "one", state.path()).await;
    scene.reached("slow").await;
    first.kill();
    scene.nodes_died().await;
    let nix = scene.nix(Version::New);
    let _second = Process::start(&scene, &nix, "two", other.path()).await;
    scene.reached("slow").await;
    scene.gates.open("slow");
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["node_died", "succeeded"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_killed_while_it_uploads_is_followed_by_the_same_node() {
    let scene = Scene::start().await;
    let (nix, state) = (scene.nix(Version::New), tempfile::tempdir().unwrap());
    let (expression, drv, _never) = killed_while_it_uploads(&scene, &nix, state.path()).await;
    let _second = Process::start(&scene, &nix, "one", state.path()).await;
    assert_published_from(&scene, &nix, &expression).await;
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted", "succeeded"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_killed_while_it_uploads_is_followed_by_another() {
    let scene = Scene::start().await;
    let state = tempfile::tempdir().unwrap();
    let (expression, drv, _never) =
        killed_while_it_uploads(&scene, &scene.nix(Version::Old), state.path()).await;
    let (nix, state) = (scene.nix(Version::New), tempfile::tempdir().unwrap());
    scene.nodes_died().await;
    let _second = Process::start(&scene, &nix, "two", state.path()).await;
    assert_published_from(&scene, &nix, &expression).await;
    assert_eq!(scene.press.outcomes(&drv).await, ["node_died", "succeeded"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_power_failure_left_half_written_is_built_again() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let nix = scene.nix(version);
        let expression = Expression::new("torn", "mkdir $out; echo whole >$out/file");
        let path = build_here(&nix, &expression);
        std::fs::write(nix.real(&path).join("file"), "").unwrap();
        let drv = scene.want(&[&expression]).await.remove(0);
        let builder = scene.builder(&nix, "one").await;
        assert_eq!(scene.after_attempts(&drv, 1).await, ["upload"], "{version:?}");
        scene.hurry().await;
        scene.press.ends_well().await;
        assert_eq!(scene.press.outcomes(&drv).await, ["upload", "succeeded"], "{version:?}");
        scene.press.check().await;
        builder.stop().await;
    }
}

/// A builder is killed when one of two outputs is in the bucket and the other is on its way, where it stays as long as what is
/// answered last.
async fn killed_while_it_uploads(
    scene: &Scene,
    nix: &Nix,
    state: &Path,
) -> (Expression, String, oneshot::Sender<()>) {
    let expression = gated_pair("pair");
    let drv = scene.want(&[&expression]).await.remove(0);
    let mut builder = Process::start(scene, nix, "one", state).await;
    scene.reached("pair").await;
    scene.bucket.reset();
    let (release, held) = Fault::hold();
    scene.bucket.on_matching(2, is_nar, held);
    scene.gates.open("pair");
    scene.sends_nars(2).await;
    scene.press.becomes(&drv, "uploading").await;
    builder.kill();
    // What is sent again passes.
    scene.bucket.reset();
    (expression, drv, release)
}

async fn assert_published_from(scene: &Scene, nix: &Nix, expression: &Expression) {
    scene.press.ends_well().await;
    let published = scene.press.check().await;
    for path in paths_of(expression) {
        let hash = local_hash(nix, &path).unwrap();
        assert_eq!(published[&path].nar_hash().digest_as_bytes(), hash.0, "{path} is of another attempt");
    }
}
