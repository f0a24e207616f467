//! Migrating: by whom, how often, beside whom, and what is closed afterwards.

use futures::future::join_all;
use harmonia_queue::migrate::{self, MigrateError};
use harmonia_tests::pg::{Database, Server};
use sqlx::{Executor, PgPool};

/// The code with which PostgreSQL refuses SQL, if it does.
async fn refusal(pool: &PgPool, sql: &'static str) -> Option<String> {
    let error = pool.execute(sql).await.err()?;
    let answer = error.as_database_error().unwrap_or_else(|| panic!("{sql}: {error}"));
    answer.code().map(Into::into)
}

#[tokio::test]
async fn migrating_twice_changes_nothing() {
    let database = Server::shared().empty_database().await;
    let first = migrate::migrate(&database.direct_url()).await.unwrap();
    assert!(!first.applied.is_empty());
    assert_eq!(first.open, Vec::<&str>::new());
    assert_eq!(migrate::migrate(&database.direct_url()).await.unwrap(), migrate::Report::default());
}

#[tokio::test]
async fn databases_of_one_cluster_migrate_at_the_same_time() {
    let server = Server::start(Default::default());
    let databases = join_all((0..4).map(|_| server.empty_database())).await;
    let urls: Vec<String> = databases.iter().map(Database::direct_url).collect();
    // Each database by two processes.
    for outcome in join_all(urls.iter().chain(&urls).map(|url| migrate::migrate(url))).await {
        assert_eq!(outcome.unwrap().open, Vec::<&str>::new());
    }
}

#[tokio::test]
async fn a_database_owner_with_createrole_migrates_and_says_what_stays_open() {
    let server = Server::start(Default::default());
    let database = server.empty_database().await;
    server.execute("CREATE ROLE app LOGIN CREATEROLE PASSWORD 'app'").await;
    server.execute(&format!("ALTER DATABASE {} OWNER TO app", database.name())).await;
    let url = database.direct_url_as("app", "app");

    let report = migrate::migrate(&url).await.unwrap();
    assert!(!report.applied.is_empty());
    assert!(report.open.iter().any(|sentence| sentence.contains("advisory locks")), "{report:?}");
    let owner: String =
        sqlx::query_scalar("SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'ci'")
            .fetch_one(&database.admin())
            .await
            .unwrap();
    assert_eq!(owner, "harmonia_owner");

    database.execute(&migrate::roles_sql(database.name())).await;
    assert_eq!(migrate::migrate(&url).await.unwrap(), migrate::Report::default());
}

#[tokio::test]
async fn an_ordinary_database_owner_needs_only_the_printed_roles() {
    let server = Server::start(Default::default());
    let database = server.empty_database().await;
    server.execute("CREATE ROLE app LOGIN PASSWORD 'app'").await;
    server.execute(&format!("ALTER DATABASE {} OWNER TO app", database.name())).await;
    let url = database.direct_url_as("app", "app");

    assert!(matches!(migrate::migrate(&url).await, Err(MigrateError::Roles(_))));
    database.execute(&migrate::roles_sql(database.name())).await;
    assert_eq!(migrate::migrate(&url).await.unwrap().open, Vec::<&str>::new());
}

#[tokio::test]
async fn the_printed_roles_refuse_another_database() {
    let database = Server::shared().empty_database().await;
    let error = sqlx::raw_sql(sqlx::AssertSqlSafe(migrate::roles_sql("elsewhere")))
        .execute(&database.admin())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("connect to the database elsewhere first"), "{error}");
}

const NEXT_RELEASE: &str =
    "INSERT INTO ci._sqlx_migrations VALUES (9998, 'from the next release', now(), true, '', 0)";

#[tokio::test]
async fn the_schema_of_the_next_release_is_left_as_it_is() {
    let database = Server::shared().database().await;
    database.execute(NEXT_RELEASE).await;
    let report = migrate::migrate(&database.direct_url()).await.unwrap();
    assert_eq!((report.newer, report.applied), (Some(9998), vec![]));
}

#[tokio::test]
async fn the_schema_of_a_later_one_is_refused() {
    let database = Server::shared().database().await;
    database.execute(NEXT_RELEASE).await;
    database
        .execute("INSERT INTO ci._sqlx_migrations VALUES (9999, 'from the future', now(), true, '', 0)")
        .await;
    database.execute("UPDATE ci.works_for SET since = 9998").await;
    let error = migrate::migrate(&database.direct_url()).await.unwrap_err();
    assert!(matches!(error, MigrateError::Newer { schema: 9999, since: 9998, .. }), "{error:?}");
}

#[tokio::test]
async fn an_altered_migration_is_refused() {
    let database = Server::shared().database().await;
    let outcome = migrate::migrate_with(&database.direct_url(), |_, sql| format!("{sql}\n-- altered")).await;
    assert!(matches!(outcome, Err(MigrateError::Apply(_))), "{outcome:?}");
}

#[tokio::test]
async fn a_builder_login_finds_the_defaults_closed() {
    const INSUFFICIENT_PRIVILEGE: &str = "42501";
    let database = Server::shared().database().await;
    let builder = database.login("harmonia_builder").await;
    for sql in [
        "CREATE TEMPORARY TABLE t ()",
        "CREATE SCHEMA s",
        "CREATE TABLE public.t ()",
        "CREATE TABLE ci.t ()",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_try_advisory_xact_lock_shared(1, 2)",
        "SELECT pg_terminate_backend(1)",
        "SELECT pg_cancel_backend(1)",
        "SELECT lo_create(0)",
        "SELECT lo_from_bytea(0, 'x')",
    ] {
        assert_eq!(refusal(&builder, sql).await.as_deref(), Some(INSUFFICIENT_PRIVILEGE), "{sql}");
    }
    for group in ["harmonia_operator", "harmonia_signer", "harmonia_frontend", "harmonia_evaluator"] {
        let pool = database.login(group).await;
        assert_eq!(refusal(&pool, "SELECT pg_advisory_xact_lock(1)").await, None, "{group}");
    }
}

#[tokio::test]
async fn a_frozen_clock_moves_only_when_told() {
    let database = Server::shared().database().await;
    database.freeze_clock().await;
    let clock = || async {
        sqlx::query_scalar::<_, f64>("SELECT extract(epoch FROM ci.clock())::float8")
            .fetch_one(&database.admin())
            .await
            .unwrap()
    };
    let before = clock().await;
    assert_eq!(clock().await, before);
    database.advance(90.0).await;
    assert_eq!(clock().await - before, 90.0);
}
