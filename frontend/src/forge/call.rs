//! Requests to a forge, and what its answers mean.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, StatusCode};
use harmonia_service::secret::SecretError;
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;
use reqwest::redirect::Policy;
use reqwest::{Client, Method, RequestBuilder, Response, Url};
use serde::de::DeserializeOwned;
use thiserror::Error;

/// How long a forge may take for an answer. A commit is told two statuses under one lease of a minute.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer: a page of a hundred branches has a tenth of it.
const LONGEST: usize = 4 << 20;
/// How much of a refusal is worth a place in a log.
const WORDS: usize = 300;
/// A forge that says nothing better is left in peace for so long,
const PAUSE: Duration = Duration::from_secs(60);
/// and never for longer than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Why a forge did not do what it was asked.
#[derive(Debug, Error)]
pub enum ForgeError {
    /// A token, or a key, cannot be read.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The key of the App is none.
    #[error("the private key of the GitHub App is no RSA key in PEM: download it again from the App's page")]
    Key,
    /// It is not there, or too slow.
    #[error("the forge cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    /// It wants to be left in peace.
    #[error("the forge asks for patience, for {} s", .0.as_secs())]
    Limited(Duration),
    /// What was asked about is elsewhere. It is not asked for there: webhooks have the new name, and find no project of that.
    #[error(
        "the forge points elsewhere, at {to}: if the repository was renamed or transferred, name it anew in the project"
    )]
    Moved {
        /// Where it is.
        to: String,
    },
    /// It tells only some who may push.
    #[error(
        "the forge tells administrators of a repository alone who may push to it: make the user of our token one"
    )]
    Discreet,
    /// It will not.
    #[error("the forge answered {status}: {words}")]
    Refused {
        /// The status of the answer.
        status: StatusCode,
        /// What it said.
        words: String,
    },
    /// It answered what nobody expects.
    #[error("the forge's answer cannot be read")]
    Unreadable(#[source] serde_json::Error),
    /// It answered more than anybody expects.
    #[error("the forge's answer is longer than {LONGEST} bytes")]
    Endless,
}

impl ForgeError {
    /// Whether a repository is asked about in vain until somebody changes its project, or our token.
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Moved { .. } | Self::Discreet => true,
            Self::Refused { status, .. } => matches!(*status, StatusCode::FORBIDDEN | StatusCode::NOT_FOUND),
            _ => false,
        }
    }
}

/// A forge's API.
#[derive(Debug, Clone)]
pub struct Http {
    client: Client,
    base: Url,
}

impl Http {
    /// Below this address.
    pub fn new(base: Url) -> Self {
        // Whoever was first decides; all of ours decide the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().timeout(PATIENCE).redirect(Policy::none()).user_agent("harmonia-ci");
        Self { client: client.build().unwrap_or_default(), base }
    }

    /// A request. Whatever a part of the path contains stays one part.
    pub fn request(&self, method: Method, path: &[&str], page: &[(&str, usize)]) -> RequestBuilder {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        if !page.is_empty() {
            url.query_pairs_mut().extend_pairs(page.iter().map(|(name, number)| (name, number.to_string())));
        }
        self.client.request(method, url)
    }
}

/// Sends a request and reads the answer.
pub async fn ask<T: DeserializeOwned>(request: RequestBuilder) -> Result<T, ForgeError> {
    ask_dated(request).await.map(|(answer, _)| answer)
}

/// The same, with what the forge's clock showed when it answered.
pub async fn ask_dated<T: DeserializeOwned>(
    request: RequestBuilder,
) -> Result<(T, Option<Timestamp>), ForgeError> {
    let (headers, body) = exchange(request).await?;
    Ok((serde_json::from_slice(&body).map_err(ForgeError::Unreadable)?, date(&headers)))
}

/// Sends a request; what the answer says does not matter.
pub async fn send(request: RequestBuilder) -> Result<(), ForgeError> {
    exchange(request).await.map(drop)
}

async fn exchange(request: RequestBuilder) -> Result<(HeaderMap, Vec<u8>), ForgeError> {
    let response = request.send().await.map_err(unreachable)?;
    let (status, headers) = (response.status(), response.headers().clone());
    let body = read(response).await?;
    if status.is_success() {
        return Ok((headers, body));
    }
    let to = headers.get("location").filter(|_| status.is_redirection());
    Err(match (pause(status, &headers, &body, now()), to) {
        (Some(wait), _) => ForgeError::Limited(wait),
        (None, Some(to)) => ForgeError::Moved { to: shortened(&String::from_utf8_lossy(to.as_bytes())) },
        (None, None) => ForgeError::Refused { status, words: shortened(&String::from_utf8_lossy(&body)) },
    })
}

async fn read(mut response: Response) -> Result<Vec<u8>, ForgeError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if body.len() + chunk.len() > LONGEST {
            return Err(ForgeError::Endless);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn unreachable(error: reqwest::Error) -> ForgeError {
    ForgeError::Unreachable(error.without_url())
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// When the forge answered, by its own clock: to the second that had begun.
fn date(headers: &HeaderMap) -> Option<Timestamp> {
    let text = headers.get("date")?.to_str().ok()?;
    DateTimeParser::new().parse_timestamp(text).ok()
}

/// How long a forge wants to be left in peace, if that is what it says. GitHub says it of its secondary limit in words alone, at times.
fn pause(status: StatusCode, headers: &HeaderMap, body: &[u8], now: Duration) -> Option<Duration> {
    let number =
        |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<u64>().ok().map(Duration::from_secs);
    let spent = number("x-ratelimit-remaining").is_some_and(|left| left.is_zero());
    let wait = match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::FORBIDDEN if number("retry-after").is_some() => {
            number("retry-after")?
        }
        StatusCode::TOO_MANY_REQUESTS | StatusCode::FORBIDDEN if spent => {
            number("x-ratelimit-reset").map_or(PAUSE, |reset| reset.saturating_sub(now))
        }
        StatusCode::TOO_MANY_REQUESTS => PAUSE,
        StatusCode::FORBIDDEN if String::from_utf8_lossy(body).to_lowercase().contains("rate limit") => PAUSE,
        _ => return None,
    };
    Some(wait.clamp(Duration::from_secs(1), LONGEST_PAUSE))
}

/// One line, not too long.
fn shortened(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).take(WORDS).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wait(status: u16, headers: &[(&'static str, &str)]) -> Option<u64> {
        wait_for(status, headers, b"")
    }

    fn wait_for(status: u16, headers: &[(&'static str, &str)], body: &[u8]) -> Option<u64> {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let status = StatusCode::from_u16(status).unwrap();
        pause(status, &headers.collect(), body, Duration::from_secs(1000)).map(|wait| wait.as_secs())
    }

    #[test]
    fn limits_of_both_kinds_are_respected() {
        assert_eq!(wait(403, &[("retry-after", "17")]), Some(17));
        assert_eq!(wait(429, &[("retry-after", "17")]), Some(17));
        assert_eq!(wait(403, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1300")]), Some(300));
        assert_eq!(wait(429, &[]), Some(60));
    }

    #[test]
    fn a_limit_that_is_told_in_words_alone_is_one() {
        let words = br#"{"message": "You have exceeded a secondary rate limit. Please wait a few minutes"}"#;
        let left = [("x-ratelimit-remaining", "4999"), ("x-ratelimit-reset", "1300")];
        assert_eq!(wait_for(403, &left, words), Some(60));
        assert_eq!(wait_for(403, &[("retry-after", "17")], words), Some(17));
        assert_eq!(wait_for(403, &left, br#"{"message": "Resource not accessible by integration"}"#), None);
        assert_eq!(wait_for(404, &[], words), None);
    }

    #[test]
    fn what_a_forges_clock_shows_is_known_to_the_second() {
        let read =
            |text: &str| date(&[("date".parse().unwrap(), text.parse().unwrap())].into_iter().collect());
        assert_eq!(read("Thu, 01 Jan 1970 00:00:07 GMT"), Timestamp::from_second(7).ok());
        assert_eq!(read("yesterday"), None);
    }

    #[test]
    fn nobody_waits_for_ever_or_not_at_all() {
        assert_eq!(wait(429, &[("retry-after", "999999999")]), Some(3600));
        assert_eq!(wait(403, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1")]), Some(1));
    }

    #[test]
    fn a_refusal_is_no_limit() {
        assert_eq!(wait(403, &[("x-ratelimit-remaining", "4999"), ("x-ratelimit-reset", "1300")]), None);
        assert_eq!(wait(404, &[("retry-after", "17")]), None);
    }

    #[test]
    fn a_part_of_a_path_stays_one() {
        let http = Http::new(Url::parse("https://host/base/").unwrap());
        let request =
            http.request(Method::GET, &["repos", "a/../b", "x?y#z"], &[("page", 2)]).build().unwrap();
        assert_eq!(request.url().as_str(), "https://host/base/repos/a%2F..%2Fb/x%3Fy%23z?page=2");
    }
}
