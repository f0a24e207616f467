//! Disks that are full.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::yard::{RunningBuilder, waiting};

use crate::scene::{Scene, local_hash};

/// A store on a disk of its own, in memory.
struct SmallStore {
    nix: Arc<Nix>,
    disk: PathBuf,
}

impl SmallStore {
    fn start(scene: &Scene, version: Version, size: &str) -> SmallStore {
        let nix = scene.nix(version);
        nix.kill_daemon();
        let disk = nix.root().join("nix");
        std::fs::create_dir_all(&disk).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size},mode=755"), "tmpfs"])
            .arg(&disk)
            .status();
        assert!(mounted.unwrap().success());
        nix.start_daemon();
        SmallStore { nix, disk }
    }

    async fn builder(&self, scene: &Scene, min_free: &str) -> RunningBuilder {
        scene.only_builders().await;
        let settings = |settings: Settings| settings.with("min_free", min_free);
        RunningBuilder::start_on(&scene.press, Arc::clone(&self.nix), "small", settings).await
    }

    /// A path that nothing holds.
    fn garbage(&self, name: &str, megabytes: usize) -> String {
        let file = self.nix.root().join(name);
        std::fs::write(&file, vec![b'x'; megabytes << 20]).unwrap();
        let path = self.nix.run("nix-store", &["--add", file.to_str().unwrap()]);
        std::fs::remove_file(file).unwrap();
        path
    }

    /// Uses up what is left, but for a little: without any Nix itself dies, which has to write to its database.
    fn fill(&self) {
        let mut filler = std::fs::File::create(self.disk.join("filler")).unwrap();
        let block = vec![b'x'; 64 << 10];
        while filler.write_all(&block).is_ok() {}
        let size = filler.metadata().unwrap().len();
        filler.set_len(size.saturating_sub(256 << 10)).unwrap();
    }
}

impl Drop for SmallStore {
    fn drop(&mut self) {
        self.nix.kill_daemon();
        let _ = Command::new("umount").arg("--lazy").arg(&self.disk).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_fills_the_disk_is_tried_elsewhere() {
    tried_elsewhere("dd if=/dev/zero of=$out bs=1M count=100").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_fills_the_disk_without_a_word_is_tried_elsewhere() {
    tried_elsewhere("dd if=/dev/zero of=$out bs=1M count=100 2>/dev/null || exit 1").await;
}

/// An attempt on a small store of each version ends for want of room.
async fn fills_small_stores(scene: &Scene, drv: &str) {
    for (count, version) in Version::ALL.into_iter().enumerate() {
        let small = SmallStore::start(scene, version, "64m");
        let builder = small.builder(scene, "8MiB").await;
        let outcomes = scene.after_attempts(drv, count + 1).await;
        assert_eq!(outcomes.last().unwrap(), "disk_full", "{version:?}: {:#?}", scene.press.history().await);
        builder.stop().await;
        scene.hurry().await;
    }
}

async fn tried_elsewhere(script: &str) {
    let scene = Scene::start().await;
    let drv = scene.want(&[&Expression::new("large", script)]).await.remove(0);
    fills_small_stores(&scene, &drv).await;
    let builder = scene.builder(&scene.nix(Version::New), "large").await;
    scene.press.ends_well().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_inputs_fill_the_disk_is_tried_elsewhere() {
    let scene = Scene::start().await;
    let large = Expression::new("large", "dd if=/dev/zero of=$out bs=1M count=100");
    let top = Expression::new("top", "head -c 10 $large >$out").input("large", &large);
    let large_drv = scene.want(&[&large]).await.remove(0);
    let roomy = scene.nix(Version::New);
    let builder = scene.builder(&roomy, "roomy").await;
    scene.press.becomes(&large_drv, "succeeded").await;
    builder.stop().await;
    let drv = scene.want(&[&top]).await.remove(0);
    fills_small_stores(&scene, &drv).await;
    let builder = scene.builder(&roomy, "roomy").await;
    scene.press.ends_well().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_only_talks_of_a_full_disk_has_failed() {
    let scene = Scene::start().await;
    let words = "echo No space left on device; echo Cannot allocate memory; exit 1";
    let drv = scene.want(&[&Expression::new("liar", words)]).await.remove(0);
    let builder = scene.builder(&scene.nix(Version::New), "one").await;
    assert_eq!(scene.after_attempts(&drv, 1).await, ["build_error"]);
    scene.press.becomes(&drv, "failed").await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_goes_when_the_disk_is_low_and_nothing_is_built() {
    let scene = Scene::start().await;
    let small = SmallStore::start(&scene, Version::New, "64m");
    let garbage = small.garbage("garbage", 20);
    let builder = small.builder(&scene, "40MiB").await;
    eventually("the garbage goes", || async { local_hash(&small.nix, &garbage).is_none() }).await;
    scene.want(&[&Expression::trivial("after")]).await;
    scene.press.ends_well().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_full_when_a_builder_begins_is_made_free() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let small = SmallStore::start(&scene, version, "96m");
        let garbage = small.garbage("garbage", 30);
        small.fill();
        scene.want(&[&Expression::files("after", 20)]).await;
        let builder = small.builder(&scene, "8MiB").await;
        scene.press.ends_well().await;
        assert_eq!(local_hash(&small.nix, &garbage), None);
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn builds_that_collect_garbage_all_the_time_lose_nothing() {
    for version in Version::ALL {
        let scene = Scene::start().await;
        let base = Expression::files("base", 50);
        let tops: Vec<Expression> = (0..6)
            .map(|number| Expression::new(&format!("top-{number}"), "ls -R $base >$out").input("base", &base))
            .collect();
        scene.want(&tops.iter().collect::<Vec<_>>()).await;
        let nix = scene.nix(version);
        scene.only_builders().await;
        let builder =
            RunningBuilder::start_on(&scene.press, nix, "low", |settings| settings.with("min_free", "100TB"))
                .await;
        scene.press.ends_well().await;
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_that_cannot_write_logs_does_not_use_up_the_patience_of_jobs() {
    let scene = Scene::start().await;
    let drv = scene.want(&[&waiting("first")]).await.remove(0);
    let state = tempfile::tempdir().unwrap();
    let directory = state.path().display().to_string();
    let settings = |settings: Settings| settings.with("state_dir", directory).with("slots", "1");
    scene.only_builders().await;
    let builder = RunningBuilder::start_on(&scene.press, scene.nix(Version::New), "one", settings).await;
    scene.reached("first").await;
    let second = scene.want(&[&Expression::trivial("second")]).await.remove(0);
    let logs = state.path().join("logs");
    std::fs::remove_dir_all(&logs).unwrap();
    std::fs::write(&logs, "").unwrap();
    scene.gates.open("first");
    assert_eq!(scene.after_attempts(&second, 1).await, ["disk_full"]);
    // A directory that is not there is made.
    std::fs::remove_file(&logs).unwrap();
    scene.hurry().await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
    builder.stop().await;
}
