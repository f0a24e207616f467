//! `/live`: tells a page that something changed, once a second at most. What to show then, the page asks for.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures::stream;
use harmonia_queue::Db;
use harmonia_queue::pages::{self, Pulse};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::Web;
use super::frame::Trouble;
use super::visitor::Looking;
use crate::api::Hub;

/// How often the database is asked for what nobody tells, such as that a builder has claimed something, and how often a page is
/// told.
const BEAT: Duration = Duration::from_millis(1000);
/// Nobody has looked for so long: nobody is asked.
const REST: Duration = Duration::from_secs(60);

/// The version of everything: another number whenever something may have changed.
pub struct Live {
    db: Db,
    hub: Arc<Hub>,
    version: watch::Sender<u64>,
    /// Somebody looked since the last beat.
    looked: AtomicBool,
    awake: AtomicBool,
}

impl Live {
    /// Asleep.
    pub fn new(db: Db, hub: Arc<Hub>) -> Self {
        let (looked, awake) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { db, hub, version: watch::Sender::new(1), looked, awake }
    }

    /// The version that whoever looks now sees. What happened while nobody did is not known: then it is another one.
    pub fn version(&self) -> u64 {
        self.looked.store(true, Ordering::Relaxed);
        if !self.awake.swap(true, Ordering::Relaxed) {
            self.change();
        }
        *self.version.borrow()
    }

    /// Something changed.
    pub fn change(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Hears of changes and looks for them, for ever.
    pub async fn run(&self) -> Infallible {
        let (_, _, mut told) = self.hub.join(None);
        let (mut last, mut looked) = (Pulse::default(), Instant::now());
        let mut due = Instant::now();
        loop {
            tokio::select! {
                // However much was missed, it is one change.
                _ = told.recv() => self.change(),
                () = sleep_until(due) => {
                    due = Instant::now() + BEAT;
                    if self.looked.swap(false, Ordering::Relaxed) || self.version.receiver_count() > 0 {
                        looked = Instant::now();
                    }
                    if looked.elapsed() > REST {
                        self.awake.store(false, Ordering::Relaxed);
                    } else if let Ok(pulse) = pages::pulse(&self.db).await
                        && std::mem::replace(&mut last, pulse) != pulse
                    {
                        self.change();
                    }
                }
            }
        }
    }
}

/// Server-sent events `changed`, for as long as the page is open.
pub async fn follow(_: Looking, State(web): State<Arc<Web>>) -> Result<Response, Trouble> {
    let permit = web.streams.enter()?;
    web.live.version();
    let mut versions = web.live.version.subscribe();
    versions.mark_unchanged();
    let told = stream::unfold((versions, false), |(mut versions, again)| async move {
        if again {
            sleep(BEAT).await;
        }
        versions.changed().await.ok()?;
        let version = *versions.borrow_and_update();
        Some((Event::default().event("changed").data(version.to_string()), (versions, true)))
    });
    Ok(web.streams.answer(permit, told).into_response())
}
