//! One object or one part into the bucket.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use harmonia_service::protocol::{Slot, Wish};
use reqwest::header::ETAG;
use tokio::time::{Instant, sleep};

use super::retry::pause;
use super::{SignerError, Stop, UploadError, Uploader};

/// What became of bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The bucket took them; its word for them.
    Stored(Option<String>),
    /// They, or others for the same path, were there.
    Present,
}

/// What to do after a PUT.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Done,
    Present,
    /// The signature is not accepted: it has expired.
    AskAgain,
    /// The bytes that arrived are not those that were signed.
    Resend,
    Wait,
    /// The upload that the part belongs to is gone.
    Restart,
    GiveUp,
}

fn after(status: u16) -> Next {
    match status {
        200..=299 => Next::Done,
        412 => Next::Present,
        401 | 403 => Next::AskAgain,
        400 => Next::Resend,
        404 => Next::Restart,
        // 409: another one writes the same key at this moment.
        408 | 409 | 425 | 429 | 500.. => Next::Wait,
        _ => Next::GiveUp,
    }
}

/// A PUT that has not ended by then never will: 64 KiB a second is less than any link that a builder is worth having on.
fn longest_put(size: usize) -> Duration {
    Duration::from_secs(30 + size as u64 / (64 << 10))
}

impl Uploader {
    /// Stores bytes under a wish, in as many tries as the limits allow.
    pub(super) async fn put(&self, what: &str, wish: Wish, bytes: Bytes) -> Result<Sent, Stop> {
        let refused = |reason: String| Stop::from(UploadError::Bucket { what: what.to_owned(), reason });
        let mut slot = None;
        let mut resent = false;
        let mut last = String::new();
        for attempt in 0..self.limits.tries {
            let (url, headers) = match slot.take() {
                Some(slot) => slot,
                None => match self.slot(what, wish.clone()).await? {
                    Slot::Put { url, headers } => (url, headers),
                    Slot::Present => return Ok(Sent::Present),
                    _ => return Err(foreign_slot()),
                },
            };
            let next = match self.send(&url, &headers, bytes.clone()).await {
                Ok((status, etag)) => {
                    last = format!("it answered {status}");
                    match (after(status), etag) {
                        (Next::Done, etag) => return Ok(Sent::Stored(etag)),
                        (next, _) => next,
                    }
                }
                // It may have been refused while it was still being sent, so the slot may be what is wrong.
                Err(error) => {
                    last = format!("the connection broke: {}", innermost(&error));
                    tracing::debug!(what, attempt, reason = last, "a PUT failed");
                    sleep(pause(self.limits.pause, attempt)).await;
                    continue;
                }
            };
            tracing::debug!(what, attempt, reason = last, "a PUT failed");
            match next {
                Next::Present => return Ok(Sent::Present),
                Next::AskAgain if attempt == 0 => {}
                Next::AskAgain => sleep(pause(self.limits.pause, attempt)).await,
                Next::Resend if !resent => resent = true,
                Next::Wait => {
                    sleep(pause(self.limits.pause, attempt)).await;
                    slot = Some((url, headers));
                }
                Next::Restart => return Err(Stop::Again(format!("{what}: the bucket forgot the upload"))),
                Next::Resend | Next::GiveUp | Next::Done => return Err(refused(last)),
            }
        }
        Err(refused(last))
    }

    /// A slot, once there is one.
    pub(super) async fn slot(&self, what: &str, wish: Wish) -> Result<Slot, Stop> {
        let until = Instant::now() + self.limits.patience;
        let mut attempt = 0;
        loop {
            match self
                .slots
                .ask(wish.clone())
                .await
                .ok_or(UploadError::Stopping)?
                .map_err(UploadError::from)?
            {
                Slot::Refused { reason } => return Err(Stop::Refused(reason)),
                Slot::Later { reason } if Instant::now() >= until => {
                    let error = SignerError::PutOff { what: what.to_owned(), reason };
                    return Err(UploadError::from(error).into());
                }
                Slot::Later { reason } => {
                    tracing::debug!(what, attempt, reason, "no slot yet");
                    sleep(pause(self.limits.pause, attempt)).await;
                    attempt += 1;
                }
                slot => return Ok(slot),
            }
        }
    }

    async fn send(
        &self,
        url: &str,
        headers: &BTreeMap<String, String>,
        bytes: Bytes,
    ) -> Result<(u16, Option<String>), reqwest::Error> {
        let request = self.http.put(url).timeout(longest_put(bytes.len())).body(bytes);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(name, value));
        let response = request.send().await.map_err(reqwest::Error::without_url)?;
        let etag = response.headers().get(ETAG).and_then(|etag| etag.to_str().ok()).map(str::to_owned);
        let status = response.status().as_u16();
        // What an error's body says is not needed, but a connection is used again only after it was read.
        let _ = super::http::body(response, 64 << 10).await;
        Ok((status, etag))
    }
}

/// A slot of a kind that does not fit the wish.
pub(super) fn foreign_slot() -> Stop {
    let reason = "its slot does not fit the wish: builder and signer are of different versions".to_owned();
    UploadError::from(SignerError::Rejected { reason }).into()
}

/// What the system said, below reqwest's and hyper's words.
fn innermost(error: &reqwest::Error) -> String {
    let mut error: &dyn std::error::Error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_decides_what_follows_a_put() {
        let cases = [
            (200, Next::Done),
            (201, Next::Done),
            (412, Next::Present),
            (403, Next::AskAgain),
            (400, Next::Resend),
            (404, Next::Restart),
            (409, Next::Wait),
            (429, Next::Wait),
            (500, Next::Wait),
            (503, Next::Wait),
            (411, Next::GiveUp),
            (301, Next::GiveUp),
        ];
        for (status, expected) in cases {
            assert_eq!(after(status), expected, "{status}");
        }
    }

    #[test]
    fn a_part_has_time_to_arrive() {
        assert_eq!(longest_put(0), Duration::from_secs(30));
        assert_eq!(longest_put(8 << 20), Duration::from_secs(30 + 128));
    }
}
