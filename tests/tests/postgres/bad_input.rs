//! Input that cannot be right: a sentence that says what is wrong, and nothing is changed.

use harmonia_queue::builder::{self, Failure, Session};
use harmonia_queue::ingest::{Ingest, Node, NodeError};
use harmonia_queue::people::{self, Ending, Project};
use harmonia_queue::signer::{self, Verdict};
use harmonia_queue::{Error, Result, janitor};
use harmonia_tests::farm::{Farm, SYSTEM, derivation, drv_path, holder};
use nix_derivation::Derivation;

async fn farm() -> Farm {
    let farm = Farm::new().await;
    farm.project("project").await;
    farm
}

/// Runs what must be refused, and answers the sentence.
async fn refused<T: std::fmt::Debug>(farm: &Farm, call: impl Future<Output = Result<T>>) -> String {
    let before = farm.digest().await;
    let error = call.await.unwrap_err();
    assert!(!matches!(error, Error::Database(_) | Error::Unreachable(_)), "{error:?}");
    assert_eq!(farm.digest().await, before);
    error.to_string()
}

#[tokio::test]
async fn a_cycle_is_named_by_one_of_its_derivations() {
    let farm = farm().await;
    let mut ingest = farm.begin("project").await;
    let nodes = vec![derivation("leaf", &[]), derivation("a", &["leaf", "b"]), derivation("b", &["a"])];
    let sentence = refused(&farm, ingest.add(nodes)).await;
    assert_eq!(sentence, format!("{} is, through its inputs, its own input", drv_path("a")));
}

#[tokio::test]
async fn an_input_that_is_nowhere_is_named() {
    let farm = farm().await;
    let mut ingest = farm.begin("project").await;
    let sentence = refused(&farm, ingest.add(vec![derivation("a", &["nowhere"])])).await;
    let (a, nowhere) = (drv_path("a"), drv_path("nowhere"));
    assert_eq!(sentence, format!("{a} needs {nowhere}, which was not added: add inputs first"));
}

/// A chunk of two derivations as the database hears it, whatever the wrapper would say: their depths, edges as pairs of
/// positions, and known ids.
async fn ingest_raw(farm: &Farm, depths: [i32; 2], of: &[i32], to: &[i32], known: &[i64]) -> Result<()> {
    let evaluation = farm.begin("project").await.evaluation;
    let before = farm.digest().await;
    let evaluator = farm.database.direct_login("harmonia_evaluator").await;
    let refusal = sqlx::query(
        "SELECT ci.ingest($1, $2, '{s,s}', '{\"\",\"\"}', '{f,f}', $3, '{0,0}', '{x,x}', '{}', '{}', '{}', $4, $5, $6)",
    )
    .bind(evaluation)
    .bind([drv_path("a"), drv_path("b")])
    .bind(depths)
    .bind(of)
    .bind(to)
    .bind(known)
    .execute(&evaluator)
    .await
    .map(drop);
    assert_eq!(farm.digest().await, before);
    Ok(refusal?)
}

#[tokio::test]
async fn the_database_itself_refuses_a_cycle() {
    let farm = farm().await;
    let error = ingest_raw(&farm, [1, 1], &[1, 2], &[2, 1], &[]).await.unwrap_err();
    assert!(
        matches!(&error, Error::Graph(sentence) if sentence.contains("the graph has a cycle")),
        "{error:?}"
    );
    assert!(error.to_string().starts_with(&drv_path("a")), "{error}");
}

#[tokio::test]
async fn the_database_itself_refuses_an_edge_to_nowhere() {
    let farm = farm().await;
    for (of, to) in [(2, 3), (2, 0), (2, -1)] {
        let error = ingest_raw(&farm, [0, 1], &[of], &[to], &[]).await.unwrap_err();
        let expected = format!(
            "{} has an input that is neither in this chunk nor in the database: send inputs first",
            drv_path("b")
        );
        assert!(matches!(&error, Error::Graph(sentence) if *sentence == expected), "{error:?}");
    }
}

#[tokio::test]
async fn the_database_itself_refuses_an_id_that_it_does_not_know() {
    let farm = farm().await;
    let error = ingest_raw(&farm, [0, 1], &[2], &[3], &[4711]).await.unwrap_err();
    assert!(
        matches!(&error, Error::Vanished(sentence) if sentence.contains("ask which are known again")),
        "{error:?}"
    );
    assert!(error.is_transient());
}

#[tokio::test]
async fn the_database_itself_refuses_demands_and_chains_without_end() {
    let farm = farm().await;
    let evaluation = farm.begin("project").await.evaluation;
    let evaluator = farm.database.direct_login("harmonia_evaluator").await;
    let before = farm.digest().await;
    for (features, depth, height) in [
        ("f".repeat(1001), 0, 0),
        (String::new(), -1, 0),
        (String::new(), 1_000_001, 0),
        (String::new(), 0, i32::MIN),
        (String::new(), 0, 1_000_001),
    ] {
        let refusal = sqlx::query(
            "SELECT ci.ingest($1, ARRAY[$2], '{s}', ARRAY[$3], '{f}', ARRAY[$4], ARRAY[$5], '{x}', '{}', '{}', '{}', '{}', '{}', '{}')",
        )
        .bind(evaluation)
        .bind(drv_path("a"))
        .bind(&features)
        .bind(depth)
        .bind(height)
        .execute(&evaluator)
        .await;
        let error = Error::from(refusal.unwrap_err());
        assert!(matches!(error, Error::Invalid(_)), "{depth} {height}: {error:?}");
    }
    assert_eq!(farm.digest().await, before);
}

#[tokio::test]
async fn a_project_does_not_ask_for_kinds_of_nodes_without_end() {
    let farm = farm().await;
    let mut ingest = farm.begin("project").await;
    let kind = |n| Node { features: vec![format!("f{n}")], ..derivation(&format!("d{n}"), &[]) };
    let sentence = refused(&farm, ingest.add((0..1001).map(kind).collect())).await;
    assert!(sentence.contains("at most 1000 kinds of nodes"), "{sentence}");
}

/// A derivation's text and the path that follows from it.
fn real_derivation(name: &str) -> (String, Vec<u8>) {
    demanding(name, SYSTEM, "")
}

/// The same for a node of some system and features.
fn demanding(name: &str, system: &str, features: &str) -> (String, Vec<u8>) {
    let text = format!(
        "Derive([(\"out\",\"\",\"r:sha256\",\"\")],[],[],\"{system}\",\"/bin/sh\",[],\
         [(\"name\",\"{name}\"),(\"out\",\"\"),(\"requiredSystemFeatures\",\"{features}\")])"
    );
    let derivation = Derivation::from_aterm_bytes(text.as_bytes(), name).unwrap();
    (derivation.drv_path().unwrap().to_absolute_path(), text.into_bytes())
}

#[test]
fn a_derivation_s_own_path_is_taken() {
    let (path, text) = real_derivation("hello");
    let node = Node::parse(&path, text.clone()).unwrap();
    assert_eq!((node.drv_path, node.system.as_str(), node.aterm), (path, SYSTEM, Some(text)));
}

#[test]
fn a_path_that_is_not_its_text_s_hash_is_refused() {
    let (actual, text) = real_derivation("hello");
    let altered = String::from_utf8(text.clone()).unwrap().replace("/bin/sh", "/bin/evil").into_bytes();
    let error = Node::parse(&actual, altered).unwrap_err();
    assert!(matches!(&error, NodeError::WrongPath { claimed, .. } if *claimed == actual), "{error:?}");
    let error = Node::parse(&drv_path("hello"), text).unwrap_err();
    let expected = format!(
        "{} does not name its text, whose path is {actual}: the file was changed or mixed up",
        drv_path("hello")
    );
    assert_eq!(error.to_string(), expected);
}

#[test]
fn what_asks_for_a_node_that_cannot_be_is_refused() {
    let (long, longs) = ("s".repeat(101), "kvm ".repeat(251));
    for (system, features, asked) in
        [(long.as_str(), "", (101, 0)), (SYSTEM, &longs, (12, 1003)), ("", "", (0, 0))]
    {
        let (path, text) = demanding("hello", system, features);
        let error = Node::parse(&path, text).unwrap_err();
        let expected = format!(
            "{path} asks for a system of {} bytes and features of {}: a system has 1 to 100 bytes, and features have 1000 at most together",
            asked.0, asked.1
        );
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn what_is_no_derivation_is_refused() {
    let (path, text) = real_derivation("hello");
    for wrong in ["", "/nix/store", "/nix/store/hello.drv", path.trim_end_matches(".drv")] {
        let error = Node::parse(wrong, text.clone()).unwrap_err();
        assert_eq!(error.to_string(), format!("{wrong} is not the path of a derivation"));
    }
    let error = Node::parse(&path, b"Derive([".to_vec()).unwrap_err();
    assert_eq!(error.to_string(), format!("{path} is not a derivation's text"));
}

#[tokio::test]
async fn a_text_of_five_megabytes_is_refused() {
    let farm = farm().await;
    let mut ingest = farm.begin("project").await;
    let node = Node { aterm: Some(vec![b'x'; 5 << 20]), ..derivation("large", &[]) };
    let sentence = refused(&farm, ingest.add(vec![node])).await;
    assert_eq!(sentence, "a derivation's text is 5242880 bytes long: at most 4194304 are taken");
}

#[tokio::test]
async fn a_system_that_no_pool_has_is_explained_and_fails_after_half_an_hour() {
    let farm = farm().await;
    farm.pool("pool", &[SYSTEM], 1).await;
    farm.freeze().await;
    let lead = farm.lead().await;
    let strange = Node { system: "riscv64-linux".into(), ..derivation("strange", &[]) };
    let jobs = farm.evaluate_nodes("project", vec![strange, derivation("plain", &[])]).await;
    farm.settle().await;
    let why = people::why(&farm.frontend, jobs["strange"]).await.unwrap();
    assert_eq!(why[0].0, "unsupported");
    assert!(why[0].1.starts_with("No pool or node builds for riscv64-linux."), "{why:?}");

    farm.advance(29.0 * 60.0).await;
    assert_eq!(janitor::fail_unsupported(&farm.operator, lead.generation).await.unwrap(), 0);
    farm.advance(2.0 * 60.0).await;
    assert_eq!(janitor::fail_unsupported(&farm.operator, lead.generation).await.unwrap(), 1);
    assert_eq!(
        (farm.state(jobs["strange"]).await, farm.state(jobs["plain"]).await),
        ("failed".into(), "ready".into())
    );
    let why = people::why(&farm.frontend, jobs["strange"]).await.unwrap();
    assert!(why[0].1.contains("No pool or node builds for riscv64-linux."), "{why:?}");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_feature_that_no_pool_has_is_named() {
    let farm = farm().await;
    farm.pool("pool", &[SYSTEM], 1).await;
    let strange = Node { features: vec!["quantum".into()], ..derivation("strange", &[]) };
    let jobs = farm.evaluate_nodes("project", vec![strange]).await;
    farm.settle().await;
    let why = people::why(&farm.frontend, jobs["strange"]).await.unwrap();
    assert!(why[0].1.starts_with("No pool or node for x86_64-linux offers the feature quantum."), "{why:?}");
}

#[tokio::test]
async fn a_stale_attempt_changes_nothing() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let stale = farm.claim(&node).await;
    node.give_back(&[stale.fence], "to claim it again").await.unwrap();
    farm.settle().await;
    let live = farm.claim(&node).await;
    assert!(live.fence.job == stale.fence.job && live.fence.attempt > stale.fence.attempt);

    let before = farm.digest().await;
    assert!(!node.fail(stale.fence, Failure::BuildError, "").await.unwrap());
    assert!(!node.input_missing(stale.fence, &drv_path("a")).await.unwrap());
    assert_eq!(node.start_upload(&[stale.fence]).await.unwrap(), Vec::<i64>::new());
    assert_eq!(node.give_back(&[stale.fence], "").await.unwrap(), Vec::<i64>::new());
    assert!(signer::check_claim(&farm.signer, &holder(&node, &stale)).await.unwrap().is_none());
    assert_eq!(farm.accept(&node, &stale).await, Verdict::Stale);
    assert_eq!(signer::finish(&farm.signer, &[stale.fence]).await.unwrap().jobs, Vec::<i64>::new());
    assert_eq!(farm.digest().await, before);
    assert_eq!(node.heartbeat(&[stale.fence], None).await.unwrap().abandon, [stale.fence.job]);
    farm.succeed(&node, &live).await;
}

#[tokio::test]
async fn a_foreign_secret_is_refused_with_the_way_out() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    let node = farm.node(&pool, "node").await;
    let stranger = Session::resume(&pool.db, node.id, "of somebody else".into(), 1);
    let sentence = refused(&farm, stranger.claim(1)).await;
    assert_eq!(
        sentence,
        format!("session {} is unknown to this login or has ended: register again", node.id)
    );
}

#[tokio::test]
async fn a_signer_shown_a_foreign_secret_finds_no_claim() {
    let farm = farm().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let stranger = Session::resume(&pool.db, node.id, "of somebody else".into(), 1);
    let before = farm.digest().await;
    assert!(signer::check_claim(&farm.signer, &holder(&stranger, &claim)).await.unwrap().is_none());
    assert_eq!(farm.accept(&stranger, &claim).await, Verdict::Stale);
    assert_eq!(farm.digest().await, before);
}

#[tokio::test]
async fn the_name_of_a_living_node_is_taken() {
    let farm = farm().await;
    farm.freeze().await;
    let pool = farm.pool("pool", &[SYSTEM], 1).await;
    farm.node(&pool, "node").await;
    let impostor = builder::Node::new("node", "another secret of a node", 1);
    let sentence = refused(&farm, Session::register(&pool.db, &impostor)).await;
    assert_eq!(
        sentence,
        "node node of pool pool is alive and this is not its secret: wait 120 s for its lease or choose another name"
    );
    farm.advance(121.0).await;
    Session::register(&pool.db, &impostor).await.unwrap();
}

#[tokio::test]
async fn an_unknown_project_is_named() {
    let farm = farm().await;
    let begin = Ingest::begin(&farm.evaluator, "nobody", "git", None, None, false);
    assert_eq!(refused(&farm, begin).await, "there is no project nobody");
}

#[tokio::test]
async fn an_unknown_pool_of_a_project_is_named() {
    let farm = farm().await;
    let project = Project { pools: Some(vec!["nowhere".into()]), ..Project::new("fresh") };
    let sentence = refused(&farm, people::put_project(&farm.operator, &project)).await;
    assert_eq!(sentence, "project fresh names pool nowhere, which does not exist");
    let project = Project { untrusted_pools: vec!["nowhere".into()], ..Project::new("project") };
    let sentence = refused(&farm, people::put_project(&farm.operator, &project)).await;
    assert_eq!(sentence, "project project names pool nowhere, which does not exist");
}

#[tokio::test]
async fn an_evaluation_that_was_cancelled_takes_no_more() {
    let farm = farm().await;
    let mut ingest = farm.begin("project").await;
    let id = ingest.evaluation;
    people::end_evaluation(&farm.frontend, id, Ending::Cancelled, None).await.unwrap();
    let sentence = refused(&farm, ingest.add(vec![derivation("a", &[])])).await;
    let expected =
        format!("evaluation {id} takes no derivations: it is unknown, complete, aborted or cancelled");
    assert_eq!(sentence, expected);
    let sentence = refused(&farm, ingest.complete(&[])).await;
    let expected =
        format!("evaluation {id} cannot be completed: it is unknown, complete, aborted or cancelled");
    assert_eq!(sentence, expected);
}

#[tokio::test]
async fn an_evaluation_is_completed_once() {
    let farm = farm().await;
    let id = farm.evaluate("project", &[("a", &[])]).await.id;
    let evaluator = farm.database.direct_login("harmonia_evaluator").await;
    let again = sqlx::query("SELECT ci.complete_evaluation($1, '{}', '{}', '{}', '{}', '{}')").bind(id);
    let before = farm.digest().await;
    let error = Error::from(again.execute(&evaluator).await.unwrap_err());
    assert!(
        matches!(&error, Error::WrongState(sentence) if sentence.contains("cannot be completed")),
        "{error:?}"
    );
    assert_eq!(farm.digest().await, before);
}

#[tokio::test]
async fn a_build_that_does_not_exist_is_said_to_be_none() {
    let farm = farm().await;
    assert_eq!(refused(&farm, people::rebuild(&farm.frontend, 4711)).await, "there is no build 4711");
    assert_eq!(refused(&farm, people::why(&farm.frontend, 4711)).await, "there is no build 4711");
}
