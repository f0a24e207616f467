//! Wake-ups: LISTEN where it works, a jittered poll as the truth. A payload is a hint that anybody may have sent: it
//! says that it is worth asking, never what the answer is.

use std::time::Duration;

use sqlx::postgres::PgListener;
use tokio::time::{Instant, sleep_until, timeout};

use crate::{Db, Result};

/// What is told to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// To builders: jobs of these classes became ready.
    Ready,
    /// To frontends: jobs came to an end.
    Ended,
    /// To builders: a build is to be stopped, or a node drains or does not any more. Ask with a heartbeat.
    Stop,
    /// To resolvers: there may be something to resolve.
    Resolve,
    /// To evaluators and frontends: this evaluation was asked for, began or ended.
    Evaluation,
}

impl Channel {
    fn name(self) -> &'static str {
        match self {
            Self::Ready => "ci_ready",
            Self::Ended => "ci_ended",
            Self::Stop => "ci_stop",
            Self::Resolve => "ci_resolve",
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
    url: String,
    beside: Option<Db>,
    channels: Vec<Channel>,
    poll: Duration,
    next_poll: Instant,
    next_try: Instant,
    inner: Option<PgListener>,
    /// Why there are no hints, if there are none: a sentence for `/readyz`.
    pub trouble: Option<String>,
}

impl Listener {
    /// Listens on `channels` and polls about every `poll`. `direct_url` should bypass a transaction-mode pooler.
    pub async fn connect(direct_url: &str, channels: &[Channel], poll: Duration) -> Self {
        Self::open(direct_url, None, channels, poll).await
    }

    /// The same for one who counts connections: what it says to itself goes by `db`, not by one more.
    pub async fn beside(db: &Db, direct_url: &str, channels: &[Channel], poll: Duration) -> Self {
        Self::open(direct_url, Some(db.clone()), channels, poll).await
    }

    async fn open(url: &str, beside: Option<Db>, channels: &[Channel], poll: Duration) -> Self {
        let now = Instant::now();
        let mut listener = Self {
            url: url.to_owned(),
            beside,
            channels: channels.to_vec(),
            poll,
            next_poll: now + jitter(poll),
            next_try: now,
            inner: None,
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
                    // What was sent while the connection was away is lost: look now.
                    Ok(None) | Err(_) => {
                        self.inner = None;
                        self.trouble = Some("the connection that listens was lost".to_owned());
                        self.next_try = Instant::now();
                        return self.polled();
                    }
                },
                () = sleep_until(self.next_poll) => return self.polled(),
            }
        }
    }

    fn polled(&mut self) -> Wake {
        self.next_poll = Instant::now() + jitter(self.poll);
        Wake::Poll
    }

    /// Proves that LISTEN works here by hearing itself: a transaction-mode pooler takes the command and delivers nothing, or
    /// to the wrong client. So nothing but a channel of its own is listened to before that: a pooled connection that listened
    /// to the real ones would break into the calls of whoever has it next.
    async fn try_listen(&mut self) -> bool {
        let attempt = async {
            let mut inner = PgListener::connect(&self.url).await?;
            inner.eager_reconnect(false);
            let probe = format!("ci_probe_{:016x}", rand::random::<u64>());
            inner.listen(&probe).await?;
            let db = self.beside.clone().map_or_else(|| Db::pooled(&self.url, 1), Ok)?;
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
