//! A caller that goes away before its answer has come.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use harmonia_queue::{Db, people};
use harmonia_tests::farm::Farm;
use harmonia_tests::pg::Database;

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
        let ended = tokio::time::timeout(Duration::from_secs(20), ended).await;
        assert!(ended.is_ok(), "dropped after {waits} waits, a call left its transaction open");
    }
}
