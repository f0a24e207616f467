//! Wake-ups: LISTEN where it works, a jittered poll as the truth. A payload is a hint that anybody may have sent: it
//! says that it is worth asking, never what the answer is.

use std::fmt;
use std::time::Duration;

use sqlx::Executor;
use sqlx::postgres::PgListener;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::{Db, Result};

/// A connection that has not answered for so long is lost.
const ROUND_TRIP: Duration = Duration::from_secs(5);

/// Where PostgreSQL itself is, past a pooler.
pub trait Address: fmt::Debug + Send + Sync {
    /// Its URL, read anew for every connection, for its password may have changed. None: it cannot be read just now.
    fn url(&self) -> Option<String>;
}

impl Address for String {
    fn url(&self) -> Option<String> {
        Some(self.clone())
    }
}

/// What is told to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// To builders: jobs of these classes became ready.
    Ready,
    /// To frontends: jobs came to an end.
    Ended,
    /// To builders: a build is to be stopped, or a node drains or does not any more. Ask with a heartbeat.
    Stop,
    /// To evaluators and frontends: this evaluation was asked for, began or ended.
    Evaluation,
}

impl Channel {
    fn name(self) -> &'static str {
        match self {
            Self::Ready => "ci_ready",
            Self::Ended => "ci_ended",
            Self::Stop => "ci_stop",
            Self::Evaluation => "ci_evaluation",
        }
    }
}

/// Sends a hint, in a transaction of its own: inside a writing one it would serialise all writers.
pub async fn notify(db: &Db, channel: Channel, payload: &str) -> Result<()> {
    let hint: String = payload.chars().take(200).collect();
    db.row(sqlx::query("SELECT pg_notify($1, $2)").bind(channel.name()).bind(hint)).await?;
    Ok(())
}

/// Why a waiter woke up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wake {
    /// A hint came.
    Hint(Channel, String),
    /// Time to look, hint or not; also right after a lost connection was made again.
    Poll,
}

/// Waits for hints. Survives restarts of the database and works, by polling, where LISTEN does not.
#[derive(Debug)]
pub struct Listener {
    address: Box<dyn Address>,
    beside: Option<Db>,
    channels: Vec<Channel>,
    poll: Duration,
    next_poll: Instant,
    next_try: Instant,
    inner: Option<PgListener>,
    /// By when it has to say that it lives, once it was asked: [`Self::next`] may be given up, and begin anew, before that.
    answer_by: Option<Instant>,
    /// Why there are no hints, if there are none: a sentence for `/readyz`.
    pub trouble: Option<String>,
}

impl Listener {
    /// Listens on `channels` and polls about every `poll`. `address` should bypass a transaction-mode pooler.
    pub async fn connect(address: impl Address + 'static, channels: &[Channel], poll: Duration) -> Self {
        Self::open(Box::new(address), None, channels, poll).await
    }

    /// The same for one who counts connections: what it says to itself goes by `db`, not by one more.
    pub async fn beside(
        db: &Db,
        address: impl Address + 'static,
        channels: &[Channel],
        poll: Duration,
    ) -> Self {
        Self::open(Box::new(address), Some(db.clone()), channels, poll).await
    }

    async fn open(
        address: Box<dyn Address>,
        beside: Option<Db>,
        channels: &[Channel],
        poll: Duration,
    ) -> Self {
        let now = Instant::now();
        let mut listener = Self {
            address,
            beside,
            channels: channels.to_vec(),
            poll,
            next_poll: now + jitter(poll),
            next_try: now,
            inner: None,
            answer_by: None,
            trouble: None,
        };
        listener.try_listen().await;
        listener
    }

    /// The next reason to look.
    pub async fn next(&mut self) -> Wake {
        loop {
            let Some(inner) = &mut self.inner else {
                sleep_until(self.next_poll.min(self.next_try)).await;
                if Instant::now() >= self.next_try && self.try_listen().await {
                    return self.polled();
                }
                if Instant::now() >= self.next_poll {
                    return self.polled();
                }
                continue;
            };
            tokio::select! {
                message = inner.try_recv() => match message {
                    Ok(Some(message)) => {
                        let heard = self.channels.iter().find(|channel| channel.name() == message.channel());
                        if let Some(&channel) = heard {
                            return Wake::Hint(channel, message.payload().to_owned());
                        }
                    }
                    Ok(None) | Err(_) => return self.lost(),
                },
                () = sleep_until(self.next_poll) => {
                    // A host that vanished says nothing, and neither does a database in which nothing happens.
                    let answer_by = *self.answer_by.get_or_insert_with(|| Instant::now() + ROUND_TRIP);
                    return match timeout_at(answer_by, inner.execute("SELECT 1")).await {
                        Ok(Ok(_)) => self.polled(),
                        Ok(Err(_)) | Err(_) => self.lost(),
                    };
                }
            }
        }
    }

    /// What was sent while the connection was away is lost: look now.
    fn lost(&mut self) -> Wake {
        tracing::info!("the connection that listens was lost: looking at once, and listening anew");
        self.inner = None;
        self.trouble = Some("the connection that listens was lost".to_owned());
        self.next_try = Instant::now();
        self.polled()
    }

    fn polled(&mut self) -> Wake {
        self.answer_by = None;
        self.next_poll = Instant::now() + jitter(self.poll);
        Wake::Poll
    }

    /// Proves that LISTEN works here by hearing itself: a transaction-mode pooler takes the command and delivers nothing, or
    /// to the wrong client. So nothing but a channel of its own is listened to before that: a pooled connection that listened
    /// to the real ones would break into the calls of whoever has it next.
    async fn try_listen(&mut self) -> bool {
        let Some(url) = self.address.url() else {
            self.pause("cannot listen: the database's URL cannot be read".to_owned(), Duration::from_secs(2));
            return false;
        };
        let attempt = async {
            let mut inner = PgListener::connect(&url).await?;
            inner.eager_reconnect(false);
            let probe = format!("ci_probe_{:016x}", rand::random::<u64>());
            inner.listen(&probe).await?;
            let db = self.beside.clone().map_or_else(|| Db::pooled(&url, 1), Ok)?;
            match db.row(sqlx::query("SELECT pg_notify($1, '')").bind(&probe)).await {
                Err(crate::Error::Database(sqlx::Error::Protocol(_))) => return Ok(None),
                sent => sent?,
            };
            let heard = timeout(Duration::from_secs(2), async {
                while inner.try_recv().await?.is_none_or(|message| message.channel() != probe) {}
                Ok::<_, sqlx::Error>(())
            });
            match heard.await {
                Ok(Ok(())) => {
                    inner.listen_all(self.channels.iter().map(|channel| channel.name())).await?;
                    inner.unlisten(&probe).await?;
                    Ok(Some(inner))
                }
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Ok::<_, crate::Error>(None),
            }
        };
        match timeout(Duration::from_secs(10), attempt).await {
            Ok(Ok(Some(inner))) => {
                self.inner = Some(inner);
                self.trouble = None;
                true
            }
            Ok(Ok(None)) => {
                self.pause(
                    "LISTEN delivers nothing on this connection, as through a pooler in transaction mode: polling \
                     instead; set HARMONIA_CI_DATABASE_DIRECT_URL to reach PostgreSQL itself"
                        .to_owned(),
                    Duration::from_secs(300),
                );
                false
            }
            Ok(Err(error)) => {
                self.pause(format!("cannot listen: {error}"), Duration::from_secs(2));
                false
            }
            Err(_) => {
                self.pause("cannot listen: no answer within 10 s".to_owned(), Duration::from_secs(2));
                false
            }
        }
    }

    fn pause(&mut self, trouble: String, pause: Duration) {
        if self.trouble.as_ref() != Some(&trouble) {
            tracing::warn!(trouble, "no wake-ups");
        }
        self.trouble = Some(trouble);
        self.next_try = Instant::now() + jitter(pause);
    }
}

/// Between three quarters and five quarters of it, so that a herd disperses.
fn jitter(duration: Duration) -> Duration {
    duration.mul_f64(0.75 + 0.5 * rand::random::<f64>())
}
