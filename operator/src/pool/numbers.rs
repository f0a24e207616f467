//! What only the database knows about pools: asked for all of them at once, and told to those whose numbers have changed.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harmonia_queue::Db;
use harmonia_queue::mirror::{self, Demand, PoolCounts};
use harmonia_queue::nodes::{self, Node};
use harmonia_service::sentence::sentence;
use rand::RngExt;

use crate::context::Context;
use crate::standing::Standing;

use super::scale::{Capacity, SCALE_IN, share};
use super::update_status::CALM;
use super::{KIND, database};

/// Whether the database answers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Reach {
    /// It was not asked yet.
    #[default]
    Unknown,
    /// It does.
    Yes,
    /// It does not, and why.
    No(String),
}

/// What the database knows of one pool.
#[derive(Debug, Clone)]
pub struct Figures {
    /// In numbers.
    pub counts: PoolCounts,
    /// Its builders, one by one.
    pub builders: Vec<Node>,
    /// Builds that wait and count for this pool, see [`share`].
    pub waiting: i64,
    /// When the pool is to hear of what it could take.
    due: Option<Instant>,
}

impl Figures {
    /// Whether nothing has changed that is more than to be shown. Who is about to go is looked at each time: it may take too long.
    fn same(&self, other: &Self) -> bool {
        fn word(builder: &Node) -> (i32, i64, i64, bool, i32, Vec<&str>) {
            let Node { id, building, uploading, seen, slots, drains, .. } = builder;
            let reasons = drains.iter().map(|drain| drain.reason.as_str()).collect();
            (*id, *building, *uploading, seen.is_some(), *slots, reasons)
        }
        let counts = PoolCounts { queued: self.counts.queued, ..other.counts.clone() };
        self.counts == counts
            && self.waiting == other.waiting
            && self.builders.iter().map(word).eq(other.builders.iter().map(word))
            && !self.builders.iter().any(|builder| builder.drains_for(SCALE_IN).is_some())
    }
}

/// All that is asked at once.
#[derive(Debug, Default)]
struct Census {
    counts: Vec<PoolCounts>,
    builders: HashMap<String, Vec<Node>>,
    demand: Vec<Demand>,
}

/// The figures of all pools.
#[derive(Default)]
pub struct Numbers(Mutex<(Reach, HashMap<String, Figures>)>);

impl Numbers {
    /// Whether the database answered when it was last asked.
    pub fn reach(&self) -> Reach {
        self.lock().0.clone()
    }

    /// A pool's figures, by its name in the database. None: the database does not know it, or does not answer.
    pub fn of(&self, name: &str) -> Option<Figures> {
        let state = self.lock();
        state.1.get(name).filter(|_| state.0 == Reach::Yes).cloned()
    }

    /// A pool's counts as they were when the database last answered.
    pub fn last_counts(&self, name: &str) -> Option<PoolCounts> {
        self.lock().1.get(name).map(|figures| figures.counts.clone())
    }

    /// Pools that the database has and that no resource keeps any more, with the uid that did: one that was let go while the
    /// database was away, for one.
    pub fn orphans(&self, exists: impl Fn(&str, &str) -> bool) -> Vec<(String, String)> {
        let state = self.lock();
        let kept = |name: &str| name.split_once('/').is_none_or(|(namespace, name)| exists(namespace, name));
        let orphan = |figures: &Figures| Some((figures.counts.name.clone(), figures.counts.uid.clone()?));
        state.1.values().filter(|figures| !kept(&figures.counts.name)).filter_map(orphan).collect()
    }

    /// Asks once a round, while this replica leads; knows without asking that a frozen one has no database. `capacity`: what a
    /// pool could take, by its name in the database.
    pub async fn ask(&self, context: &Context, capacity: impl Fn(&str, &[Node]) -> Capacity) {
        let answer = match (context.lead(), context.standing()) {
            (Some(lead), _) => database::bounded(census(&lead.db)).await.map_err(|error| sentence(&error)),
            (None, Standing::Frozen) => Err("the database is away".to_owned()),
            // Whoever leads asks.
            (None, _) => return,
        };
        self.put(answer.map(|census| figures(census, capacity)), context);
    }

    fn put(&self, answer: Result<HashMap<String, Figures>, String>, context: &Context) {
        let mut state = self.lock();
        let (reach, known) = &mut *state;
        match answer {
            Ok(mut figures) => {
                for name in news(known, &mut figures, Instant::now()) {
                    if let Some((namespace, name)) = name.split_once('/') {
                        context.caches.touch(KIND, namespace, name);
                    }
                }
                *known = figures;
                if let Reach::No(_) = std::mem::replace(reach, Reach::Yes) {
                    tracing::info!("the database answers again");
                    context.caches.touch_all();
                }
            }
            Err(reason) => {
                if !matches!(reach, Reach::No(_)) {
                    tracing::warn!(reason, "the database does not answer");
                    context.caches.touch_all();
                }
                *reach = Reach::No(reason);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Reach, HashMap<String, Figures>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn census(db: &Db) -> harmonia_queue::Result<Census> {
    let (counts, nodes, demand) =
        tokio::try_join!(mirror::pool_counts(db), nodes::list(db), mirror::demand(db))?;
    let mut builders: HashMap<String, Vec<Node>> = HashMap::new();
    for node in nodes {
        builders.entry(node.pool.clone()).or_default().push(node);
    }
    Ok(Census { counts, builders, demand })
}

fn figures(census: Census, capacity: impl Fn(&str, &[Node]) -> Capacity) -> HashMap<String, Figures> {
    let Census { counts, mut builders, demand } = census;
    let of = |name: &str| builders.get(name).map(Vec::as_slice).unwrap_or_default();
    let capacities =
        counts.iter().map(|pool| (pool.name.clone(), capacity(&pool.name, of(&pool.name)))).collect();
    let shares = share(&demand, &capacities);
    let figure = |counts: PoolCounts| {
        let figures = Figures {
            builders: builders.remove(&counts.name).unwrap_or_default(),
            waiting: shares.get(&counts.name).copied().unwrap_or(0),
            due: None,
            counts,
        };
        (figures.counts.name.clone(), figures)
    };
    counts.into_iter().map(figure).collect()
}

/// Pools that hear of their figures now. A build that becomes ready counts for one pool and could be taken by many: that one hears
/// of it at once, and does not wait for the others, each of which hears at a moment of its own.
fn news(
    before: &HashMap<String, Figures>,
    figures: &mut HashMap<String, Figures>,
    now: Instant,
) -> Vec<String> {
    let gone = before.keys().filter(|name| !figures.contains_key(*name)).cloned();
    let mut news: Vec<String> = gone.collect();
    for (name, new) in figures {
        let old = before.get(name);
        let due = old.and_then(|old| {
            let moved = old.counts.queued != new.counts.queued;
            old.due.or_else(|| moved.then(|| now + rand::rng().random_range(Duration::ZERO..CALM)))
        });
        let hears = !old.is_some_and(|old| old.same(new)) || due.is_some_and(|due| due <= now);
        new.due = due.filter(|_| !hears);
        news.extend(hears.then(|| name.clone()));
    }
    news
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn figures(pools: &[(&str, i64)]) -> HashMap<String, Figures> {
        let counts = |(name, busy): &(&str, i64)| {
            let name = (*name).to_owned();
            let counts = PoolCounts {
                name: name.clone(),
                uid: Some("one".to_owned()),
                nodes: 1,
                busy: *busy,
                draining: 0,
                building: 0,
                uploading: 0,
                queued: 0,
            };
            (name, Figures { counts, builders: Vec::new(), waiting: 0, due: None })
        };
        pools.iter().map(counts).collect()
    }

    #[test]
    fn what_no_pool_keeps_is_an_orphan_unless_people_do() {
        let mut known = figures(&[("ci/a", 0), ("ci/b", 0), ("ci/c", 0), ("by-hand", 0)]);
        known.get_mut("ci/c").unwrap().counts.uid = None;
        let numbers = Numbers(Mutex::new((Reach::Yes, known)));
        assert_eq!(numbers.orphans(|_, name| name == "a"), [("ci/b".to_owned(), "one".to_owned())]);
    }

    fn heard(
        before: &HashMap<String, Figures>,
        figures: &mut HashMap<String, Figures>,
        now: Instant,
    ) -> Vec<String> {
        let mut names = news(before, figures, now);
        names.sort_unstable();
        names
    }

    #[test]
    fn only_pools_with_other_numbers_hear_of_them() {
        let (before, mut now) = (
            figures(&[("ci/a", 1), ("ci/b", 1), ("ci/c", 1)]),
            figures(&[("ci/a", 1), ("ci/b", 2), ("ci/d", 0)]),
        );
        assert_eq!(heard(&before, &mut now, Instant::now()), ["ci/b", "ci/c", "ci/d"]);
    }

    #[test]
    fn what_a_pool_could_take_is_told_once_and_not_at_once() {
        let first = figures(&[("ci/a", 1), ("ci/b", 1)]);
        let mut longer = first.clone();
        longer.values_mut().for_each(|figures| figures.counts.queued = 7);
        longer.get_mut("ci/b").unwrap().waiting = 7;
        let (begun, mut later, mut last) = (Instant::now(), longer.clone(), longer.clone());
        assert_eq!(heard(&first, &mut longer, begun), ["ci/b"], "the one it counts for");
        assert_eq!(heard(&longer, &mut later, begun + CALM), ["ci/a"], "the other");
        assert!(heard(&later, &mut last, begun + 2 * CALM).is_empty());
    }
}
