//! What ends a build, and the words for it.

use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Version};

use crate::stage::{Scene, runs, unchanged};

/// Builds it with these settings, on an old and on a new Nix; the failure and the words must be these.
async fn fails(expression: &Expression, more: impl Fn(Settings) -> Settings, failure: &str, words: &[&str]) {
    fails_on(&Version::ALL, expression, more, failure, words).await;
}

async fn fails_on(
    versions: &[Version],
    expression: &Expression,
    more: impl Fn(Settings) -> Settings,
    failure: &str,
    words: &[&str],
) {
    for &version in versions {
        let (scene, signer) = Scene::new().await;
        let drv = scene.queue_one(&signer, expression).await;
        let builder = scene.builder(version, "one", &more).await;
        let end = scene.end(&drv).await;
        assert_eq!(
            (end.state.as_str(), end.failure.as_deref()),
            ("failed", Some(failure)),
            "{version:?}: {end:?}"
        );
        let error = end.error.unwrap_or_default();
        for words in words {
            assert!(error.contains(words), "{version:?}: {error}");
        }
        assert_eq!(scene.press.outcomes(&drv).await, [failure]);
        scene.press.check().await;
        builder.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_fails_says_its_exit_code() {
    fails(&Expression::failing("failing"), unchanged, "build_error", &["exit code 7"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_takes_too_long_is_ended() {
    let endless = Expression::new("endless", "while :; do echo tick; sleep 0.2; done");
    let words = ["longer than the 3 s allowed"];
    fails(&endless, |set| set.with("build_timeout", "3s"), "timeout", &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_build_is_ended() {
    let silent = Expression::new("silent", "echo once; sleep 1000");
    let words = ["said nothing for 2 s"];
    fails(&silent, |set| set.with("max_silent", "2s"), "silent", &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_without_an_end_is_not_silence() {
    let dots = Expression::new("dots", "while :; do printf .; sleep 0.2; done");
    // A machine that stalls makes a build silent for a while.
    let more = |set: Settings| set.with("max_silent", "20s").with("build_timeout", "25s");
    fails_on(&[Version::New], &dots, more, "timeout", &["longer than the 25 s allowed"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_that_are_too_large_are_not_published() {
    let large = Expression::new("large", "head -c 300000 /dev/zero >$out");
    let words = ["more than the 200000 allowed"];
    fails(&large, |set| set.with("max_output_size", "200000"), "output_size", &words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fixed_output_of_another_hash_is_refused() {
    let wrong = Expression::new("wrong", "echo something else >$out")
        .attribute("outputHashMode", "\"flat\"")
        .attribute("outputHashAlgo", "\"sha256\"")
        .attribute("outputHash", &format!("\"{}\"", "0".repeat(64)));
    fails(&wrong, unchanged, "hash_mismatch", &["hash mismatch"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_no_store_can_hold_is_the_builds_fault() {
    let pipe = Expression::new("pipe", "mkdir $out; mkfifo $out/pipe");
    fails(&pipe, unchanged, "build_error", &["unsupported type"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_build_prints_does_not_decide_why_it_failed() {
    let liar = "echo hash mismatch in fixed-output derivation; echo signal 9; echo No space left on device; \
                echo required system or feature; echo timed out after 5 seconds of silence; exit 3";
    fails(&Expression::new("liar", liar), unchanged, "build_error", &["exit code 3"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_a_build_leaves_behind_end_with_it() {
    for version in Version::ALL {
        let (scene, signer) = Scene::new().await;
        // A number that no other process sleeps for.
        let seconds = 1_000_000 + u64::from(std::process::id());
        let script =
            format!("sleep {seconds} & setsid sleep {seconds} & (setsid sleep {seconds} &); echo >$out");
        scene.queue_one(&signer, &Expression::new("forks", &script)).await;
        let builder = scene.builder(version, "one", unchanged).await;
        scene.press.ends_well().await;
        eventually("they end", async || !runs(&seconds.to_string())).await;
        builder.stop().await;
    }
}
