//! What builds print: all of it in the bucket, its end in the queue while they run.

use harmonia_builder::BuilderError;
use harmonia_nix::store_path;
use harmonia_service::layout;
use harmonia_signer::Signer;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Version};
use harmonia_tests::press::shared_nix;
use harmonia_tests::yard::{RunningBuilder, WAIT};

use crate::stage::{Scene, unchanged};

/// What a log's object holds.
async fn read(scene: &Scene, key: &str) -> Vec<u8> {
    zstd::decode_all(scene.press.object(key).await.as_slice()).expect("zstd")
}

/// The log that counts, and those of all attempts.
async fn logs(scene: &Scene, drv: &str) -> (Option<Vec<u8>>, Vec<Vec<u8>>) {
    let path = store_path::parse(drv).expect("a path");
    let job = scene.press.job(drv).await;
    let attempts: Vec<i64> = scene
        .press
        .farm
        .value("SELECT array_agg(id ORDER BY id) FROM ci.attempt WHERE job_id = $1", job)
        .await;
    let counts = match scene.press.keys(&layout::log(&path)).await.first() {
        Some(key) => Some(read(scene, key).await),
        None => None,
    };
    let mut all = Vec::new();
    for attempt in attempts {
        all.push(read(scene, &layout::log_of_attempt(&path, attempt)).await);
    }
    (counts, all)
}

/// What followers of a running build see.
async fn tail(scene: &Scene, drv: &str) -> Vec<u8> {
    let rows =
        sqlx::query_scalar::<_, Vec<u8>>("SELECT data FROM ci.log_tail WHERE job_id = $1 ORDER BY starts")
            .bind(scene.press.job(drv).await)
            .fetch_all(&scene.press.farm.database.admin())
            .await;
    rows.expect("the tail").concat()
}

/// Builds it and answers its only log, whether it succeeded or not.
async fn log_of(version: Version, expression: &Expression, state: &str) -> Vec<u8> {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, expression).await;
    let builder = scene.builder(version, "one", unchanged).await;
    assert_eq!(scene.end(&drv).await.state, state);
    let (counts, mut all) = logs(&scene, &drv).await;
    assert_eq!(all.len(), 1);
    if state == "succeeded" {
        assert_eq!(counts.as_ref(), all.first());
    }
    scene.press.check().await;
    builder.stop().await;
    all.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_success_is_what_it_printed() {
    for version in Version::ALL {
        let talkative =
            Expression::new("talkative", "echo one; echo; echo two >&2; printf three; echo >$out");
        let log = log_of(version, &talkative, "succeeded").await;
        assert_eq!(String::from_utf8_lossy(&log), "one\n\ntwo\nthree\n", "{version:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_failure_is_what_it_printed() {
    for version in Version::ALL {
        let log = log_of(version, &Expression::failing("failing"), "failed").await;
        assert_eq!(String::from_utf8_lossy(&log), "this build fails\n", "{version:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_what_cannot_be_uploaded_is_what_it_printed() {
    let deep = format!("echo this goes deep; mkdir -p $out/{}", "d/".repeat(70));
    let log = log_of(Version::Old, &Expression::new("deep", &deep), "failed").await;
    assert_eq!(String::from_utf8_lossy(&log), "this goes deep\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_already_keeps_the_log_of_its_build() {
    for version in Version::ALL {
        let (scene, signer) = Scene::new().await;
        let talkative = Expression::new("talkative", "echo one; echo >$out");
        let drv = scene.queue_one(&signer, &talkative).await;
        let builder = scene.builder(version, "one", unchanged).await;
        scene.press.ends_well().await;
        let control = Signer::connect(&scene.press.signer_settings().await).await.expect("a signer");
        let path = shared_nix().run("nix-store", &["--query", "--outputs", &drv]);
        control.forget(&[path], None).await.expect("it is forgotten");
        scene.press.farm.settle().await;
        scene.press.ends_well().await;
        assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"; 2], "{version:?}");
        let drv = store_path::parse(&drv).expect("a path");
        assert_eq!(read(&scene, &layout::log(&drv)).await, b"one\n", "{version:?}");
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_says_nothing_has_an_empty_log_and_a_failure_has_none() {
    let (scene, signer) = Scene::new().await;
    let mut drvs = Vec::new();
    for (name, script) in [("silent", "echo >$out"), ("broken", "exit 1")] {
        drvs.push(scene.queue_one(&signer, &Expression::new(name, script)).await);
    }
    let builder = scene.builder(Version::New, "one", unchanged).await;
    let mut kept = Vec::new();
    for drv in &drvs {
        scene.end(drv).await;
        let drv = store_path::parse(drv).expect("a path");
        kept.push(scene.press.keys(&layout::log(&drv)).await.len());
        kept.push(scene.press.keys(&format!("log-attempts/{}", drv.to_basename())).await.len());
    }
    assert_eq!(kept, [1, 1, 0, 0]);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_log_stays_on_the_node() {
    for version in Version::ALL {
        let (scene, signer) = Scene::new().await;
        scene.queue_one(&signer, &Expression::new("talkative", "echo one; echo >$out")).await;
        let builder = scene.builder(version, "one", unchanged).await;
        scene.press.ends_well().await;
        let kept = builder.nix.root().join("nix/var/log/nix/drvs");
        let kept: Vec<_> = std::fs::read_dir(kept).into_iter().flatten().flatten().collect();
        assert!(kept.is_empty(), "{version:?}: {kept:?}");
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_text_are_kept() {
    for version in Version::ALL {
        let binary = Expression::new("binary", r"printf 'a\377\376b\000c\n'; echo >$out");
        let log = log_of(version, &binary, "succeeded").await;
        assert_eq!(log, b"a\xff\xfeb\x00c\n", "{version:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_whose_last_words_are_no_text_is_told() {
    for version in Version::ALL {
        let binary = Expression::new("binary", r"printf 'a\377\000\033[31mb\n'; exit 3");
        let log = log_of(version, &binary, "failed").await;
        assert_eq!(log, b"a\xff\x00\x1b[31mb\n", "{version:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_a_build_forges_change_nothing() {
    let script = r#"
        echo '@nix {"action":"setPhase","phase":"forged"}'
        echo '@nix {"action":"start","id":7,"level":0,"type":105,"text":"forged","parent":0,"fields":[]}'
        echo '@nix {"action":"result","id":7,"type":105,"fields":[1,2,3,4]}'
        echo '@nix {"action":"stop","id":7}'
        echo '@nix {"action":"msg","level":0,"msg":"error: signal 9, No space left on device"}'
        echo '@nix {"action":'
        echo '@nix [[[['
        printf '\033]0;title\007\033[2Jcleared\n'
        echo last
        echo >$out"#;
    for version in Version::ALL {
        let log = log_of(version, &Expression::new("forger", script), "succeeded").await;
        let text = String::from_utf8_lossy(&log);
        assert!(text.contains("\u{1b}]0;title\u{7}\u{1b}[2Jcleared\n"), "{version:?}: {text:?}");
        assert!(text.ends_with("last\n"), "{version:?}: {text:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_prints_too_much_is_cut_short_and_goes_on() {
    const LIMIT: usize = 1_000_000;
    let (scene, signer) = Scene::new().await;
    // Lines of a thousand bytes.
    let bytes = if harmonia_tests::long() { 1_000_000_000 } else { 50_000_000 };
    let loud = Expression::new("loud", &format!("yes $(printf %0999d 0) | head -c {bytes}; echo >$out"));
    let drv = scene.queue_one(&signer, &loud).await;
    let builder = scene.builder(Version::New, "one", |set| set.with("max_log_size", LIMIT.to_string())).await;
    assert_eq!(scene.end(&drv).await.state, "succeeded");
    let (log, _) = logs(&scene, &drv).await;
    let log = String::from_utf8(log.expect("a log")).expect("text");
    let mark = format!("[... log truncated at {LIMIT} bytes]\n");
    assert!(log.ends_with(&mark), "{}", &log[log.len() - 100..]);
    assert!((LIMIT - 1000..=LIMIT + mark.len()).contains(&log.len()), "{}", log.len());
    scene.press.check().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_see_a_running_build() {
    let (scene, signer) = Scene::new().await;
    let script = format!("echo one; {WAIT}; echo two; name=end; {WAIT}; echo >$out");
    let drv = scene.queue_one(&signer, &Expression::new("followed", &script)).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    eventually("the first line is seen", async || tail(&scene, &drv).await == b"one\n").await;
    scene.gates.open("followed");
    eventually("the second line is seen", async || tail(&scene, &drv).await == b"one\ntwo\n").await;
    scene.gates.open("end");
    scene.press.ends_well().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_build_that_was_given_back_is_kept_beside_the_next_one() {
    let (scene, signer) = Scene::new().await;
    let talkative = Expression::new("gated", &format!("echo begun; {WAIT}; echo ended; echo >$out"));
    let drv = scene.queue_one(&signer, &talkative).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    eventually("it is heard", async || tail(&scene, &drv).await == b"begun\n").await;
    builder.term();
    builder.term();
    builder.ended().await.expect("it ends well");
    scene.gates.open("gated");
    let other = scene.builder(Version::New, "two", unchanged).await;
    scene.press.ends_well().await;
    let (_, all) = logs(&scene, &drv).await;
    let all: Vec<_> = all.iter().map(|log| String::from_utf8_lossy(log)).collect();
    assert_eq!(all, ["begun\n", "begun\nended\n"]);
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_whose_state_another_uses_ends_and_takes_no_log_away() {
    let (scene, signer) = Scene::new().await;
    let script = format!("echo one; {WAIT}; echo >$out");
    let drv = scene.queue_one(&signer, &Expression::new("followed", &script)).await;
    let state = tempfile::tempdir().expect("a directory");
    let shared = state.path().display().to_string();
    let first = scene.builder(Version::New, "one", |set| set.with("state_dir", &shared)).await;
    scene.gates.arrived("followed").await;
    let second = RunningBuilder::start_on(&scene.press, first.nix.clone(), "one", |set| {
        set.with("state_dir", &shared)
    })
    .await;
    let error = second.ended().await.expect_err("it does not run");
    assert!(matches!(error, BuilderError::Taken { .. }), "{error:?}");
    scene.gates.open("followed");
    scene.press.ends_well().await;
    assert_eq!(logs(&scene, &drv).await.0.as_deref(), Some(&b"one\n"[..]));
    first.stop().await;
}
