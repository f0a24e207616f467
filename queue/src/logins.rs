//! The database logins of roles and pools, made and kept by whoever holds the admin connection.

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::{Error, Result};

/// Whose login it is: its group in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// A pool's builders, which run foreign code.
    Builder,
    /// Evaluators.
    Evaluator,
    /// Frontends.
    Frontend,
    /// Operators, and whoever does their work where there is none.
    Operator,
    /// Signers.
    Signer,
}

impl Group {
    fn name(self) -> &'static str {
        match self {
            Self::Builder => "harmonia_builder",
            Self::Evaluator => "harmonia_evaluator",
            Self::Frontend => "harmonia_frontend",
            Self::Operator => "harmonia_operator",
            Self::Signer => "harmonia_signer",
        }
    }

    /// A builder's statements are short: what takes longer is harm. Nobody waits longer than half a minute for a page. Nobody
    /// thinks within a transaction: who is silent there has vanished, or is frozen.
    fn settings(self) -> &'static [(&'static str, &'static str)] {
        const SILENT: (&str, &str) = ("idle_in_transaction_session_timeout", "10s");
        match self {
            Self::Builder => &[("statement_timeout", "30s"), SILENT],
            Self::Frontend => &[("statement_timeout", "35s"), SILENT],
            Self::Evaluator | Self::Operator | Self::Signer => &[SILENT],
        }
    }
}

/// Makes a pool's login, or sets it right again: password, connection limit, group, and no settings of its own. A
/// builder can change its own login's password; this undoes it, so it is called at every reconcile.
pub async fn ensure(admin_url: &str, login: &str, password: &str, connections: i32) -> Result<()> {
    ensure_in(admin_url, Group::Builder, login, password, connections).await
}

/// The same for a login of any group.
pub async fn ensure_in(
    admin_url: &str,
    group: Group,
    login: &str,
    password: &str,
    connections: i32,
) -> Result<()> {
    if login.is_empty() || login.len() > 63 || login.contains('\0') || password.contains('\0') {
        return Err(Error::Invalid(format!("{login:?} cannot be the name of a database login")));
    }
    let mut admin = PgConnection::connect(admin_url).await?;
    let login = format!("\"{}\"", login.replace('"', "\"\""));
    let password = password.replace('\'', "''");
    let exists: bool =
        sqlx::query_scalar("SELECT to_regrole($1) IS NOT NULL").bind(&login).fetch_one(&mut admin).await?;
    let verb = if exists { "ALTER" } else { "CREATE" };
    let own: Vec<String> = sqlx::query_scalar(
        "SELECT format('ALTER ROLE %I IN DATABASE %I RESET ALL;', r.rolname, d.datname) FROM pg_db_role_setting s \
         JOIN pg_roles r ON r.oid = s.setrole JOIN pg_database d ON d.oid = s.setdatabase WHERE r.oid = to_regrole($1)",
    )
    .bind(&login)
    .fetch_all(&mut admin)
    .await?;
    let settings: Vec<String> = group
        .settings()
        .iter()
        .map(|(name, value)| format!("ALTER ROLE {login} SET {name} = '{value}';"))
        .collect();
    let sql = format!(
        "SET client_min_messages = warning;
         {verb} ROLE {login} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS \
           CONNECTION LIMIT {connections} PASSWORD '{password}';
         ALTER ROLE {login} RESET ALL;
         {own}
         {settings}
         GRANT {group} TO {login};",
        own = own.concat(),
        settings = settings.concat(),
        group = group.name(),
    );
    let made = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await;
    admin.close().await?;
    made?;
    Ok(())
}
