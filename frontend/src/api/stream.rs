//! Answers that go on: server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use harmonia_service::problem::Problem;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// So often an idle stream says that it lives, which also shows who has gone away.
const BREATH: Duration = Duration::from_secs(15);

/// The streams of a process, which all end when it stops.
pub struct Streams {
    permits: Arc<Semaphore>,
    closing: watch::Receiver<bool>,
}

impl Streams {
    /// So many at once, until `closing` says so.
    pub fn new(closing: watch::Receiver<bool>, most: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(most)), closing }
    }

    /// The right to be told.
    pub fn enter(&self) -> Result<OwnedSemaphorePermit, Problem> {
        let permit = self.permits.clone().try_acquire_owned();
        permit.map_err(|_| Problem::unavailable("too many follow what happens: try again in a moment"))
    }

    /// An answer of these events, for as long as they come.
    pub fn answer(
        &self,
        permit: OwnedSemaphorePermit,
        events: impl Stream<Item = Event> + Send + 'static,
    ) -> Response {
        let mut closing = self.closing.clone();
        let closed = async move { drop(closing.wait_for(|closing| *closing).await) };
        let events = events.take_until(Box::pin(closed)).map(move |event| {
            // Given back when the stream is dropped.
            let _ = &permit;
            Ok::<_, Infallible>(event)
        });
        let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(BREATH)).into_response();
        // A proxy that collects an answer before it passes it on would collect for ever.
        response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }
}
