//! Pushes that no webhook told us of: found by comparing the heads of branches with those that we know. Pull requests that were
//! closed without a word, too.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use harmonia_queue::branches::{self, Push};
use harmonia_queue::forges::{self, Comparison};
use harmonia_service::sentence::sentence;
use thiserror::Error;

use super::call::ForgeError;
use super::payload::is_commit;
use super::{Forges, Heads};

/// How often the heads of a project are compared,
const EVERY: Duration = Duration::from_secs(15 * 60);
/// and how often it is asked whether any are to be.
const LOOK: Duration = Duration::from_secs(10);
/// How often old deliveries are forgotten.
const PRUNE: u32 = 360;

#[derive(Debug, Error)]
enum CompareError {
    #[error(transparent)]
    Forge(#[from] ForgeError),
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
}

/// For ever. What was missed while no frontend ran is found as soon as one does.
pub async fn run(forges: &Forges) -> Infallible {
    let instances = forges.instances();
    let mut begun = false;
    let mut rounds = 0_u32;
    loop {
        begun = begun || forges::compare_soon(&forges.db, EVERY).await.is_ok();
        while let Ok(Some(due)) = forges::due_comparison(&forges.db, &instances, jittered(EVERY)).await {
            if let Err(error) = compare(forges, &due).await {
                note(forges, &due, &error).await;
            }
        }
        if rounds.is_multiple_of(PRUNE) {
            let _ = forges::prune_deliveries(&forges.db).await;
        }
        rounds = rounds.wrapping_add(1);
        tokio::time::sleep(jittered(LOOK)).await;
    }
}

fn jittered(time: Duration) -> Duration {
    time.mul_f64(rand::random_range(0.9..1.1))
}

async fn compare(forges: &Forges, due: &Comparison) -> Result<(), CompareError> {
    let Some(known) = forges.of(&due.instance) else { return Ok(()) };
    // Ours first: a push that comes while the forge answers is newer than its answer.
    let ours = forges::heads(&forges.db, due.id).await?;
    let theirs = known.forge.heads(&due.repository).await?;
    let Missed { pushed, seen, gone } = missed(due, &ours, &theirs);
    for (branch, commit) in &pushed {
        let push = Push {
            project: &due.project,
            source: &due.url,
            branch,
            commit,
            untrusted: false,
            attrs: &due.attrs,
            pull_request: None,
        };
        let before = ours.get(branch).map(String::as_str);
        if let Some(evaluation) = branches::push_after(&forges.db, &push, before).await? {
            tracing::info!(
                project = due.project,
                branch,
                commit,
                evaluation,
                "a push that no webhook told of"
            );
        }
    }
    for (branch, commit) in &gone {
        // A list comes page by page: one that goes away meanwhile moves another to a page that was read already.
        if known.forge.head(&due.repository, branch).await?.is_none() {
            forges::end_branch(&forges.db, due.id, branch, "the branch was deleted", Some(commit)).await?;
        }
    }
    forges::see_heads(&forges.db, due.id, &seen).await?;
    for number in forges::doubtful_pull_requests(&forges.db, due.id).await? {
        match known.is_open(&due.repository, number).await? {
            true => forges::still_open(&forges.db, due.id, number).await?,
            false => drop(forges::close_pull_request(&forges.db, due.id, number).await?),
        }
    }
    Ok(forges::compared(&forges.db, due.id).await?)
}

/// Whoever looks at the project is told; a forge that wants to be left in peace is no news.
async fn note(forges: &Forges, due: &Comparison, error: &CompareError) {
    let noted = match error {
        CompareError::Forge(ForgeError::Limited(wait)) => {
            forges::pause(&forges.db, &due.instance, *wait).await
        }
        error => {
            let (project, error) = (&due.project, sentence(error));
            tracing::warn!(project, error, "the heads of its branches could not be compared");
            forges::not_compared(&forges.db, due.id, &error).await
        }
    };
    if let Err(error) = noted {
        tracing::debug!(error = sentence(&error), "that is not noted");
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Missed {
    /// To be built.
    pushed: Vec<(String, String)>,
    /// Older than the project: to be built when they are pushed to.
    seen: Vec<(String, String)>,
    /// As we have them: not named by the forge.
    gone: Vec<(String, String)>,
}

/// What nobody told us of. The first time, all is new: then only the branch that matters most is built.
fn missed(due: &Comparison, ours: &BTreeMap<String, String>, theirs: &Heads) -> Missed {
    let mut missed = Missed::default();
    let main = due.branch.as_deref().unwrap_or(&theirs.default);
    for (branch, commit) in &theirs.branches {
        let wanted = due.branch.as_deref().is_none_or(|only| only == branch);
        if !wanted || !is_commit(commit) || ours.get(branch) == Some(commit) {
            continue;
        }
        let head = (branch.clone(), commit.clone());
        if due.first && branch != main && !ours.contains_key(branch) {
            missed.seen.push(head);
        } else {
            missed.pushed.push(head);
        }
    }
    // A repository with no branch at all is rather a forge in trouble.
    if theirs.whole && !theirs.branches.is_empty() {
        let there: BTreeSet<&String> = theirs.branches.iter().map(|(branch, _)| branch).collect();
        let gone = ours.iter().filter(|(branch, _)| !there.contains(branch));
        missed.gone = gone.map(|(branch, commit)| (branch.clone(), commit.clone())).collect();
    }
    missed
}

#[cfg(test)]
mod tests {
    use harmonia_queue::forges::Repository;

    use super::*;

    fn due(first: bool, branch: Option<&str>) -> Comparison {
        Comparison {
            id: 1,
            project: "dots".to_owned(),
            instance: "https://github.com".to_owned(),
            repository: Repository { owner: "acme".to_owned(), name: "dots".to_owned() },
            url: "https://github.com/acme/dots".to_owned(),
            branch: branch.map(str::to_owned),
            attrs: Vec::new(),
            first,
        }
    }

    fn pairs(heads: &[(&str, char)]) -> Vec<(String, String)> {
        heads.iter().map(|(branch, digit)| ((*branch).to_owned(), digit.to_string().repeat(40))).collect()
    }

    fn found(due: &Comparison, ours: &[(&str, char)], theirs: &[(&str, char)]) -> Missed {
        let theirs = Heads { default: "main".to_owned(), branches: pairs(theirs), whole: true };
        missed(due, &pairs(ours).into_iter().collect(), &theirs)
    }

    #[test]
    fn what_is_new_or_elsewhere_was_pushed_and_what_is_not_there_is_gone() {
        let ours = [("main", '1'), ("next", '2'), ("old", '3')];
        let theirs = [("main", '1'), ("next", '4'), ("more", '5')];
        let expected = Missed {
            pushed: pairs(&[("next", '4'), ("more", '5')]),
            seen: Vec::new(),
            gone: pairs(&[("old", '3')]),
        };
        assert_eq!(found(&due(false, None), &ours, &theirs), expected);
    }

    #[test]
    fn at_first_only_the_default_branch_is_built() {
        let missed = found(&due(true, None), &[], &[("main", '1'), ("next", '2')]);
        assert_eq!((missed.pushed, missed.seen), (pairs(&[("main", '1')]), pairs(&[("next", '2')])));
    }

    #[test]
    fn a_project_of_one_branch_looks_at_no_other() {
        let missed = found(&due(false, Some("next")), &[], &[("main", '1'), ("next", '2')]);
        assert_eq!((missed.pushed, missed.seen), (pairs(&[("next", '2')]), Vec::new()));
    }

    #[test]
    fn nothing_is_gone_only_because_it_was_not_named() {
        let ours: BTreeMap<_, _> = pairs(&[("main", '1'), ("next", '2')]).into_iter().collect();
        for branches in [Vec::new(), pairs(&[("main", '1')])] {
            let theirs = Heads { default: "main".to_owned(), whole: branches.is_empty(), branches };
            assert_eq!(missed(&due(false, None), &ours, &theirs), Missed::default());
        }
    }

    #[test]
    fn what_is_no_commit_is_passed_over() {
        let branches = vec![("main".to_owned(), "x".to_owned())];
        let theirs = Heads { default: "main".to_owned(), branches, whole: true };
        assert_eq!(missed(&due(false, None), &BTreeMap::new(), &theirs), Missed::default());
    }
}
