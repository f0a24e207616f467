//! What is stale or somebody else's changes nothing.

use harmonia_queue::builder::{self, Claim, Failure, LogPiece, Session};
use harmonia_queue::signer::{self, Holder, Verdict};
use harmonia_queue::{Error, Fence};
use harmonia_tests::farm::{Farm, PoolHandle, SYSTEM, holder, output, store_path};

/// A build that runs, and another node of the same pool.
async fn running() -> (Farm, PoolHandle, Session, Claim) {
    let (farm, pool, node) = Farm::small(2).await;
    farm.queue("main", &[("leaf", &[])]).await;
    let claim = farm.claim(&node).await;
    (farm, pool, node, claim)
}

fn before(fence: Fence) -> Fence {
    Fence { attempt: fence.attempt - 1, ..fence }
}

async fn accept(farm: &Farm, holder: Holder) -> Verdict {
    let outputs = vec![output("out", &store_path("leaf", "leaf"))];
    signer::accept(&farm.signer, &[(holder, outputs)]).await.unwrap()[0]
}

#[tokio::test]
async fn a_word_about_an_earlier_attempt_changes_nothing() {
    let (farm, _, node, claim) = running().await;
    let stale = before(claim.fence);
    assert!(!node.fail(stale, Failure::BuildError, "no").await.unwrap());
    assert!(node.give_back(&[stale], "no").await.unwrap().is_empty());
    assert!(node.start_upload(&[stale]).await.unwrap().is_empty());
    assert!(!node.input_missing(stale, "/nix/store/x").await.unwrap());
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_word_about_the_claim_of_another_changes_nothing() {
    let (farm, pool, _, claim) = running().await;
    let other = farm.node(&pool, "other").await;
    assert!(!other.fail(claim.fence, Failure::BuildError, "no").await.unwrap());
    assert!(other.give_back(&[claim.fence], "no").await.unwrap().is_empty());
    assert!(other.start_upload(&[claim.fence]).await.unwrap().is_empty());
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_session_is_known_by_its_secret() {
    let (farm, pool, node, claim) = running().await;
    let forged = Session::resume(&pool.db, node.id, "a guess".into(), 1);
    let refused = forged.give_back(&[claim.fence], "no").await.unwrap_err();
    assert!(matches!(&refused, Error::SessionOver(_)), "{refused:?}");
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_stolen_secret_is_of_no_use_to_another_login() {
    let (farm, _, node, claim) = running().await;
    let elsewhere = farm.pool("elsewhere", &[SYSTEM], 1).await;
    let thief = Session::resume(&elsewhere.db, node.id, node.secret.clone(), 1);
    let refused = thief.give_back(&[claim.fence], "no").await.unwrap_err();
    assert!(matches!(&refused, Error::SessionOver(_)), "{refused:?}");
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_session_that_has_ended_is_told_to_register_again() {
    let (_farm, _, node, _) = running().await;
    node.deregister().await.unwrap();
    let refused = node.claim(1).await.unwrap_err();
    assert!(
        matches!(&refused, Error::SessionOver(sentence) if sentence.contains("register again")),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_heartbeat_extends_only_the_attempt_it_names() {
    let (farm, _, node, claim) = running().await;
    farm.advance(60.0).await;
    let pulse = node.heartbeat(&[before(claim.fence)], None).await.unwrap();
    assert_eq!(pulse.abandon, [claim.fence.job]);
    assert!(!extended(&farm, claim.fence.job).await);
    node.heartbeat(&[claim.fence], None).await.unwrap();
    assert!(extended(&farm, claim.fence.job).await);
}

#[tokio::test]
async fn a_heartbeat_extends_no_claim_of_another() {
    let (farm, pool, _, claim) = running().await;
    let other = farm.node(&pool, "other").await;
    farm.advance(60.0).await;
    let pulse = other.heartbeat(&[claim.fence], None).await.unwrap();
    assert_eq!(pulse.abandon, [claim.fence.job]);
    assert!(!extended(&farm, claim.fence.job).await);
}

async fn extended(farm: &Farm, job: i64) -> bool {
    farm.value("SELECT lease_until = ci.clock() + ci.lease() FROM ci.running WHERE job_id = $1", job).await
}

#[tokio::test]
async fn a_signer_takes_no_result_of_an_earlier_attempt() {
    let (farm, _, node, claim) = running().await;
    let stale = Holder { fence: before(claim.fence), ..holder(&node, &claim) };
    assert!(signer::check_claim(&farm.signer, &stale).await.unwrap().is_none());
    assert_eq!(accept(&farm, stale).await, Verdict::Stale);
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

#[tokio::test]
async fn a_signer_takes_no_result_of_another_session() {
    let (farm, pool, node, claim) = running().await;
    let other = farm.node(&pool, "other").await;
    let foreign = Holder { session: other.id, secret: node.secret.clone(), ..holder(&node, &claim) };
    assert!(signer::check_claim(&farm.signer, &foreign).await.unwrap().is_none());
    assert_eq!(accept(&farm, foreign).await, Verdict::Stale);
}

#[tokio::test]
async fn a_signer_takes_no_result_under_a_wrong_secret() {
    let (farm, _, node, claim) = running().await;
    let forged = Holder { secret: "a guess".into(), ..holder(&node, &claim) };
    assert!(signer::check_claim(&farm.signer, &forged).await.unwrap().is_none());
    assert_eq!(accept(&farm, forged).await, Verdict::Stale);
}

#[tokio::test]
async fn a_result_is_finished_only_under_its_attempt() {
    let (farm, _, node, claim) = running().await;
    accept(&farm, holder(&node, &claim)).await;
    assert!(signer::finish(&farm.signer, &[before(claim.fence)]).await.unwrap().jobs.is_empty());
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn a_result_is_finished_only_once_it_is_accepted() {
    let (farm, _, node, claim) = running().await;
    node.start_upload(&[claim.fence]).await.unwrap();
    assert!(signer::finish(&farm.signer, &[claim.fence]).await.unwrap().jobs.is_empty());
    assert_eq!(farm.state(claim.fence.job).await, "uploading");
}

#[tokio::test]
async fn a_result_is_finished_once() {
    let (farm, _, node, claim) = running().await;
    farm.succeed(&node, &claim).await;
    assert!(signer::finish(&farm.signer, &[claim.fence]).await.unwrap().jobs.is_empty());
    assert_eq!(
        farm.value::<i64>("SELECT count(*) FROM ci.attempt WHERE job_id = $1", claim.fence.job).await,
        1
    );
}

#[tokio::test]
async fn an_accepted_result_cannot_be_given_back() {
    let (farm, _, node, claim) = running().await;
    accept(&farm, holder(&node, &claim)).await;
    assert!(node.give_back(&[claim.fence], "late").await.unwrap().is_empty());
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn an_accepted_result_cannot_fail() {
    let (farm, _, node, claim) = running().await;
    accept(&farm, holder(&node, &claim)).await;
    assert!(!node.fail(claim.fence, Failure::Upload, "late").await.unwrap());
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn an_accepted_result_does_not_go_back_to_uploading() {
    let (farm, _, node, claim) = running().await;
    accept(&farm, holder(&node, &claim)).await;
    assert!(node.start_upload(&[claim.fence]).await.unwrap().is_empty());
    assert_eq!(farm.state(claim.fence.job).await, "accepted");
}

#[tokio::test]
async fn a_log_of_an_earlier_attempt_is_dropped() {
    let (farm, _, node, claim) = running().await;
    node.log_append(&[LogPiece { fence: before(claim.fence), offset: 0, data: b"old".to_vec() }])
        .await
        .unwrap();
    assert_eq!(
        farm.value::<i64>("SELECT count(*) FROM ci.log_tail WHERE job_id = $1", claim.fence.job).await,
        0
    );
}

#[tokio::test]
async fn a_log_of_the_claim_of_another_is_dropped() {
    let (farm, pool, _, claim) = running().await;
    let other = farm.node(&pool, "other").await;
    other.log_append(&[LogPiece { fence: claim.fence, offset: 0, data: b"x".to_vec() }]).await.unwrap();
    assert_eq!(
        farm.value::<i64>("SELECT count(*) FROM ci.log_tail WHERE job_id = $1", claim.fence.job).await,
        0
    );
}

#[tokio::test]
async fn a_kind_of_failure_that_is_not_a_builders_is_refused() {
    let (farm, pool, node, claim) = running().await;
    let call =
        sqlx::query("SELECT ci.fail($1, $2, $3, $4, 'node_died', 'x')").bind(node.id).bind(&node.secret);
    let call = call.bind(claim.fence.job).bind(claim.fence.attempt).persistent(false);
    let refused = Error::from(call.execute(&pool.login.pool()).await.unwrap_err());
    assert!(matches!(&refused, Error::Invalid(_)), "{refused:?}");
    assert_eq!(farm.state(claim.fence.job).await, "building");
}

// --- the names of nodes

async fn register(pool: &PoolHandle, secret: &str) -> harmonia_queue::Result<Session> {
    Session::register(&pool.db, &builder::Node::new("node", secret, 1)).await
}

#[tokio::test]
async fn the_name_of_a_living_node_is_taken() {
    let (farm, pool, node, claim) = running().await;
    let refused = register(&pool, "another secret of a node").await.unwrap_err();
    assert!(matches!(&refused, Error::NameTaken(sentence) if sentence.contains("120 s")), "{refused:?}");
    assert_eq!(farm.state(claim.fence.job).await, "building");
    assert!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon.is_empty());
}

#[tokio::test]
async fn the_name_of_a_node_is_free_when_its_lease_has_ended() {
    let (farm, pool, _, claim) = running().await;
    farm.advance(121.0).await;
    register(&pool, "another secret of a node").await.unwrap();
    assert_eq!(farm.state(claim.fence.job).await, "blocked");
}

#[tokio::test]
async fn a_new_life_of_a_node_releases_its_former_one_at_once() {
    let (farm, pool, node, claim) = running().await;
    let again = farm.node(&pool, "node").await;
    farm.settle().await;
    assert!(matches!(node.claim(1).await.unwrap_err(), Error::SessionOver(_)));
    assert_eq!(farm.claim(&again).await.fence.job, claim.fence.job);
    assert_eq!(farm.value::<i16>("SELECT interruptions FROM ci.job WHERE id = $1", claim.fence.job).await, 1);
    farm.assert_sound().await;
}

#[tokio::test]
async fn the_same_name_in_another_pool_is_another_node() {
    let (farm, _, _, claim) = running().await;
    let elsewhere = farm.pool("elsewhere", &[SYSTEM], 1).await;
    register(&elsewhere, "another secret of a node").await.unwrap();
    assert_eq!(farm.state(claim.fence.job).await, "building");
}
