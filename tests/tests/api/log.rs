//! Logs: the live end of what runs, and the archive.

use std::time::Duration;

use harmonia_queue::Fence;
use harmonia_queue::builder::{Claim, Failure, LogPiece};
use harmonia_queue::ingest::Node;
use harmonia_tests::farm::derivation;
use reqwest::StatusCode;
use serde_json::json;

use super::desk::{Desk, answer, problem};
use super::sse::Stream;

async fn running() -> (Desk, Claim) {
    let desk = Desk::new().await;
    desk.farm.queue("main", &[("leaf", &[])]).await;
    let claim = desk.farm.claim(&desk.node).await;
    (desk, claim)
}

async fn append(desk: &Desk, fence: Fence, offset: usize, data: &[u8]) {
    let piece = LogPiece { fence, offset: offset as i64, data: data.to_vec() };
    desk.node.log_append(&[piece]).await.unwrap();
}

async fn interrupt(desk: &Desk, claim: &Claim) {
    desk.node.give_back(&[claim.fence], "drained").await.unwrap();
    desk.farm.settle().await;
}

/// Reads until the build is said to be so; it may pass through other states.
async fn await_state(stream: &mut Stream, data: serde_json::Value) {
    loop {
        let event = stream.next().await.expect("the stream goes on");
        assert_eq!(event.kind, "state", "{event:?}");
        if event.data == data {
            return;
        }
    }
}

fn log(claim: &Claim) -> String {
    format!("/api/builds/{}/log", claim.fence.job)
}

#[tokio::test]
async fn a_client_that_comes_back_misses_nothing_and_hears_nothing_twice() {
    let (desk, claim) = running().await;
    let lines: Vec<String> = (0..300).map(|n| format!("line {n} of a log\n")).collect();
    let whole = lines.concat();
    let (mut written, mut heard, mut last_id) = (0, String::new(), None);
    for lines in lines.chunks(60) {
        let text = lines.concat();
        append(&desk, claim.fence, written, text.as_bytes()).await;
        written += text.len();
        let request = desk.get(&log(&claim));
        let request = match &last_id {
            Some(id) => request.header("last-event-id", id),
            None => request,
        };
        let mut stream = Stream::open(request).await;
        heard.push_str(&stream.text(text.len()).await);
        last_id = stream.last_id.clone();
    }
    assert_eq!(heard, whole);
    assert_eq!(last_id.unwrap(), format!("{}:{}", claim.fence.attempt, whole.len()));
}

#[tokio::test]
async fn a_bare_offset_resumes_too() {
    let (desk, claim) = running().await;
    append(&desk, claim.fence, 0, b"one\ntwo\n").await;
    let mut stream = Stream::open(desk.get(&log(&claim)).header("last-event-id", "4")).await;
    let piece = stream.piece().await;
    assert_eq!((piece.attempt, piece.offset, piece.text.as_str()), (claim.fence.attempt, 4, "two\n"));
}

#[tokio::test]
async fn a_character_that_is_cut_comes_out_whole() {
    let (desk, claim) = running().await;
    let (head, tail) = "grüße ✓\n".as_bytes().split_at(3);
    append(&desk, claim.fence, 0, head).await;
    let mut stream = Stream::open(desk.get(&log(&claim))).await;
    assert_eq!(stream.piece().await.text, "gr");
    append(&desk, claim.fence, 3, tail).await;
    assert_eq!(stream.piece().await.text, "üße ✓\n");
}

#[tokio::test]
async fn an_offset_that_jumps_tells_what_is_missed() {
    let (desk, claim) = running().await;
    for n in 0..3 {
        append(&desk, claim.fence, n * 60_000, &[b'x'; 60_000]).await;
    }
    let mut stream = Stream::open(desk.get(&log(&claim))).await;
    let piece = stream.piece().await;
    assert!(piece.offset > 100_000, "{}", piece.offset);
    assert_eq!(piece.offset + piece.text.len() as u64, 180_000);
}

#[tokio::test]
async fn an_attempt_that_ends_is_heard_to_its_last_word() {
    let (desk, claim) = running().await;
    append(&desk, claim.fence, 0, b"begun\n").await;
    let mut stream = Stream::open(desk.get(&log(&claim))).await;
    assert_eq!(stream.piece().await.text, "begun\n");
    // Builders archive a log, then report the end: its last words never came by the database.
    desk.archive(&claim.drv_path, claim.fence.attempt, b"begun\nbroken\n").await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    let piece = stream.piece().await;
    assert_eq!((piece.offset, piece.text.as_str()), (6, "broken\n"));
    let end = stream.next().await.unwrap();
    assert_eq!((end.kind.as_str(), &end.data["outcome"]), ("end", &json!("build_error")));
    assert_eq!(end.data["attempt"], claim.fence.attempt);
    assert_eq!(stream.next().await, None);
}

#[tokio::test]
async fn whoever_follows_waits_for_an_archive_that_does_not_answer() {
    let (desk, claim) = running().await;
    append(&desk, claim.fence, 0, b"begun\n").await;
    let mut stream = Stream::open(desk.get(&log(&claim))).await;
    assert_eq!(stream.piece().await.text, "begun\n");
    desk.archive_unreadable(&claim.drv_path, claim.fence.attempt).await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    desk.archive(&claim.drv_path, claim.fence.attempt, b"begun\nbroken\n").await;
    assert_eq!(stream.piece().await.text, "broken\n");
    assert_eq!(stream.next().await.unwrap().kind, "end");
}

#[tokio::test]
async fn whoever_comes_back_after_the_end_hears_the_rest() {
    let (desk, claim) = running().await;
    append(&desk, claim.fence, 0, b"begun\n").await;
    let mut stream = Stream::open(desk.get(&log(&claim))).await;
    stream.piece().await;
    let last_id = stream.last_id.clone().unwrap();
    drop(stream);
    desk.archive(&claim.drv_path, claim.fence.attempt, b"begun\nbroken\n").await;
    desk.node.fail(claim.fence, Failure::BuildError, "exit 1").await.unwrap();
    let mut back = Stream::open(desk.get(&log(&claim)).header("last-event-id", last_id)).await;
    assert_eq!(back.piece().await.text, "broken\n");
    assert_eq!(back.next().await.unwrap().kind, "end");
}

#[tokio::test]
async fn following_goes_from_attempt_to_attempt_until_the_build_has_ended() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("leaf", &[])]).await;
    let job = evaluation["leaf"];
    let mut stream = Stream::open(desk.get(&format!("/api/builds/{job}/log?follow=true"))).await;
    await_state(&mut stream, json!({"state": "ready", "attempt": null})).await;

    let first = desk.farm.claim(&desk.node).await;
    append(&desk, first.fence, 0, b"first\n").await;
    await_state(&mut stream, json!({"state": "building", "attempt": first.fence.attempt})).await;
    let piece = stream.piece().await;
    assert_eq!((piece.attempt, piece.text.as_str()), (first.fence.attempt, "first\n"));
    interrupt(&desk, &first).await;
    await_state(&mut stream, json!({"state": "ready", "attempt": null})).await;

    let second = desk.farm.claim(&desk.node).await;
    append(&desk, second.fence, 0, b"second\n").await;
    await_state(&mut stream, json!({"state": "building", "attempt": second.fence.attempt})).await;
    let piece = stream.piece().await;
    assert_eq!((piece.attempt, piece.offset, piece.text.as_str()), (second.fence.attempt, 0, "second\n"));
    desk.farm.succeed(&desk.node, &second).await;
    let end = stream.next().await.unwrap();
    assert_eq!(end.data, json!({"attempt": second.fence.attempt, "outcome": "succeeded"}));
    assert_eq!((end.kind.as_str(), stream.next().await), ("end", None));
}

#[tokio::test]
async fn what_is_cancelled_while_it_waits_ends_for_its_followers() {
    let desk = Desk::new().await;
    let evaluation = desk.farm.queue("main", &[("leaf", &[])]).await;
    let path = format!("/api/builds/{}", evaluation["leaf"]);
    let mut stream = Stream::open(desk.get(&format!("{path}/log?follow=true"))).await;
    stream.next().await.unwrap();
    desk.change(&format!("{path}/cancel")).await;
    let end = stream.next().await.unwrap();
    assert_eq!((end.kind.as_str(), end.data), ("end", json!({"attempt": null, "outcome": "cancelled"})));
}

#[tokio::test]
async fn archived_logs_are_plain_text_of_the_last_attempt_or_the_one_that_is_named() {
    let (desk, first) = running().await;
    desk.archive(&first.drv_path, first.fence.attempt, b"the first try\n").await;
    interrupt(&desk, &first).await;
    let path = log(&first);
    let response = answer(desk.get(&path), StatusCode::OK).await;
    assert_eq!(response.headers()["content-type"], "text/plain; charset=utf-8");
    assert_eq!(response.text().await.unwrap(), "the first try\n");

    let second = desk.farm.claim(&desk.node).await;
    desk.archive(&second.drv_path, second.fence.attempt, b"the second try\n").await;
    desk.farm.succeed(&desk.node, &second).await;
    desk.farm.settle().await;
    for (query, expected) in [
        (String::new(), "the second try\n"),
        ("?follow=true".to_owned(), "the second try\n"),
        (format!("?attempt={}", first.fence.attempt), "the first try\n"),
        (format!("?attempt={}", second.fence.attempt), "the second try\n"),
    ] {
        let text = answer(desk.get(&format!("{path}{query}")), StatusCode::OK).await.text().await.unwrap();
        assert_eq!(text, expected, "{query}");
    }
}

#[tokio::test]
async fn where_there_is_no_log_a_sentence_says_why() {
    let desk = Desk::new().await;
    let cached = Node { cached: true, ..derivation("cached", &[]) };
    let nodes = vec![cached, derivation("leaf", &["cached"])];
    let evaluation = desk.farm.evaluate_nodes("main", nodes).await;
    desk.farm.settle().await;
    let sentence = |name: &str, query: &str| {
        let request = desk.get(&format!("/api/builds/{}/log{query}", evaluation[name]));
        async { problem(request, 404).await }
    };
    let (leaf, cached) = (evaluation["leaf"], evaluation["cached"]);
    assert_eq!(sentence("leaf", "").await, format!("build {leaf} has no log: it was not tried yet"));
    assert_eq!(sentence("cached", "").await, format!("build {cached} has no log: it was there already"));
    assert_eq!(sentence("leaf", "?attempt=7").await, format!("build {leaf} has no attempt 7"));
    let claim = desk.farm.claim(&desk.node).await;
    interrupt(&desk, &claim).await;
    let attempt = claim.fence.attempt;
    assert_eq!(sentence("leaf", "").await, format!("build {leaf} has no log: attempt {attempt} left none"));
}

#[tokio::test]
async fn what_is_no_id_of_an_event_is_refused() {
    let (desk, claim) = running().await;
    for id in ["x", "1:x", "-1", ""] {
        problem(desk.get(&log(&claim)).header("last-event-id", id), 400).await;
    }
    problem(desk.get(&format!("{}?attempt=x", log(&claim))), 400).await;
    problem(desk.get(&format!("{}?follow=perhaps", log(&claim))), 400).await;
}
