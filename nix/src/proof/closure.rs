//! Proving a derivation together with all that it depends on, asking for texts in batches.

use std::collections::{BTreeSet, HashMap};

use nix_derivation::{Derivation, StorePath};

use super::{InputHash, ProofError, Proven, needed_inputs, parse, prove_read, read};

/// The most bytes of texts that wait for their inputs. All of a system's 10,000 derivations have about 60 MB.
const MOST_WAITING: usize = 512 * 1024 * 1024;

/// What the asker has of a derivation.
#[derive(Debug, Clone)]
pub enum Answer {
    /// It was proven before.
    Known(InputHash),
    /// Its text.
    Text(Vec<u8>),
}

/// Proves a derivation and what it depends on, from the bottom up. Ask what it [needs](Self::needs), [supply](Self::supply)
/// that, and again until it is [finished](Self::is_finished).
///
/// Answers may run ahead: a text that nobody asked for yet is taken too, so that a whole closure can be fetched at once.
/// Nothing recurses, for closures can be as deep as they are large. There is always something needed until the end:
/// texts are taken only under their own hashes, and no derivation can contain a hash that depends on its own.
#[derive(Debug)]
pub struct Prover {
    goal: StorePath,
    limit: usize,
    needed: BTreeSet<StorePath>,
    waiting: HashMap<StorePath, Waiting>,
    waiting_bytes: usize,
    dependents: HashMap<StorePath, Vec<StorePath>>,
    known: HashMap<StorePath, InputHash>,
    proven: Vec<(StorePath, Proven)>,
}

#[derive(Debug)]
struct Waiting {
    text: Vec<u8>,
    inputs: usize,
}

impl Prover {
    /// Starts with one derivation.
    pub fn new(goal: StorePath) -> Self {
        Self::with_limit(goal, MOST_WAITING)
    }

    /// The same with another limit to the bytes of texts that wait for their inputs.
    pub fn with_limit(goal: StorePath, limit: usize) -> Self {
        Self {
            needed: [goal.clone()].into(),
            goal,
            limit,
            waiting: HashMap::new(),
            waiting_bytes: 0,
            dependents: HashMap::new(),
            known: HashMap::new(),
            proven: Vec::new(),
        }
    }

    /// At most so many derivations to be supplied next.
    pub fn needs(&self, most: usize) -> Vec<StorePath> {
        self.needed.iter().take(most).cloned().collect()
    }

    /// Whether nothing is needed any more.
    pub fn is_finished(&self) -> bool {
        self.known.contains_key(&self.goal)
    }

    /// What was proven since the last call, inputs before those that depend on them: the goal is the last, unless it
    /// was answered as known.
    pub fn take_proven(&mut self) -> Vec<(StorePath, Proven)> {
        std::mem::take(&mut self.proven)
    }

    /// Takes an answer. Repeated ones change nothing. An error is one of the whole proof.
    pub fn supply(&mut self, path: &StorePath, answer: Answer) -> Result<(), ProofError> {
        if self.known.contains_key(path) || self.waiting.contains_key(path) {
            return Ok(());
        }
        match answer {
            Answer::Known(hash) => self.learn(path.clone(), hash),
            Answer::Text(text) => self.take_text(path, text),
        }
    }

    fn take_text(&mut self, path: &StorePath, text: Vec<u8>) -> Result<(), ProofError> {
        let derivation = read(path, &text)?;
        let missing: Vec<&StorePath> =
            needed_inputs(&derivation).into_iter().filter(|input| !self.known.contains_key(*input)).collect();
        if missing.is_empty() {
            let hash = self.prove(path, &derivation)?;
            return self.learn(path.clone(), hash);
        }
        self.waiting_bytes += text.len();
        if self.waiting_bytes > self.limit {
            return Err(ProofError::TooMuch { goal: self.goal.clone(), limit: self.limit });
        }
        for input in &missing {
            self.dependents.entry((*input).clone()).or_default().push(path.clone());
            if !self.waiting.contains_key(*input) {
                self.needed.insert((*input).clone());
            }
        }
        self.needed.remove(path);
        self.waiting.insert(path.clone(), Waiting { inputs: missing.len(), text });
        Ok(())
    }

    /// Notes a hash, and proves all that waited for nothing else.
    fn learn(&mut self, path: StorePath, hash: InputHash) -> Result<(), ProofError> {
        let mut learnt = vec![(path, hash)];
        while let Some((path, hash)) = learnt.pop() {
            self.needed.remove(&path);
            self.known.insert(path.clone(), hash);
            for dependent in self.dependents.remove(&path).unwrap_or_default() {
                let Some(waiting) = self.waiting.get_mut(&dependent) else { continue };
                waiting.inputs -= 1;
                if waiting.inputs == 0
                    && let Some(Waiting { text, .. }) = self.waiting.remove(&dependent)
                {
                    self.waiting_bytes -= text.len();
                    let hash = self.prove(&dependent, &parse(&dependent, &text)?)?;
                    learnt.push((dependent, hash));
                }
            }
        }
        Ok(())
    }

    fn prove(&mut self, path: &StorePath, derivation: &Derivation) -> Result<InputHash, ProofError> {
        let proven = prove_read(path, derivation, &|input| self.known.get(input).copied())?;
        let hash = proven.hash;
        self.proven.push((path.clone(), proven));
        Ok(hash)
    }
}
