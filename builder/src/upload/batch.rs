//! Many who ask at the same time share a request.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use super::SignerError;
use super::ask::{Question, Signers};

/// Questions in one request: the signer makes S3 calls for each, and answers when all are done.
const MOST: usize = 50;
/// How long the first waits for others.
const LINGER: Duration = Duration::from_millis(2);
/// Requests at a time: while they are on their way, others gather.
const IN_FLIGHT: usize = 4;

type Answered<Q> = oneshot::Sender<Result<<Q as Question>::Answer, SignerError>>;

/// A place to ask one question.
pub(super) struct Batcher<Q: Question> {
    queue: mpsc::Sender<(Q, Answered<Q>)>,
}

impl<Q: Question> Batcher<Q> {
    /// Gathers and asks until it is dropped.
    pub fn new(signers: Arc<Signers>) -> Self {
        let (queue, questions) = mpsc::channel(MOST);
        tokio::spawn(gather(questions, signers));
        Self { queue }
    }

    /// None: the runtime is shutting down.
    pub async fn ask(&self, question: Q) -> Option<Result<Q::Answer, SignerError>> {
        let (answered, answer) = oneshot::channel();
        self.queue.send((question, answered)).await.ok()?;
        answer.await.ok()
    }
}

async fn gather<Q: Question>(mut questions: mpsc::Receiver<(Q, Answered<Q>)>, signers: Arc<Signers>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    while let Some(first) = questions.recv().await {
        let Ok(permit) = Arc::clone(&in_flight).acquire_owned().await else { return };
        let mut batch = vec![first];
        let until = Instant::now() + LINGER;
        while batch.len() < MOST
            && let Ok(Some(next)) = timeout_at(until, questions.recv()).await
        {
            batch.push(next);
        }
        // Whoever stopped waiting has no use for a slot.
        batch.retain(|(_, answered)| !answered.is_closed());
        let signers = Arc::clone(&signers);
        tokio::spawn(async move {
            ask_together(&signers, batch).await;
            drop(permit);
        });
    }
}

async fn ask_together<Q: Question>(signers: &Signers, batch: Vec<(Q, Answered<Q>)>) {
    let (questions, answered): (Vec<Q>, Vec<_>) = batch.into_iter().unzip();
    if questions.is_empty() {
        return;
    }
    let alone = questions.len() == 1;
    let mut answered = answered;
    let answers = tokio::select! {
        answers = signers.ask(questions.clone()) => answers,
        () = nobody_waits(&mut answered) => return,
    };
    match answers {
        Ok(answers) => {
            for (answered, answer) in answered.into_iter().zip(answers) {
                // Nobody waits for it any more.
                let _ = answered.send(Ok(answer));
            }
        }
        // One of them may be what is wrong: it must not spoil the others.
        Err(SignerError::Rejected { .. }) if !alone => {
            for (question, mut answered) in questions.into_iter().zip(answered) {
                tokio::select! {
                    answer = signers.ask(vec![question]) => drop(answered.send(answer.and_then(only))),
                    () = answered.closed() => {}
                }
            }
        }
        Err(error) => {
            for answered in answered {
                let _ = answered.send(Err(error.clone()));
            }
        }
    }
}

/// Ends when all who asked were cancelled, or belong to a life that is over: signers may be away for a day.
async fn nobody_waits<A>(answered: &mut [oneshot::Sender<A>]) {
    for answered in answered {
        answered.closed().await;
    }
}

/// The answer to one question.
fn only<A>(answers: Vec<A>) -> Result<A, SignerError> {
    let missing = || SignerError::Rejected { reason: "the answer is empty".to_owned() };
    answers.into_iter().next().ok_or_else(missing)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use harmonia_service::protocol::{Token, Wish};
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::super::{Limits, http_client};
    use super::*;

    #[tokio::test]
    async fn signers_that_are_away_are_asked_for_as_long_as_somebody_waits() {
        let token = Token::Builder { session: 1, secret: "secret".to_owned() };
        let limits = Limits { patience: Duration::from_secs(24 * 3600), ..Limits::default() };
        let (_known, urls) = watch::channel(Vec::new());
        let signers = Arc::new(Signers::new(http_client().unwrap(), urls, &token, limits));
        let batcher = Batcher::new(Arc::clone(&signers));
        let wish = || Wish::Published { path: "/nix/store/x".to_owned() };
        let both = async { tokio::join!(batcher.ask(wish()), batcher.ask(wish())) };
        assert!(timeout(Duration::from_millis(100), both).await.is_err());
        // Of those who have it, the test and the batcher are left.
        let ended = async {
            while Arc::strong_count(&signers) > 2 {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(10), ended).await.unwrap();
    }
}
