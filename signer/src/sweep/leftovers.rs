//! Objects that belong to nothing: of attempts that were lost or are long past, of jobs that went.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use futures::FutureExt;
use harmonia_nix::{Sha256, realisation};
use harmonia_queue::sweep::{self, Known, Sweep};
use harmonia_service::bucket::Listed;
use harmonia_service::layout::{self, Object};
use serde::Deserialize;

use super::{Keeping, Swept};
use crate::{Signer, SignerError, side_by_side};

const STORE: &str = "/nix/store/";

/// What the queue knows of a page of objects.
#[derive(Default)]
struct Facts {
    paths: HashMap<String, Known>,
    derivations: HashSet<String>,
}

impl Signer {
    /// Looks at every object of the bucket; with a sweep, removes what belongs to nothing.
    pub(super) async fn sweep_leftovers(
        &self,
        keeping: &Keeping,
        sweep: Option<&Sweep<'_>>,
        swept: &mut Swept,
        progress: &(impl Fn(&Swept) + Sync),
    ) -> Result<(), SignerError> {
        let mut from = None;
        loop {
            let (page, next) = self.bucket.list("", false, from).await?;
            let leftovers = self.leftovers(&page, keeping, swept).await?;
            if let Some(sweep) = sweep {
                // Whoever was silent for too long must not remove anything.
                sweep.renew().await?;
                self.delete_all(leftovers.iter().map(|(object, _)| object.key.clone())).await?;
            }
            for (object, kind) in leftovers {
                swept.leftovers.entry(kind).or_default().add(object.size);
            }
            progress(swept);
            match next {
                Some(next) => from = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// Those of a page that belong to nothing, and what they are.
    async fn leftovers<'p>(
        &self,
        page: &'p [Listed],
        keeping: &Keeping,
        swept: &mut Swept,
    ) -> Result<Vec<(&'p Listed, &'static str)>, SignerError> {
        let facts = self.facts(page).await?;
        let now = SystemTime::now();
        let (mut found, mut of_paths, mut realisations) = (Vec::new(), Vec::new(), Vec::new());
        for object in page {
            swept.objects.add(object.size);
            // Written in the future, as another's clock has it: young.
            let age = now.duration_since(object.written).unwrap_or_default();
            match layout::read(&object.key) {
                Object::NarInfo(hash) if facts.of(hash).path.is_none() => swept.unknown.add(object.size),
                Object::Realisation if age >= keeping.grace => realisations.push(object),
                read => {
                    let Some(kind) = leftover(read, age, keeping, &facts) else { continue };
                    match path_of(read).filter(|hash| facts.of(hash).path.is_none()) {
                        Some(hash) => of_paths.push((hash, object, kind)),
                        None => found.push((object, kind)),
                    }
                }
            }
        }
        // What a narinfo may name that the database does not know is left like that narinfo, for `resync` to adopt.
        let visible = self.visible(of_paths.iter().map(|(hash, ..)| *hash).collect()).await?;
        let of_paths = of_paths.into_iter().filter(|(hash, ..)| !visible.contains(hash));
        found.extend(of_paths.map(|(_, object, kind)| (object, kind)));
        found.extend(self.unrecorded(realisations).await?.into_iter().map(|object| (object, "realisations")));
        Ok(found)
    }

    /// Of paths by their hash parts, those that clients find.
    async fn visible<'p>(&self, hashes: HashSet<&'p str>) -> Result<HashSet<&'p str>, SignerError> {
        let looks = hashes.into_iter().map(|hash| {
            async move { Ok((hash, self.bucket.head(&format!("{hash}.narinfo")).await?.is_some())) }.boxed()
        });
        let looks: Vec<Result<_, SignerError>> = side_by_side(looks).await;
        let there = looks.into_iter().filter(|look| !matches!(look, Ok((_, false))));
        there.map(|look| look.map(|(hash, _)| hash)).collect()
    }

    async fn facts(&self, page: &[Listed]) -> Result<Facts, SignerError> {
        let (mut hashes, mut drvs) = (HashSet::new(), HashSet::new());
        for object in page {
            match layout::read(&object.key) {
                Object::Nar(hash, _)
                | Object::NarInfo(hash)
                | Object::Listing(hash)
                | Object::ListingOfAttempt(hash, _) => {
                    hashes.insert(hash);
                }
                Object::Log(drv) | Object::LogOfAttempt(drv, _) | Object::Trace(drv) => {
                    drvs.insert(format!("{STORE}{drv}"));
                }
                Object::Realisation | Object::Probe | Object::Other => {}
            }
        }
        let (hashes, drvs) = (Vec::from_iter(hashes), Vec::from_iter(drvs));
        Ok(Facts {
            paths: sweep::known_hashes(&self.db, &hashes).await?,
            derivations: sweep::known_derivations(&self.db, &drvs).await?.into_iter().collect(),
        })
    }

    /// Of realisations, those that say of an output that it is a path which is not on record.
    async fn unrecorded<'p>(&self, objects: Vec<&'p Listed>) -> Result<Vec<&'p Listed>, SignerError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Said {
            out_path: String,
        }
        let texts = objects.iter().map(|object| self.bucket.get(&object.key, realisation::LARGEST).boxed());
        let texts = side_by_side(texts).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let path = |text: Option<Vec<u8>>| {
            let said: Said = serde_json::from_slice(&text?).ok()?;
            Some(format!("{STORE}{}", said.out_path.trim_start_matches(STORE)))
        };
        let said: Vec<(&Listed, String)> =
            objects.into_iter().zip(texts).filter_map(|(object, text)| Some((object, path(text)?))).collect();
        let paths: Vec<String> = said.iter().map(|(_, path)| path.clone()).collect();
        let known: HashSet<String> = sweep::known_paths(&self.db, &paths).await?.into_iter().collect();
        Ok(said.into_iter().filter(|(_, path)| !known.contains(path)).map(|(object, _)| object).collect())
    }
}

impl Facts {
    fn of(&self, hash: &str) -> &Known {
        static UNKNOWN: Known = Known { path: None, nar_hash: None, attempt: None, made: false };
        self.paths.get(hash).unwrap_or(&UNKNOWN)
    }

    fn knows(&self, drv: &str) -> bool {
        self.derivations.contains(&format!("{STORE}{drv}"))
    }
}

/// The path for whose sake an object is there, by its hash part.
fn path_of(object: Object<'_>) -> Option<&str> {
    match object {
        Object::Nar(hash, _) | Object::Listing(hash) | Object::ListingOfAttempt(hash, _) => Some(hash),
        _ => None,
    }
}

/// What an object is that belongs to nothing. While a job makes a path, everything of that path may be needed in a moment.
fn leftover(object: Object<'_>, age: Duration, keeping: &Keeping, facts: &Facts) -> Option<&'static str> {
    let (kind, needed) = match object {
        Object::Nar(hash, nar) => {
            let known = facts.of(hash);
            let recorded = known.nar_hash.as_deref().and_then(|hash| Sha256::try_from(hash).ok());
            ("NARs", known.made || recorded.is_some_and(|hash| hash.nix32() == nar))
        }
        Object::Listing(hash) => ("listings", facts.of(hash).made || facts.of(hash).path.is_some()),
        Object::ListingOfAttempt(hash, attempt) => {
            ("listings", facts.of(hash).made || facts.of(hash).attempt == Some(attempt))
        }
        Object::Log(drv) => ("logs", facts.knows(drv)),
        Object::LogOfAttempt(drv, _) => ("logs of attempts", facts.knows(drv) && age < keeping.logs),
        Object::Trace(drv) => ("realisations", facts.knows(drv)),
        Object::Probe => ("probes", false),
        Object::NarInfo(_) | Object::Realisation | Object::Other => return None,
    };
    (!needed && age >= keeping.grace).then_some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const KEEPING: Keeping = Keeping { every: None, grace: DAY, logs: Duration::from_secs(30 * 86_400) };

    fn facts(known: Known) -> Facts {
        let derivations = HashSet::from(["/nix/store/x.drv".to_owned()]);
        Facts { paths: HashMap::from([("x".to_owned(), known)]), derivations }
    }

    fn recorded() -> Known {
        Known {
            path: Some("/nix/store/x".into()),
            nar_hash: Some(Sha256::of("nar").0.to_vec()),
            attempt: Some(7),
            made: false,
        }
    }

    #[test]
    fn what_is_on_record_stays_and_what_differs_from_it_goes() {
        let (facts, nar, other) = (facts(recorded()), Sha256::of("nar").nix32(), Sha256::of("other").nix32());
        let judge = |object| leftover(object, DAY, &KEEPING, &facts);
        assert_eq!(judge(Object::Nar("x", &nar)), None);
        assert_eq!(judge(Object::Nar("x", &other)), Some("NARs"));
        assert_eq!(judge(Object::Nar("y", &nar)), Some("NARs"));
        assert_eq!(judge(Object::Listing("x")), None);
        assert_eq!(judge(Object::Listing("y")), Some("listings"));
        assert_eq!(judge(Object::ListingOfAttempt("x", 7)), None);
        assert_eq!(judge(Object::ListingOfAttempt("x", 6)), Some("listings"));
        assert_eq!(judge(Object::Log("x.drv")), None);
        assert_eq!(judge(Object::Log("y.drv")), Some("logs"));
        assert_eq!(judge(Object::Trace("y.drv")), Some("realisations"));
    }

    #[test]
    fn what_a_job_makes_stays_whatever_it_is() {
        let facts = facts(Known { made: true, ..Known::default() });
        for object in [Object::Nar("x", "any"), Object::Listing("x"), Object::ListingOfAttempt("x", 1)] {
            assert_eq!(leftover(object, DAY, &KEEPING, &facts), None);
        }
    }

    #[test]
    fn what_is_young_stays_although_nobody_knows_it() {
        let facts = facts(Known::default());
        for object in [Object::Nar("x", "any"), Object::Log("y.drv"), Object::Probe] {
            assert_eq!(leftover(object, DAY - Duration::from_secs(1), &KEEPING, &facts), None);
            assert!(leftover(object, DAY, &KEEPING, &facts).is_some());
        }
    }

    #[test]
    fn a_log_of_an_attempt_goes_with_its_time_or_with_its_job() {
        let facts = facts(recorded());
        let judge = |drv, age| leftover(Object::LogOfAttempt(drv, 1), age, &KEEPING, &facts);
        assert_eq!(judge("x.drv", 29 * DAY), None);
        assert_eq!(judge("x.drv", 30 * DAY), Some("logs of attempts"));
        assert_eq!(judge("y.drv", DAY), Some("logs of attempts"));
    }

    #[test]
    fn narinfos_and_what_is_not_ours_are_not_left_over() {
        let facts = Facts::default();
        for object in [Object::NarInfo("y"), Object::Other] {
            assert_eq!(leftover(object, 99 * DAY, &KEEPING, &facts), None);
        }
    }
}
