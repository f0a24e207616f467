//! The database logins of pools, made and kept by whoever holds the admin connection.

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::{Error, Result};

/// Makes a pool's login, or sets it right again: password, connection limit, group, and no settings of its own. A
/// builder can change its own login's password; this undoes it, so it is called at every reconcile.
pub async fn ensure(admin_url: &str, login: &str, password: &str, connections: i32) -> Result<()> {
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
    let sql = format!(
        "{verb} ROLE {login} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS \
           CONNECTION LIMIT {connections} PASSWORD '{password}';
         ALTER ROLE {login} RESET ALL;
         {own}
         ALTER ROLE {login} SET statement_timeout = '30s';
         ALTER ROLE {login} SET idle_in_transaction_session_timeout = '10s';
         GRANT harmonia_builder TO {login};",
        own = own.concat(),
    );
    let made = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await;
    admin.close().await?;
    made?;
    Ok(())
}
