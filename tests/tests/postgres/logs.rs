//! Tails of logs: bounded, resumable by byte offset, and of one attempt.

use harmonia_queue::builder::{Claim, LogPiece, Session};
use harmonia_queue::builds::{self, Place};
use harmonia_queue::{Error, Fence, janitor};
use harmonia_tests::farm::Farm;

async fn running() -> (Farm, Session, Claim) {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    (farm, node, claim)
}

async fn append(node: &Session, fence: Fence, offset: i64, data: &[u8]) {
    node.log_append(&[LogPiece { fence, offset, data: data.to_vec() }]).await.unwrap();
}

/// What a reader that has seen everything before `from` gets: where it begins, and the bytes.
async fn tail(farm: &Farm, fence: Fence, from: i64) -> (i64, Vec<u8>) {
    let rows: Vec<(i64, Vec<u8>)> = sqlx::query_as(
        "SELECT starts, data FROM ci.log_tail WHERE job_id = $1 AND attempt = $2 AND starts + octet_length(data) > $3 ORDER BY starts",
    )
    .bind(fence.job)
    .bind(fence.attempt)
    .bind(from)
    .fetch_all(&farm.database.admin())
    .await
    .unwrap();
    let begin = rows.first().map_or(from, |(starts, _)| *starts);
    let data: Vec<u8> = rows.into_iter().flat_map(|(_, data)| data).collect();
    let seen = usize::try_from(from - begin).unwrap_or(0);
    (begin.max(from), data[seen..].to_vec())
}

fn bytes(from: i64, count: i64) -> Vec<u8> {
    (from..from + count).map(|n| (n % 251) as u8).collect()
}

#[tokio::test]
async fn pieces_join_up() {
    let (farm, node, claim) = running().await;
    for (offset, piece) in [(0, &b"unpacking "[..]), (10, b"sources"), (17, b"\npatching")] {
        append(&node, claim.fence, offset, piece).await;
    }
    assert_eq!(tail(&farm, claim.fence, 0).await, (0, b"unpacking sources\npatching".to_vec()));
}

#[tokio::test]
async fn a_reader_resumes_by_offset() {
    let (farm, node, claim) = running().await;
    append(&node, claim.fence, 0, &bytes(0, 5000)).await;
    append(&node, claim.fence, 5000, &bytes(5000, 100)).await;
    assert_eq!(tail(&farm, claim.fence, 4990).await, (4990, bytes(4990, 110)));
}

#[tokio::test]
async fn the_tail_is_bounded_and_is_the_end() {
    let (farm, node, claim) = running().await;
    const PIECE: i64 = 60_000;
    for n in 0..5 {
        append(&node, claim.fence, n * PIECE, &bytes(n * PIECE, PIECE)).await;
    }
    let kept: i64 = farm
        .value("SELECT sum(octet_length(data)) FROM ci.log_tail WHERE job_id = $1", claim.fence.job)
        .await;
    assert!(kept <= 64 << 10, "{kept} bytes");
    let (begin, data) = tail(&farm, claim.fence, 0).await;
    assert_eq!(data, bytes(begin, 5 * PIECE - begin));
    assert!(5 * PIECE - begin > 60 << 10);
}

#[tokio::test]
async fn bytes_that_are_sent_again_are_not_taken_twice() {
    let (farm, node, claim) = running().await;
    for _ in 0..2 {
        append(&node, claim.fence, 0, &bytes(0, 3000)).await;
    }
    assert_eq!(tail(&farm, claim.fence, 0).await, (0, bytes(0, 3000)));
}

#[tokio::test]
async fn bytes_that_are_sent_again_with_more_behind_them_go_on() {
    let (farm, node, claim) = running().await;
    append(&node, claim.fence, 0, &bytes(0, 100)).await;
    append(&node, claim.fence, 50, &bytes(50, 3000)).await;
    assert_eq!(tail(&farm, claim.fence, 0).await, (0, bytes(0, 3050)));
}

#[tokio::test]
async fn a_new_attempt_begins_a_new_tail() {
    let (farm, node, first) = running().await;
    append(&node, first.fence, 0, b"the first attempt").await;
    node.give_back(&[first.fence], "drained").await.unwrap();
    farm.settle().await;
    let second = farm.claim(&node).await;
    append(&node, second.fence, 0, b"anew").await;
    assert_eq!(tail(&farm, second.fence, 0).await, (0, b"anew".to_vec()));
    assert_eq!(tail(&farm, first.fence, 0).await, (0, Vec::new()));
}

#[tokio::test]
async fn a_piece_that_is_too_long_is_refused() {
    let (farm, node, claim) = running().await;
    let piece = LogPiece { fence: claim.fence, offset: 0, data: vec![0; 65_537] };
    assert!(matches!(node.log_append(&[piece]).await.unwrap_err(), Error::Invalid(_)));
    assert_eq!(tail(&farm, claim.fence, 0).await.1, Vec::<u8>::new());
}

#[tokio::test]
async fn tails_of_builds_that_ended_are_removed() {
    let (farm, node, claim) = running().await;
    let lead = farm.lead().await;
    append(&node, claim.fence, 0, b"done").await;
    janitor::prune(&farm.operator, lead.generation).await.unwrap();
    assert_eq!(tail(&farm, claim.fence, 0).await.1, b"done");
    farm.succeed(&node, &claim).await;
    janitor::prune(&farm.operator, lead.generation).await.unwrap();
    assert_eq!(tail(&farm, claim.fence, 0).await.1, Vec::<u8>::new());
}

#[tokio::test]
async fn a_reader_who_has_everything_hears_no_news_until_there_are_some() {
    let (farm, _, node) = Farm::small(2).await;
    farm.queue("main", &[("talks", &[]), ("silent", &[])]).await;
    let (talks, silent) = (farm.claim(&node).await.fence, farm.claim(&node).await.fence);
    append(&node, talks, 0, b"one\n").await;
    let place = |of: Fence, offset| Place { build: of.job, attempt: Some(of.attempt), offset };
    let places = [place(talks, 4), place(silent, 0)];
    let pieces = async || {
        let news = builds::news(&farm.frontend, &places).await.unwrap();
        news.into_values().flat_map(|news| news.pieces).map(|piece| piece.data).collect::<Vec<_>>()
    };
    assert!(pieces().await.is_empty());
    append(&node, talks, 4, b"two\n").await;
    assert_eq!(pieces().await, [b"two\n"]);
}
