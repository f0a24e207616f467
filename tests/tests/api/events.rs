//! What changed, as it happens.

use harmonia_queue::evaluations::{self, Request};
use harmonia_queue::people;
use serde_json::json;

use super::desk::Desk;
use super::sse::Stream;

async fn queue(desk: &Desk) -> i64 {
    let request = Request { project: "main", source: "/src", ..Request::default() };
    evaluations::queue(&desk.farm.frontend, &request).await.unwrap()
}

/// Reads until this is said; what else happens meanwhile is nobody's concern.
async fn await_event(stream: &mut Stream, data: &serde_json::Value) {
    while stream.next().await.expect("the stream goes on").data != *data {}
}

/// Something is heard only once the listener listens.
async fn listening(desk: &Desk) -> Stream {
    let mut stream = Stream::open(desk.get("/api/events")).await;
    harmonia_tests::eventually("the frontend listens", || async {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'UNLISTEN%' AND $1 = 0";
        desk.farm.value::<i64>(query, 0).await > 0
    })
    .await;
    let id = queue(desk).await;
    await_event(&mut stream, &json!({"kind": "evaluation", "id": id})).await;
    stream
}

#[tokio::test]
async fn evaluations_builds_and_nodes_are_told_of() {
    let desk = Desk::new().await;
    let mut stream = listening(&desk).await;
    people::drain(&desk.farm.frontend, desk.farm.node_of(&desk.node).await, "test", None).await.unwrap();
    await_event(&mut stream, &json!({"kind": "nodes"})).await;
    harmonia_queue::listen::notify(&desk.farm.frontend, harmonia_queue::listen::Channel::Ended, "")
        .await
        .unwrap();
    await_event(&mut stream, &json!({"kind": "builds"})).await;
}

#[tokio::test]
async fn whoever_comes_back_hears_what_was_missed() {
    let desk = Desk::new().await;
    let stream = listening(&desk).await;
    let last_id = stream.last_id.clone().unwrap();
    drop(stream);
    let mut other = Stream::open(desk.get("/api/events")).await;
    let missed = queue(&desk).await;
    await_event(&mut other, &json!({"kind": "evaluation", "id": missed})).await;
    let mut back = Stream::open(desk.get("/api/events").header("last-event-id", last_id)).await;
    assert_eq!(back.next().await.unwrap().data, json!({"kind": "evaluation", "id": missed}));
}

#[tokio::test]
async fn whoever_was_elsewhere_is_told_to_look_at_everything() {
    let desk = Desk::new().await;
    let mut stream = Stream::open(desk.get("/api/events").header("last-event-id", "elsewhere-7")).await;
    assert_eq!(stream.next().await.unwrap().data, json!({"kind": "resync"}));
}

#[tokio::test]
async fn a_frontend_that_stops_ends_its_streams() {
    let mut desk = Desk::new().await;
    let mut stream = Stream::open(desk.get("/api/events")).await;
    desk.stop();
    assert_eq!(stream.next().await, None);
    desk.stopped().await;
}
