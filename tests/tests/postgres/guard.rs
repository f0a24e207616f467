//! What a pool's database login cannot do: builders run foreign code, so each of these is refused by PostgreSQL or
//! changes nothing for anybody else. Connections are direct: an attacker does not go through the pooler.

use std::time::Duration;

use futures::future::join_all;
use harmonia_queue::builder::{Claim, Failure, LogPiece, Node, Session};
use harmonia_queue::listen::{Channel, Wake};
use harmonia_queue::logins::Group;
use harmonia_queue::people::{self, Pool, Project};
use harmonia_queue::replica::Replica;
use harmonia_queue::resolver::{self, Resolver};
use harmonia_queue::signer::{self, Verdict};
use harmonia_queue::{Error, Fence, janitor, logins};
use harmonia_tests::farm::{Farm, PoolHandle, SYSTEM, derivation, drv_path, holder};
use harmonia_tests::pg::{Database, Login, Server};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::listener::{NEVER, listen};

const BUILDER_FUNCTIONS: [&str; 10] = [
    "claim",
    "closure",
    "deregister",
    "fail",
    "give_back",
    "heartbeat",
    "input_missing",
    "log_append",
    "register",
    "start_upload",
];
const DENIED: &str = "42501";

async fn connect(login: &Login) -> PgConnection {
    PgConnection::connect(&login.direct_url).await.unwrap()
}

async fn run(connection: &mut PgConnection, sql: &str) {
    outcome(connection, sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

async fn outcome(connection: &mut PgConnection, sql: &str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
}

async fn assert_denied(connection: &mut PgConnection, sql: &str) {
    let error = outcome(connection, sql).await.expect_err(sql);
    let code = error.as_database_error().and_then(|answer| answer.code().map(String::from));
    assert_eq!(code.as_deref(), Some(DENIED), "{sql}: {error}");
}

/// A farm with a pool of two slots a node.
async fn farm_and_pool() -> (Farm, PoolHandle) {
    let farm = Farm::new().await;
    farm.project("project").await;
    let pool = farm.pool("pool", &[SYSTEM], 2).await;
    (farm, pool)
}

/// Every table, view and sequence of the queue, with one of its columns.
async fn relations(farm: &Farm) -> Vec<(String, String)> {
    sqlx::query_as(
        "SELECT c.oid::regclass::text, min(a.attname::text) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND a.attidentity = ''
         WHERE c.relnamespace = 'ci'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm') GROUP BY c.oid",
    )
    .fetch_all(&farm.database.admin())
    .await
    .unwrap()
}

/// Every function of the queue: its name and a call of it.
async fn functions(farm: &Farm) -> Vec<(String, String)> {
    sqlx::query_as(
        "SELECT p.proname::text, format('SELECT ci.%I(%s)', p.proname, coalesce((
           SELECT string_agg('NULL::' || format_type(t, NULL), ', ' ORDER BY n) FROM unnest(p.proargtypes) WITH ORDINALITY u (t, n)), ''))
         FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace",
    )
    .fetch_all(&farm.database.admin())
    .await
    .unwrap()
}

async fn assert_no_relation_is_open(farm: &Farm, login: &Login) {
    let mut connection = connect(login).await;
    let relations = relations(farm).await;
    assert!(relations.len() > 30);
    for (table, column) in relations {
        for sql in [
            format!("SELECT FROM {table}"),
            format!("SELECT {column} FROM {table} FOR UPDATE"),
            format!("INSERT INTO {table} DEFAULT VALUES"),
            format!("UPDATE {table} SET {column} = {column}"),
            format!("DELETE FROM {table}"),
            format!("TRUNCATE {table}"),
            format!("SELECT; LOCK TABLE {table} IN ACCESS SHARE MODE"),
            format!("COPY {table} TO STDOUT"),
        ] {
            assert_denied(&mut connection, &sql).await;
        }
    }
}

#[tokio::test]
async fn a_builder_reads_and_writes_no_table() {
    let (farm, pool) = farm_and_pool().await;
    assert_no_relation_is_open(&farm, &pool.login).await;
}

#[tokio::test]
async fn an_evaluator_reads_and_writes_no_table() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_evaluator").await;
    assert_no_relation_is_open(&farm, &login).await;
}

#[tokio::test]
async fn a_builder_moves_no_sequence() {
    let (farm, pool) = farm_and_pool().await;
    let sequences: Vec<String> = sqlx::query_scalar(
        "SELECT format('%I.%I', schemaname, sequencename) FROM pg_sequences WHERE schemaname = 'ci'",
    )
    .fetch_all(&farm.database.admin())
    .await
    .unwrap();
    let mut connection = connect(&pool.login).await;
    for sequence in sequences {
        assert_denied(&mut connection, &format!("SELECT nextval('{sequence}')")).await;
        assert_denied(&mut connection, &format!("SELECT setval('{sequence}', 1)")).await;
    }
}

#[tokio::test]
async fn a_builder_calls_ten_functions_and_no_other() {
    let (farm, pool) = farm_and_pool().await;
    let mut connection = connect(&pool.login).await;
    let mut open = Vec::new();
    for (name, call) in functions(&farm).await {
        if BUILDER_FUNCTIONS.contains(&name.as_str()) {
            open.push(name);
        } else {
            assert_denied(&mut connection, &call).await;
        }
    }
    open.sort();
    assert_eq!(open, BUILDER_FUNCTIONS);
}

#[tokio::test]
async fn an_evaluator_calls_no_function_of_builders_or_signers() {
    const SIGNER_FUNCTIONS: [&str; 10] = [
        "check_claim",
        "accept",
        "unpublished",
        "finish",
        "give_up",
        "missing_reports",
        "settle_missing",
        "forget",
        "condemn",
        "adopt",
    ];
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_evaluator").await;
    let mut connection = connect(&login).await;
    let (mut tried, foreign) = (0, [&BUILDER_FUNCTIONS[..], &SIGNER_FUNCTIONS].concat());
    for (name, call) in functions(&farm).await {
        if foreign.contains(&name.as_str()) {
            assert_denied(&mut connection, &call).await;
            tried += 1;
        }
    }
    assert_eq!(tried, foreign.len());
}

#[tokio::test]
async fn no_role_reads_the_hash_of_a_secret() {
    let farm = Farm::new().await;
    for group in ["operator", "signer", "frontend", "evaluator", "builder"] {
        let login = farm.database.make_login(&format!("harmonia_{group}")).await;
        let mut connection = connect(&login).await;
        for table in ["node", "session"] {
            assert_denied(&mut connection, &format!("SELECT secret_hash FROM ci.{table}")).await;
            assert_denied(&mut connection, &format!("SELECT t FROM ci.{table} t")).await;
        }
    }
}

#[tokio::test]
async fn the_server_logs_no_secret_of_a_call_that_failed() {
    let (farm, pool) = farm_and_pool().await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    // One is refused by a function, the other by the type of an argument.
    node.input_missing(claim.fence, "/nix/store/nothing-of-the-sort").await.unwrap_err();
    let stranger = Session::resume(&pool.db, node.id + 1, node.secret.clone(), 1);
    stranger.heartbeat(&[], None).await.unwrap_err();
    sqlx::query("SELECT ci.start_upload($1, $2, ARRAY[1 / (length($2) - length($2))], NULL)")
        .bind(node.id)
        .bind(&node.secret)
        .execute(&mut connect(&pool.login).await)
        .await
        .unwrap_err();
    let log = farm.database.server().log();
    assert!(log.contains("register again") && log.contains("division by zero"), "the errors are logged");
    assert!(!log.contains(&node.secret));
}

#[tokio::test]
async fn another_pool_s_session_is_unknown_even_with_its_secret() {
    let (farm, pool) = farm_and_pool().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let other = farm.pool("other", &[SYSTEM], 2).await;
    let thief = Session::resume(&other.db, node.id, node.secret.clone(), 2);
    assert_all_session_over(&thief, claim.fence).await;
    assert_eq!(farm.state(jobs["a"]).await, "building");
}

#[tokio::test]
async fn another_session_of_the_pool_is_unknown_with_a_wrong_secret() {
    let (farm, pool) = farm_and_pool().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    let neighbour = farm.node(&pool, "neighbour").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let thief = Session::resume(&pool.db, node.id, neighbour.secret, 2);
    assert_all_session_over(&thief, claim.fence).await;
    assert_eq!(farm.state(jobs["a"]).await, "building");
}

async fn assert_all_session_over(thief: &Session, fence: Fence) {
    let refusals = [
        thief.claim(1).await.map(drop),
        thief.heartbeat(&[fence], None).await.map(drop),
        thief.start_upload(&[fence]).await.map(drop),
        thief.give_back(&[fence], "").await.map(drop),
        thief.fail(fence, Failure::BuildError, "").await.map(drop),
        thief.input_missing(fence, "/nix/store/x").await.map(drop),
        thief.deregister().await.map(drop),
    ];
    for (n, refusal) in refusals.into_iter().enumerate() {
        assert!(matches!(&refusal, Err(Error::SessionOver(_))), "call {n}: {refusal:?}");
    }
}

#[tokio::test]
async fn another_session_s_claim_is_nothing_to_mine() {
    let (farm, pool) = farm_and_pool().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    let neighbour = farm.node(&pool, "neighbour").await;
    farm.settle().await;
    let fence = farm.claim(&node).await.fence;
    assert_eq!(neighbour.heartbeat(&[fence], None).await.unwrap().abandon, [fence.job]);
    assert!(neighbour.start_upload(&[fence]).await.unwrap().is_empty());
    assert!(neighbour.give_back(&[fence], "").await.unwrap().is_empty());
    assert!(!neighbour.fail(fence, Failure::BuildError, "").await.unwrap());
    assert!(!neighbour.input_missing(fence, "/nix/store/x").await.unwrap());
    neighbour.log_append(&[LogPiece { fence, offset: 0, data: b"line".to_vec() }]).await.unwrap();
    neighbour.deregister().await.unwrap();
    assert_eq!(farm.state(jobs["a"]).await, "building");
    let logged: i64 = sqlx::query_scalar("SELECT count(*) FROM ci.log_tail")
        .fetch_one(&farm.database.admin())
        .await
        .unwrap();
    assert_eq!(logged, 0);
}

#[tokio::test]
async fn a_builder_cannot_say_that_it_succeeded() {
    let (farm, pool) = farm_and_pool().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    let accept = signer::accept(&pool.db, &[(holder(&node, &claim), Vec::new())]).await;
    assert!(matches!(accept, Err(Error::Forbidden(_))), "{accept:?}");
    let finish = signer::finish(&pool.db, &[claim.fence]).await;
    assert!(matches!(finish, Err(Error::Forbidden(_))), "{finish:?}");
    assert_eq!(farm.state(jobs["a"]).await, "building");
}

#[tokio::test]
async fn a_builder_registers_in_its_own_pool_only() {
    let (farm, pool) = farm_and_pool().await;
    let other = farm.pool("other", &[SYSTEM], 2).await;
    let honest = farm.node(&pool, "node").await;
    // The same name and secret, under another login: another node.
    let namesake = farm.node(&other, "node").await;
    let pool_of = |session: i64| {
        let admin = farm.database.admin();
        async move {
            let query =
                "SELECT n.pool_id FROM ci.session s JOIN ci.node n ON n.id = s.node_id WHERE s.id = $1";
            sqlx::query_scalar::<_, i32>(query).bind(session).fetch_one(&admin).await.unwrap()
        }
    };
    assert_eq!((pool_of(honest.id).await, pool_of(namesake.id).await), (pool.id, other.id));
    honest.heartbeat(&[], None).await.unwrap();
}

#[tokio::test]
async fn a_login_without_a_pool_registers_nowhere() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_builder").await;
    let error =
        Session::register(&login.db(), &Node::new("node", "the secret of a node", 1)).await.unwrap_err();
    assert!(
        matches!(&error, Error::Forbidden(sentence) if sentence.contains("belongs to no pool")),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_builder_gets_no_more_slots_than_its_pool_has() {
    let (farm, pool) = farm_and_pool().await;
    let node = Node::new("node", "the secret of a node", 1000);
    let node = Session::register(&pool.db, &node).await.unwrap();
    assert_eq!(node.slots, 2);
    farm.evaluate("project", &[("a", &[]), ("b", &[]), ("c", &[])]).await;
    farm.settle().await;
    assert_eq!(node.claim(1000).await.unwrap().len(), 2);
    assert_eq!(node.claim(1000).await.unwrap().len(), 0);
    farm.assert_sound().await;
}

#[tokio::test]
async fn simultaneous_claims_of_a_session_share_its_slots() {
    let (farm, pool) = farm_and_pool().await;
    let names: Vec<String> = (0..40).map(|n| format!("job-{n}")).collect();
    farm.evaluate_nodes("project", names.iter().map(|name| derivation(name, &[])).collect()).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claims = join_all((0..20).map(|_| node.claim(2))).await;
    assert_eq!(claims.into_iter().map(|claims| claims.unwrap().len()).sum::<usize>(), 2);
    farm.assert_sound().await;
}

#[tokio::test]
async fn a_builder_claims_nothing_beyond_its_pool_s_systems_and_features() {
    let (farm, pool) = farm_and_pool().await;
    let node = Node {
        systems: Some(vec![SYSTEM.into(), "aarch64-linux".into()]),
        features: Some(vec!["kvm".into(), "signer".into()]),
        ..Node::new("node", "the secret of a node", 2)
    };
    let node = Session::register(&pool.db, &node).await.unwrap();
    let foreign = derivation("foreign", &[]);
    let virtual_machine = derivation("virtual-machine", &[]);
    farm.evaluate_nodes(
        "project",
        vec![
            harmonia_queue::ingest::Node { system: "aarch64-linux".into(), ..foreign },
            harmonia_queue::ingest::Node { features: vec!["kvm".into()], ..virtual_machine },
            derivation("plain", &[]),
        ],
    )
    .await;
    farm.settle().await;
    let claimed: Vec<String> = node.claim(2).await.unwrap().into_iter().map(|claim| claim.drv_path).collect();
    assert_eq!(claimed, [drv_path("plain")]);
}

#[tokio::test]
async fn a_builder_cannot_pass_for_a_signer() {
    let (farm, pool) = farm_and_pool().await;
    let mut connection = connect(&pool.login).await;
    for role in ["signer", "up"] {
        let beat = format!("SELECT ci.beat('{}', '{role}', 'https://evil')", uuid::Uuid::from_u128(6));
        assert_denied(&mut connection, &beat).await;
    }
    let features = Some(vec!["signer".to_owned()]);
    let node = Node { features, ..Node::new("signer", "the secret of a node", 1) };
    let node = Session::register(&pool.db, &node).await.unwrap();
    farm.settle().await;
    assert_eq!(node.heartbeat(&[], None).await.unwrap().signers, Vec::<String>::new());
}

/// A replica that a signer's login has registered.
async fn a_signer(farm: &Farm) -> Replica {
    let replica =
        Replica { id: uuid::Uuid::from_u128(6), role: "signer".to_owned(), url: "https://signer".to_owned() };
    replica.beat(&farm.signer).await.unwrap();
    replica
}

async fn known_signers(farm: &Farm, pool: &PoolHandle) -> Vec<String> {
    farm.node(pool, "node").await.heartbeat(&[], None).await.unwrap().signers
}

#[tokio::test]
async fn an_evaluator_cannot_pass_for_a_signer() {
    let (farm, pool) = farm_and_pool().await;
    let signer = a_signer(&farm).await;
    let impostor = Replica { id: uuid::Uuid::from_u128(7), url: "https://evil".to_owned(), ..signer };
    let refused = impostor.beat(&farm.evaluator).await;
    assert!(matches!(refused, Err(Error::Forbidden(_))), "{refused:?}");
    assert_eq!(known_signers(&farm, &pool).await, ["https://signer"]);
}

#[tokio::test]
async fn an_evaluator_cannot_take_a_signer_s_place() {
    let (farm, pool) = farm_and_pool().await;
    let impostor = Replica { role: "evaluator".to_owned(), ..a_signer(&farm).await };
    let refused = impostor.beat(&farm.evaluator).await;
    assert!(matches!(refused, Err(Error::Forbidden(_))), "{refused:?}");
    assert_eq!(known_signers(&farm, &pool).await, ["https://signer"]);
}

#[tokio::test]
async fn an_evaluator_cannot_sign_a_signer_off() {
    let (farm, pool) = farm_and_pool().await;
    a_signer(&farm).await.leave(&farm.evaluator).await.unwrap();
    assert_eq!(known_signers(&farm, &pool).await, ["https://signer"]);
}

#[tokio::test]
async fn a_builder_cannot_take_the_control_plane_s_locks() {
    let (farm, pool) = farm_and_pool().await;
    let mut connection = connect(&pool.login).await;
    for sql in [
        "SELECT FROM ci.resolver FOR UPDATE",
        "SELECT FROM ci.gate FOR KEY SHARE",
        "SELECT FROM ci.leadership FOR UPDATE",
        "SELECT; LOCK TABLE ci.resolver",
    ] {
        assert_denied(&mut connection, sql).await;
    }
    let locks: Vec<String> = sqlx::query_scalar(
        "SELECT format('SELECT %s(%s)', p.proname, repeat('0, ', p.pronargs - 1) || '0') FROM pg_proc p WHERE p.proname ~ 'advisory'
         AND p.pronargs > 0",
    )
    .fetch_all(&farm.database.admin())
    .await
    .unwrap();
    assert!(locks.len() > 15, "{locks:?}");
    for sql in locks {
        assert_denied(&mut connection, &sql).await;
    }
    assert!(!resolver::step(&farm.operator, 1).await.unwrap().busy);
    farm.lead().await;
}

#[tokio::test]
async fn forged_notifications_are_hints_and_change_nothing() {
    let (farm, pool) = farm_and_pool().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    farm.settle().await;
    let channels = [Channel::Ready, Channel::Ended, Channel::Stop];
    let url = farm.database.make_login("harmonia_frontend").await.direct_url;
    let mut listener = listen(&url, &channels, NEVER).await;
    let before = farm.digest().await;
    let resolver = Resolver::default();
    let forge = async {
        let mut connection = connect(&pool.login).await;
        for channel in ["ci_ready", "ci_ended", "ci_stop"] {
            for payload in ["''", "'; DROP TABLE ci.job; --'", "repeat('9,', 3999)", "'-1,x,\u{1F4A3}'"] {
                run(&mut connection, &format!("SELECT pg_notify('{channel}', {payload})")).await;
            }
        }
        for _ in 0..12 {
            assert!(matches!(listener.next().await, Wake::Hint(..)));
        }
        resolver.nudge();
    };
    tokio::select! {
        () = resolver.run(&farm.operator) => unreachable!(),
        () = forge => {}
    }
    let mut after = farm.digest().await;
    // The resolver's own note of when it last folded.
    after.insert("resolver".into(), before["resolver"].clone());
    assert_eq!(after, before);
    assert_eq!(farm.state(jobs["a"]).await, "ready");
}

#[tokio::test]
async fn a_builder_signals_no_backend_not_even_its_own_login_s() {
    let (farm, pool) = farm_and_pool().await;
    let mut neighbour = connect(&pool.login).await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut neighbour).await.unwrap();
    let mut connection = connect(&pool.login).await;
    for sql in [
        format!("SELECT pg_terminate_backend({pid})"),
        format!("SELECT pg_terminate_backend({pid}, 1000)"),
        format!("SELECT pg_cancel_backend({pid})"),
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity".to_owned(),
        "SELECT pg_reload_conf()".to_owned(),
        "SELECT pg_rotate_logfile()".to_owned(),
    ] {
        assert_denied(&mut connection, &sql).await;
    }
    run(&mut neighbour, "SELECT 1").await;
    drop(farm);
}

#[tokio::test]
async fn a_builder_makes_nothing_anywhere() {
    let (farm, pool) = farm_and_pool().await;
    let mut connection = connect(&pool.login).await;
    for sql in [
        "CREATE TEMPORARY TABLE t ()",
        "CREATE TEMPORARY SEQUENCE t",
        "CREATE TEMPORARY VIEW t AS SELECT 1",
        "CREATE TABLE public.t ()",
        "CREATE TABLE ci.t ()",
        "CREATE FUNCTION ci.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE FUNCTION public.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE SCHEMA s",
        "CREATE DATABASE d",
        "CREATE ROLE r",
        "CREATE PUBLICATION p",
        "CREATE EVENT TRIGGER e ON ddl_command_start EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()",
    ] {
        assert_denied(&mut connection, sql).await;
    }
    drop(farm);
}

#[tokio::test]
async fn a_builder_has_no_large_objects() {
    let (farm, pool) = farm_and_pool().await;
    let mut connection = connect(&pool.login).await;
    for sql in [
        "SELECT lo_creat(-1)",
        "SELECT lo_create(0)",
        "SELECT lo_from_bytea(0, 'x')",
        "SELECT lo_open(1, 131072)",
        "SELECT lo_put(1, 0, 'x')",
        "SELECT lo_import('/etc/passwd')",
    ] {
        assert_denied(&mut connection, sql).await;
    }
    drop(farm);
}

#[tokio::test]
async fn a_builder_reaches_no_file_and_no_program() {
    let (farm, pool) = farm_and_pool().await;
    let mut connection = connect(&pool.login).await;
    for sql in [
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "COPY (SELECT 1) TO '/tmp/x'",
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT pg_read_binary_file('/etc/passwd')",
        "SELECT pg_stat_file('postgresql.conf')",
        "SELECT pg_ls_dir('.')",
        "SELECT pg_ls_waldir()",
        "SELECT * FROM pg_file_settings",
        "SELECT * FROM pg_hba_file_rules",
        "SELECT * FROM pg_authid",
        "SELECT * FROM pg_shadow",
        "LOAD 'evil'",
        "ALTER SYSTEM SET fsync = off",
        "SET session_replication_role = replica",
        "SET SESSION AUTHORIZATION postgres",
        "SET ROLE harmonia_owner",
        "SET ROLE harmonia_operator",
        "CHECKPOINT",
    ] {
        assert_denied(&mut connection, sql).await;
    }
    drop(farm);
}

#[tokio::test]
async fn a_changed_password_is_put_right_and_hurts_no_other_pool() {
    let (farm, pool) = farm_and_pool().await;
    let other = farm.pool("other", &[SYSTEM], 2).await;
    let role = &pool.login.role;
    let mut connection = connect(&pool.login).await;
    run(&mut connection, &format!("ALTER ROLE {role} PASSWORD 'mine now'")).await;
    assert!(PgConnection::connect(&pool.login.direct_url).await.is_err());
    connect(&other.login).await;
    assert_denied(&mut connection, &format!("ALTER ROLE {} PASSWORD 'mine too'", other.login.role)).await;
    logins::ensure(&farm.database.direct_url(), role, &pool.login.password, 10).await.unwrap();
    connect(&pool.login).await;
}

#[tokio::test]
async fn changed_settings_of_a_login_are_put_right() {
    let (farm, pool) = farm_and_pool().await;
    let role = &pool.login.role;
    let mut connection = connect(&pool.login).await;
    for scope in
        ["".to_owned(), format!("IN DATABASE {}", farm.database.name()), "IN DATABASE postgres".to_owned()]
    {
        run(&mut connection, &format!("ALTER ROLE {role} {scope} SET statement_timeout = 0")).await;
        run(&mut connection, &format!("ALTER ROLE {role} {scope} SET default_transaction_read_only = on"))
            .await;
    }
    logins::ensure(&farm.database.direct_url(), role, &pool.login.password, 10).await.unwrap();
    let mut connection = connect(&pool.login).await;
    let (timeout, read_only): (String, String) = sqlx::query_as(
        "SELECT current_setting('statement_timeout'), current_setting('default_transaction_read_only')",
    )
    .fetch_one(&mut connection)
    .await
    .unwrap();
    assert_eq!((timeout.as_str(), read_only.as_str()), ("30s", "off"));
    let left: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_db_role_setting WHERE setrole = to_regrole($1) AND setdatabase <> 0",
    )
    .bind(role)
    .fetch_one(&farm.database.admin())
    .await
    .unwrap();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn powers_of_a_login_are_taken_from_it() {
    let (farm, pool) = farm_and_pool().await;
    let role = &pool.login.role;
    let powers = "SUPERUSER CREATEDB CREATEROLE REPLICATION BYPASSRLS";
    farm.database.execute(&format!("ALTER ROLE {role} {powers}")).await;
    logins::ensure(&farm.database.direct_url(), role, &pool.login.password, 10).await.unwrap();
    let left: bool = sqlx::query_scalar(
        "SELECT rolsuper OR rolcreatedb OR rolcreaterole OR rolreplication OR rolbypassrls FROM pg_roles WHERE rolname = $1",
    )
    .bind(role)
    .fetch_one(&farm.database.admin())
    .await
    .unwrap();
    assert!(!left);
}

#[tokio::test]
async fn a_login_of_another_database_on_the_server_is_not_taken_unless_that_is_gone() {
    let (one, server) = (Farm::new().await.database, Server::shared());
    let other = server.empty_database().await;
    let (admin, role) = (server.unique("admin"), server.unique("login"));
    // Who may make logins, and is no superuser.
    server.execute(&format!("CREATE ROLE {admin} LOGIN CREATEROLE PASSWORD 'secret'")).await;
    server.execute(&format!("GRANT harmonia_signer TO {admin} WITH ADMIN OPTION")).await;
    let ensure = async |database: &Database, password: &str| {
        let url = database.direct_url_as(&admin, "secret");
        logins::ensure_in(&url, Group::Signer, &role, password, 10).await
    };
    for password in ["first", "theirs"] {
        ensure(&other, password).await.unwrap();
    }
    let refused = ensure(&one, "mine").await.unwrap_err();
    let sentence = format!("the login \"{role}\" belongs to the database \"{}\"", other.name());
    assert!(matches!(&refused, Error::WrongState(words) if words.contains(&sentence)), "{refused:?}");
    PgConnection::connect(&other.direct_url_as(&role, "theirs")).await.unwrap().close().await.unwrap();

    // A backup was restored under another name, and the database of before is called otherwise.
    let (now, before) = (format!("{}'s", other.name()), other.name());
    server.execute(&format!("ALTER DATABASE {before} RENAME TO \"{now}\"")).await;
    ensure(&one, "mine").await.unwrap();
    PgConnection::connect(&one.direct_url_as(&role, "mine")).await.unwrap();
    server.execute(&format!("ALTER DATABASE \"{now}\" RENAME TO {before}")).await;
    assert!(matches!(ensure(&other, "theirs").await, Err(Error::WrongState(_))));
}

#[tokio::test]
async fn no_login_is_idle_in_a_transaction_for_long() {
    let farm = Farm::new().await;
    for group in [Group::Builder, Group::Evaluator, Group::Frontend, Group::Operator, Group::Signer] {
        let role = farm.database.server().unique("login");
        logins::ensure_in(&farm.database.direct_url(), group, &role, "secret", 10).await.unwrap();
        let mut connection =
            PgConnection::connect(&farm.database.direct_url_as(&role, "secret")).await.unwrap();
        let limit: String = sqlx::query_scalar("SHOW idle_in_transaction_session_timeout")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        assert_eq!(limit, "10s", "{group:?}");
    }
}

#[tokio::test]
async fn a_login_keeps_its_rights_and_limits_whatever_it_asks_for() {
    let (farm, pool) = farm_and_pool().await;
    let role = &pool.login.role;
    let mut connection = connect(&pool.login).await;
    for wish in
        ["SUPERUSER", "CREATEROLE", "CREATEDB", "REPLICATION", "BYPASSRLS", "CONNECTION LIMIT -1", "NOLOGIN"]
    {
        assert_denied(&mut connection, &format!("ALTER ROLE {role} {wish}")).await;
    }
    assert_denied(&mut connection, &format!("GRANT harmonia_operator TO {role}")).await;
    assert_denied(&mut connection, "GRANT EXECUTE ON FUNCTION ci.lead TO PUBLIC").await;
    drop(farm);
}

#[tokio::test]
async fn becoming_another_pool_s_role_does_not_make_its_sessions_one_s_own() {
    let (farm, pool) = farm_and_pool().await;
    let other = farm.pool("other", &[SYSTEM], 2).await;
    let node = farm.node(&other, "node").await;
    // Older PostgreSQL lets a login give itself away.
    let grant = format!("GRANT {} TO {}", other.login.role, pool.login.role);
    let _ = outcome(&mut connect(&other.login).await, &grant).await;
    let mut connection = connect(&pool.login).await;
    let _ = outcome(&mut connection, &format!("SET ROLE {}", other.login.role)).await;
    let claim = format!("SELECT ci.claim({}, '{}', 1)", node.id, node.secret);
    let error = outcome(&mut connection, &claim).await.unwrap_err();
    assert!(error.to_string().contains("is unknown to this login"), "{error}");
}

/// A transaction of a builder that means to keep it open.
async fn held(pool: &PoolHandle) -> PgConnection {
    let mut connection = connect(&pool.login).await;
    run(
        &mut connection,
        "SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0; SET lock_timeout = 0",
    )
    .await;
    run(&mut connection, "BEGIN").await;
    connection
}

#[tokio::test]
async fn a_held_snapshot_is_ended_by_the_janitor() {
    let (farm, pool) = farm_and_pool().await;
    let mut idle = held(&pool).await;
    run(&mut idle, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1").await;
    let generation = farm.lead().await;
    // Not before its time, and nobody else's.
    assert_eq!(janitor::end_long_transactions(&farm.operator, generation.generation).await.unwrap(), 0);
    let mut admin = farm.database.admin().begin().await.unwrap();
    sqlx::query("SELECT 1").execute(&mut *admin).await.unwrap();
    let ended: i32 = sqlx::query_scalar("SELECT ci.end_long_transactions($1, '0 s')")
        .bind(generation.generation)
        .fetch_one(&farm.database.admin())
        .await
        .unwrap();
    assert_eq!(ended, 1);
    assert!(outcome(&mut idle, "SELECT 1").await.is_err());
    sqlx::query("SELECT 1").execute(&mut *admin).await.unwrap();
}

#[tokio::test]
async fn a_transaction_that_an_evaluator_holds_is_ended_too() {
    let farm = Farm::new().await;
    let mut connection = connect(&farm.database.make_login("harmonia_evaluator").await).await;
    run(&mut connection, "BEGIN; SELECT 1").await;
    let lead = farm.lead().await;
    assert_eq!(janitor::end_long_transactions(&farm.operator, lead.generation).await.unwrap(), 0);
    let ended: i32 = sqlx::query_scalar("SELECT ci.end_long_transactions($1, '0 s')")
        .bind(lead.generation)
        .fetch_one(&farm.database.admin())
        .await
        .unwrap();
    assert_eq!(ended, 1);
    assert!(outcome(&mut connection, "SELECT 1").await.is_err());
}

/// Everything else that must go on while a builder holds what `hold` locks, with waiting forbidden. `$S` is the session's
/// number and secret, `$J` and `$A` are a job that it builds and the attempt; there is a second job to claim.
async fn assert_the_farm_goes_on_while(hold: &str) {
    let farm = Farm::new().await;
    farm.forbid_waiting().await;
    farm.freeze().await;
    farm.put_project(Project { max_concurrent: Some(8), ..Project::new("project") }).await;
    let pool = farm.pool("pool", &[SYSTEM], 2).await;
    let others = farm.pool("others", &[SYSTEM], 8).await;
    let lead = farm.lead().await;
    let generation = lead.generation;
    farm.advance(121.0).await;

    let jobs = farm.evaluate("project", &[("held", &[]), ("above", &["held"])]).await;
    let villain = farm.node(&pool, "villain").await;
    let victim = farm.node(&pool, "victim").await;
    let worker = farm.node(&others, "worker").await;
    farm.settle().await;
    // An older attempt has left a tail for the janitor to remove.
    let older = farm.claim(&villain).await.fence;
    villain.log_append(&[LogPiece { fence: older, offset: 0, data: b"line".to_vec() }]).await.unwrap();
    villain.give_back(&[older], "to have an older attempt").await.unwrap();
    farm.settle().await;
    let fence = farm.claim(&villain).await.fence;
    farm.evaluate("project", &[("lost", &[])]).await;
    farm.settle().await;
    let lost = farm.claim(&victim).await.fence;
    farm.evaluate("project", &[("b", &[]), ("c", &["b"]), ("d", &[]), ("e", &[])]).await;
    farm.settle().await;

    let mut connection = held(&pool).await;
    let session = format!("{}, '{}'", villain.id, villain.secret);
    let hold = hold.replace("$S", &session);
    let hold = hold.replace("$J", &fence.job.to_string()).replace("$A", &fence.attempt.to_string());
    run(&mut connection, &hold).await;

    farm.advance(2.0).await;
    let bystander = farm.node(&others, "bystander").await;
    let claim = farm.claim(&worker).await;
    farm.succeed(&worker, &claim).await;
    farm.settle().await;
    let claim = farm.claim(&bystander).await;
    bystander.fail(claim.fence, Failure::Network, "").await.unwrap();
    farm.settle().await;
    // People and the operator: the pool, the project, the very build.
    let features = Pool {
        name: &pool.name,
        login: &pool.login.role,
        systems: vec![SYSTEM.to_owned()],
        features: Some(vec!["kvm".into()]),
        mandatory_features: Vec::new(),
        slots: 2,
        memory: 0,
    };
    people::put_pool(&farm.operator, &features).await.unwrap();
    for max_concurrent in [Some(1), None, Some(5)] {
        farm.put_project(Project { max_concurrent, ..Project::new("project") }).await;
    }
    // This alone may have to wait for the builder, and nobody may have to wait for this.
    let cancel = tokio::spawn({
        let frontend = farm.frontend.clone();
        async move { people::cancel(&frontend, fence.job).await }
    });
    while !cancel.is_finished() && !somebody_waits(&farm).await {
        tokio::task::yield_now().await;
    }
    farm.settle().await;
    let give_up = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    farm.database.execute(give_up).await;
    let _ = cancel.await.unwrap();
    // An evaluation that knows the same job, with a longer chain above it.
    let longer: &[(&str, &[&str])] = &[("held", &[]), ("above", &["held"]), ("top", &["above"])];
    let again = farm.evaluate("project", longer).await;
    assert_eq!(again["held"], jobs["held"]);
    people::end_evaluation(&farm.frontend, again.id, people::Ending::Cancelled, None).await.unwrap();
    farm.settle().await;
    // The janitor, whole: its rounds are what ends the transaction in the end.
    farm.advance(125.0).await;
    for session in [&worker, &bystander] {
        session.heartbeat(&[], None).await.unwrap();
    }
    janitor::keep_order(&farm.operator, generation).await.unwrap();
    janitor::clean_up(&farm.operator, generation).await.unwrap();
    assert_ne!(farm.state(lost.job).await, "building");
    farm.settle().await;
    farm.assert_sound().await;

    // Unless PostgreSQL has done it: a builder that is idle in a transaction is not waited for long.
    let _ = outcome(&mut connection, "ROLLBACK").await;
    farm.settle().await;
    farm.assert_sound().await;
}

async fn somebody_waits(farm: &Farm) -> bool {
    let query = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database())";
    sqlx::query_scalar(query).fetch_one(&farm.database.admin()).await.unwrap()
}

#[tokio::test]
async fn a_registration_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.register('fresh', 'the secret of a node', 2)").await;
}

#[tokio::test]
async fn a_second_life_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.register('villain', 'the secret of a node', 2)").await;
}

#[tokio::test]
async fn a_claim_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.claim($S, 1)").await;
}

#[tokio::test]
async fn a_failure_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.fail($S, $J, $A, 'build_error', '')").await;
}

#[tokio::test]
async fn a_retry_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.fail($S, $J, $A, 'network', '')").await;
}

#[tokio::test]
async fn a_heartbeat_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.heartbeat($S, '{$J}', '{$A}', 5)").await;
}

#[tokio::test]
async fn an_upload_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.start_upload($S, '{$J}', '{$A}')").await;
}

#[tokio::test]
async fn a_return_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.give_back($S, '{$J}', '{$A}', '')").await;
}

#[tokio::test]
async fn a_log_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.log_append($S, '{$J}', '{$A}', '{0}', '{\"line\"}')").await;
}

#[tokio::test]
async fn a_farewell_kept_open_stops_nobody() {
    assert_the_farm_goes_on_while("SELECT ci.deregister($S)").await;
}

#[tokio::test]
async fn all_of_them_kept_open_together_stop_nobody() {
    assert_the_farm_goes_on_while(
        "SELECT ci.register('fresh', 'the secret of a node', 2); SELECT ci.claim($S, 2); \
         SELECT ci.log_append($S, '{$J}', '{$A}', '{0}', '{\"line\"}'); SELECT ci.heartbeat($S, '{$J}', '{$A}', 5); \
         SELECT ci.fail($S, $J, $A, 'oom', ''); SELECT ci.deregister($S)",
    )
    .await;
}

#[tokio::test]
async fn arguments_out_of_bounds_are_refused_and_nothing_is_stored() {
    let (farm, pool) = farm_and_pool().await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let Fence { job, attempt } = farm.claim(&node).await.fence;
    let s = format!("{}, '{}'", node.id, node.secret);
    let before = farm.digest().await;
    let mut connection = connect(&pool.login).await;
    for call in [
        "ci.register('', 'the secret of a node', 1)".to_owned(),
        "ci.register(repeat('n', 254), 'the secret of a node', 1)".to_owned(),
        "ci.register(repeat('\u{1F4A3}', 64), 'the secret of a node', 1)".to_owned(),
        "ci.register(NULL, 'the secret of a node', 1)".to_owned(),
        "ci.register('n', 'short', 1)".to_owned(),
        "ci.register('n', NULL, 1)".to_owned(),
        "ci.register('n', repeat('s', 201), 1)".to_owned(),
        "ci.register('n', 'the secret of a node', 1, array_fill('x'::text, '{33}'))".to_owned(),
        "ci.register('n', 'the secret of a node', 1, NULL, array_fill('x'::text, '{65}'))".to_owned(),
        "ci.register('n', 'the secret of a node', 1, NULL, NULL, repeat('\u{1F4A3}', 64))".to_owned(),
        "ci.register('n', 'the secret of a node', 1, NULL, NULL, NULL, repeat('\u{1F4A3}', 26))".to_owned(),
        format!("ci.heartbeat({s}, array_fill(1::bigint, '{{4097}}'), array_fill(1::bigint, '{{4097}}'))"),
        format!("ci.start_upload({s}, array_fill(1::bigint, '{{4097}}'), array_fill(1::bigint, '{{4097}}'))"),
        format!(
            "ci.give_back({s}, array_fill(1::bigint, '{{4097}}'), array_fill(1::bigint, '{{4097}}'), '')"
        ),
        format!("ci.fail({s}, {job}, {attempt}, repeat('k', 1000000), '')"),
        format!("ci.fail({s}, {job}, {attempt}, 'node_died', '')"),
        format!("ci.input_missing({s}, {job}, {attempt}, repeat('p', 1000000))"),
        format!("ci.input_missing({s}, {job}, {attempt}, '')"),
        format!("ci.input_missing({s}, {job}, {attempt}, 'Derive')"),
        format!("ci.input_missing({s}, {job}, {attempt}, NULL)"),
        format!(
            "ci.log_append({s}, '{{{job}}}', '{{{attempt}}}', '{{0}}', ARRAY[convert_to(repeat('x', 65537), 'UTF8')])"
        ),
        format!("ci.log_append({s}, '{{{job}}}', '{{{attempt}}}', '{{-1}}', '{{x}}')"),
        format!("ci.log_append({s}, '{{{job}}}', '{{{attempt}}}', '{{{}}}', '{{x}}')", 1_u64 << 41),
        format!("ci.log_append({s}, array_fill(1::bigint, '{{1025}}'), NULL, NULL, NULL)"),
    ] {
        let error = outcome(&mut connection, &format!("SELECT {call}")).await.expect_err(&call);
        let code = error.as_database_error().and_then(|answer| answer.code().map(String::from));
        assert_eq!(code.as_deref(), Some("HC002"), "{call}: {error}");
    }
    assert_eq!(farm.digest().await, before);
}

#[tokio::test]
async fn a_long_message_is_cut() {
    let (farm, pool) = farm_and_pool().await;
    let jobs = farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let message = "\u{1F4A3}".repeat(100_000);
    for _ in 0..10 {
        let claim = farm.claim(&node).await;
        node.give_back(&[claim.fence], &message).await.unwrap();
        farm.settle().await;
    }
    assert_eq!(farm.state(jobs["a"]).await, "failed");
    let longest: i32 = sqlx::query_scalar(
        "SELECT max(greatest(octet_length(j.error), octet_length(a.message))) FROM ci.job j JOIN ci.attempt a ON a.job_id = j.id",
    )
    .fetch_one(&farm.database.admin())
    .await
    .unwrap();
    assert!(longest <= 8192, "{longest} bytes were stored");
}

/// A node with one claim, and a heartbeat for it that has not ended yet.
async fn heartbeat_in_flight() -> (Farm, Session, Claim, PgConnection) {
    let (farm, pool) = farm_and_pool().await;
    farm.evaluate("project", &[("a", &[])]).await;
    let node = farm.node(&pool, "node").await;
    farm.settle().await;
    let claim = farm.claim(&node).await;
    signer::check_claim(&farm.signer, &holder(&node, &claim)).await.unwrap();
    let mut connection = held(&pool).await;
    let Fence { job, attempt } = claim.fence;
    let call = format!("SELECT ci.heartbeat({}, '{}', '{{{job}}}', '{{{attempt}}}')", node.id, node.secret);
    run(&mut connection, &call).await;
    (farm, node, claim, connection)
}

async fn commit_soon(connection: &mut PgConnection) {
    // Long enough for the other call to meet the lock; a test that passes without meeting it is still right.
    tokio::time::sleep(Duration::from_millis(200)).await;
    run(connection, "COMMIT").await;
}

#[tokio::test]
async fn a_heartbeat_in_flight_does_not_make_a_result_stale() {
    let (farm, node, claim, mut connection) = heartbeat_in_flight().await;
    let (verdict, ()) = tokio::join!(farm.accept(&node, &claim), commit_soon(&mut connection));
    assert_eq!(verdict, Verdict::Accepted);
}

#[tokio::test]
async fn a_heartbeat_in_flight_does_not_make_a_failure_stale() {
    let (farm, node, claim, mut connection) = heartbeat_in_flight().await;
    let fail = node.fail(claim.fence, Failure::DiskFull, "no space");
    let (known, ()) = tokio::join!(fail, commit_soon(&mut connection));
    assert!(known.unwrap());
    assert_eq!(farm.state(claim.fence.job).await, "blocked");
}

#[tokio::test]
async fn a_claim_that_its_builder_keeps_locked_holds_up_no_signer() {
    let (farm, node, claim, _held) = heartbeat_in_flight().await;
    assert_eq!(farm.accept(&node, &claim).await, Verdict::Busy);
}
