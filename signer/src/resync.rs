//! After the database was restored from a backup, under a bucket that went on: what the bucket has is adopted, and what only
//! the database has is built again.
//!
//! Part by part, by the first digit of the paths' hashes: the narinfos and the NARs of a part are listed, its records read,
//! each narinfo fetched, and [`judge`] says what is to be done.

use std::collections::{BTreeSet, HashMap};

use futures::FutureExt;
use harmonia_nix::key::PublicKey;
use harmonia_nix::{narinfo, store_path};
use harmonia_queue::signer::{self, Output, Published};
use harmonia_queue::sweep::{self, Maker, Sweep};
use harmonia_queue::{people, resolver};
use harmonia_service::bucket::Listed;
use harmonia_service::layout::{self, Object};
use serde::Serialize;

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
    /// Narinfos that none of today's keys signed: left alone.
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

/// What the bucket lists and the database knows of one part of all paths.
#[derive(Default)]
struct Part {
    narinfos: Vec<String>,
    nars: HashMap<String, u64>,
    records: HashMap<String, Output>,
}

impl Signer {
    /// Compares all that database and bucket have. None: a sweep runs.
    pub async fn resync(
        &self,
        holder: &str,
        progress: impl Fn(&Resynced) + Send + Sync,
    ) -> Result<Option<Resynced>, SignerError> {
        let Some(sweep) = Sweep::begin_resync(&self.db, holder).await? else { return Ok(None) };
        let mut done = Resynced::default();
        sweep.advance_attempts(self.last_attempt().await?).await?;
        for digit in DIGITS.chars() {
            let mut part = self.part(digit).await?;
            done.objects += (part.narinfos.len() + part.nars.len()) as u64;
            for keys in std::mem::take(&mut part.narinfos).chunks(BATCH) {
                let found = self.fetch(keys).await?;
                self.settle_found(&sweep, found, &mut part, &mut done).await?;
                progress(&done);
            }
            // Whatever is left has no narinfo.
            let lost: Vec<String> = part.records.into_keys().collect();
            self.lose(&sweep, &lost, &mut done).await?;
        }
        sweep.release().await?;
        resolver::settle(&self.db).await?;
        done.violations = people::audit(&self.db).await?.len() as u64;
        Ok(Some(done))
    }

    /// The greatest number of an attempt that an object names.
    async fn last_attempt(&self) -> Result<i64, SignerError> {
        let mut last = 0;
        for prefix in ["log-attempts/", "listings/"] {
            for object in self.list_all(prefix, true).await? {
                if let Object::LogOfAttempt(_, attempt) | Object::ListingOfAttempt(_, attempt) =
                    layout::read(&object.key)
                {
                    last = last.max(attempt);
                }
            }
        }
        Ok(last)
    }

    async fn part(&self, digit: char) -> Result<Part, SignerError> {
        let (root, nars) = (digit.to_string(), format!("nar/{digit}"));
        let (root, nars) = futures::try_join!(self.list_all(&root, true), self.list_all(&nars, true))?;
        let is_narinfo = |object: &Listed| matches!(layout::read(&object.key), Object::NarInfo(_));
        Ok(Part {
            narinfos: root.into_iter().filter(is_narinfo).map(|object| object.key).collect(),
            nars: nars.into_iter().map(|object| (object.key, object.size)).collect(),
            records: self.records(&format!("/nix/store/{digit}")).await?,
        })
    }

    async fn list_all(&self, prefix: &str, flat: bool) -> Result<Vec<Listed>, SignerError> {
        let (mut all, mut from) = (Vec::new(), None);
        loop {
            let (page, next) = self.bucket.list(prefix, flat, from).await?;
            all.extend(page);
            match next {
                Some(next) => from = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// What the database believes to be in the bucket, of paths that begin so.
    async fn records(&self, prefix: &str) -> Result<HashMap<String, Output>, SignerError> {
        let (mut records, mut after) = (HashMap::new(), prefix.to_owned());
        loop {
            let page = signer::published(&self.db, &after, PAGE).await?;
            let Some(last) = page.last() else { return Ok(records) };
            after.clone_from(&last.output.path);
            let ours = page.into_iter().filter(|record| record.output.path.starts_with(prefix));
            records.extend(ours.map(|record| (record.output.path.clone(), record.output)));
            if !after.starts_with(prefix) {
                return Ok(records);
            }
        }
    }

    /// Narinfos that can be read; others are nobody's.
    async fn fetch(&self, keys: &[String]) -> Result<Vec<Option<Found>>, SignerError> {
        let public: Vec<PublicKey> = self.keys().iter().map(|key| key.public()).collect();
        let texts = keys.iter().map(|key| self.bucket.get(key, narinfo::MAX_NARINFO_SIZE).boxed());
        let texts = side_by_side(texts).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(texts.into_iter().map(|text| read(&text?, &public)).collect())
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
        let mut whole = Vec::new();
        for mut found in found {
            let makers: Vec<&Maker> = makers.iter().filter(|maker| maker.path == found.output.path).collect();
            if !makers.is_empty() && !makers.iter().any(|maker| follows(&mut found, maker, &proofs)) {
                done.unproven += 1;
            } else if self.has_narinfos(makers.iter().flat_map(|maker| &maker.others)).await? {
                whole.push(Published { drv_path: found.deriver, output: found.output });
            } else {
                broken.push(found.output.path);
            }
        }
        if !whole.is_empty() {
            done.adopted += u64::from(sweep.adopt(&whole).await?.unsigned_abs());
        }
        Ok(())
    }

    async fn has_narinfos(&self, paths: impl Iterator<Item = &String>) -> Result<bool, SignerError> {
        for path in paths {
            if self.bucket.head(&layout::narinfo(&store_path::parse(path)?)).await?.is_none() {
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
    let output = Output {
        name: String::new(),
        path: info.store_path().to_string(),
        nar_hash: info.nar_hash().digest_as_bytes().to_vec(),
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
        signed: narinfo::is_signed_by(&info, keys),
    })
}

/// What we recorded is ours, whoever signed it: `cache resign` is for that.
fn judge(found: &Found, record: Option<&Output>, nars: &HashMap<String, u64>) -> Verdict {
    let same = record.is_some_and(|record| {
        (&record.nar_hash, &record.file_hash) == (&found.output.nar_hash, &found.output.file_hash)
    });
    let there = nars.get(&found.url).is_some_and(|size| i64::try_from(*size) == Ok(found.output.file_size));
    match (same, there) {
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
        let found = Found { output: output(1), deriver: None, url: URL.into(), signed };
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
    fn without_its_nar_or_with_another_it_is_broken() {
        assert_eq!(judged(true, None, None), Verdict::Broken);
        assert_eq!(judged(true, Some(output(1)), Some(2)), Verdict::Broken);
    }
}
