//! Brings a database to the schema that this binary was built with, and closes what PostgreSQL leaves open to
//! every login.

use std::fmt::Write;

use sqlx::migrate::{Migrate, MigrateError as SqlxMigrateError, Migration, MigrationType, Migrator};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, SqlSafeStr};
use thiserror::Error;

struct File {
    version: i64,
    name: &'static str,
    description: &'static str,
    sql: &'static str,
}

const FILES: &[File] = include!(concat!(env!("OUT_DIR"), "/migrations.rs"));

const MIGRATIONS_TABLE: &str = "ci._sqlx_migrations";

/// Why a database could not be migrated.
#[derive(Debug, Error)]
pub enum MigrateError {
    /// No connection, or the login was refused.
    #[error("failed to connect to the database")]
    Connect(#[source] sqlx::Error),
    /// The groups do not exist and this login may not make them.
    #[error("failed to make the database's groups; a superuser can run what `migrate --print-roles` prints")]
    Roles(#[source] sqlx::Error),
    /// The login cannot act as the owner of the schema.
    #[error(
        "failed to become harmonia_owner; a superuser can run what `migrate --print-roles` prints, \
         or grant harmonia_owner to this login"
    )]
    Owner(#[source] sqlx::Error),
    /// The schema could not be made.
    #[error("failed to make the schema ci")]
    Schema(#[source] sqlx::Error),
    /// A later release has been here, one more than the next.
    #[error(
        "the database has migration {schema} and works for binaries that know those up to {since}, this one knows those up to \
         {binary}: use a newer release, or restore the backup of before"
    )]
    Newer {
        /// The last migration in the database.
        schema: i64,
        /// The last one that a binary must know.
        since: i64,
        /// The last migration that this binary knows.
        binary: i64,
    },
    /// One of the migrations failed, or is not the one that was applied before.
    #[error("failed to apply the migrations")]
    Apply(#[source] SqlxMigrateError),
    /// A question about the database's state failed.
    #[error("failed to read the state of the database")]
    State(#[source] sqlx::Error),
}

/// What a migration did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The files applied by this run, in order.
    pub applied: Vec<&'static str>,
    /// The schema is of a later release, of this migration, and works for this one: it was left as it is.
    pub newer: Option<i64>,
    /// What this login was not allowed to close, one sentence each.
    pub open: Vec<&'static str>,
}

/// Migrates the database and hardens it. `url` must reach PostgreSQL itself, not a pooler.
pub async fn migrate(url: &str) -> Result<Report, MigrateError> {
    migrate_with(url, |_, sql| sql.to_owned()).await
}

/// Like [`migrate`], with each file's text replaced by `alter(file name, text)`: a test proves itself by failing
/// on an altered schema.
pub async fn migrate_with(url: &str, alter: impl Fn(&str, &str) -> String) -> Result<Report, MigrateError> {
    let migrations = FILES.iter().map(|file| {
        let sql = AssertSqlSafe(alter(file.name, file.sql)).into_sql_str();
        Migration::new(file.version, file.description.into(), MigrationType::Simple, sql, false)
    });
    let mut migrator = Migrator::with_migrations(migrations.collect());
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);

    migrator.set_locking(false);

    let mut connection = connect(url).await?;
    execute(&mut connection, MAKE_ROLES).await.map_err(MigrateError::Roles)?;
    join_owner(&mut connection).await.map_err(MigrateError::Owner)?;
    take_turn(&mut connection).await?;
    execute(&mut connection, MAKE_SCHEMA).await.map_err(MigrateError::Schema)?;

    execute(&mut connection, "SET ROLE harmonia_owner; SET search_path = ci")
        .await
        .map_err(MigrateError::Owner)?;
    let before = newest(&mut connection).await.map_err(MigrateError::State)?;
    let newer = Some(before).filter(|before| *before > known());
    match newer {
        Some(schema) => works_for(&mut connection, schema).await?,
        None => migrator.run_direct(None, &mut connection, false).await.map_err(MigrateError::Apply)?,
    }
    execute(&mut connection, "RESET ROLE; RESET search_path").await.map_err(MigrateError::State)?;

    let applied = FILES.iter().filter(|file| file.version > before).map(|file| file.name).collect();
    let open = close_gaps(&mut connection).await?;
    connection.close().await.map_err(MigrateError::State)?;
    Ok(Report { applied, newer, open })
}

/// Only the hardening of [`migrate`]: a database cloned from a template does not inherit its privileges.
pub async fn harden(url: &str) -> Result<Report, MigrateError> {
    let mut connection = connect(url).await?;
    take_turn(&mut connection).await?;
    let open = close_gaps(&mut connection).await?;
    connection.close().await.map_err(MigrateError::State)?;
    Ok(Report { open, ..Report::default() })
}

/// What a superuser runs once, connected to `database`, where the migrating login is an ordinary one.
pub fn roles_sql(database: &str) -> String {
    let literal = database.replace('\'', "''");
    let mut sql = format!(
        "-- Run as a superuser, connected to the database. It can be run again.\n\
         BEGIN;\n\
         DO $$ BEGIN\n    \
         IF current_database() <> '{literal}' THEN\n        \
         RAISE 'connect to the database % first', '{literal}';\n    \
         END IF;\n\
         END $$;\n\
         {MAKE_ROLES};\n\
         {GRANT_OWNER_TO_DATABASE_OWNER};\n"
    );
    for gap in GAPS {
        // A String takes every write.
        let _ = writeln!(sql, "{};", gap.close);
    }
    sql.push_str("COMMIT;\n");
    sql
}

async fn connect(url: &str) -> Result<PgConnection, MigrateError> {
    let options: PgConnectOptions = url.parse().map_err(MigrateError::Connect)?;
    options.application_name("harmonia-ci migrate").connect().await.map_err(MigrateError::Connect)
}

async fn execute(connection: &mut PgConnection, sql: &'static str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(sql).execute(connection).await.map(drop)
}

/// A login with CREATEROLE may grant itself the group; a superuser needs no grant.
async fn join_owner(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    if execute(connection, "SET ROLE harmonia_owner").await.is_ok() {
        return execute(connection, "RESET ROLE").await;
    }
    execute(connection, "GRANT harmonia_owner TO CURRENT_USER").await
}

/// One process at a time migrates a database, until its connection ends. As the owner, because the hardening takes the
/// lock functions from everybody else.
async fn take_turn(connection: &mut PgConnection) -> Result<(), MigrateError> {
    execute(connection, "SET ROLE harmonia_owner").await.map_err(MigrateError::Owner)?;
    connection.lock().await.map_err(MigrateError::Apply)?;
    execute(connection, "RESET ROLE").await.map_err(MigrateError::State)
}

async fn newest(connection: &mut PgConnection) -> Result<i64, sqlx::Error> {
    let exists: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
        .bind(MIGRATIONS_TABLE)
        .fetch_one(&mut *connection)
        .await?;
    if !exists {
        return Ok(0);
    }
    let newest = AssertSqlSafe(format!("SELECT coalesce(max(version), 0) FROM {MIGRATIONS_TABLE}"));
    sqlx::query_scalar(newest).fetch_one(connection).await
}

/// The last migration that this binary knows.
fn known() -> i64 {
    FILES.last().map_or(0, |file| file.version)
}

/// A release that was rolled back works on the schema of the next one, and on no later one.
async fn works_for(connection: &mut PgConnection, schema: i64) -> Result<(), MigrateError> {
    let since = sqlx::query_scalar("SELECT since FROM ci.works_for").fetch_one(connection).await;
    let (since, binary) = (since.map_err(MigrateError::State)?, known());
    if since > binary { Err(MigrateError::Newer { schema, since, binary }) } else { Ok(()) }
}

/// Asks before and after each change: a REVOKE without the right to it is a mere warning, a change that is already
/// made should not be made again, and a migration of another database may just have granted what the cluster shares.
async fn close_gaps(connection: &mut PgConnection) -> Result<Vec<&'static str>, MigrateError> {
    let mut open = Vec::new();
    for gap in GAPS {
        if is_closed(connection, gap).await? {
            continue;
        }
        let outcome = execute(connection, gap.close).await;
        if !is_closed(connection, gap).await? {
            tracing::debug!(error = ?outcome.err(), gap = gap.sentence, "could not be closed");
            open.push(gap.sentence);
        }
    }
    Ok(open)
}

async fn is_closed(connection: &mut PgConnection, gap: &Gap) -> Result<bool, MigrateError> {
    sqlx::query_scalar(gap.closed).fetch_one(connection).await.map_err(MigrateError::State)
}

/// Roles belong to the whole cluster: a migration of another database may make them at the same moment.
const MAKE_ROLES: &str = "\
DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY '{harmonia_owner,harmonia_operator,harmonia_signer,harmonia_frontend,harmonia_evaluator,harmonia_builder}'::text[] LOOP
        IF to_regrole(role) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
            END;
        END IF;
    END LOOP;
END $$";

const GRANT_OWNER_TO_DATABASE_OWNER: &str = "\
DO $$
DECLARE
    login text := (SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database());
BEGIN
    EXECUTE format('GRANT harmonia_owner TO %I', login);
END $$";

const MAKE_SCHEMA: &str = "\
DO $$
BEGIN
    IF to_regnamespace('ci') IS NULL THEN
        CREATE SCHEMA ci AUTHORIZATION harmonia_owner;
    END IF;
END $$";

/// A right that PostgreSQL gives or withholds by default, and that the queue needs otherwise. What the cluster shares has a
/// gap of its own: another database's migration may close it in between, and would undo the rest of the statement.
struct Gap {
    sentence: &'static str,
    /// A query for one boolean.
    closed: &'static str,
    close: &'static str,
}

const GAPS: &[Gap] = &[
    Gap {
        sentence: "Every login may make temporary tables and schemas in this database.",
        closed: "SELECT NOT has_database_privilege('public', current_database(), 'TEMPORARY') \
                 AND NOT has_database_privilege('public', current_database(), 'CREATE')",
        close: "\
DO $$ BEGIN
    EXECUTE format('REVOKE TEMPORARY, CREATE ON DATABASE %I FROM PUBLIC', current_database());
END $$",
    },
    Gap {
        sentence: "Every login may use the schema public.",
        closed: "SELECT to_regnamespace('public') IS NULL \
                 OR NOT has_schema_privilege('public', to_regnamespace('public'), 'USAGE') \
                 AND NOT has_schema_privilege('public', to_regnamespace('public'), 'CREATE')",
        close: "REVOKE ALL ON SCHEMA public FROM PUBLIC",
    },
    Gap {
        sentence: "Every login may take advisory locks, signal its other sessions and write large objects.",
        closed: "SELECT NOT bool_or(has_function_privilege('public', oid, 'EXECUTE')) FROM pg_proc \
                 WHERE pronamespace = 'pg_catalog'::regnamespace AND proname ~ \
                 '^(pg_(try_)?advisory_.*|pg_(cancel|terminate)_backend|lo_.*|loread|lowrite)$'",
        close: "\
DO $$ BEGIN
    EXECUTE (
        SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', string_agg(oid::regprocedure::text, ', '))
        FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace
          AND proname ~ '^(pg_(try_)?advisory_.*|pg_(cancel|terminate)_backend|lo_.*|loread|lowrite)$'
    );
END $$",
    },
    Gap {
        sentence: "The control plane may not take advisory locks, so that no replica can lead.",
        closed: "SELECT bool_and(has_function_privilege(role, oid, 'EXECUTE')) FROM pg_proc, \
                 unnest('{harmonia_owner,harmonia_operator,harmonia_signer,harmonia_frontend,harmonia_evaluator}'::text[]) role \
                 WHERE pronamespace = 'pg_catalog'::regnamespace AND proname ~ '^pg_(try_)?advisory_'",
        close: "\
DO $$ BEGIN
    EXECUTE (
        SELECT format('GRANT EXECUTE ON FUNCTION %s TO harmonia_owner, harmonia_operator, harmonia_signer, \
harmonia_frontend, harmonia_evaluator', string_agg(oid::regprocedure::text, ', '))
        FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND proname ~ '^pg_(try_)?advisory_'
    );
END $$",
    },
    Gap {
        sentence: "The queue may not signal the sessions of its logins.",
        closed: "SELECT pg_has_role('harmonia_owner', 'pg_signal_backend', 'MEMBER')",
        close: "GRANT pg_signal_backend TO harmonia_owner",
    },
    Gap {
        sentence: "The queue may not see for how long a session has held its snapshot.",
        closed: "SELECT pg_has_role('harmonia_owner', 'pg_read_all_stats', 'MEMBER')",
        close: "GRANT pg_read_all_stats TO harmonia_owner",
    },
    Gap {
        sentence: "The queue may not end a session that holds a snapshot for too long.",
        closed: "SELECT bool_and(has_function_privilege('harmonia_owner', oid, 'EXECUTE')) FROM pg_proc \
                 WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = 'pg_terminate_backend'",
        close: "GRANT EXECUTE ON FUNCTION pg_terminate_backend TO harmonia_owner",
    },
    Gap {
        sentence: "The groups can connect only for as long as every login can.",
        closed: "SELECT count(*) = 5 FROM pg_database, aclexplode(datacl) AS entry \
                 WHERE datname = current_database() AND entry.privilege_type = 'CONNECT' AND entry.grantee IN \
                 ('harmonia_operator'::regrole, 'harmonia_signer'::regrole, 'harmonia_frontend'::regrole, \
                 'harmonia_evaluator'::regrole, 'harmonia_builder'::regrole)",
        close: "\
DO $$ BEGIN
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO harmonia_operator, harmonia_signer, harmonia_frontend, \
harmonia_evaluator, harmonia_builder', current_database());
END $$",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_numbered_without_gaps() {
        let versions: Vec<i64> = FILES.iter().map(|file| file.version).collect();
        let expected: Vec<i64> = (1..).take(FILES.len()).collect();
        assert_eq!(versions, expected);
    }

    #[test]
    fn printed_roles_guard_against_the_wrong_database() {
        let sql = roles_sql("it's");
        assert!(sql.contains("current_database() <> 'it''s'"), "{sql}");
        assert!(sql.contains("harmonia_builder"), "{sql}");
    }
}
