//! Calls without an end: a caller that goes away before its answer has come, and an answer that never comes.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use harmonia_queue::listen::{Channel, notify};
use harmonia_queue::{Db, Error, people, resolver};
use harmonia_tests::farm::Farm;
use harmonia_tests::pg::Database;
use harmonia_tests::proxy::{Fault, Proxy, Target};
use harmonia_tests::{PATIENCE, eventually};
use sqlx::AssertSqlSafe;

/// A proxy before a farm's database, and a frontend's URL through it.
pub async fn proxied(farm: &Farm) -> (Proxy, String) {
    let (database, server) = (&farm.database, farm.database.server());
    let proxy = Proxy::postgres(Target::Unix(server.sockets().join(format!(".s.PGSQL.{}", server.port()))));
    let login = database.make_login("harmonia_frontend").await;
    let url = format!("postgres://{}:{}@{}/{}", login.role, login.password, proxy.address(), database.name());
    (proxy, url)
}

async fn arrives(proxy: &Proxy, name: &str) {
    eventually(name, || async { proxy.requests().iter().any(|request| request.contains(name)) }).await;
}

/// Lets a call go on until it has waited `waits` times, and drops it there.
async fn drop_after(waits: usize, call: impl Future) {
    let mut call = pin!(call);
    let mut waited = 0;
    std::future::poll_fn(|context| {
        waited += 1;
        if call.as_mut().poll(context).is_ready() || waited == waits {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// Until twenty looks in a row have found none: what was sent last may be on its way.
async fn no_transaction_left(database: &Database, role: &str) {
    let open = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE usename = $1 AND xact_start IS NOT NULL)";
    let mut none = 0;
    while none < 20 {
        let open = sqlx::query_scalar::<_, bool>(open).bind(role).fetch_one(&database.admin()).await.unwrap();
        none = if open { 0 } else { none + 1 };
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Through a pooler a call is a transaction, and one that nobody ends would keep its connection to PostgreSQL for ever.
#[tokio::test]
async fn no_transaction_of_a_dropped_call_stays_open() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_frontend").await;
    let db = Db::pooled(&login.direct_url, 1).unwrap();
    // It waits for a connection, BEGIN, its query and COMMIT, unless their answers are there when it looks.
    for waits in 1..=6 {
        people::token_scope(&db, "").await.unwrap();
        drop_after(waits, people::token_scope(&db, "")).await;
        let ended = no_transaction_left(&farm.database, &login.role);
        let ended = tokio::time::timeout(PATIENCE, ended).await;
        assert!(ended.is_ok(), "dropped after {waits} waits, a call left its transaction open");
    }
}

#[tokio::test]
async fn a_call_that_nobody_answers_ends_and_the_next_one_takes_another_connection() {
    let farm = Farm::new().await;
    let (proxy, url) = proxied(&farm).await;
    let db = Db::direct(&url, 1).unwrap();
    let (_silent, never) = Fault::hold();
    proxy.on_matching(1, |name| name.contains("pg_notify"), never);
    let answer = notify(&db.within(Duration::from_secs(2)), Channel::Ready, "").await;
    assert!(matches!(answer, Err(Error::Unreachable(_))), "{answer:?}");
    proxy.reset();
    notify(&db, Channel::Ready, "").await.unwrap();
}

#[tokio::test]
async fn whoever_is_frozen_within_a_call_does_not_hold_up_the_others_for_good() {
    let farm = Farm::new().await;
    let (proxy, url) = proxied(&farm).await;
    let db = Db::pooled(&url, 1).unwrap();
    let (_silent, never) = Fault::hold();
    proxy.on_matching(1, |name| name.contains("COMMIT"), never);
    let frozen = tokio::spawn(async move { resolver::step(&db, 1).await });
    arrives(&proxy, "COMMIT").await;
    assert!(resolver::step(&farm.operator, 1).await.unwrap().busy);
    eventually("others go on", || async { !resolver::step(&farm.operator, 1).await.unwrap().busy }).await;
    frozen.abort();
}

#[tokio::test]
async fn what_poolers_and_former_primaries_say_is_that_the_database_is_away() {
    let farm = Farm::new().await;
    // What PgBouncer says of itself, a lost connection, a standby, a transaction that was idle for too long, a shutdown.
    for code in ["08P01", "08006", "25006", "25P03", "57P01"] {
        let raise = format!("DO $$ BEGIN RAISE SQLSTATE '{code}'; END $$");
        let error = sqlx::query(AssertSqlSafe(raise)).execute(&farm.database.admin()).await.unwrap_err();
        let error = Error::from(error);
        assert!(matches!(error, Error::Unreachable(_)), "{code}: {error:?}");
    }
}
