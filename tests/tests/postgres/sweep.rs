//! What a sweep of the bucket forgets, what it leaves, and whom it meets.

use std::collections::BTreeSet;
use std::time::Duration;

use harmonia_queue::builder::Session;
use harmonia_queue::ingest::Node;
use harmonia_queue::signer::{self, Output, Verdict};
use harmonia_queue::sweep::{self, Sweep};
use harmonia_queue::{Error, evaluations, janitor};
use harmonia_tests::farm::{Evaluation, Farm, PoolHandle, derivation, holder, output, store_path};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::races::{after, open_words, open_written};

const GRACE: Duration = Duration::from_secs(86_400);
const DAY: f64 = 86_400.0;

/// The path of a derivation of a short name.
fn path(name: &str) -> String {
    store_path(name, name)
}

/// A farm that has built `top` on `base`, and nobody wants it any more: its jobs went, its paths are on record.
async fn abandoned() -> (Farm, PoolHandle, Session) {
    let (farm, pool, node) = Farm::small(4).await;
    build(&farm, &node, &[("base", &[]), ("top", &["base"])]).await;
    abandon(&farm).await;
    farm.advance(DAY + 1.0).await;
    let node = farm.node(&pool, "node").await;
    (farm, pool, node)
}

/// An evaluation that is built, each output referring to those of its inputs.
async fn build(farm: &Farm, node: &Session, graph: &[(&str, &[&str])]) -> Evaluation {
    let evaluation = farm.queue("main", graph).await;
    while let Some(claim) = node.claim(1).await.unwrap().pop() {
        let (_, inputs) =
            graph.iter().find(|(name, _)| claim.drv_path.ends_with(&format!("-{name}.drv"))).unwrap();
        let name = claim.drv_path[44..].trim_end_matches(".drv").to_owned();
        let references = inputs.iter().map(|input| path(input)).collect();
        let made = Output { references, ..output("out", &path(&name)) };
        assert_eq!(accept(farm, node, &claim, made).await, Verdict::Accepted);
        signer::finish(&farm.signer, &[claim.fence]).await.unwrap();
        farm.settle().await;
    }
    evaluation
}

async fn accept(
    farm: &Farm,
    node: &Session,
    claim: &harmonia_queue::builder::Claim,
    made: Output,
) -> Verdict {
    signer::accept(&farm.signer, &[(holder(node, claim), vec![made])]).await.unwrap()[0]
}

/// All evaluations are past their time, and go with what only they needed.
async fn abandon(farm: &Farm) {
    farm.database.execute("UPDATE ci.evaluation SET state = 'cancelled' WHERE NOT pinned").await;
    farm.database.execute("UPDATE ci.project SET retention = '0'").await;
    farm.advance(1.0).await;
    let lead = farm.lead().await;
    while janitor::retain(&farm.operator, lead.generation).await.unwrap() > 0 {
        farm.settle().await;
    }
}

async fn begin(farm: &Farm) -> Sweep<'_> {
    Sweep::begin(&farm.signer, "test", None).await.unwrap().expect("nobody else sweeps")
}

async fn read_all(sweep: &Sweep<'_>) {
    while sweep.read_sources(2).await.unwrap() {}
}

async fn plan(sweep: &Sweep<'_>) {
    read_all(sweep).await;
    mark(sweep).await;
    sweep::pass(|after| async move { sweep.confirm(&after, 2).await }).await.unwrap();
}

async fn mark(sweep: &Sweep<'_>) {
    sweep::pass(|after| async move { sweep.mark_candidates(&after, 2, GRACE).await }).await.unwrap();
    sweep::pass(|after| async move { sweep.spare_references(&after, 2).await }).await.unwrap();
}

/// Forgets all whose grace is over; answers the paths in that order.
async fn condemn(sweep: &Sweep<'_>, grace: Duration) -> Vec<String> {
    let mut gone = Vec::new();
    loop {
        let some = sweep.condemn(grace, 1).await.unwrap();
        if some.is_empty() {
            return gone;
        }
        gone.extend(some.into_iter().map(|condemned| condemned.path));
    }
}

/// A sweep whose marks are as old as the grace already.
async fn sweep(farm: &Farm) -> Vec<String> {
    let sweep = begin(farm).await;
    plan(&sweep).await;
    let gone = condemn(&sweep, Duration::ZERO).await;
    sweep.bury(&gone).await.unwrap();
    sweep.end().await.unwrap();
    gone
}

async fn recorded(farm: &Farm) -> BTreeSet<String> {
    let paths = sqlx::query_scalar("SELECT path FROM ci.canonical").fetch_all(&farm.database.admin()).await;
    paths.unwrap().into_iter().collect()
}

async fn dying(farm: &Farm) -> i64 {
    farm.value("SELECT count(*) FROM ci.dying WHERE $1 = 0", 0).await
}

/// A source that was uploaded, long ago.
async fn publish_source(farm: &Farm, name: &str) -> String {
    let ingest = farm.begin("main").await;
    let token = ingest.token().await.unwrap();
    let source = Output { name: String::new(), ..output("", &path(name)) };
    signer::accept_sources(&farm.signer, ingest.evaluation, &token, &[source]).await.unwrap();
    path(name)
}

fn naming(name: &str, source: &str) -> Node {
    Node { aterm: Some(format!("Derive([],[],[\"{source}\"])").into_bytes()), ..derivation(name, &[]) }
}

#[tokio::test]
async fn what_no_evaluation_needs_is_forgotten_the_last_recorded_first() {
    let (farm, ..) = abandoned().await;
    assert_eq!(sweep(&farm).await, [path("top"), path("base")]);
    assert_eq!(recorded(&farm).await, BTreeSet::new());
}

#[tokio::test]
async fn what_a_kept_path_refers_to_is_kept_although_its_job_went() {
    let (farm, _, node) = Farm::small(4).await;
    build(&farm, &node, &[("base", &[]), ("middle", &["base"]), ("top", &["middle"])]).await;
    // The job of the top alone is left, as if it had come with another derivation of the same output.
    farm.database.execute("DELETE FROM ci.output WHERE path NOT LIKE '%-top'").await;
    farm.advance(DAY + 1.0).await;
    assert_eq!(sweep(&farm).await, [""; 0]);
    assert_eq!(recorded(&farm).await.len(), 3);
}

#[tokio::test]
async fn a_pinned_evaluation_keeps_its_closure() {
    let (farm, _, node) = Farm::small(4).await;
    let pinned = build(&farm, &node, &[("base", &[]), ("top", &["base"])]).await;
    build(&farm, &node, &[("base", &[]), ("other", &["base"])]).await;
    assert!(evaluations::pin(&farm.frontend, pinned.id, true).await.unwrap());
    assert!(!evaluations::pin(&farm.frontend, pinned.id, true).await.unwrap());
    abandon(&farm).await;
    farm.advance(DAY + 1.0).await;
    assert_eq!(sweep(&farm).await, [path("other")]);
}

#[tokio::test]
async fn who_pins_what_is_not_there_is_told() {
    let (farm, ..) = Farm::small(1).await;
    let refused = evaluations::pin(&farm.frontend, 7, true).await.unwrap_err();
    assert!(
        matches!(&refused, Error::NotFound(sentence) if sentence == "there is no evaluation 7"),
        "{refused:?}"
    );
}

#[tokio::test]
async fn what_was_recorded_a_moment_ago_is_not_even_marked() {
    let (farm, _, node) = Farm::small(4).await;
    build(&farm, &node, &[("top", &[])]).await;
    abandon(&farm).await;
    plan(&begin(&farm).await).await;
    assert_eq!(dying(&farm).await, 0);
}

#[tokio::test]
async fn a_mark_has_its_grace() {
    let (farm, ..) = abandoned().await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    assert_eq!(condemn(&sweep, GRACE).await, [""; 0]);
    sweep.end().await.unwrap();
    farm.advance(DAY).await;
    assert_eq!(condemn(&begin(&farm).await, GRACE).await.len(), 2);
}

#[tokio::test]
async fn a_source_that_a_kept_derivation_names_is_kept() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    farm.evaluate_nodes("main", vec![naming("user", &source)]).await;
    farm.advance(DAY + 1.0).await;
    assert_eq!(sweep(&farm).await, [""; 0]);
}

#[tokio::test]
async fn a_source_goes_with_the_last_derivation_that_names_it() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    farm.evaluate_nodes("main", vec![naming("user", &source)]).await;
    begin(&farm).await.end().await.unwrap();
    abandon(&farm).await;
    farm.settle().await;
    abandon(&farm).await;
    farm.advance(DAY + 1.0).await;
    assert_eq!(sweep(&farm).await, [source]);
}

#[tokio::test]
async fn a_derivation_that_comes_after_the_mark_spares_its_sources() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    farm.advance(DAY + 1.0).await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    assert_eq!(dying(&farm).await, 1);
    farm.evaluate_nodes("main", vec![naming("user", &source)]).await;
    // Not before the new text was read, and then not at all.
    assert_eq!(condemn(&sweep, Duration::ZERO).await, [""; 0]);
    assert_eq!(dying(&farm).await, 1);
    read_all(&sweep).await;
    assert_eq!(dying(&farm).await, 0);
    assert_eq!(condemn(&sweep, Duration::ZERO).await, [""; 0]);
}

#[tokio::test]
async fn a_text_that_takes_the_place_of_another_is_read_too() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    let cached = Node { cached: true, aterm: None, ..derivation("user", &[]) };
    farm.evaluate_nodes("main", vec![cached]).await;
    let sweep = begin(&farm).await;
    read_all(&sweep).await;
    farm.evaluate_nodes("main", vec![naming("user", &source)]).await;
    read_all(&sweep).await;
    farm.advance(60.0).await;
    let kept: i64 = farm.value("SELECT count(*) FROM ci.job_source WHERE $1 = 0", 0).await;
    assert_eq!(kept, 1);
}

#[tokio::test]
async fn what_is_wanted_again_between_mark_and_removal_is_spared_with_all_below() {
    let (farm, ..) = abandoned().await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    assert_eq!(dying(&farm).await, 2);
    farm.queue("main", &[("top", &[])]).await;
    assert_eq!(dying(&farm).await, 0);
    assert_eq!(condemn(&sweep, Duration::ZERO).await, [""; 0]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_a_new_result_refers_to_is_spared() {
    let (farm, _, node) = abandoned().await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    farm.queue("main", &[("new", &[])]).await;
    let claim = farm.claim(&node).await;
    let made = Output { references: vec![path("top")], ..output("out", &path("new")) };
    assert_eq!(accept(&farm, &node, &claim, made).await, Verdict::Accepted);
    assert_eq!(condemn(&sweep, Duration::ZERO).await, [""; 0]);
}

#[tokio::test]
async fn a_source_that_is_published_again_is_spared() {
    let (farm, ..) = Farm::small(4).await;
    publish_source(&farm, "source").await;
    farm.advance(DAY + 1.0).await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    publish_source(&farm, "source").await;
    assert_eq!(condemn(&sweep, Duration::ZERO).await, [""; 0]);
}

#[tokio::test]
async fn what_is_being_removed_is_accepted_a_moment_later() {
    let (farm, _, node) = abandoned().await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    let gone = condemn(&sweep, Duration::ZERO).await;
    farm.queue("main", &[("base", &[])]).await;
    let claim = farm.claim(&node).await;
    let busy = "SELECT verdict FROM ci.accept(ARRAY[$1], ARRAY[$2], ARRAY[$3], ARRAY[$4], ARRAY[1], ARRAY['out'], ARRAY[$5], ARRAY[$6], ARRAY[1::bigint],
                ARRAY[''], ARRAY[$6], ARRAY[1::bigint], ARRAY[NULL])";
    let verdict = || async {
        let made = output("out", &path("base"));
        let query =
            sqlx::query_scalar::<_, String>(busy).bind(node.id).bind(&node.secret).bind(claim.fence.job);
        let query = query.bind(claim.fence.attempt).bind(made.path).bind(made.nar_hash);
        query.fetch_one(&farm.database.admin()).await.unwrap()
    };
    assert_eq!(verdict().await, "busy");
    sweep.bury(&gone).await.unwrap();
    assert_eq!(verdict().await, "busy");
    farm.advance(121.0).await;
    assert_eq!(verdict().await, "accepted");
}

#[tokio::test]
async fn a_source_that_is_being_removed_is_taken_a_moment_later() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    farm.advance(DAY + 1.0).await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    assert_eq!(condemn(&sweep, Duration::ZERO).await, std::slice::from_ref(&source));
    let ingest = farm.begin("main").await;
    let token = ingest.token().await.unwrap();
    let again = [Output { name: String::new(), ..output("", &source) }];
    let refused = signer::accept_sources(&farm.signer, ingest.evaluation, &token, &again).await.unwrap_err();
    assert!(matches!(refused, Error::WrongState(_)), "{refused:?}");
}

#[tokio::test]
async fn one_sweeps_at_a_time() {
    let (farm, ..) = Farm::small(1).await;
    let first = begin(&farm).await;
    assert!(Sweep::begin(&farm.signer, "second", None).await.unwrap().is_none());
    assert!(sweep::state(&farm.signer).await.unwrap().running);
    first.end().await.unwrap();
    assert!(Sweep::begin(&farm.signer, "second", None).await.unwrap().is_some());
}

#[tokio::test]
async fn who_was_silent_for_too_long_sweeps_no_more() {
    let (farm, ..) = abandoned().await;
    let silent = begin(&farm).await;
    plan(&silent).await;
    farm.advance(121.0).await;
    let next = begin(&farm).await;
    let refused = silent.condemn(Duration::ZERO, 10).await.unwrap_err();
    assert!(matches!(refused, Error::NotLeader(_)), "{refused:?}");
    assert_eq!(condemn(&next, Duration::ZERO).await.len(), 2);
}

#[tokio::test]
async fn the_next_sweep_is_due_after_its_time_or_if_the_last_broke_off() {
    let (farm, ..) = abandoned().await;
    let due = || async { Sweep::begin(&farm.signer, "test", Some(GRACE)).await.unwrap() };
    let first = due().await.expect("none was yet");
    plan(&first).await;
    first.end().await.unwrap();
    assert!(due().await.is_none());
    let broken = begin(&farm).await;
    assert_eq!(condemn(&broken, Duration::ZERO).await.len(), 2);
    farm.advance(121.0).await;
    let next = due().await.expect("what is left to be removed is");
    assert_eq!(next.unburied(10).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_plan_waits_for_an_ingest_that_wants_the_path_again() {
    let (farm, ..) = abandoned().await;
    let sweep = begin(&farm).await;
    read_all(&sweep).await;
    let held = open_written(&farm, &derivation("top", &[])).await;
    mark(&sweep).await;
    assert_eq!(dying(&farm).await, 2);
    let db = farm.signer.clone();
    let generation: i64 = farm.value("SELECT generation FROM ci.sweep WHERE $1 = 0", 0).await;
    after(&farm, held, confirm(db, generation)).await;
    assert_eq!(dying(&farm).await, 0);
}

async fn confirm(db: harmonia_queue::Db, generation: i64) {
    let sweep = &Sweep::resume(&db, generation);
    sweep::pass(|after| async move { sweep.confirm(&after, 1000).await }).await.unwrap();
}

#[tokio::test]
async fn texts_are_not_read_past_one_that_is_on_its_way() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    // So that the two do not meet at a new class or lane.
    farm.evaluate_nodes("main", vec![derivation("first", &[])]).await;
    let held = open_written(&farm, &naming("slow", &source)).await;
    // Its number is greater, and it is there first.
    farm.evaluate_nodes("main", vec![derivation("quick", &[])]).await;
    let sweep = begin(&farm).await;
    let generation: i64 = farm.value("SELECT generation FROM ci.sweep WHERE $1 = 0", 0).await;
    let db = farm.signer.clone();
    after(&farm, held, async move { read_all(&Sweep::resume(&db, generation)).await }).await;
    farm.advance(60.0).await;
    sweep.renew().await.unwrap();
    let kept: i64 = farm.value("SELECT count(*) FROM ci.job_source WHERE $1 = 0", 0).await;
    assert_eq!(kept, 1);
}

#[tokio::test]
async fn a_removal_waits_for_a_text_that_is_on_its_way() {
    let (farm, ..) = Farm::small(4).await;
    let source = publish_source(&farm, "source").await;
    farm.advance(DAY + 1.0).await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    let held = open_written(&farm, &naming("user", &source)).await;
    let generation: i64 = farm.value("SELECT generation FROM ci.sweep WHERE $1 = 0", 0).await;
    let db = farm.signer.clone();
    let gone =
        after(&farm, held, async move { condemn(&Sweep::resume(&db, generation), Duration::ZERO).await });
    assert_eq!(gone.await, [""; 0]);
}

#[tokio::test]
async fn a_removal_does_not_wait_for_who_spares_the_path() {
    let (farm, ..) = abandoned().await;
    farm.forbid_waiting().await;
    let farm = Farm::on(farm.database).await;
    let sweep = begin(&farm).await;
    plan(&sweep).await;
    let held = open_words(&farm, &format!("SELECT ci.spare(ARRAY['{}'])", path("top"))).await;
    assert_eq!(condemn(&sweep, Duration::ZERO).await, [""; 0]);
    drop(held);
}

#[tokio::test]
async fn a_dry_run_says_what_a_sweep_does() {
    let (farm, ..) = abandoned().await;
    let before = farm.digest().await;
    assert_eq!(sweep::would_sweep(&farm.signer, GRACE).await.unwrap(), [(0, 0), (2, 2)]);
    assert_eq!(farm.digest().await, before);
    let marking = begin(&farm).await;
    plan(&marking).await;
    marking.end().await.unwrap();
    farm.advance(DAY).await;
    assert_eq!(sweep::would_sweep(&farm.signer, GRACE).await.unwrap(), [(2, 2), (0, 0)]);
    assert_eq!(sweep::marked(&farm.signer).await.unwrap(), (2, 2));
}

#[tokio::test]
async fn what_the_bucket_has_ends_the_job_that_would_make_it() {
    let (farm, _, node) = Farm::small(4).await;
    let jobs = farm.queue("main", &[("base", &[]), ("top", &["base"])]).await;
    let resync = Sweep::begin_resync(&farm.signer, "test").await.unwrap().unwrap();
    let found = signer::Published { drv_path: None, output: output("", &path("base")) };
    assert_eq!(resync.adopt(std::slice::from_ref(&found)).await.unwrap(), 1);
    assert_eq!(resync.adopt(&[found]).await.unwrap(), 0);
    farm.settle().await;
    assert_eq!(farm.state(jobs["base"]).await, "succeeded");
    assert_eq!(farm.claim_names(&node, 4).await, ["top"]);
}

#[tokio::test]
async fn what_the_bucket_has_undoes_a_failure_of_before() {
    let (farm, _, node) = Farm::small(4).await;
    let jobs = farm.queue("main", &[("base", &[])]).await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, harmonia_queue::builder::Failure::BuildError, "no").await.unwrap();
    let resync = Sweep::begin_resync(&farm.signer, "test").await.unwrap().unwrap();
    resync.adopt(&[signer::Published { drv_path: None, output: output("", &path("base")) }]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["base"]).await, "succeeded");
    farm.assert_sound().await;
}

#[tokio::test]
async fn attempts_go_on_after_the_last_that_the_bucket_has() {
    let (farm, _, node) = Farm::small(4).await;
    let resync = Sweep::begin_resync(&farm.signer, "test").await.unwrap().unwrap();
    resync.advance_attempts(1_000_000).await.unwrap();
    resync.advance_attempts(5).await.unwrap();
    farm.queue("main", &[("base", &[])]).await;
    // A connection that has drawn numbers before keeps those.
    let claim = farm.claim(&node).await;
    assert!(claim.fence.attempt > 1_000_000, "{}", claim.fence.attempt);
}

/// The tops of an evaluation, and whether it is kept.
type Evaluated = (Vec<usize>, bool);

/// A graph of up to a dozen paths in the order of their making, and up to four evaluations of some of them.
fn graphs() -> impl Strategy<Value = (Vec<Vec<usize>>, Vec<Evaluated>)> {
    let inputs = vec(vec(0..12_usize, 0..4), 1..12);
    (inputs, vec((vec(0..12_usize, 1..4), any::<bool>()), 1..5))
}

/// Everything that can be reached from some nodes.
fn closure(graph: &[Vec<usize>], tops: &[usize]) -> BTreeSet<usize> {
    let (mut found, mut open) = (BTreeSet::new(), tops.to_vec());
    while let Some(node) = open.pop() {
        if found.insert(node) {
            open.extend(&graph[node]);
        }
    }
    found
}

/// Evaluations of random parts of a random graph, some of which are kept: exactly what those need is left.
#[test]
fn no_kept_closure_loses_a_path_and_nothing_else_is_left() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let cases = if harmonia_tests::long() { 200 } else { 24 };
    // What everybody runs is the same for everybody.
    let rng_seed = if harmonia_tests::long() { RngSeed::Random } else { RngSeed::Fixed(1) };
    let config =
        Config { cases, max_shrink_iters: 64, failure_persistence: None, rng_seed, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&graphs(), |(graph, evaluations)| {
        let count = graph.len();
        let graph: Vec<Vec<usize>> = graph
            .into_iter()
            .enumerate()
            .map(|(node, inputs)| inputs.into_iter().filter(|&input| input < node).collect())
            .collect();
        let evaluations: Vec<Evaluated> = evaluations
            .into_iter()
            .map(|(tops, kept)| (tops.into_iter().map(|top| top % count).collect(), kept))
            .collect();
        runtime.block_on(sweep_random(&graph, &evaluations))
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

async fn sweep_random(graph: &[Vec<usize>], evaluations: &[Evaluated]) -> Result<(), TestCaseError> {
    let (farm, _, node) = Farm::small(4).await;
    let names: Vec<String> = (0..graph.len()).map(|node| format!("n{node}")).collect();
    let (mut all, mut kept) = (BTreeSet::new(), BTreeSet::new());
    for (tops, keep) in evaluations {
        let part = closure(graph, tops);
        let inputs: Vec<Vec<&str>> =
            part.iter().map(|&n| graph[n].iter().map(|&input| names[input].as_str()).collect()).collect();
        let written: Vec<(&str, &[&str])> =
            part.iter().zip(&inputs).map(|(&n, inputs)| (names[n].as_str(), inputs.as_slice())).collect();
        let evaluation = build(&farm, &node, &written).await;
        if *keep {
            evaluations::pin(&farm.frontend, evaluation.id, true).await.unwrap();
            kept.extend(part.iter().copied());
        }
        all.extend(part);
    }
    abandon(&farm).await;
    farm.advance(DAY + 1.0).await;
    let [_, (dead, _)] = sweep::would_sweep(&farm.signer, GRACE).await.unwrap();
    let gone = sweep(&farm).await;
    prop_assert_eq!(dead as usize, gone.len());
    let expected: BTreeSet<String> = kept.iter().map(|&node| path(&names[node])).collect();
    prop_assert_eq!(recorded(&farm).await, expected);
    prop_assert_eq!(gone.len(), all.len() - kept.len());
    farm.assert_sound().await;
    Ok(())
}

#[tokio::test]
async fn what_is_adopted_while_somebody_rebuilds_it_is_opened_once() {
    let (farm, _, node) = Farm::small(4).await;
    let jobs = farm.queue("main", &[("base", &[])]).await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, harmonia_queue::builder::Failure::BuildError, "no").await.unwrap();
    let _resync = Sweep::begin_resync(&farm.signer, "test").await.unwrap().unwrap();
    let held =
        open_words(&farm, &format!("SELECT ci.rebuild({}); SELECT ci.resolve(1000)", jobs["base"])).await;
    let (db, generation) =
        (farm.signer.clone(), farm.value("SELECT generation FROM ci.sweep WHERE $1 = 0", 0).await);
    let found = [signer::Published { drv_path: None, output: output("", &path("base")) }];
    after(&farm, held, async move { Sweep::resume(&db, generation).adopt(&found).await.unwrap() }).await;
    farm.assert_sound().await;
}
