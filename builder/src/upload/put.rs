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
    /// The slot may be what is wrong: it has expired, perhaps.
    AskAgain,
    /// There is no such place: the upload that a part belongs to is gone.
    NoPlace,
    /// The bytes that arrived are not those that were signed.
    Resend,
    Wait,
    GiveUp,
}

fn after(status: u16) -> Next {
    match status {
        200..=299 => Next::Done,
        412 => Next::Present,
        401 | 403 => Next::AskAgain,
        400 => Next::Resend,
        404 => Next::NoPlace,
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
    /// Stores bytes under a wish. A bucket that is away is waited for as long as a signer; one that finds the bytes garbled, or
    /// takes them at no place, is tried as often as the limits allow. Where a part goes is asked without a look at the bucket:
    /// whether that is away is found out from the beginning.
    pub(super) async fn put(&self, what: &str, wish: Wish, bytes: Bytes) -> Result<Sent, Stop> {
        let until = Instant::now() + self.limits.patience;
        let is_part = matches!(wish, Wish::Part { .. });
        let (mut slot, mut attempt, mut garbled, mut refused) = (None, 0, 0, 0);
        loop {
            let (url, headers) = match slot.take() {
                Some(slot) => slot,
                None => match self.slot(what, wish.clone()).await? {
                    Slot::Put { url, headers } => (url, headers),
                    Slot::Present => return Ok(Sent::Present),
                    _ => return Err(foreign_slot()),
                },
            };
            let (next, etag, reason) = match self.send(&url, &headers, bytes.clone()).await {
                Ok((status, etag)) => (after(status), etag, format!("it answered {status}")),
                // It may have been refused while it was still being sent.
                Err(error) => (Next::AskAgain, None, format!("the connection broke: {}", innermost(&error))),
            };
            match next {
                Next::Done => return Ok(Sent::Stored(etag)),
                Next::Present => return Ok(Sent::Present),
                Next::Wait if Instant::now() < until => slot = Some((url, headers)),
                Next::NoPlace if is_part => {
                    return Err(Stop::Again(format!("{what}: the bucket forgot the upload")));
                }
                Next::AskAgain | Next::NoPlace if refused < self.limits.refusals => refused += 1,
                Next::AskAgain if is_part => return Err(Stop::Again(format!("{what}: {reason}"))),
                Next::Resend if garbled + 1 < self.limits.tries => garbled += 1,
                _ => return Err(UploadError::Bucket { what: what.to_owned(), reason }.into()),
            }
            match attempt + 1 == self.limits.tries {
                true => tracing::warn!(what, reason, "the bucket does not take it yet"),
                false => tracing::debug!(what, attempt, reason, "a PUT failed"),
            }
            sleep(pause(self.limits.pause, attempt)).await;
            attempt += 1;
        }
    }

    /// A slot, once there is one.
    pub(super) async fn slot(&self, what: &str, wish: Wish) -> Result<Slot, Stop> {
        match self.ask(&self.slots, what, wish).await? {
            Slot::Refused { reason } => Err(Stop::Refused(reason)),
            slot => Ok(slot),
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
            (404, Next::NoPlace),
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
