//! After the database was restored from a backup, under a bucket that went on: what the bucket has is adopted, and what only
//! the database has is built again.
//!
//! Part by part, by the first digit of the paths' hashes: narinfos, NARs and records are read side by side, each in its order
//! and once, each narinfo is fetched, and [`judge`] says what is to be done.

use std::collections::{BTreeSet, HashMap};

use futures::{FutureExt, TryFutureExt, try_join};
use harmonia_nix::key::PublicKey;
use harmonia_nix::{Sha256, narinfo, store_path};
use harmonia_queue::signer::{self, Output, Published};
use harmonia_queue::sweep::{self, Maker, Sweep};
use harmonia_queue::{people, resolver};
use harmonia_service::bucket::{BucketError, Listed};
use harmonia_service::layout::{self, Object};
use serde::Serialize;

use crate::pages::Pages;
use crate::prove::{Verdict as Proof, check_output};
use crate::{Signer, SignerError, side_by_side};

/// The digits with which a path's hash can begin.
const DIGITS: &str = "0123456789abcdfghijklmnpqrsvwxyz";
/// Narinfos that are fetched before any of them is acted upon.
const BATCH: usize = 1_000;
/// Records of one question.
const PAGE: i32 = 10_000;

/// What a resync found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Resynced {
    /// Narinfos and NARs that were looked at.
    pub objects: u64,
    /// Paths of which database and bucket say the same.
    pub same: u64,
    /// Paths that the bucket has and the database did not know, or knew otherwise: adopted.
    pub adopted: u64,
    /// Paths that the database believed published and the bucket lacks, in part or whole: built again if somebody wants them.
    pub lost: u64,
    /// Narinfos that none of today's keys signed, that another tool wrote, or that cannot be read: left alone.
    pub foreign: u64,
    /// Narinfos that do not follow from the derivation that should have made them: left alone.
    pub unproven: u64,
    /// What is wrong with the queue afterwards.
    pub violations: u64,
}

/// A narinfo in the bucket.
struct Found {
    output: Output,
    deriver: Option<String>,
    url: String,
    /// It names its NAR as signers do: others may sign with the same key, such as `nix copy`.
    ours: bool,
    signed: bool,
}

/// What is to be done about a narinfo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    Adopt,
    Broken,
    Foreign,
}

/// All that there is, in the order of paths.
struct Everything<'a> {
    root: Pages<'a, Listed>,
    nars: Pages<'a, Listed>,
    records: Pages<'a, Published>,
}

/// What the bucket lists and the database knows of one part of all paths.
#[derive(Default)]
struct Part {
    narinfos: Vec<String>,
    nars: HashMap<String, u64>,
    records: HashMap<String, Output>,
}

impl Everything<'_> {
    /// What comes before the paths whose hashes begin so, and was not there before.
    async fn before(&mut self, digit: Option<char>) -> Result<Part, SignerError> {
        let bound = |prefix: &str| digit.map(|digit| format!("{prefix}{digit}"));
        let (root, nars, records) = (bound(""), bound("nar/"), bound("/nix/store/"));
        let (root, nars, records) = try_join!(
            self.root.before(root.as_deref()),
            self.nars.before(nars.as_deref()),
            self.records.before(records.as_deref()),
        )?;
        let is_narinfo = |object: &Listed| matches!(layout::read(&object.key), Object::NarInfo(_));
        Ok(Part {
            narinfos: root.into_iter().filter(is_narinfo).map(|object| object.key).collect(),
            nars: nars.into_iter().map(|object| (object.key, object.size)).collect(),
            records: records.into_iter().map(|record| (record.output.path.clone(), record.output)).collect(),
        })
    }
}

impl Signer {
    /// Compares all that database and bucket have. None: a sweep runs.
    pub async fn resync(
        &self,
        holder: &str,
        progress: impl Fn(&Resynced) + Send + Sync,
    ) -> Result<Option<Resynced>, SignerError> {
        let last_attempt = self.last_attempt().await?;
        let Some(sweep) = Sweep::begin_resync(&self.db, holder).await? else { return Ok(None) };
        let mut done = Resynced::default();
        sweep.advance_attempts(last_attempt).await?;
        let mut everything = self.everything();
        let mut part = Part::default();
        // The next part is listed while one is settled.
        for next in DIGITS.chars().skip(1).map(Some).chain([None]) {
            let settled = self.settle(&sweep, part, &mut done, &progress);
            (part, ()) = try_join!(everything.before(next), settled)?;
        }
        self.settle(&sweep, part, &mut done, &progress).await?;
        sweep.release().await?;
        resolver::settle(&self.db).await?;
        done.violations = people::audit(&self.db).await?.len() as u64;
        Ok(Some(done))
    }

    /// The greatest number of an attempt that an object names.
    async fn last_attempt(&self) -> Result<i64, SignerError> {
        let mut last = 0;
        for prefix in ["log-attempts/", "listings/"] {
            let mut from = None;
            loop {
                let (page, next) = self.bucket.list(prefix, true, from).await?;
                let attempts = page.iter().filter_map(|object| match layout::read(&object.key) {
                    Object::LogOfAttempt(_, attempt) | Object::ListingOfAttempt(_, attempt) => Some(attempt),
                    _ => None,
                });
                last = attempts.fold(last, i64::max);
                let Some(next) = next else { break };
                from = Some(next);
            }
        }
        Ok(last)
    }

    fn everything(&self) -> Everything<'_> {
        let listed = |prefix: &'static str| {
            let list = move |from| self.bucket.list(prefix, true, from).map_err(SignerError::from).boxed();
            Pages::new(|object: &Listed| object.key.as_str(), list)
        };
        let records = move |from: Option<String>| {
            async move {
                let page = signer::published(&self.db, &from.unwrap_or_default(), PAGE).await?;
                let next = page.last().map(|record| record.output.path.clone());
                Ok::<_, SignerError>((page, next))
            }
            .boxed()
        };
        Everything {
            root: listed(""),
            nars: listed("nar/"),
            records: Pages::new(|record: &Published| record.output.path.as_str(), records),
        }
    }

    /// Narinfos that can be read; others are nobody's.
    async fn fetch(&self, keys: &[String]) -> Result<Vec<Option<Found>>, SignerError> {
        let public: Vec<PublicKey> = self.keys().iter().map(|key| key.public()).collect();
        let texts = keys.iter().map(|key| self.narinfo(key).boxed());
        let texts = side_by_side(texts).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(texts.into_iter().map(|text| read(&text?, &public)).collect())
    }

    /// Its text. One that is larger than any of ours is nobody's.
    async fn narinfo(&self, key: &str) -> Result<Option<Vec<u8>>, BucketError> {
        match self.bucket.get(key, narinfo::MAX_NARINFO_SIZE).await {
            Err(BucketError::TooLarge { .. }) => Ok(None),
            text => text,
        }
    }

    /// Brings one part of all paths together.
    async fn settle(
        &self,
        sweep: &Sweep<'_>,
        mut part: Part,
        done: &mut Resynced,
        progress: &(impl Fn(&Resynced) + Send + Sync),
    ) -> Result<(), SignerError> {
        done.objects += (part.narinfos.len() + part.nars.len()) as u64;
        for keys in std::mem::take(&mut part.narinfos).chunks(BATCH) {
            let found = self.fetch(keys).await?;
            sweep.renew().await?;
            self.settle_found(sweep, found, &mut part, done).await?;
            progress(done);
        }
        // Whatever is left has no narinfo.
        let lost: Vec<String> = part.records.into_keys().collect();
        self.lose(sweep, &lost, done).await
    }

    async fn settle_found(
        &self,
        sweep: &Sweep<'_>,
        found: Vec<Option<Found>>,
        part: &mut Part,
        done: &mut Resynced,
    ) -> Result<(), SignerError> {
        let (mut adopted, mut broken) = (Vec::new(), Vec::new());
        for found in found {
            let Some(found) = found else {
                done.foreign += 1;
                continue;
            };
            let record = part.records.remove(&found.output.path);
            match judge(&found, record.as_ref(), &part.nars) {
                Verdict::Same => done.same += 1,
                Verdict::Foreign => done.foreign += 1,
                Verdict::Adopt => adopted.push(found),
                Verdict::Broken => broken.push(found.output.path),
            }
        }
        self.adopt(sweep, adopted, &mut broken, done).await?;
        self.lose(sweep, &broken, done).await
    }

    /// Records what follows from its derivation, where we know that. Of a derivation with several outputs all must be there:
    /// half of one build is never joined with half of another.
    async fn adopt(
        &self,
        sweep: &Sweep<'_>,
        found: Vec<Found>,
        broken: &mut Vec<String>,
        done: &mut Resynced,
    ) -> Result<(), SignerError> {
        let paths: Vec<String> = found.iter().map(|found| found.output.path.clone()).collect();
        let makers = sweep::makers(&self.db, &paths).await?;
        let goals: BTreeSet<String> = makers.iter().map(|maker| maker.drv_path.clone()).collect();
        let proofs = self.prove_all(goals).await?;
        let mut of = HashMap::<&str, Vec<&Maker>>::new();
        for maker in &makers {
            of.entry(&maker.path).or_default().push(maker);
        }
        let mut proven = Vec::new();
        for mut found in found {
            let makers = of.remove(found.output.path.as_str()).unwrap_or_default();
            if makers.is_empty() || makers.iter().any(|maker| follows(&mut found, maker, &proofs)) {
                proven.push((found, makers));
            } else {
                done.unproven += 1;
            }
        }
        let there = proven.iter().map(|(_, makers)| {
            self.has_narinfos(makers.iter().flat_map(|maker| maker.others.clone()).collect()).boxed()
        });
        let there = side_by_side(there).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut whole = Vec::new();
        for ((found, _), there) in proven.into_iter().zip(there) {
            match there {
                true => whole.push(Published { drv_path: found.deriver, output: found.output }),
                false => broken.push(found.output.path),
            }
        }
        if !whole.is_empty() {
            done.adopted += u64::from(sweep.adopt(&whole).await?.unsigned_abs());
        }
        Ok(())
    }

    async fn has_narinfos(&self, paths: Vec<String>) -> Result<bool, SignerError> {
        for path in paths {
            if self.bucket.head(&layout::narinfo(&store_path::parse(&path)?)).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whoever makes these builds again.
    async fn lose(
        &self,
        sweep: &Sweep<'_>,
        paths: &[String],
        done: &mut Resynced,
    ) -> Result<(), SignerError> {
        for some in paths.chunks(BATCH) {
            sweep.renew().await?;
            self.forget(some, None).await?;
            done.lost += some.len() as u64;
        }
        Ok(())
    }
}

fn read(text: &[u8], keys: &[PublicKey]) -> Option<Found> {
    let info = narinfo::parse(text).ok()?;
    let (file_hash, file_size) = (info.file_hash()?, info.file_size()?);
    let nar_hash = Sha256::try_from(info.nar_hash().digest_as_bytes()).ok()?;
    let output = Output {
        name: String::new(),
        path: info.store_path().to_string(),
        nar_hash: nar_hash.0.to_vec(),
        nar_size: info.nar_size().try_into().ok()?,
        references: info.references().iter().map(ToString::to_string).collect(),
        file_hash: file_hash.digest_as_bytes().to_vec(),
        file_size: file_size.try_into().ok()?,
        content_address: info.content_address().map(|ca| ca.to_nix_string()),
        made_by: None,
    };
    Some(Found {
        output,
        deriver: info.deriver().map(ToString::to_string),
        url: info.url().to_owned(),
        ours: info.url() == layout::nar(info.store_path(), &nar_hash),
        signed: narinfo::is_signed_by(&info, keys),
    })
}

/// What we recorded is ours, whoever signed it: `cache resign` is for that. What names another NAR than ours never is.
fn judge(found: &Found, record: Option<&Output>, nars: &HashMap<String, u64>) -> Verdict {
    let same = record.is_some_and(|record| {
        (&record.nar_hash, &record.file_hash) == (&found.output.nar_hash, &found.output.file_hash)
    });
    let there = nars.get(&found.url).is_some_and(|size| i64::try_from(*size) == Ok(found.output.file_size));
    match (same, there) {
        _ if !found.ours => Verdict::Foreign,
        (false, _) if !found.signed => Verdict::Foreign,
        (_, false) => Verdict::Broken,
        (true, true) => Verdict::Same,
        (false, true) => Verdict::Adopt,
    }
}

/// Whether a path follows from a derivation. Where only builds show paths, our signature says that one did.
fn follows(found: &mut Found, maker: &Maker, proofs: &HashMap<String, Proof>) -> bool {
    let Some(Ok(proven)) = proofs.get(&maker.drv_path) else { return false };
    found.output.name.clone_from(&maker.output);
    if !proven.is_open() && check_output(proven, &mut found.output).is_err() {
        return false;
    }
    found.deriver = Some(maker.drv_path.clone());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "nar/x.nar.zst";

    fn output(contents: u8) -> Output {
        Output {
            name: String::new(),
            path: "/nix/store/7h7qgvs4kgzsn8a6rb273saxyqh4jxlz-a".into(),
            nar_hash: vec![contents; 32],
            nar_size: 1,
            references: Vec::new(),
            file_hash: vec![contents; 32],
            file_size: 1,
            content_address: None,
            made_by: None,
        }
    }

    fn judged(signed: bool, record: Option<Output>, nar: Option<u64>) -> Verdict {
        let found = Found { output: output(1), deriver: None, url: URL.into(), ours: true, signed };
        judge(&found, record.as_ref(), &nar.map(|size| (URL.to_owned(), size)).into_iter().collect())
    }

    #[test]
    fn what_both_have_is_the_same_although_another_key_signed_it() {
        for signed in [true, false] {
            assert_eq!(judged(signed, Some(output(1)), Some(1)), Verdict::Same);
        }
    }

    #[test]
    fn what_we_signed_is_adopted_also_if_it_was_recorded_otherwise() {
        assert_eq!(judged(true, None, Some(1)), Verdict::Adopt);
        assert_eq!(judged(true, Some(output(2)), Some(1)), Verdict::Adopt);
    }

    #[test]
    fn what_others_signed_is_left_alone() {
        assert_eq!(judged(false, None, Some(1)), Verdict::Foreign);
        assert_eq!(judged(false, Some(output(2)), None), Verdict::Foreign);
    }

    #[test]
    fn what_another_tool_wrote_is_left_alone_whoever_signed_it() {
        let found = Found { output: output(1), deriver: None, url: URL.into(), ours: false, signed: true };
        for record in [None, Some(output(1)), Some(output(2))] {
            for nars in [HashMap::new(), HashMap::from([(URL.to_owned(), 1)])] {
                assert_eq!(judge(&found, record.as_ref(), &nars), Verdict::Foreign);
            }
        }
    }

    #[test]
    fn without_its_nar_or_with_another_it_is_broken() {
        assert_eq!(judged(true, None, None), Verdict::Broken);
        assert_eq!(judged(true, Some(output(1)), Some(2)), Verdict::Broken);
    }
}
