//! What changed, for all who look: heard once in a process, and told to each client.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use harmonia_queue::listen::{Channel, Listener, Wake};
use harmonia_service::api::Event;
use harmonia_service::secret::Secret;
use tokio::sync::broadcast;
use tokio::time::{Instant, sleep_until};

const CHANNELS: [Channel; 4] = [Channel::Ended, Channel::Ready, Channel::Evaluation, Channel::Stop];
/// Where nothing can be heard, clients are told to look so often.
const POLL: Duration = Duration::from_secs(5);
/// The same is told five times a second at most.
const PAUSE: Duration = Duration::from_millis(200);
/// What a client that comes back can have missed.
const KEPT: usize = 1000;
/// A client that is behind by more is told to look at everything.
const BEHIND: usize = 256;
/// More evaluations than this within a pause are told as one word.
const CROWD: usize = 50;

/// An event and its number.
pub type Told = (u64, Event);

/// Hears and tells.
pub struct Hub {
    /// Numbers begin anew with each process, this does not come again.
    name: String,
    state: Mutex<State>,
    live: broadcast::Sender<Told>,
}

#[derive(Default)]
struct State {
    last: u64,
    kept: VecDeque<Told>,
}

impl Hub {
    /// Nothing has happened.
    pub fn new() -> Self {
        let name = format!("{:08x}", rand::random::<u32>());
        Self { name, state: Mutex::default(), live: broadcast::Sender::new(BEHIND) }
    }

    /// How an event of this number is called.
    pub fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.name)
    }

    /// From now on: the number of the last event, what a client missed that has seen one before, and what comes.
    pub fn join(&self, seen: Option<&str>) -> (u64, Vec<Told>, broadcast::Receiver<Told>) {
        let state = self.lock();
        let missed = match seen {
            Some(id) => state.missed(self.number(id)),
            None => Vec::new(),
        };
        (state.last, missed, self.live.subscribe())
    }

    fn number(&self, id: &str) -> Option<u64> {
        let (name, number) = id.split_once('-')?;
        if name == self.name { number.parse().ok() } else { None }
    }

    fn tell(&self, event: Event) {
        let mut state = self.lock();
        state.last += 1;
        let told = (state.last, event);
        if state.kept.len() == KEPT {
            state.kept.pop_front();
        }
        state.kept.push_back(told.clone());
        // An error only says that nobody listens.
        let _ = self.live.send(told);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells what the database says, for ever.
    pub async fn listen(&self, direct_url: &Secret) -> Infallible {
        let mut listener = Listener::connect(direct_url.clone(), &CHANNELS, POLL).await;
        let mut pending = Pending::default();
        let mut deaf = listener.trouble.is_some();
        let mut due = Instant::now();
        loop {
            tokio::select! {
                wake = listener.next() => {
                    let was_deaf = std::mem::replace(&mut deaf, listener.trouble.is_some());
                    if let Some(event) = meaning(&wake, deaf || was_deaf) {
                        pending.add(event);
                    }
                }
                () = sleep_until(due), if !pending.0.is_empty() => {
                    std::mem::take(&mut pending.0).into_iter().for_each(|event| self.tell(event));
                    due = Instant::now() + PAUSE;
                }
            }
        }
    }
}

impl State {
    fn missed(&self, seen: Option<u64>) -> Vec<Told> {
        let first = self.kept.front().map_or(self.last + 1, |(number, _)| *number);
        match seen {
            Some(seen) if seen.saturating_add(1) >= first && seen <= self.last => {
                self.kept.iter().filter(|(number, _)| *number > seen).cloned().collect()
            }
            _ => vec![(self.last, Event::Resync)],
        }
    }
}

/// What a client should look at. `deaf`: something may have been missed.
fn meaning(wake: &Wake, deaf: bool) -> Option<Event> {
    match wake {
        Wake::Hint(Channel::Ended | Channel::Ready, _) => Some(Event::Builds),
        Wake::Hint(Channel::Stop, _) => Some(Event::Nodes),
        Wake::Hint(Channel::Evaluation, id) => Some(Event::Evaluation { id: id.parse().ok()? }),
        Wake::Poll => deaf.then_some(Event::Resync),
    }
}

/// What is to be told after the pause, each once.
#[derive(Default)]
struct Pending(Vec<Event>);

impl Pending {
    fn add(&mut self, event: Event) {
        if self.0.contains(&Event::Resync) || self.0.contains(&event) {
            return;
        }
        if event == Event::Resync || self.0.len() == CROWD {
            self.0.clear();
            self.0.push(Event::Resync);
        } else {
            self.0.push(event);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn numbers(hub: &Hub, seen: &str) -> Vec<u64> {
        hub.join(Some(seen)).1.into_iter().map(|(number, _)| number).collect()
    }

    #[test]
    fn who_comes_back_hears_what_was_missed_and_no_more() {
        let hub = Hub::new();
        (0..5).for_each(|_| hub.tell(Event::Builds));
        assert_eq!(numbers(&hub, &hub.id(3)), [4, 5]);
        assert_eq!(numbers(&hub, &hub.id(5)), [] as [u64; 0]);
        assert_eq!(hub.join(None).1, []);
    }

    #[test]
    fn who_was_away_too_long_or_elsewhere_is_told_to_look_at_everything() {
        let hub = Hub::new();
        (0..KEPT + 10).for_each(|_| hub.tell(Event::Builds));
        let newest = KEPT as u64 + 10;
        for id in [&hub.id(9), &hub.id(newest + 1), "other-1", "", "-", &hub.id(u64::MAX)] {
            assert_eq!(hub.join(Some(id)).1, [(newest, Event::Resync)], "{id}");
        }
        assert_eq!(hub.join(Some(&hub.id(10))).1.len(), KEPT);
    }

    #[test]
    fn nothing_falls_between_what_was_missed_and_what_comes() {
        let hub = Hub::new();
        hub.tell(Event::Builds);
        let (last, missed, mut live) = hub.join(Some(&hub.id(0)));
        hub.tell(Event::Nodes);
        assert_eq!((last, missed), (1, vec![(1, Event::Builds)]));
        assert_eq!(live.try_recv().unwrap(), (2, Event::Nodes));
        assert!(live.try_recv().is_err());
    }

    #[test]
    fn the_same_is_told_once_and_a_crowd_as_one_word() {
        let mut pending = Pending::default();
        for _ in 0..100 {
            pending.add(Event::Builds);
            pending.add(Event::Evaluation { id: 1 });
        }
        assert_eq!(pending.0, [Event::Builds, Event::Evaluation { id: 1 }]);
        (0..100).for_each(|id| pending.add(Event::Evaluation { id }));
        assert_eq!(pending.0, [Event::Resync]);
    }

    #[test]
    fn a_poll_means_something_only_to_the_deaf() {
        assert_eq!(meaning(&Wake::Poll, false), None);
        assert_eq!(meaning(&Wake::Poll, true), Some(Event::Resync));
        assert_eq!(meaning(&Wake::Hint(Channel::Evaluation, "x".to_owned()), false), None);
    }
}
