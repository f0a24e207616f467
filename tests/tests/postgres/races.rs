//! Calls that meet in the database: one is held open, another comes, and neither the answer nor the queue is wrong.

use std::time::Duration;

use harmonia_queue::branches::{self, ProjectSource, Push};
use harmonia_queue::builder::{self, Failure, Session};
use harmonia_queue::evaluations::{self, Request};
use harmonia_queue::ingest::{Ingest, Node};
use harmonia_queue::leader::Leadership;
use harmonia_queue::people::{self, Ending, Project};
use harmonia_queue::signer::{self, Finished, Verdict};
use harmonia_queue::{Db, Error, Fence, janitor, resolver};
use harmonia_tests::PATIENCE;
use harmonia_tests::farm::{Evaluation, Farm, PoolHandle, SYSTEM, derivation, store_path};
use sqlx::{Connection, PgConnection, Row};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A farm in which whoever waits for a lock gets an error, with two ready jobs.
async fn impatient(slots: i32) -> (Farm, PoolHandle, Session, Evaluation) {
    let farm = Farm::new().await;
    farm.forbid_waiting().await;
    farm.freeze().await;
    farm.project("main").await;
    let pool = farm.pool("pool", &[SYSTEM], slots).await;
    let node = farm.node(&pool, "node").await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    (farm, pool, node, jobs)
}

/// The same, but one may wait.
async fn patient(slots: i32) -> (Farm, PoolHandle, Session, Evaluation) {
    let (farm, pool, node) = Farm::small(slots).await;
    let jobs = farm.queue("main", &[("a", &[]), ("b", &[])]).await;
    (farm, pool, node, jobs)
}

/// A transaction that stays open, on a connection past the pooler.
async fn open(url: &str) -> PgConnection {
    let mut connection = PgConnection::connect(url).await.unwrap();
    // A machine that stalls would have it ended otherwise.
    let begin = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0";
    sqlx::raw_sql(begin).execute(&mut connection).await.unwrap();
    connection
}

async fn commit(mut connection: PgConnection) {
    sqlx::query("COMMIT").execute(&mut connection).await.unwrap();
}

/// A claim of one job that is not committed yet, and the job.
async fn open_claim(pool: &PoolHandle, node: &Session) -> (PgConnection, Vec<i64>) {
    let mut connection = open(&pool.login.direct_url).await;
    let claim = sqlx::query("SELECT job_id FROM ci.claim($1, $2, 1)").bind(node.id).bind(&node.secret);
    let rows = claim.fetch_all(&mut connection).await.unwrap();
    (connection, rows.iter().map(|row| row.get(0)).collect())
}

/// A heartbeat that names a build or none and is not committed yet.
async fn open_heartbeat(pool: &PoolHandle, node: &Session, fences: &[Fence]) -> PgConnection {
    let mut connection = open(&pool.login.direct_url).await;
    let (jobs, attempts): (Vec<i64>, Vec<i64>) = fences.iter().map(|f| (f.job, f.attempt)).unzip();
    let beat = sqlx::query("SELECT ci.heartbeat($1, $2, $3, $4)").bind(node.id).bind(&node.secret);
    beat.bind(jobs).bind(attempts).execute(&mut connection).await.unwrap();
    connection
}

/// A step of the resolver that is not committed yet.
async fn open_step(farm: &Farm) -> PgConnection {
    let mut connection = open(&farm.direct_url).await;
    sqlx::query("SELECT * FROM ci.resolve(1000)").fetch_all(&mut connection).await.unwrap();
    connection
}

/// A chunk of a new evaluation, not committed yet, that wants a job which is known.
async fn open_ingest(farm: &Farm, job: i64) -> PgConnection {
    let evaluation = farm.begin("main").await.evaluation;
    let mut connection = open(&farm.database.direct_url()).await;
    want(&mut connection, evaluation, job).await;
    connection
}

/// A chunk with one new derivation, not committed yet.
pub async fn open_written(farm: &Farm, node: &Node) -> PgConnection {
    let evaluation = farm.begin("main").await.evaluation;
    let mut connection = open(&farm.database.direct_url()).await;
    let sql =
        "SELECT ci.ingest($1, ARRAY[$2], ARRAY[$3], ARRAY[''], ARRAY[false], ARRAY[0], ARRAY[0], ARRAY[$4],
                 ARRAY[1], ARRAY['out'], ARRAY[$5], '{}', '{}', '{}')";
    let query = sqlx::query(sql).bind(evaluation).bind(&node.drv_path).bind(&node.system).bind(&node.aterm);
    query.bind(&node.outputs[0].1).execute(&mut connection).await.unwrap();
    connection
}

/// A chunk that wants one job which is known.
async fn want(connection: &mut PgConnection, evaluation: i64, job: i64) {
    let none = "'{}'";
    let sql = format!(
        "SELECT ci.ingest($1, {none}, {none}, {none}, {none}, {none}, {none}, {none}, {none}, {none}, {none}, {none}, {none}, ARRAY[$2])"
    );
    sqlx::query(sqlx::AssertSqlSafe(sql)).bind(evaluation).bind(job).execute(connection).await.unwrap();
}

/// How many calls wait for a lock.
async fn waiting(farm: &Farm) -> i64 {
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND $1 = 0";
    farm.value(waiting, 0).await
}

/// Whether a call waits for a lock, instead of coming to its end. `others` do already.
async fn waits_after<T>(farm: &Farm, others: i64, call: &JoinHandle<T>) -> bool {
    while !call.is_finished() {
        if waiting(farm).await > others {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    false
}

pub(super) async fn waits<T>(farm: &Farm, call: &JoinHandle<T>) -> bool {
    waits_after(farm, 0, call).await
}

/// Makes a call while a transaction is held open: it waits for that one, and goes on once it is committed.
pub async fn after<T: Send + 'static>(
    farm: &Farm,
    held: PgConnection,
    call: impl Future<Output = T> + Send + 'static,
) -> T {
    let call = tokio::spawn(call);
    assert!(waits(farm, &call).await);
    commit(held).await;
    call.await.unwrap()
}

async fn cancel_evaluation(farm: &Farm, evaluation: &Evaluation) {
    people::end_evaluation(&farm.frontend, evaluation.id, Ending::Cancelled, None).await.unwrap();
}

async fn step(farm: &Farm) -> resolver::Step {
    resolver::step(&farm.operator, 1000).await.unwrap()
}

// --- claims

#[tokio::test]
async fn a_claim_passes_over_what_another_is_claiming() {
    let (farm, pool, node, _) = impatient(1).await;
    let other = farm.node(&pool, "other").await;
    let (held, taken) = open_claim(&pool, &node).await;
    let claim = farm.claim(&other).await;
    assert_ne!(taken, [claim.fence.job]);
    commit(held).await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_claim_in_some_lanes_of_a_project_passes_over_what_another_is_claiming() {
    let (farm, pool, node, _) = impatient(1).await;
    let foreign = Node { system: "aarch64-linux".into(), ..derivation("foreign", &[]) };
    farm.evaluate_nodes("main", vec![foreign]).await;
    farm.settle().await;
    let other = farm.node(&pool, "other").await;
    let (held, taken) = open_claim(&pool, &node).await;
    let claim = farm.claim(&other).await;
    assert_ne!(taken, [claim.fence.job]);
    commit(held).await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_claim_passes_over_the_permit_that_another_is_taking() {
    let (farm, pool, node, _) = impatient(1).await;
    farm.put_project(Project { max_concurrent: Some(1), ..Project::new("main") }).await;
    let other = farm.node(&pool, "other").await;
    let (held, taken) = open_claim(&pool, &node).await;
    assert_eq!(taken.len(), 1);
    assert!(other.claim(1).await.unwrap().is_empty());
    commit(held).await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn two_claims_of_a_session_come_one_after_the_other() {
    let (farm, pool, node, _) = patient(1).await;
    let (held, taken) = open_claim(&pool, &node).await;
    assert_eq!(taken.len(), 1);
    let second = after(&farm, held, async move { node.claim(1).await.unwrap().len() }).await;
    assert_eq!(second, 0);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_claim_counts_from_when_it_was_made_not_from_when_it_was_asked_for() {
    let (farm, pool, node, _) = patient(2).await;
    let (held, _) = open_claim(&pool, &node).await;
    let second = tokio::spawn(async move { node.claim(1).await.unwrap().remove(0).fence.attempt });
    assert!(waits(&farm, &second).await);
    farm.advance(60.0).await;
    commit(held).await;
    let now = "SELECT ci.clock() = claimed_at FROM ci.running WHERE attempt = $1";
    assert!(farm.value::<bool>(now, second.await.unwrap()).await);
}

#[tokio::test]
async fn a_claim_that_meets_the_end_of_its_session_gets_nothing() {
    let (farm, pool, node, _) = patient(1).await;
    let mut held = open(&pool.login.direct_url).await;
    let leave = sqlx::query("SELECT ci.deregister($1, $2)").bind(node.id).bind(&node.secret);
    leave.execute(&mut held).await.unwrap();
    let claim = after(&farm, held, async move { node.claim(1).await }).await;
    assert!(matches!(claim, Err(Error::SessionOver(_))));
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_new_life_of_a_node_lets_go_of_what_the_former_is_just_claiming() {
    let (farm, pool, node, _) = patient(1).await;
    let (held, taken) = open_claim(&pool, &node).await;
    let db = pool.db.clone();
    let register = async move {
        let node = builder::Node::new("node", "the secret of a node", 1);
        Session::register(&db, &node).await.unwrap();
    };
    after(&farm, held, register).await;
    farm.settle().await;
    assert_eq!(farm.state(taken[0]).await, "ready");
    farm.assert_sound().await;
}

// --- drains

#[tokio::test]
async fn a_drain_waits_for_a_claim_in_flight() {
    let (farm, pool, node, _) = patient(2).await;
    let id = farm.node_of(&node).await;
    let (held, _) = open_claim(&pool, &node).await;
    let db = farm.operator.clone();
    after(&farm, held, async move { people::drain(&db, id, "cordoned", None).await.unwrap() }).await;
    assert!(node.claim(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_node_that_is_claiming_is_not_idle() {
    let (farm, pool, node, _) = patient(1).await;
    let id = farm.node_of(&node).await;
    let (held, _) = open_claim(&pool, &node).await;
    let db = farm.operator.clone();
    let mark =
        after(&farm, held, async move { people::drain_idle(&db, &[id], "scale-in").await.unwrap() }).await;
    assert!(mark.is_empty());
}

// --- the resolver and what it must not wait for

#[tokio::test]
async fn there_is_one_step_of_the_resolver_at_a_time() {
    let (farm, ..) = impatient(1).await;
    farm.evaluate("main", &[("c", &[])]).await;
    let held = open_step(&farm).await;
    assert!(step(&farm).await.busy);
    commit(held).await;
    assert!(!step(&farm).await.busy);
}

#[tokio::test]
async fn a_cancel_neither_waits_for_a_claim_in_flight_nor_forgets_it() {
    let (farm, pool, node, jobs) = impatient(1).await;
    let (held, taken) = open_claim(&pool, &node).await;
    cancel_evaluation(&farm, &jobs).await;
    step(&farm).await;
    commit(held).await;
    farm.pass(1.0).await;
    let cancelled = "SELECT cancelled FROM ci.running WHERE job_id = $1";
    assert!(farm.value::<bool>(cancelled, taken[0]).await);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_new_lane_does_not_wait_for_a_claim_in_flight() {
    let (farm, pool, node, _) = impatient(1).await;
    farm.project("other").await;
    let (held, _) = open_claim(&pool, &node).await;
    farm.evaluate("other", &[("a", &[]), ("b", &[])]).await;
    step(&farm).await;
    commit(held).await;
    farm.pass(1.0).await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_cancel_neither_waits_for_a_heartbeat_in_flight_nor_is_lost_to_it() {
    let (farm, pool, node, jobs) = impatient(1).await;
    let claim = farm.claim(&node).await;
    let held = open_heartbeat(&pool, &node, &[claim.fence]).await;
    cancel_evaluation(&farm, &jobs).await;
    step(&farm).await;
    commit(held).await;
    farm.pass(1.0).await;
    assert_eq!(node.heartbeat(&[claim.fence], None).await.unwrap().abandon, [claim.fence.job]);
}

#[tokio::test]
async fn what_is_given_back_after_its_last_evaluation_ended_is_cancelled() {
    let (farm, pool, node, jobs) = impatient(1).await;
    let (held, taken) = open_claim(&pool, &node).await;
    cancel_evaluation(&farm, &jobs).await;
    step(&farm).await;
    commit(held).await;
    node.deregister().await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(taken[0]).await, "cancelled");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_cancelling_step_waits_for_an_ingest_that_wants_the_job() {
    let (farm, _, _, jobs) = patient(1).await;
    let held = open_ingest(&farm, jobs["a"]).await;
    cancel_evaluation(&farm, &jobs).await;
    let db = farm.operator.clone();
    after(&farm, held, async move { resolver::step(&db, 1000).await.unwrap() }).await;
    farm.settle().await;
    assert_eq!(farm.state(jobs["a"]).await, "ready");
    assert_eq!(farm.state(jobs["b"]).await, "cancelled");
    farm.assert_sound().await;
}

#[tokio::test]
async fn retention_waits_for_an_ingest_that_wants_the_job() {
    let (farm, _, node, jobs) = patient(1).await;
    farm.build_all(&node).await;
    let lead = farm.lead().await;
    farm.database.execute("DELETE FROM ci.want; INSERT INTO ci.orphan SELECT id FROM ci.job").await;
    let held = open_ingest(&farm, jobs["a"]).await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    after(&farm, held, async move { janitor::retain(&db, generation).await.unwrap() }).await;
    assert_eq!(farm.state(jobs["a"]).await, "succeeded");
}

#[tokio::test]
async fn a_persons_cancel_meets_a_step_that_makes_the_job_ready() {
    let (farm, ..) = patient(1).await;
    let jobs = farm.evaluate("main", &[("c", &[])]).await;
    let held = open_step(&farm).await;
    let (db, job) = (farm.frontend.clone(), jobs["c"]);
    let cancel = after(&farm, held, async move { people::cancel(&db, job).await.unwrap() }).await;
    assert!(cancel);
    assert_eq!(farm.state(job).await, "cancelled");
}

#[tokio::test]
async fn a_change_of_a_project_does_not_overwrite_what_a_step_ranks() {
    let (farm, _, node) = Farm::small(1).await;
    farm.project("other").await;
    farm.evaluate("main", &[("a", &[])]).await;
    let held = open_step(&farm).await;
    let db = farm.operator.clone();
    after(&farm, held, async move {
        people::put_project(&db, &Project { shares: 7, ..Project::new("other") }).await.unwrap()
    })
    .await;
    assert_eq!(node.claim(1).await.unwrap().len(), 1);
}

// --- two ends of one attempt

/// A build that is being given back, not committed yet.
async fn open_return(pool: &PoolHandle, node: &Session, fence: Fence) -> PgConnection {
    let mut connection = open(&pool.login.direct_url).await;
    let call = sqlx::query("SELECT ci.give_back($1, $2, ARRAY[$3], ARRAY[$4], 'drained')").bind(node.id);
    let call = call.bind(&node.secret).bind(fence.job).bind(fence.attempt);
    call.execute(&mut connection).await.unwrap();
    connection
}

#[tokio::test]
async fn of_two_words_about_an_attempt_the_first_counts() {
    let (farm, pool, node, _) = patient(1).await;
    let claim = farm.claim(&node).await;
    let held = open_return(&pool, &node, claim.fence).await;
    let (second, fence) = (node.clone(), claim.fence);
    let fail =
        after(&farm, held, async move { second.fail(fence, Failure::BuildError, "no").await.unwrap() }).await;
    assert!(!fail);
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_heartbeat_waits_for_no_word_about_a_build() {
    let (farm, pool, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    let held = open_return(&pool, &node, claim.fence).await;
    node.heartbeat(&[claim.fence], None).await.unwrap();
    commit(held).await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_is_being_given_back_is_not_accepted() {
    let (farm, pool, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    let held = open_return(&pool, &node, claim.fence).await;
    assert_eq!(farm.accept(&node, &claim).await, Verdict::Busy);
    commit(held).await;
    assert_eq!(farm.accept(&node, &claim).await, Verdict::Stale);
    farm.settle().await;
    assert_eq!(farm.state(claim.fence.job).await, "ready");
    assert_eq!(farm.value::<i64>("SELECT count(*) FROM ci.canonical WHERE $1 = 0", 0).await, 0);
}

#[tokio::test]
async fn what_is_being_given_back_is_not_reaped() {
    let (farm, pool, node, _) = impatient(1).await;
    let lead = farm.lead().await;
    let claim = farm.claim(&node).await;
    farm.advance(121.0).await;
    let held = open_return(&pool, &node, claim.fence).await;
    assert_eq!(janitor::reap(&farm.operator, lead.generation).await.unwrap(), 0);
    commit(held).await;
    farm.settle().await;
    assert_eq!(farm.value::<i16>("SELECT retries FROM ci.job WHERE id = $1", claim.fence.job).await, 0);
    farm.assert_sound().await;
}

#[tokio::test]
async fn of_two_signers_one_finishes() {
    let (farm, _, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    farm.accept(&node, &claim).await;
    let mut held = open(&farm.database.direct_url()).await;
    let finish = sqlx::query("SELECT ci.finish(ARRAY[$1], ARRAY[$2])").bind(claim.fence.job);
    assert_eq!(finish.bind(claim.fence.attempt).fetch_all(&mut held).await.unwrap().len(), 1);
    let busy = Finished { busy: vec![claim.fence.job], ..Finished::default() };
    assert_eq!(signer::finish(&farm.signer, &[claim.fence]).await.unwrap(), busy);
    commit(held).await;
    assert_eq!(signer::finish(&farm.signer, &[claim.fence]).await.unwrap(), Finished::default());
    assert_eq!(farm.state(claim.fence.job).await, "succeeded");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_one_signer_finishes_another_does_not_give_up() {
    let (farm, _, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    farm.accept(&node, &claim).await;
    let Fence { job, attempt } = claim.fence;
    let held = open_words(&farm, &format!("SELECT ci.finish('{{{job}}}', '{{{attempt}}}')")).await;
    assert!(!signer::give_up(&farm.signer, claim.fence, "forget it").await.unwrap());
    commit(held).await;
    assert_eq!(farm.state(job).await, "succeeded");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_its_builder_speaks_of_is_finished_when_it_has_spoken() {
    let (farm, pool, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    farm.accept(&node, &claim).await;
    let mut held = open(&pool.login.direct_url).await;
    let beat =
        sqlx::query("SELECT ci.heartbeat($1, $2, ARRAY[$3], ARRAY[$4])").bind(node.id).bind(&node.secret);
    beat.bind(claim.fence.job).bind(claim.fence.attempt).execute(&mut held).await.unwrap();
    let signer = farm.signer.clone();
    let (finished, ()) =
        tokio::join!(signer::finish(&signer, std::slice::from_ref(&claim.fence)), commit(held));
    assert_eq!(finished.unwrap().jobs, [claim.fence.job]);
    farm.assert_sound().await;
}

// --- what is done once, whoever asks twice

/// A transaction of the owner that stays open.
pub async fn open_words(farm: &Farm, words: &str) -> PgConnection {
    let mut connection = open(&farm.database.direct_url()).await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(words)).execute(&mut connection).await.unwrap();
    connection
}

#[tokio::test]
async fn of_two_new_lives_of_a_node_one_is_left() {
    let (farm, pool, node, _) = patient(1).await;
    let held = open_words(&farm, "SELECT FROM ci.node FOR UPDATE").await;
    let register = |db: Db| async move {
        Session::register(&db, &builder::Node::new("node", "the secret of a node", 1)).await.unwrap()
    };
    let lives = [tokio::spawn(register(pool.db.clone())), tokio::spawn(register(pool.db.clone()))];
    assert!(waits_after(&farm, 1, &lives[1]).await);
    commit(held).await;
    for life in lives {
        life.await.unwrap();
    }
    assert!(node.heartbeat(&[], None).await.is_err());
    let lives = "SELECT count(*) FROM ci.session WHERE ended_at IS NULL AND $1 = 0";
    assert_eq!(farm.value::<i64>(lives, 0).await, 1);
}

#[tokio::test]
async fn of_two_evaluations_one_opens_a_job_again() {
    let (farm, _, _, jobs) = patient(1).await;
    cancel_evaluation(&farm, &jobs).await;
    farm.settle().await;
    let mut held = open_ingest(&farm, jobs["a"]).await;
    sqlx::query("SELECT * FROM ci.resolve(1000)").fetch_all(&mut held).await.unwrap();
    let again = farm.begin("main").await;
    let job = jobs["a"];
    let mut connection = PgConnection::connect(&farm.database.direct_url()).await.unwrap();
    after(&farm, held, async move { want(&mut connection, again.evaluation, job).await }).await;
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_two_people_forget_is_opened_once() {
    let (farm, _, node, jobs) = patient(1).await;
    farm.build_all(&node).await;
    let held =
        open_words(&farm, "SELECT ci.forget(ARRAY(SELECT path FROM ci.canonical)); SELECT ci.resolve(1000)")
            .await;
    let (db, path) = (farm.signer.clone(), store_path("a", "a"));
    after(&farm, held, async move { signer::forget(&db, &[path], None).await.unwrap() }).await;
    assert_eq!(farm.state(jobs["a"]).await, "ready");
    farm.assert_sound().await;
}

#[tokio::test]
async fn what_two_people_rebuild_is_opened_once() {
    let (farm, _, node, _) = patient(1).await;
    let job = farm.claim(&node).await.fence;
    node.fail(job, Failure::BuildError, "exit 1").await.unwrap();
    farm.settle().await;
    let held = open_words(&farm, &format!("SELECT ci.rebuild({}); SELECT ci.resolve(1000)", job.job)).await;
    let db = farm.frontend.clone();
    let second = after(&farm, held, async move { people::rebuild(&db, job.job).await.unwrap() }).await;
    assert!(!second);
    farm.assert_sound().await;
}

#[tokio::test]
async fn all_that_failed_is_opened_once_whoever_else_opens_it() {
    let (farm, _, node, jobs) = patient(1).await;
    let job = farm.claim(&node).await.fence;
    node.fail(job, Failure::BuildError, "exit 1").await.unwrap();
    farm.settle().await;
    let held = open_words(&farm, &format!("SELECT ci.rebuild({}); SELECT ci.resolve(1000)", job.job)).await;
    let (db, evaluation) = (farm.frontend.clone(), jobs.id);
    let second =
        after(&farm, held, async move { evaluations::rebuild_failed(&db, evaluation).await.unwrap() }).await;
    assert_eq!(second, 0);
    farm.assert_sound().await;
}

#[tokio::test]
async fn an_evaluator_passes_over_what_another_is_claiming() {
    let farm = Farm::new().await;
    farm.forbid_waiting().await;
    farm.project("main").await;
    let request = Request { project: "main", source: "/src", ..Request::default() };
    let first = evaluations::queue(&farm.frontend, &request).await.unwrap();
    let second = evaluations::queue(&farm.frontend, &request).await.unwrap();
    let held = open_words(&farm, "SELECT * FROM ci.claim_evaluation('one')").await;
    let claimed = evaluations::claim(&farm.evaluator, "two").await.unwrap().unwrap();
    assert!(first < second && claimed.id == second);
    commit(held).await;
}

#[tokio::test]
async fn a_push_sees_the_one_that_is_just_being_made() {
    let farm = Farm::new().await;
    farm.project("main").await;
    let held = open_words(&farm, "SELECT ci.push('main', 'x', 'main', 'aa', 0::smallint, '{}', 7)").await;
    let db = farm.frontend.clone();
    let newer = tokio::spawn(async move {
        let push = Push {
            project: "main",
            source: "x",
            branch: "main",
            commit: "bb",
            untrusted: false,
            attrs: &[],
            pull_request: Some(7),
        };
        branches::push(&db, &push).await.unwrap()
    });
    waits(&farm, &newer).await;
    commit(held).await;
    newer.await.unwrap();
    let live: i64 =
        farm.value("SELECT count(*) FROM ci.evaluation WHERE state = 'queued' AND id > $1", 0).await;
    assert_eq!(live, 1);
}

#[tokio::test]
async fn a_look_passes_over_what_another_looks_at() {
    let farm = Farm::new().await;
    farm.forbid_waiting().await;
    for name in ["main", "other"] {
        farm.project(name).await;
        branches::put_source(&farm.frontend, name, Some(&ProjectSource::git("x"))).await.unwrap();
    }
    let held = open_words(&farm, "SELECT * FROM ci.claim_poll()").await;
    let looked = branches::claim_poll(&farm.evaluator).await.unwrap().unwrap();
    assert_eq!(looked.project, "other");
    commit(held).await;
}

#[tokio::test]
async fn a_rebuild_keeps_its_priority_when_a_pool_appears() {
    let (farm, ..) = patient(1).await;
    let lead = farm.lead().await;
    let foreign = Node { system: "aarch64-linux".into(), ..derivation("arm", &[]) };
    let jobs = farm.evaluate_nodes("main", vec![foreign]).await;
    farm.pass(1801.0).await;
    janitor::fail_unsupported(&farm.operator, lead.generation).await.unwrap();
    farm.settle().await;
    assert_eq!(farm.state(jobs["arm"]).await, "failed");
    farm.pool("arms", &["aarch64-linux"], 1).await;
    let held = open_words(&farm, &format!("SELECT ci.rebuild({})", jobs["arm"])).await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    after(&farm, held, async move { janitor::fail_unsupported(&db, generation).await.unwrap() }).await;
    assert_eq!(farm.value::<i16>("SELECT priority FROM ci.job WHERE id = $1", jobs["arm"]).await, 100);
}

#[tokio::test]
async fn a_failure_and_a_farewell_do_not_wait_for_each_other() {
    let (farm, pool, node, _) = patient(1).await;
    let claim = farm.claim(&node).await;
    let held = open_heartbeat(&pool, &node, &[]).await;
    let leaver = node.clone();
    let farewell = tokio::spawn(async move { leaver.deregister().await });
    assert!(waits(&farm, &farewell).await);
    let failure = tokio::spawn(async move { node.fail(claim.fence, Failure::Oom, "killed").await });
    assert!(waits_after(&farm, 1, &failure).await);
    commit(held).await;
    assert_eq!(farewell.await.unwrap().unwrap(), 1);
    assert!(matches!(failure.await.unwrap(), Ok(false)));
    farm.assert_sound().await;
}

#[tokio::test]
async fn an_hour_is_counted_once() {
    let (farm, _, node, _) = patient(1).await;
    farm.claim(&node).await;
    let lead = farm.lead().await;
    farm.database.execute("UPDATE ci.lane SET used = 100").await;
    farm.advance(3600.0).await;
    let held = open_words(&farm, &format!("SELECT ci.decay({})", lead.generation)).await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    let second = after(&farm, held, async move { janitor::decay(&db, generation).await.unwrap() }).await;
    assert_eq!(second, 0);
}

#[tokio::test]
async fn nothing_is_found_unsupported_in_the_middle_of_a_step() {
    let (farm, ..) = patient(1).await;
    let lead = farm.lead().await;
    let held = open_step(&farm).await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    after(&farm, held, async move { janitor::fail_unsupported(&db, generation).await.unwrap() }).await;
}

#[tokio::test]
async fn nothing_is_settled_in_the_middle_of_a_step() {
    let (farm, ..) = patient(1).await;
    let held = open_step(&farm).await;
    let db = farm.signer.clone();
    after(&farm, held, async move { signer::settle_missing(&db, "/nix/store/nothing", true).await.unwrap() })
        .await;
}

#[tokio::test]
async fn nothing_is_removed_in_the_middle_of_a_step() {
    let (farm, ..) = patient(1).await;
    let lead = farm.lead().await;
    let held = open_step(&farm).await;
    let (db, generation) = (farm.operator.clone(), lead.generation);
    after(&farm, held, async move { janitor::retain(&db, generation).await.unwrap() }).await;
}

// --- who waits for no builder

#[tokio::test]
async fn a_nodes_speed_does_not_wait_for_its_registration() {
    let (farm, pool, node, _) = impatient(1).await;
    farm.database
        .execute("INSERT INTO ci.duration VALUES ('a', '{10,10,10}', 10), ('b', '{10,10,10}', 10)")
        .await;
    let claim = farm.claim(&node).await;
    farm.advance(5.0).await;
    farm.succeed(&node, &claim).await;
    let mut held = open(&pool.login.direct_url).await;
    let register = sqlx::query("SELECT ci.register('node', 'the secret of a node', 1)");
    register.execute(&mut held).await.unwrap();
    farm.pass(1.0).await;
    commit(held).await;
}

#[tokio::test]
async fn a_nodes_recovery_does_not_wait_for_its_heartbeat() {
    let (farm, pool, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, Failure::Oom, "killed").await.unwrap();
    let claim = farm.claim(&node).await;
    farm.succeed(&node, &claim).await;
    let held = open_heartbeat(&pool, &node, &[]).await;
    farm.pass(1.0).await;
    commit(held).await;
}

#[tokio::test]
async fn a_retry_that_may_go_anywhere_does_not_wait_for_a_claim_in_flight() {
    let (farm, pool, node, _) = impatient(2).await;
    let other = farm.node(&pool, "other").await;
    let claim = farm.claim(&node).await;
    node.fail(claim.fence, Failure::Network, "").await.unwrap();
    farm.pass(31.0).await;
    let mut held = open(&pool.login.direct_url).await;
    let take = sqlx::query("SELECT job_id FROM ci.claim($1, $2, 2)").bind(other.id).bind(&other.secret);
    assert_eq!(take.fetch_all(&mut held).await.unwrap().len(), 2);
    farm.pass(121.0).await;
    commit(held).await;
}

#[tokio::test]
async fn a_new_limit_does_not_wait_for_a_heartbeat() {
    let (farm, pool, node, _) = impatient(1).await;
    let claim = farm.claim(&node).await;
    let held = open_heartbeat(&pool, &node, &[claim.fence]).await;
    farm.put_project(Project { max_concurrent: Some(1), ..Project::new("main") }).await;
    commit(held).await;
}

#[tokio::test]
async fn a_cancel_that_holds_up_the_resolver_does_not_wait_for_a_builder() {
    let (farm, pool, node, jobs) = patient(1).await;
    let step = open_step(&farm).await;
    let (db, job) = (farm.frontend.clone(), jobs["a"].min(jobs["b"]));
    let cancel = tokio::spawn(async move { people::cancel(&db, job).await });
    assert!(waits(&farm, &cancel).await);
    let claim = farm.claim(&node).await;
    assert_eq!(claim.fence.job, job);
    let held = open_heartbeat(&pool, &node, &[claim.fence]).await;
    commit(step).await;
    let refused = timeout(PATIENCE, cancel).await.expect("it waits for the builder").unwrap();
    assert!(matches!(refused, Err(Error::WrongState(_))));
    commit(held).await;
}

#[tokio::test]
async fn the_reaper_does_not_wait_for_a_heartbeat() {
    let (farm, pool, node, _) = impatient(1).await;
    let lead = farm.lead().await;
    farm.advance(121.0).await;
    let held = open_heartbeat(&pool, &node, &[]).await;
    janitor::reap(&farm.operator, lead.generation).await.unwrap();
    commit(held).await;
    node.heartbeat(&[], None).await.unwrap();
}

// --- what is removed while somebody comes for it

#[tokio::test]
async fn an_evaluation_is_not_begun_in_a_project_that_is_just_removed() {
    let (farm, ..) = patient(1).await;
    let held = open_words(&farm, "SELECT ci.remove_project('main')").await;
    let db = farm.evaluator.clone();
    let begin = async move { Ingest::begin(&db, "main", "git", None, None, false).await.map(drop) };
    let begun = after(&farm, held, begin).await;
    assert!(matches!(begun, Err(Error::NotFound(_))), "{begun:?}");
}

/// A node that was away for days: nothing is left of its sessions.
async fn long_gone(farm: &Farm, node: &Session) -> Leadership {
    node.deregister().await.unwrap();
    farm.advance(2.0 * 86_400.0).await;
    farm.database.execute("DELETE FROM ci.session").await;
    farm.lead().await
}

#[tokio::test]
async fn a_node_that_registers_again_is_not_removed_and_not_waited_for() {
    let (farm, pool, node, _) = impatient(1).await;
    let lead = long_gone(&farm, &node).await;
    let mut held = open(&pool.login.direct_url).await;
    let register = sqlx::query("SELECT ci.register('node', 'the secret of a node', 1)");
    register.execute(&mut held).await.unwrap();
    janitor::prune(&farm.operator, lead.generation).await.unwrap();
    commit(held).await;
    assert_eq!(farm.value::<i64>("SELECT count(*) FROM ci.session WHERE $1 = 0", 0).await, 1);
}

#[tokio::test]
async fn a_kind_of_node_is_not_removed_while_a_node_of_it_registers() {
    let (farm, pool, node, _) = patient(1).await;
    let lead = long_gone(&farm, &node).await;
    // It stops when it knows its kind, before it has a session of it.
    let stop = "CREATE FUNCTION public.stop() RETURNS trigger LANGUAGE plpgsql AS
                  $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$;
                CREATE TRIGGER stop BEFORE INSERT ON ci.session FOR EACH ROW EXECUTE FUNCTION public.stop()";
    farm.database.execute(stop).await;
    let held = open_words(&farm, "SELECT pg_advisory_xact_lock(7)").await;
    let db = pool.db.clone();
    let register = tokio::spawn(async move {
        Session::register(&db, &builder::Node::new("node", "the secret of a node", 1)).await
    });
    assert!(waits(&farm, &register).await);
    janitor::prune(&farm.operator, lead.generation).await.unwrap();
    commit(held).await;
    register.await.unwrap().unwrap();
}
