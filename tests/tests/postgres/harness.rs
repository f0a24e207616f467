//! The harness itself: what the other modules take for granted.

use futures::future::join_all;
use harmonia_tests::eventually;
use harmonia_tests::farm::{Farm, SYSTEM};
use harmonia_tests::pg::{Options, Server};
use sqlx::Executor;

#[tokio::test]
async fn a_server_can_crash_and_start_again() {
    let server = Server::start(Options::default());
    let database = server.database().await;
    let login = database.login("harmonia_frontend").await;
    login.execute("SELECT 1").await.unwrap();
    server.stop_immediate().await;
    assert!(database.admin().execute("SELECT 1").await.is_err());
    server.start_again().await;
    // PgBouncer waits a second before it tries again.
    eventually("PostgreSQL comes back", || async { login.execute("SELECT 1").await.is_ok() }).await;
}

#[tokio::test]
async fn clones_are_made_side_by_side() {
    let server = Server::shared();
    let names = join_all((0..8).map(|_| async { server.database().await.name().to_owned() })).await;
    assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), 8);
}

#[tokio::test]
async fn a_server_listens_where_it_is_told() {
    let server = Server::start(Options { listen: Some("127.0.0.2".into()), ..Options::default() });
    let database = server.database().await;
    let login = database.make_login("harmonia_frontend").await;
    let url = format!(
        "postgres://{}:{}@127.0.0.2:{}/{}",
        login.role,
        login.password,
        server.port(),
        database.name()
    );
    sqlx::PgPool::connect(&url).await.unwrap().execute("SELECT 1").await.unwrap();
}

#[tokio::test]
async fn a_farm_builds_a_chain() {
    let farm = Farm::new().await;
    let pool = farm.pool("pool", &[SYSTEM], 2).await;
    farm.project("project").await;
    let node = farm.node(&pool, "node").await;
    let jobs = farm.evaluate("project", &[("below", &[]), ("above", &["below"])]).await;
    farm.settle().await;
    for name in ["below", "above"] {
        let claim = farm.claim(&node).await;
        assert_eq!((claim.fence.job, farm.state(jobs[name]).await.as_str()), (jobs[name], "building"));
        farm.succeed(&node, &claim).await;
        farm.settle().await;
        assert_eq!(farm.state(jobs[name]).await, "succeeded");
    }
    farm.assert_sound().await;
}
