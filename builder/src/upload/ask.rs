//! Asking signers: any of them will do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use harmonia_service::protocol::{
    BuildResult, CompleteAnswer, CompleteRequest, Outcome, Slot, SlotsAnswer, SlotsRequest, StoredSource,
    Token, Wish,
};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Client, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};

use super::http::body;
use super::retry::pause;
use super::{Limits, SignerError};

/// One answer is never longer: fifty slots have a signed address each, of at most some kilobytes.
const LONGEST_ANSWER: usize = 4 << 20;
/// A signer makes some S3 calls for each question before it answers.
const PATIENCE_WITH_ONE: Duration = Duration::from_secs(60);

/// What can be asked, many at once.
pub(super) trait Question: Clone + Send + Sync + 'static {
    type Request: Serialize + Send;
    type Reply: DeserializeOwned;
    type Answer: Answer + Send + 'static;
    const PATH: &'static str;

    fn request(questions: Vec<Self>) -> Self::Request;
    fn answers(reply: Self::Reply) -> Vec<Self::Answer>;
}

/// What is said to a question.
pub(super) trait Answer {
    /// Why it is to be asked again later, if it is.
    fn later(&self) -> Option<&str>;
}

impl Answer for Slot {
    fn later(&self) -> Option<&str> {
        if let Self::Later { reason } = self { Some(reason) } else { None }
    }
}

impl Answer for Outcome {
    fn later(&self) -> Option<&str> {
        if let Self::Later { reason } = self { Some(reason) } else { None }
    }
}

impl Question for Wish {
    type Request = SlotsRequest;
    type Reply = SlotsAnswer;
    type Answer = Slot;
    const PATH: &'static str = "/api/upload-slots";

    fn request(wishes: Vec<Self>) -> SlotsRequest {
        SlotsRequest { wishes }
    }

    fn answers(reply: SlotsAnswer) -> Vec<Slot> {
        reply.slots
    }
}

impl Question for BuildResult {
    type Request = CompleteRequest;
    type Reply = CompleteAnswer;
    type Answer = Outcome;
    const PATH: &'static str = "/api/build-complete";

    fn request(results: Vec<Self>) -> CompleteRequest {
        CompleteRequest { results, sources: Vec::new() }
    }

    fn answers(reply: CompleteAnswer) -> Vec<Outcome> {
        reply.results
    }
}

impl Question for StoredSource {
    type Request = CompleteRequest;
    type Reply = CompleteAnswer;
    type Answer = Outcome;
    const PATH: &'static str = "/api/build-complete";

    fn request(sources: Vec<Self>) -> CompleteRequest {
        CompleteRequest { results: Vec::new(), sources }
    }

    fn answers(reply: CompleteAnswer) -> Vec<Outcome> {
        reply.sources
    }
}

/// The signers, and how to speak to them.
pub(super) struct Signers {
    http: Client,
    urls: watch::Receiver<Vec<String>>,
    authorization: Option<HeaderValue>,
    limits: Limits,
    /// The one that answered last: its connections are open.
    preferred: AtomicUsize,
    /// None of them answered.
    pub unanswered: Notify,
}

/// What to do with a signer's status.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Read,
    SessionOver,
    NextSigner,
    Rejected,
}

fn verdict(status: StatusCode) -> Verdict {
    match status.as_u16() {
        200..=299 => Verdict::Read,
        401 | 403 => Verdict::SessionOver,
        // 404: a stale address that somebody else has now.
        404 | 408 | 425 | 429 | 500.. => Verdict::NextSigner,
        _ => Verdict::Rejected,
    }
}

/// How one signer failed.
enum Failure {
    /// Another may do better.
    Signer(String, Option<reqwest::Error>),
    /// No other will.
    Final(SignerError),
}

impl Signers {
    pub fn new(http: Client, urls: watch::Receiver<Vec<String>>, token: &Token, limits: Limits) -> Self {
        let authorization =
            HeaderValue::from_str(&format!("Bearer {}", token.to_text())).ok().map(|mut value| {
                value.set_sensitive(true);
                value
            });
        Self {
            http,
            urls,
            authorization,
            limits,
            preferred: AtomicUsize::new(rand::random_range(0..1024)),
            unanswered: Notify::new(),
        }
    }

    /// Asks until somebody answers, for as long as the limits allow.
    pub async fn ask<Q: Question>(&self, questions: Vec<Q>) -> Result<Vec<Q::Answer>, SignerError> {
        let count = questions.len();
        let request = serde_json::to_vec(&Q::request(questions)).map(Bytes::from);
        let request = request.map_err(|error| SignerError::Rejected { reason: error.to_string() })?;
        let until = Instant::now() + self.limits.patience;
        let mut urls = self.urls.clone();
        let mut attempt = 0;
        loop {
            let known = urls.borrow_and_update().clone();
            let mut trouble = ("none is known".to_owned(), None);
            let preferred = self.preferred.load(Ordering::Relaxed);
            for turn in 0..known.len() {
                let index = (preferred + turn) % known.len();
                match self.ask_one::<Q>(&known[index], request.clone(), count).await {
                    Ok(answers) => {
                        self.preferred.store(index, Ordering::Relaxed);
                        return Ok(answers);
                    }
                    Err(Failure::Signer(reason, source)) => trouble = (reason, source),
                    Err(Failure::Final(error)) => return Err(error),
                }
            }
            if Instant::now() >= until {
                let (reason, source) = trouble;
                return Err(SignerError::Unreachable { reason, source: source.map(Arc::new) });
            }
            tracing::debug!(attempt, reason = trouble.0, "no signer answered");
            self.unanswered.notify_one();
            tokio::select! {
                () = sleep(pause(self.limits.pause, attempt)) => {}
                // A list that nobody keeps up to date any more is still a list.
                Ok(()) = urls.changed() => {}
            }
            attempt += 1;
        }
    }

    async fn ask_one<Q: Question>(
        &self,
        url: &str,
        request: Bytes,
        count: usize,
    ) -> Result<Vec<Q::Answer>, Failure> {
        let unreachable = |error: reqwest::Error| {
            let error = error.without_url();
            Failure::Signer("the connection failed".to_owned(), Some(error))
        };
        let authorization = self.authorization.clone().ok_or(Failure::Final(SignerError::SessionOver))?;
        let response = self
            .http
            .post(format!("{}{}", url.trim_end_matches('/'), Q::PATH))
            .header(AUTHORIZATION, authorization)
            .header(CONTENT_TYPE, "application/json")
            .timeout(PATIENCE_WITH_ONE)
            .body(request)
            .send()
            .await
            .map_err(unreachable)?;
        let status = response.status();
        let verdict = verdict(status);
        if verdict == Verdict::SessionOver {
            return Err(Failure::Final(SignerError::SessionOver));
        }
        let bytes = body(response, LONGEST_ANSWER).await.map_err(unreachable)?;
        match verdict {
            Verdict::Read => {
                let answers = serde_json::from_slice(&bytes).map(Q::answers).unwrap_or_default();
                if answers.len() == count {
                    Ok(answers)
                } else {
                    // Another version, perhaps, in the middle of an upgrade.
                    Err(Failure::Signer("its answer is not understood".to_owned(), None))
                }
            }
            Verdict::NextSigner => Err(Failure::Signer(detail(status, &bytes), None)),
            Verdict::Rejected | Verdict::SessionOver => {
                Err(Failure::Final(SignerError::Rejected { reason: detail(status, &bytes) }))
            }
        }
    }
}

/// The sentence in a problem document.
fn detail(status: StatusCode, body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Problem {
        detail: String,
    }
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => format!("{status}: {}", problem.detail.chars().take(500).collect::<String>()),
        Err(_) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_decides_who_is_asked_next() {
        let cases = [
            (200, Verdict::Read),
            (401, Verdict::SessionOver),
            (403, Verdict::SessionOver),
            (400, Verdict::Rejected),
            (413, Verdict::Rejected),
            (422, Verdict::Rejected),
            (302, Verdict::Rejected),
            (404, Verdict::NextSigner),
            (429, Verdict::NextSigner),
            (500, Verdict::NextSigner),
            (503, Verdict::NextSigner),
        ];
        for (status, expected) in cases {
            assert_eq!(verdict(StatusCode::from_u16(status).unwrap()), expected, "{status}");
        }
    }

    #[test]
    fn a_problem_is_quoted_and_anything_else_is_not() {
        let problem = br#"{"status":400,"title":"Bad Request","detail":"too many wishes"}"#;
        assert_eq!(detail(StatusCode::BAD_REQUEST, problem), "400 Bad Request: too many wishes");
        assert_eq!(detail(StatusCode::BAD_REQUEST, b"<html>"), "400 Bad Request");
    }
}
