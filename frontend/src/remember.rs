//! A memory that forgets by itself.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;
use std::time::{Duration, Instant};

/// What was learnt within the last moments, and no more of it than a limit. Two generations: what is learnt goes into the
/// young one; when its time is over or it is full it becomes the old one, and the old one is forgotten at once. So
/// nothing has to be searched for its age.
#[derive(Debug)]
pub struct Memory<K, V> {
    start: Instant,
    span: Duration,
    most: usize,
    turn: u128,
    weight: usize,
    young: HashMap<K, V>,
    old: HashMap<K, V>,
}

impl<K: Eq + Hash, V: Clone> Memory<K, V> {
    /// Of what is younger than `lifetime` (at least half of it, if there is room) and of no more weight than `most`.
    pub fn new(now: Instant, lifetime: Duration, most: usize) -> Self {
        let (young, old) = (HashMap::new(), HashMap::new());
        Self { start: now, span: lifetime / 2, most: most / 2, turn: 0, weight: 0, young, old }
    }

    /// What is remembered.
    pub fn get<Q>(&mut self, now: Instant, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.forget(now);
        self.young.get(key).or_else(|| self.old.get(key)).cloned()
    }

    /// Remembers what was learnt then. Not what alone is heavier than a generation, nor what comes in a later turn than
    /// it was learnt in: it would live too long.
    pub fn insert(&mut self, then: Instant, key: K, value: V, weight: usize) {
        self.forget(then);
        if weight > self.most || self.turn_of(then) < self.turn {
            return;
        }
        if self.weight + weight > self.most {
            self.age();
        }
        self.weight += weight;
        self.young.insert(key, value);
    }

    /// Turns follow the clock, not the calls: what was learnt in one turn is gone two turns later, whoever asked when.
    fn forget(&mut self, now: Instant) {
        let turn = self.turn_of(now);
        match turn.saturating_sub(self.turn) {
            0 => return,
            1 => self.age(),
            _ => {
                self.age();
                self.age();
            }
        }
        self.turn = turn;
    }

    fn turn_of(&self, moment: Instant) -> u128 {
        let passed = moment.saturating_duration_since(self.start);
        passed.as_nanos() / self.span.as_nanos().max(1)
    }

    fn age(&mut self) {
        self.old = mem::take(&mut self.young);
        self.weight = 0;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LIFE: Duration = Duration::from_secs(10);

    fn memory(most: usize) -> (Memory<u32, &'static str>, Instant) {
        let now = Instant::now();
        (Memory::new(now, LIFE, most), now)
    }

    #[test]
    fn nothing_is_remembered_for_its_lifetime_or_longer() {
        for learnt in 0..10 {
            let (mut memory, start) = memory(100);
            let learnt = start + Duration::from_secs(learnt);
            memory.insert(learnt, 1, "one", 1);
            assert_eq!(memory.get(learnt + LIFE / 2, &1), Some("one"));
            assert_eq!(memory.get(learnt + LIFE, &1), None);
        }
    }

    #[test]
    fn what_comes_late_does_not_live_longer() {
        let (mut memory, start) = memory(100);
        let later = start + LIFE / 2;
        assert_eq!(memory.get(later, &1), None);
        memory.insert(start, 1, "one", 1);
        assert_eq!(memory.get(start + LIFE, &1), None);
    }

    #[test]
    fn asking_does_not_lengthen_a_life() {
        let (mut memory, start) = memory(100);
        memory.insert(start, 1, "one", 1);
        for second in 0..10 {
            memory.get(start + Duration::from_secs(second), &1);
        }
        assert_eq!(memory.get(start + LIFE, &1), None);
    }

    #[test]
    fn it_never_holds_more_than_its_weight() {
        let (mut memory, now) = memory(20);
        for key in 0..1000 {
            memory.insert(now, key, "x", 3);
            assert!(memory.young.len() + memory.old.len() <= 20 / 3);
        }
        assert_eq!(memory.get(now, &999), Some("x"));
        assert_eq!(memory.get(now, &0), None);
    }

    #[test]
    fn what_is_too_heavy_is_not_remembered_and_drives_nothing_out() {
        let (mut memory, now) = memory(20);
        memory.insert(now, 1, "one", 1);
        memory.insert(now, 2, "two", 11);
        assert_eq!(memory.get(now, &1), Some("one"));
        assert_eq!(memory.get(now, &2), None);
    }

    #[test]
    fn the_newest_word_counts() {
        let (mut memory, now) = memory(20);
        memory.insert(now, 1, "old", 1);
        memory.insert(now + LIFE / 2, 1, "new", 1);
        assert_eq!(memory.get(now + LIFE / 2, &1), Some("new"));
    }
}
