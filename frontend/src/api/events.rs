//! `/api/events`

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::response::sse;
use futures::{Stream, StreamExt, stream};
use harmonia_service::api::Event;
use harmonia_service::problem::Problem;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::Api;
use super::ask::Reader;
use super::hub::{Hub, Told};
use super::openapi::Refusals;

/// What changed, as it happens
///
/// Server-sent events; the data of each is an `Event`. A client that comes back with `Last-Event-ID` hears what it missed,
/// or `{"kind": "resync"}` if that is not known any more. The same is told five times a second at most.
#[utoipa::path(get, path = "/events", operation_id = "listen", tag = "events",
    params(("Last-Event-ID" = Option<String>, Header, description = "The last event that was heard")),
    responses((status = 200, description = "Events", body = Event, content_type = "text/event-stream"), Refusals))]
pub async fn listen(_: Reader, State(api): State<Arc<Api>>, headers: HeaderMap) -> Result<Response, Problem> {
    let permit = api.streams.enter()?;
    let seen = headers.get("last-event-id").map(|id| id.to_str().unwrap_or_default());
    let (last, missed, live) = api.hub.join(seen);
    // Without data, this is no event; but a client that leaves before the first one knows where it was.
    let begin = seen.is_none().then(|| sse::Event::default().id(api.hub.id(last)));
    let hub = api.hub.clone();
    let missed: Vec<sse::Event> = missed.into_iter().map(|told| written(&hub, told)).collect();
    Ok(api.streams.answer(permit, stream::iter(begin).chain(stream::iter(missed)).chain(coming(hub, live))))
}

fn coming(hub: Arc<Hub>, live: Receiver<Told>) -> impl Stream<Item = sse::Event> + Send {
    stream::unfold((hub, live), |(hub, mut live)| async move {
        let event = match live.recv().await {
            Ok(told) => written(&hub, told),
            Err(RecvError::Lagged(_)) => data(&Event::Resync),
            Err(RecvError::Closed) => return None,
        };
        Some((event, (hub, live)))
    })
}

fn written(hub: &Hub, (number, event): Told) -> sse::Event {
    data(&event).id(hub.id(number))
}

fn data(event: &Event) -> sse::Event {
    // These words are always fit for JSON.
    sse::Event::default().json_data(event).unwrap_or_default()
}
