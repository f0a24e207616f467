//! Nothing is signed that does not follow from its derivation. Evaluators run foreign code, so their graph is checked by
//! arithmetic over the stored texts; what was proven once is remembered in the database.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use harmonia_nix::proof::{Answer, InputHash, Proven, Prover};
use harmonia_nix::store_path::{self, StorePath};
use harmonia_nix::{Sha256, narinfo};
use harmonia_queue::signer::{self, Output, Text};
use harmonia_service::protocol::{BuildResult, Outcome};
use harmonia_service::sentence::sentence;

use crate::publish::record;
use crate::slots::{Claims, fence};
use crate::{Signer, SignerError};

/// Derivations of one question. Their texts have some kilobytes each.
const BATCH: usize = 500;
/// Proofs of one statement.
const REMEMBERED: usize = 10_000;

/// What came of a goal: what it promises, or why it is not believed.
pub(crate) type Verdict = Result<Proven, String>;

impl Signer {
    /// Turns results whose outputs do not follow from their derivations into refusals, and notes content addresses.
    pub(crate) async fn prove_results(
        &self,
        claims: &Claims,
        results: &[BuildResult],
        checked: &mut [Result<Vec<Output>, Outcome>],
    ) -> Result<(), SignerError> {
        let derivation =
            |result: &BuildResult| claims.get(&fence(result.claim)).map(|live| live.drv_path.clone());
        let goals: BTreeSet<String> = results
            .iter()
            .zip(checked.iter())
            .filter(|(_, checked)| checked.is_ok())
            .filter_map(|(result, _)| derivation(result))
            .collect();
        let verdicts = self.prove_all(goals).await?;
        let is_open = |verdict: &Verdict| verdict.as_ref().is_ok_and(Proven::is_open);
        let open = verdicts.iter().filter(|(_, verdict)| is_open(verdict));
        let ways = self.ways_of(open.map(|(drv, _)| drv.clone()).collect()).await?;
        for (result, checked) in results.iter().zip(checked) {
            let Ok(outputs) = checked else { continue };
            let drv = derivation(result).unwrap_or_default();
            let checked_all = match (verdicts.get(&drv), ways.get(&drv)) {
                (Some(Ok(proven)), None) => check_outputs(proven, outputs),
                (Some(Ok(proven)), Some(Ok(ways))) => {
                    check_outputs(&proven.clone().resolved(ways, &claimed(outputs)), outputs)
                }
                (Some(Err(reason)), _) | (_, Some(Err(reason))) => Err(reason.clone()),
                (None, _) => Err("its derivation is not known".to_owned()),
            };
            if let Err(reason) = checked_all {
                tracing::warn!(job = result.claim.job, reason, "a result is not signed");
                *checked = Err(Outcome::Refused { reason });
            }
        }
        Ok(())
    }

    /// Proves derivations side by side, with one question to the database for all of them in each round.
    pub(crate) async fn prove_all(
        &self,
        goals: BTreeSet<String>,
    ) -> Result<HashMap<String, Verdict>, SignerError> {
        let mut verdicts: HashMap<String, Verdict> = HashMap::new();
        let mut open: BTreeMap<String, Prover> = BTreeMap::new();
        for goal in goals {
            open.insert(goal.clone(), Prover::new(store_path::parse(&goal)?));
        }
        let mut learnt: Vec<(String, Vec<u8>)> = Vec::new();
        let mut always = true; // of the goals the text is needed, because it names the outputs
        while !open.is_empty() {
            let wanted: BTreeSet<String> = open
                .values()
                .flat_map(|prover| prover.needs(BATCH))
                .map(|path| path.to_string())
                .take(BATCH)
                .collect();
            let asked: Vec<String> = wanted.into_iter().collect();
            let known = signer::texts(&self.db, &asked, always).await?;
            let known: HashMap<&str, &Text> =
                known.iter().map(|text| (text.drv_path.as_str(), text)).collect();
            for (goal, mut prover) in std::mem::take(&mut open) {
                match advance(&mut prover, &asked, &known, always) {
                    Ok(false) => drop(open.insert(goal, prover)),
                    Ok(true) => {
                        let mut proven = prover.take_proven();
                        let all =
                            proven.iter().map(|(path, proven)| (path.to_string(), proven.hash.to_bytes()));
                        learnt.extend(all);
                        let verdict = proven.pop().map(|(_, proven)| proven);
                        verdicts.insert(goal, verdict.ok_or_else(|| "its text is not known".to_owned()));
                    }
                    Err(reason) => drop(verdicts.insert(goal, Err(reason))),
                }
            }
            always = false;
        }
        learnt.sort();
        learnt.dedup();
        for some in learnt.chunks(REMEMBERED) {
            signer::remember_proofs(&self.db, some).await?;
        }
        Ok(verdicts)
    }
}

/// Gives a proof what was found of what it needs. True: it is finished.
fn advance(
    prover: &mut Prover,
    asked: &[String],
    known: &HashMap<&str, &Text>,
    always: bool,
) -> Result<bool, String> {
    for path in prover.needs(BATCH) {
        let name = path.to_string();
        let found = known.get(name.as_str());
        let proof = found.and_then(|text| InputHash::from_bytes(text.proof.as_ref()?)).filter(|_| !always);
        let answer = match (proof, found.and_then(|text| text.text.clone())) {
            (Some(hash), _) => Answer::Known(hash),
            (None, Some(text)) => Answer::Text(text),
            (None, None) if asked.binary_search(&name).is_ok() => {
                return Err(format!(
                    "the text of {name} is not stored, so that nothing above it can be proven"
                ));
            }
            (None, None) => continue,
        };
        prover.supply(&path, answer).map_err(|error| sentence(&error))?;
    }
    Ok(prover.is_finished())
}

fn claimed(outputs: &[Output]) -> BTreeMap<String, StorePath> {
    let path = |output: &Output| Some((output.name.clone(), store_path::parse(&output.path).ok()?));
    outputs.iter().filter_map(path).collect()
}

fn check_outputs(proven: &Proven, outputs: &mut [Output]) -> Result<(), String> {
    outputs.iter_mut().try_for_each(|output| {
        check_output(proven, output)?;
        check_size(output)
    })
}

/// Whether its narinfo can be published: once it is accepted, it is too late to say that it cannot.
fn check_size(output: &Output) -> Result<(), String> {
    let record = record(output, None).map_err(|error| sentence(&error))?;
    narinfo::check_size(&record).map_err(|error| sentence(&error))
}

/// Whether an output is what its derivation promises; notes its content address.
pub(crate) fn check_output(proven: &Proven, output: &mut Output) -> Result<(), String> {
    let path = store_path::parse(&output.path).map_err(|error| error.to_string())?;
    let nar_hash = Sha256::try_from(output.nar_hash.as_slice()).map_err(|error| error.to_string())?;
    let references: BTreeSet<StorePath> = output
        .references
        .iter()
        .map(|reference| store_path::parse(reference))
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    let ca =
        proven.check_built(&output.name, &path, nar_hash, &references).map_err(|error| error.to_string())?;
    output.content_address = ca.map(|ca| ca.to_nix_string());
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_output_whose_narinfo_no_client_would_read_is_refused() {
        let path = |n: usize| format!("/nix/store/{n:032}-{}", "x".repeat(200));
        let with = |count| Output {
            name: "out".to_owned(),
            path: path(0),
            nar_hash: vec![0; 32],
            nar_size: 1000,
            references: (0..count).map(path).collect(),
            file_hash: vec![0; 32],
            file_size: 1000,
            content_address: None,
            made_by: None,
        };
        assert_eq!(check_size(&with(4000)), Ok(()));
        let reason = check_size(&with(5000)).unwrap_err();
        assert!(reason.contains("more than the 1048576 that clients read"), "{reason}");
    }
}
