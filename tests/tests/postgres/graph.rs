//! How a graph comes in, and when a job of it is ready: inputs, chunks, caches, and derivations that share a path.

use futures::future::join_all;
use harmonia_queue::builder::Failure;
use harmonia_queue::ingest::{self, Ingest, KnownPath, Node};
use harmonia_queue::people::{self, Ending};
use harmonia_queue::{Error, Result, signer};
use harmonia_tests::farm::{Farm, derivation, drv_path, name, store_path};
use sha2::{Digest, Sha256};

/// A derivation that makes the same path as another.
fn twin(name: &str, of: &str, inputs: &[&str]) -> Node {
    let outputs = vec![("out".to_owned(), Some(store_path(of, of)))];
    Node { outputs, ..derivation(name, inputs) }
}

fn cached(name: &str) -> Node {
    Node { cached: true, aterm: None, ..derivation(name, &[]) }
}

fn known_path(name: &str) -> KnownPath {
    let path = store_path(name, name);
    KnownPath { nar_hash: Sha256::digest(&path).to_vec(), nar_size: 1, references: Vec::new(), path }
}

/// A chunk past the wrapper, which would find the mistake itself: one derivation, its inputs by position, and ids.
async fn raw_chunk(farm: &Farm, evaluation: i64, inputs: &[i32], known: &[i64]) -> Result<Vec<i64>> {
    let rows = sqlx::query_scalar(
        "SELECT ci.ingest($1, ARRAY[$2], ARRAY['x86_64-linux'], ARRAY[''], ARRAY[false], ARRAY[1], ARRAY[0], ARRAY['x'::bytea],
                          ARRAY[1], ARRAY['out'], ARRAY[NULL::text], array_fill(1, ARRAY[cardinality($3)]), $3, $4)",
    )
    .bind(evaluation)
    .bind(drv_path("raw"))
    .bind(inputs)
    .bind(known)
    .fetch_one(&farm.database.admin())
    .await;
    rows.map_err(Error::from)
}

#[tokio::test]
async fn a_job_is_ready_when_its_last_input_is_built() {
    let (farm, _, node) = Farm::small(2).await;
    let graph: &[(&str, &[&str])] = &[("left", &[]), ("right", &[]), ("top", &["left", "right"])];
    let jobs = farm.queue("main", graph).await;
    let claims = node.claim(2).await.unwrap();
    farm.succeed(&node, &claims[0]).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "blocked");
    farm.succeed(&node, &claims[1]).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn leaves_of_the_first_chunk_are_built_before_the_evaluation_is_complete() {
    let (farm, _, node) = Farm::small(1).await;
    let mut evaluation = farm.begin("main").await;
    evaluation.add(vec![derivation("leaf", &[])]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.build_all(&node).await, ["leaf"]);
    evaluation.add(vec![derivation("top", &["leaf"])]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.build_all(&node).await, ["top"]);
    evaluation.complete(&[]).await.unwrap();
    farm.assert_sound().await;
}

#[tokio::test]
async fn overlapping_ingests_in_different_orders_never_deadlock() {
    const NODES: usize = 240;
    let (farm, ..) = Farm::small(1).await;
    let names: Vec<String> = (0..NODES).map(|n| format!("d{n}")).collect();
    let nodes: Vec<Node> = names.iter().map(|name| derivation(name, &[])).collect();
    // Cancelled ones are reopened, which writes rows that exist.
    let first = farm.evaluate_nodes("main", nodes[..NODES / 2].to_vec()).await;
    people::end_evaluation(&farm.operator, first.id, Ending::Cancelled, None).await.unwrap();
    farm.settle().await;
    let ingests = (0..6).map(|n| {
        let (farm, mut nodes) = (&farm, nodes.clone());
        async move {
            nodes.rotate_left(n * NODES / 6);
            if n % 2 == 1 {
                nodes.reverse();
            }
            let mut evaluation = farm.begin("main").await;
            for chunk in nodes.chunks(NODES / 4) {
                evaluation.add(chunk.to_vec()).await.unwrap();
            }
            evaluation.complete(&[]).await.unwrap();
        }
    });
    join_all(ingests).await;
    farm.settle().await;
    farm.assert_sound().await;
    assert_eq!(farm.value::<i64>("SELECT count(*) FROM ci.ready WHERE $1 = 0", 0).await, NODES as i64);
}

#[tokio::test]
async fn an_aborted_evaluation_cancels_what_only_it_wanted() {
    let (farm, ..) = Farm::small(1).await;
    let kept = farm.evaluate("main", &[("shared", &[])]).await;
    let mut aborted = farm.begin("main").await;
    aborted.add(vec![derivation("shared", &[]), derivation("own", &["shared"])]).await.unwrap();
    let own = aborted.job(&drv_path("own")).unwrap();
    aborted.abort("out of memory").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(own).await, "cancelled");
    assert_eq!(farm.state(kept["shared"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_is_cached_is_not_built_and_holds_nobody_up() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.evaluate_nodes("main", vec![cached("glibc"), derivation("hello", &["glibc"])]).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["glibc"]).await, "cached");
    assert_eq!(farm.state(jobs["hello"]).await, "ready");
}

#[tokio::test]
async fn a_cached_input_is_built_when_the_cache_of_a_later_evaluation_lacks_it() {
    let (farm, _, node) = Farm::small(1).await;
    farm.evaluate_nodes("main", vec![cached("glibc")]).await;
    farm.queue("main", &[("glibc", &[]), ("hello", &["glibc"])]).await;
    assert_eq!(farm.build_all(&node).await, ["glibc", "hello"]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_job_that_lands_under_a_failed_input_fails_at_once() {
    let (farm, _, node) = Farm::small(1).await;
    let first = farm.queue("main", &[("bad", &[])]).await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, Failure::BuildError, "no").await.unwrap();
    let second = farm.queue("main", &[("bad", &[]), ("top", &["bad"])]).await;
    assert_eq!(farm.state(second["top"]).await, "dep_failed");
    assert_eq!(farm.value::<i64>("SELECT root FROM ci.job WHERE id = $1", second["top"]).await, first["bad"]);
}

#[tokio::test]
async fn an_evaluation_that_has_ended_takes_no_derivations() {
    let (farm, ..) = Farm::small(1).await;
    let mut evaluation = farm.begin("main").await;
    people::end_evaluation(&farm.operator, evaluation.evaluation, Ending::Cancelled, None).await.unwrap();
    let refused = evaluation.add(vec![derivation("late", &[])]).await.unwrap_err();
    assert!(matches!(&refused, Error::WrongState(_)), "{refused:?}");
}

#[tokio::test]
async fn an_edge_to_an_unknown_id_is_refused() {
    let (farm, ..) = Farm::small(1).await;
    let evaluation = farm.begin("main").await.evaluation;
    let refused = raw_chunk(&farm, evaluation, &[2], &[4711]).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Vanished(sentence) if sentence.contains("named by its id")),
        "{refused:?}"
    );
}

#[tokio::test]
async fn an_edge_to_nowhere_is_refused() {
    let (farm, ..) = Farm::small(1).await;
    let evaluation = farm.begin("main").await.evaluation;
    let refused = raw_chunk(&farm, evaluation, &[2], &[]).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Graph(sentence) if sentence.contains("neither in this chunk")),
        "{refused:?}"
    );
}

#[tokio::test]
async fn an_edge_that_does_not_lead_down_is_refused() {
    let (farm, ..) = Farm::small(1).await;
    let evaluation = farm.begin("main").await.evaluation;
    let refused = raw_chunk(&farm, evaluation, &[1], &[]).await.unwrap_err();
    assert!(matches!(&refused, Error::Graph(sentence) if sentence.contains("cycle")), "{refused:?}");
}

#[tokio::test]
async fn a_class_that_is_new_is_claimed_by_nodes_that_were_there_before() {
    let (farm, _, node) = Farm::small(1).await;
    let class = Node { features: vec!["big-parallel".into()], ..derivation("chromium", &[]) };
    farm.evaluate_nodes("main", vec![class]).await;
    farm.settle().await;
    assert_eq!(farm.claim_names(&node, 1).await, ["chromium"]);
}

// --- derivations that share a path

#[tokio::test]
async fn a_derivation_whose_path_was_built_by_another_is_not_built() {
    let (farm, _, node) = Farm::small(1).await;
    farm.queue("main", &[("source", &[])]).await;
    farm.build_all(&node).await;
    let jobs = farm.evaluate_nodes("main", vec![twin("mirror", "source", &[])]).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["mirror"]).await, "succeeded");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_derivation_follows_the_one_that_makes_its_path() {
    let (farm, _, node) = Farm::small(2).await;
    farm.queue("main", &[("source", &[])]).await;
    let running = farm.claim(&node).await;
    let jobs = farm
        .evaluate_nodes("main", vec![twin("mirror", "source", &[]), derivation("top", &["mirror"])])
        .await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["mirror"]).await, "blocked");
    farm.succeed(&node, &running).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["mirror"]).await, "succeeded");
    assert_eq!(farm.state(jobs["top"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn of_derivations_that_share_a_path_one_is_ready() {
    let (farm, _, node) = Farm::small(2).await;
    farm.evaluate_nodes("main", vec![derivation("source", &[]), twin("mirror", "source", &[])]).await;
    farm.settle().await;
    assert_eq!(node.claim(2).await.unwrap().len(), 1);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_derivation_that_waits_follows_one_that_comes_later() {
    let (farm, _, node) = Farm::small(2).await;
    let waiting = farm.queue("main", &[("base", &[]), ("source", &["base"])]).await;
    let base = farm.claim(&node).await;
    farm.evaluate_nodes("main", vec![twin("mirror", "source", &[])]).await;
    farm.settle().await;
    let mirror = farm.claim(&node).await;
    farm.succeed(&node, &mirror).await;
    farm.settle().await;
    assert_eq!(farm.state(waiting["source"]).await, "succeeded");
    node.give_back(&[base.fence], "not needed").await.unwrap();
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_follower_takes_over_when_its_leader_fails() {
    let (farm, _, node) = Farm::small(2).await;
    farm.queue("main", &[("source", &[])]).await;
    let running = farm.claim(&node).await;
    let jobs = farm.evaluate_nodes("main", vec![twin("mirror", "source", &[])]).await;
    farm.settle().await;
    node.fail(running.fence, Failure::BuildError, "404").await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["mirror"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_leader_that_must_retry_and_its_follower_do_not_wait_for_each_other() {
    let (farm, _, node) = Farm::small(2).await;
    // The leader is deeper than its follower, which would go first if both waited.
    farm.evaluate_nodes("main", vec![cached("curl"), derivation("source", &["curl"])]).await;
    farm.settle().await;
    let leader = farm.claim(&node).await;
    farm.evaluate_nodes("main", vec![twin("mirror", "source", &[])]).await;
    farm.settle().await;
    node.fail(leader.fence, Failure::Network, "reset").await.unwrap();
    farm.pass(60.0).await;
    assert_eq!(name(&farm.claim(&node).await), "mirror");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_waiting_job_ends_when_a_substituter_turns_out_to_have_its_path() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    assert_eq!(ingest::record_paths(&farm.evaluator, &[known_path("top")]).await.unwrap(), 1);
    farm.settle().await;
    assert_eq!(farm.state(jobs["top"]).await, "succeeded");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_ready_job_ends_when_a_substituter_turns_out_to_have_its_path() {
    let (farm, _, node) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("leaf", &[]), ("top", &["leaf"])]).await;
    ingest::record_paths(&farm.evaluator, &[known_path("leaf")]).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["leaf"]).await, "succeeded");
    assert_eq!(farm.claim_names(&node, 1).await, ["top"]);
    farm.assert_sound().await;
}

#[tokio::test]
async fn the_first_word_about_a_path_stands() {
    let (farm, ..) = Farm::small(1).await;
    let first = known_path("glibc");
    let second = KnownPath { nar_hash: vec![9; 32], ..first.clone() };
    assert_eq!(ingest::record_paths(&farm.evaluator, std::slice::from_ref(&first)).await.unwrap(), 1);
    assert_eq!(ingest::record_paths(&farm.evaluator, &[second]).await.unwrap(), 0);
    let hash: Vec<u8> = farm.value("SELECT nar_hash FROM ci.canonical WHERE $1 = 0", 0).await;
    assert_eq!(hash, first.nar_hash);
}

#[tokio::test]
async fn an_evaluation_of_an_unknown_project_is_refused() {
    let (farm, ..) = Farm::small(1).await;
    let refused = Ingest::begin(&farm.evaluator, "nobody", "git", None, None, false).await.unwrap_err();
    assert!(matches!(&refused, Error::NotFound(_)), "{refused:?}");
}

/// Which of these a new evaluation has to add, and what it wants of the rest.
async fn want_known(farm: &Farm, tops: &[&str]) -> (Vec<String>, i64) {
    let mut evaluation = farm.begin("other").await;
    let unknown = evaluation.want_known(tops.iter().map(|top| drv_path(top)).collect()).await.unwrap();
    let wanted = "SELECT count(*) FROM ci.want WHERE evaluation_id = $1";
    (unknown, farm.value(wanted, evaluation.evaluation).await)
}

#[tokio::test]
async fn a_closure_that_is_known_is_wanted_by_its_top() {
    let (farm, ..) = Farm::small(1).await;
    farm.project("other").await;
    farm.queue("main", &[("base", &[]), ("left", &["base"]), ("top", &["left"]), ("aside", &[])]).await;
    assert_eq!(want_known(&farm, &["top"]).await, (vec![], 3));
    farm.settle().await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_is_not_known_is_answered() {
    let (farm, ..) = Farm::small(1).await;
    farm.project("other").await;
    farm.queue("main", &[("base", &[])]).await;
    assert_eq!(want_known(&farm, &["new", "base"]).await, (vec![drv_path("new")], 1));
}

#[tokio::test]
async fn a_closure_without_all_its_texts_is_not_known() {
    let (farm, ..) = Farm::small(1).await;
    farm.project("other").await;
    farm.evaluate_nodes("main", vec![cached("base"), derivation("top", &["base"])]).await;
    assert_eq!(want_known(&farm, &["top"]).await, (vec![drv_path("top")], 0));
}

#[tokio::test]
async fn a_closure_that_lost_a_source_is_not_known() {
    let (farm, _, node) = Farm::small(1).await;
    farm.project("other").await;
    let source = store_path("source", "source.tar");
    let base = Node { aterm: Some(format!("Derive({source})").into_bytes()), ..derivation("base", &[]) };
    farm.evaluate_nodes("main", vec![base, derivation("top", &["base"])]).await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    assert!(node.input_missing(claim.fence, &source).await.unwrap());
    signer::settle_missing(&farm.signer, &source, true).await.unwrap();
    farm.settle().await;
    assert_eq!(want_known(&farm, &["top"]).await, (vec![drv_path("top")], 0));
}

#[tokio::test]
async fn a_chain_that_grows_above_what_is_known_raises_all_of_it() {
    let (farm, ..) = Farm::small(1).await;
    let jobs = farm.queue("main", &[("base", &[]), ("middle", &["base"])]).await;
    let mut evaluation = farm.begin("main").await;
    assert!(evaluation.want_known(vec![drv_path("middle")]).await.unwrap().is_empty());
    let grown = [("base", &[][..]), ("middle", &["base"]), ("above", &["middle"]), ("top", &["above"])];
    evaluation.add(grown.map(|(name, inputs)| derivation(name, inputs)).to_vec()).await.unwrap();
    evaluation.complete(&[]).await.unwrap();
    for (name, height) in [("middle", 2), ("base", 3)] {
        assert_eq!(farm.value::<i32>("SELECT height FROM ci.job WHERE id = $1", jobs[name]).await, height);
    }
}
