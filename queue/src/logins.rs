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

/// How they are made by hand where nobody is given a login that may, as comments of SQL. A pool's has to be called like this.
pub fn by_hand() -> String {
    use Group::{Builder, Evaluator, Frontend, Operator, Signer};
    let roles = [
        (Operator, "ci_operator"),
        (Signer, "ci_signer"),
        (Frontend, "ci_frontend"),
        (Evaluator, "ci_evaluator"),
    ];
    let mut text =
        "-- Then the logins, each with a password of its own; a pool's is called pool_NAMESPACE_NAME:\n"
            .to_owned();
    for (group, login) in roles.into_iter().chain([(Builder, "pool_builders_x86")]) {
        let group_name = group.name();
        text += &format!(
            "-- CREATE ROLE {login} LOGIN CONNECTION LIMIT 100 PASSWORD '…' IN ROLE {group_name};\n"
        );
        for (name, value) in group.settings() {
            text += &format!("-- ALTER ROLE {login} SET {name} = '{value}';\n");
        }
    }
    text
}

/// What a login's comment begins with; the name of its database follows.
const MARK: &str = "A login of harmonia-ci in the database ";

/// Takes from a login what it may not have, and says nothing of what it does not have: even that would need a superuser, and who
/// makes logins need be none. A new one has none of them.
const POWERS: &str = "SELECT concat_ws(' ', CASE WHEN rolsuper THEN 'NOSUPERUSER' END, CASE WHEN rolcreatedb THEN 'NOCREATEDB' END, \
     CASE WHEN rolcreaterole THEN 'NOCREATEROLE' END, CASE WHEN rolreplication THEN 'NOREPLICATION' END, \
     CASE WHEN rolbypassrls THEN 'NOBYPASSRLS' END) FROM pg_roles WHERE oid = to_regrole($1)";

/// Makes a pool's login, or sets it right again: password, connection limit, group, and no settings of its own. A
/// builder can change its own login's password; this undoes it, so it is called at every reconcile.
pub async fn ensure(admin_url: &str, login: &str, password: &str, connections: i32) -> Result<()> {
    ensure_in(admin_url, Group::Builder, login, password, connections).await
}

/// The same for a login of any group. Logins belong to the whole server: one of another database there, perhaps of another
/// installation with the same name, is refused.
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
    let powers: Option<String> = sqlx::query_scalar(POWERS).bind(&login).fetch_optional(&mut admin).await?;
    let mark = mark(&mut admin, &login).await?;
    let verb = if powers.is_some() { "ALTER" } else { "CREATE" };
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
         {verb} ROLE {login} LOGIN {powers} CONNECTION LIMIT {connections} PASSWORD '{password}';
         ALTER ROLE {login} RESET ALL;
         {own}
         {settings}
         GRANT {group} TO {login};
         {mark}",
        own = own.concat(),
        settings = settings.concat(),
        powers = powers.unwrap_or_default(),
        group = group.name(),
    );
    let made = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await;
    admin.close().await?;
    made?;
    Ok(())
}

/// What marks a login as one of this database. One of a database that is gone, or has another name by now, belongs to whoever has
/// its data: a backup may have been restored under another name.
async fn mark(admin: &mut PgConnection, login: &str) -> Result<String> {
    let (here, comment): (String, Option<String>) = sqlx::query_as(
        "SELECT current_database()::text, shobj_description(to_regrole($1)::oid, 'pg_authid')",
    )
    .bind(login)
    .fetch_one(&mut *admin)
    .await?;
    let marked = comment.as_deref().and_then(|comment| comment.strip_prefix(MARK));
    if let Some(other) = marked.filter(|marked| *marked != here) {
        let exists = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)";
        if sqlx::query_scalar(exists).bind(other).fetch_one(&mut *admin).await? {
            return Err(taken(login, other));
        }
    }
    let comment = format!("{MARK}{here}");
    let sql = sqlx::query_scalar("SELECT format('COMMENT ON ROLE %s IS %L;', $1::text, $2::text)");
    Ok(sql.bind(login).bind(comment).fetch_one(admin).await?)
}

fn taken(login: &str, other: &str) -> Error {
    Error::WrongState(format!(
        "the login {login} belongs to the database \"{other}\" on the same server: give this installation another name \
         (fullnameOverride) and its pools other namespaces, or take another server; if that database is of no use any more, drop or \
         rename it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_login_is_told_with_its_group_and_its_limits() {
        let text = by_hand();
        for group in [Group::Builder, Group::Evaluator, Group::Frontend, Group::Operator, Group::Signer] {
            assert!(text.contains(&format!("IN ROLE {};", group.name())), "{text}");
        }
        assert!(text.contains("-- ALTER ROLE pool_builders_x86 SET statement_timeout = '30s';"), "{text}");
        assert!(text.lines().all(|line| line.starts_with("-- ")), "{text}");
    }
}
