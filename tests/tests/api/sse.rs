//! A client of server-sent events.

use harmonia_service::api::LogPiece;
use harmonia_tests::PATIENCE;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::Value;
use tokio::time::timeout;

use super::desk::answer;

/// A stream that is being read.
pub struct Stream {
    response: Response,
    bytes: Vec<u8>,
    /// The last id that was heard, which a client gives when it comes back.
    pub last_id: Option<String>,
}

/// An event.
#[derive(Debug, PartialEq)]
pub struct Event {
    /// Its type; empty for the usual one.
    pub kind: String,
    /// Its data.
    pub data: Value,
}

impl Stream {
    /// Begins to read.
    pub async fn open(request: RequestBuilder) -> Stream {
        let response = answer(request, StatusCode::OK).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Stream { response, bytes: Vec::new(), last_id: None }
    }

    /// The next event; none: the stream ended.
    pub async fn next(&mut self) -> Option<Event> {
        timeout(PATIENCE, self.read()).await.expect("an event in time")
    }

    /// The next event, which is a piece of a log.
    pub async fn piece(&mut self) -> LogPiece {
        let event = self.next().await.expect("a piece");
        assert_eq!(event.kind, "", "{event:?}");
        serde_json::from_value(event.data).unwrap()
    }

    /// Until something was said that is as long as this.
    pub async fn text(&mut self, length: usize) -> String {
        let mut text = String::new();
        while text.len() < length {
            text.push_str(&self.piece().await.text);
        }
        text
    }

    async fn read(&mut self) -> Option<Event> {
        loop {
            while let Some(end) = self.bytes.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.bytes.drain(..end + 2).collect();
                let (mut kind, mut data) = (String::new(), None);
                for line in String::from_utf8(block).unwrap().lines() {
                    match line.split_once(": ") {
                        Some(("id", id)) => self.last_id = Some(id.to_owned()),
                        Some(("event", name)) => kind = name.to_owned(),
                        // What is meant for a page is HTML.
                        Some(("data", text)) => {
                            data = Some(serde_json::from_str(text).unwrap_or_else(|_| text.into()))
                        }
                        _ => {}
                    }
                }
                if let Some(data) = data {
                    return Some(Event { kind, data });
                }
            }
            self.bytes.extend(self.response.chunk().await.unwrap()?);
        }
    }
}
