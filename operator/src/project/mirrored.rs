use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use harmonia_crds::Project;
use harmonia_queue::branches;
use harmonia_queue::mirror::{self, Resource};
use kube::ResourceExt;

use super::queue_name;
use super::validate::{source, wanted};
use crate::context::Lead;

/// The queue is told again what it should know already after this long, less than a resync: somebody may have restored a backup.
const AGAIN: Duration = Duration::from_secs(200);

/// What was mirrored, by whom and when: numbers of the queue change every few seconds, and a project does not.
#[derive(Default)]
pub struct Mirrored(Mutex<HashMap<String, Word>>);

struct Word {
    uid: String,
    generation: i64,
    leader: i64,
    at: Instant,
}

impl Mirrored {
    /// Mirrors it, unless that was just done. False: a later word stands.
    pub async fn mirror(&self, lead: &Lead, project: &Project) -> harmonia_queue::Result<bool> {
        let name = queue_name(project);
        let uid = project.uid().unwrap_or_default();
        let generation = project.metadata.generation.unwrap_or_default();
        if self.stands(&name, &uid, generation, lead.generation) {
            return Ok(true);
        }
        let resource = Resource { uid: &uid, generation };
        let done = mirror::project(&lead.db, lead.generation, resource, &wanted(project, &name)).await?;
        if done && let Some(source) = source(project) {
            branches::mirror_source(&lead.db, lead.generation, resource, &name, &source).await?;
        }
        if done {
            let word = Word { uid, generation, leader: lead.generation, at: Instant::now() };
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name, word);
        }
        Ok(done)
    }

    /// It is gone.
    pub fn forget(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    fn stands(&self, name: &str, uid: &str, generation: i64, leader: i64) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(name).is_some_and(|word| {
            word.uid == uid
                && word.generation == generation
                && word.leader == leader
                && word.at.elapsed() < AGAIN
        })
    }
}
