//! How a result is published: all outputs of one build or none, the first one for good.

use std::time::Duration;

use harmonia_queue::Fence;
use harmonia_queue::builder::{Claim, Failure, Session};
use harmonia_queue::ingest::{self, KnownPath, Node};
use harmonia_queue::people::{self, Ending};
use harmonia_queue::signer::{self, Output, Verdict};
use harmonia_tests::farm::{Farm, derivation, holder, output, store_path};

fn two_outputs(name: &str) -> Node {
    let path = |output: &str| Some(store_path(&format!("{name}-{output}"), name));
    let outputs = vec![("out".to_owned(), path("out")), ("dev".to_owned(), path("dev"))];
    Node { outputs, ..derivation(name, &[]) }
}

fn made(name: &str) -> Vec<Output> {
    ["out", "dev"].map(|which| output(which, &store_path(&format!("{name}-{which}"), name))).to_vec()
}

/// A running build of a derivation.
async fn running(node: Node) -> (Farm, Session, Claim) {
    let (farm, _, session) = Farm::small(2).await;
    farm.evaluate_nodes("main", vec![node]).await;
    farm.settle().await;
    let claim = farm.claim(&session).await;
    (farm, session, claim)
}

async fn accept(farm: &Farm, session: &Session, claim: &Claim, outputs: Vec<Output>) -> Verdict {
    signer::accept(&farm.signer, &[(holder(session, claim), outputs)]).await.unwrap()[0]
}

async fn recorded(farm: &Farm) -> i64 {
    farm.value("SELECT count(*) FROM ci.canonical WHERE $1 = 0", 0).await
}

async fn findings(farm: &Farm) -> i64 {
    farm.value("SELECT count(*) FROM ci.finding WHERE $1 = 0", 0).await
}

fn from_elsewhere(output: &Output, nar_hash: Vec<u8>) -> KnownPath {
    KnownPath { path: output.path.clone(), nar_hash, nar_size: 1, references: Vec::new() }
}

#[tokio::test]
async fn all_outputs_are_recorded_with_what_they_refer_to() {
    let (farm, session, claim) = running(two_outputs("lib")).await;
    let mut outputs = made("lib");
    outputs[0].references = vec![outputs[1].path.clone(), outputs[0].path.clone()];
    let expected = outputs[0].references.clone();
    assert_eq!(accept(&farm, &session, &claim, outputs).await, Verdict::Accepted);
    assert_eq!(recorded(&farm).await, 2);
    let refs: Vec<String> = farm.value("SELECT refs FROM ci.canonical WHERE cardinality(refs) > $1", 0).await;
    assert_eq!(refs, expected);
}

#[tokio::test]
async fn a_result_without_all_its_outputs_is_refused() {
    let (farm, session, claim) = running(two_outputs("lib")).await;
    assert_eq!(accept(&farm, &session, &claim, made("lib")[..1].to_vec()).await, Verdict::Incomplete);
    assert_eq!(recorded(&farm).await, 0);
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_result_with_an_output_too_many_is_refused() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    let outputs = vec![output("out", &store_path("leaf", "leaf")), output("doc", &store_path("doc", "doc"))];
    assert_eq!(accept(&farm, &session, &claim, outputs).await, Verdict::Incomplete);
    assert_eq!(recorded(&farm).await, 0);
}

#[tokio::test]
async fn a_result_at_a_path_that_is_not_the_derivations_is_refused() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    let foreign = vec![output("out", &store_path("bash", "bash"))];
    assert_eq!(accept(&farm, &session, &claim, foreign).await, Verdict::Incomplete);
    assert_eq!(recorded(&farm).await, 0);
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_path_that_is_known_only_after_the_build_is_set_by_it() {
    let floating = Node { outputs: vec![("out".into(), None)], ..derivation("floating", &[]) };
    let (farm, session, claim) = running(floating).await;
    let path = store_path("content", "floating");
    assert_eq!(accept(&farm, &session, &claim, vec![output("out", &path)]).await, Verdict::Accepted);
    let set: String = farm.value("SELECT path FROM ci.output WHERE job_id = $1", claim.fence.job).await;
    assert_eq!(set, path);
}

fn floating(name: &str) -> Node {
    Node { outputs: vec![("out".into(), None)], ..derivation(name, &[]) }
}

#[tokio::test]
async fn a_path_that_a_build_showed_is_not_known_any_more_once_it_is_forgotten() {
    let (farm, session, claim) = running(floating("floating")).await;
    let path = store_path("content", "floating");
    accept(&farm, &session, &claim, vec![output("out", &path)]).await;
    let realised = signer::realised(&farm.signer, std::slice::from_ref(&claim.drv_path)).await.unwrap();
    assert_eq!(realised.iter().map(|known| known.path.as_str()).collect::<Vec<_>>(), [path.as_str()]);
    assert_eq!(signer::realised_at(&farm.signer, std::slice::from_ref(&path)).await.unwrap(), realised);
    signer::finish(&farm.signer, &[claim.fence]).await.unwrap();

    signer::forget(&farm.signer, &[path], None).await.unwrap();
    let realised = signer::realised(&farm.signer, std::slice::from_ref(&claim.drv_path)).await.unwrap();
    assert_eq!(realised, []);
    farm.settle().await;
    let again = farm.claim(&session).await;
    let other = vec![output("out", &store_path("other", "floating"))];
    assert_eq!(accept(&farm, &session, &again, other).await, Verdict::Accepted);
}

#[tokio::test]
async fn what_is_forgotten_before_it_is_published_is_stopped_if_nobody_wants_it() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    let path = store_path("leaf", "leaf");
    accept(&farm, &session, &claim, vec![output("out", &path)]).await;
    let evaluation: i64 = farm.value("SELECT max(id) FROM ci.evaluation WHERE id > $1", 0_i64).await;
    people::end_evaluation(&farm.frontend, evaluation, Ending::Cancelled, None).await.unwrap();
    farm.settle().await;
    let abandoned = async || session.heartbeat(&[claim.fence], None).await.unwrap().abandon;
    assert!(abandoned().await.is_empty(), "what is accepted is kept");
    signer::forget(&farm.signer, &[path], None).await.unwrap();
    farm.settle().await;
    assert_eq!(abandoned().await, [claim.fence.job]);
}

#[tokio::test]
async fn what_an_evaluator_says_is_not_what_a_build_showed() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    accept(&farm, &session, &claim, vec![output("out", &store_path("leaf", "leaf"))]).await;
    assert_eq!(signer::realised(&farm.signer, &[claim.drv_path]).await.unwrap(), []);
}

#[tokio::test]
async fn several_builds_without_paths_are_sound() {
    let (farm, _, session) = Farm::small(2).await;
    farm.evaluate_nodes("main", vec![floating("one"), floating("other")]).await;
    farm.settle().await;
    assert_eq!(session.claim(2).await.unwrap().len(), 2);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_second_build_adopts_the_first_and_is_a_finding_if_it_differs() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    let mine = output("out", &store_path("leaf", "leaf"));
    ingest::record_paths(&farm.evaluator, &[from_elsewhere(&mine, vec![1; 32])]).await.unwrap();
    assert_eq!(accept(&farm, &session, &claim, vec![mine]).await, Verdict::Adopted);
    assert_eq!(findings(&farm).await, 1);
    let hash: Vec<u8> = farm.value("SELECT nar_hash FROM ci.canonical WHERE $1 = 0", 0).await;
    assert_eq!(hash, [1; 32]);
    assert_eq!(signer::finish(&farm.signer, &[claim.fence]).await.unwrap().jobs, [claim.fence.job]);
}

#[tokio::test]
async fn a_second_build_with_the_same_bytes_is_no_finding() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    let mine = output("out", &store_path("leaf", "leaf"));
    let same = from_elsewhere(&mine, mine.nar_hash.clone());
    ingest::record_paths(&farm.evaluator, &[same]).await.unwrap();
    assert_eq!(accept(&farm, &session, &claim, vec![mine]).await, Verdict::Adopted);
    assert_eq!(findings(&farm).await, 0);
}

#[tokio::test]
async fn outputs_of_two_builds_are_never_mixed() {
    let (farm, session, claim) = running(two_outputs("lib")).await;
    let outputs = made("lib");
    ingest::record_paths(&farm.evaluator, &[from_elsewhere(&outputs[1], vec![1; 32])]).await.unwrap();
    assert_eq!(accept(&farm, &session, &claim, outputs).await, Verdict::Conflict);
    assert_eq!(recorded(&farm).await, 1);
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn an_acceptance_whose_answer_was_lost_is_repeated() {
    let (farm, session, claim) = running(two_outputs("lib")).await;
    for _ in 0..2 {
        assert_eq!(accept(&farm, &session, &claim, made("lib")).await, Verdict::Accepted);
    }
    assert_eq!(recorded(&farm).await, 2);
}

#[tokio::test]
async fn any_signer_completes_what_was_accepted() {
    let (farm, session, claim) = running(two_outputs("lib")).await;
    accept(&farm, &session, &claim, made("lib")).await;
    let age = Duration::from_secs(30);
    assert!(signer::unpublished(&farm.signer, age).await.unwrap().is_empty());
    farm.advance(30.0).await;
    let left = signer::unpublished(&farm.signer, age).await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].outputs.len(), 2);
    assert_eq!(signer::finish(&farm.signer, &[left[0].fence]).await.unwrap().jobs, [claim.fence.job]);
    assert_eq!(farm.state(claim.fence.job).await, "succeeded");
    farm.assert_sound().await;
}

#[tokio::test]
async fn results_in_one_call_are_judged_each_by_itself() {
    let (farm, _, session) = Farm::small(2).await;
    farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    let claims = session.claim(2).await.unwrap();
    let right = |claim: &Claim| {
        vec![output("out", &store_path(harmonia_tests::farm::name(claim), harmonia_tests::farm::name(claim)))]
    };
    let results = [
        (holder(&session, &claims[0]), right(&claims[1])),
        (holder(&session, &claims[1]), right(&claims[1])),
    ];
    let verdicts = signer::accept(&farm.signer, &results).await.unwrap();
    assert_eq!(verdicts, [Verdict::Incomplete, Verdict::Accepted]);
}

#[tokio::test]
async fn the_first_of_two_attempts_stands() {
    let (farm, session, first) = running(derivation("leaf", &[])).await;
    let path = store_path("leaf", "leaf");
    accept(&farm, &session, &first, vec![output("out", &path)]).await;
    signer::finish(&farm.signer, &[first.fence]).await.unwrap();
    farm.settle().await;
    // A rebuild of what is recorded: its path stays what it was.
    farm.database.execute("UPDATE ci.job SET state = 'failed', failure = 'build_error'").await;
    harmonia_queue::people::rebuild(&farm.frontend, first.fence.job).await.unwrap();
    farm.settle().await;
    let again = farm.claim(&session).await;
    let differs = Output { nar_hash: vec![2; 32], ..output("out", &path) };
    assert_eq!(accept(&farm, &session, &again, vec![differs]).await, Verdict::Adopted);
    assert_eq!(findings(&farm).await, 1);
    assert!(!session.fail(again.fence, Failure::Upload, "late").await.unwrap());
}

#[tokio::test]
async fn two_attempts_at_one_job_are_told_apart_in_one_call() {
    let (farm, session, stale) = running(two_outputs("lib")).await;
    session.give_back(&[stale.fence], "drained").await.unwrap();
    farm.settle().await;
    let claim = farm.claim(&session).await;
    let results = [&stale, &claim].map(|claim| (holder(&session, claim), made("lib")));
    let verdicts = signer::accept(&farm.signer, &results).await.unwrap();
    assert_eq!(verdicts, [Verdict::Stale, Verdict::Accepted]);
    assert_eq!(signer::finish(&farm.signer, &[claim.fence]).await.unwrap().jobs, [claim.fence.job]);
}

#[tokio::test]
async fn an_upload_begins_whatever_else_the_same_call_names() {
    let (farm, session, stale) = running(two_outputs("lib")).await;
    session.give_back(&[stale.fence], "drained").await.unwrap();
    farm.settle().await;
    let claim = farm.claim(&session).await;
    session.start_upload(&[stale.fence, claim.fence]).await.unwrap();
    assert_eq!(farm.state(claim.fence.job).await, "uploading");
}

// --- what cannot be published

#[tokio::test]
async fn what_cannot_be_published_fails_with_the_words_of_the_signer() {
    let (farm, session, claim) = running(two_outputs("lib")).await;
    accept(&farm, &session, &claim, made("lib")).await;
    assert!(signer::give_up(&farm.signer, claim.fence, "forget it").await.unwrap());
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "failed");
    assert_eq!(recorded(&farm).await, 0);
    let why = people::why(&farm.frontend, claim.fence.job).await.unwrap();
    assert!(why[0].1.contains("forget it"), "{why:?}");
    assert_eq!(accept(&farm, &session, &claim, made("lib")).await, Verdict::Stale);
    farm.assert_sound().await;
    assert!(people::rebuild(&farm.frontend, claim.fence.job).await.unwrap());
    farm.settle().await;
    assert_eq!(farm.build_all(&session).await, ["lib"]);
}

#[tokio::test]
async fn a_path_that_a_build_showed_is_not_known_any_more_once_it_is_given_up() {
    let (farm, session, claim) = running(floating("floating")).await;
    accept(&farm, &session, &claim, vec![output("out", &store_path("content", "floating"))]).await;
    assert!(signer::give_up(&farm.signer, claim.fence, "forget it").await.unwrap());
    assert_eq!(signer::realised(&farm.signer, std::slice::from_ref(&claim.drv_path)).await.unwrap(), []);
}

#[tokio::test]
async fn an_earlier_attempt_gives_up_nothing() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    accept(&farm, &session, &claim, vec![output("out", &store_path("leaf", "leaf"))]).await;
    let earlier = Fence { attempt: claim.fence.attempt - 1, ..claim.fence };
    assert!(!signer::give_up(&farm.signer, earlier, "forget it").await.unwrap());
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn what_is_not_accepted_is_not_given_up() {
    let (farm, _, claim) = running(derivation("leaf", &[])).await;
    assert!(!signer::give_up(&farm.signer, claim.fence, "forget it").await.unwrap());
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn what_another_build_made_of_a_path_is_not_given_up_with_it() {
    let (farm, session, claim) = running(derivation("leaf", &[])).await;
    let mine = output("out", &store_path("leaf", "leaf"));
    ingest::record_paths(&farm.evaluator, &[from_elsewhere(&mine, vec![1; 32])]).await.unwrap();
    assert_eq!(accept(&farm, &session, &claim, vec![mine]).await, Verdict::Adopted);
    assert!(signer::give_up(&farm.signer, claim.fence, "forget it").await.unwrap());
    assert_eq!(recorded(&farm).await, 1);
}

// --- what is forgotten

#[tokio::test]
async fn what_a_node_built_is_forgotten_and_nothing_else() {
    let (farm, pool, session) = Farm::small(1).await;
    farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    let claim = farm.claim(&session).await;
    farm.succeed(&session, &claim).await;
    let other = farm.node(&pool, "other").await;
    farm.settle().await;
    farm.build_all(&other).await;
    let ids = signer::nodes_named(&farm.signer, "other").await.unwrap();
    assert_eq!(signer::to_forget(&farm.signer, &[], None).await.unwrap(), Vec::<String>::new());
    let going = signer::to_forget(&farm.signer, &[], Some(ids[0])).await.unwrap();
    assert_eq!(going.len(), 1);
    assert_eq!(signer::forget(&farm.signer, &[], Some(ids[0])).await.unwrap(), going);
    assert_eq!(recorded(&farm).await, 1);
}
