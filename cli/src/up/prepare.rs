//! What a farm has in its database before its roles start: the schema, a login for each role, a pool, a project, tokens.

use std::fs;
use std::path::Path;
use std::time::Duration;

use harmonia_queue::logins::{self, Group};
use harmonia_queue::people::{self, Pool, Project, Scope};
use harmonia_queue::{Db, migrate, pages, projects};

use super::error::UpError;
use super::layout::Layout;
use super::postgres::Database;
use super::roles::url_file;
use super::secrets;

/// The pool of the one builder.
const POOL: &str = "local";
/// Whose evaluations are that name no project.
const PROJECT: &str = "default";
/// A role that is started again may find the connections of its former life still there.
const CONNECTIONS: i32 = 40;
/// So long the printed link signs somebody in.
const INVITED: Duration = Duration::from_secs(3600);
/// `up` itself does what an operator does in a cluster.
pub const SELF: &str = "up";
const ROLES: &[(&str, Group)] = &[
    (SELF, Group::Operator),
    ("signer", Group::Signer),
    ("frontend", Group::Frontend),
    ("evaluator", Group::Evaluator),
    ("builder", Group::Builder),
];

/// All of it; it can be done again at every start. Answers what this login of the database was not allowed to close.
pub async fn prepare(layout: &Layout, database: &Database, slots: i32) -> Result<Vec<&'static str>, UpError> {
    secrets::write(&layout.secret("database-url"), &database.admin_url)?;
    let report = migrate::migrate(&database.admin_url).await?;
    for (role, group) in ROLES {
        make_login(layout, database, role, *group).await?;
    }
    let admin = Db::direct(&database.admin_url, 1)?;
    let pool = Pool {
        name: POOL,
        login: &login("builder"),
        systems: vec![system()],
        features: Some(features(Path::new("/dev/kvm").exists())),
        mandatory_features: Vec::new(),
        slots,
        memory: 0,
    };
    people::put_pool(&admin, &pool).await?;
    if projects::get(&admin, PROJECT).await?.is_none() {
        people::put_project(&admin, &Project::new(PROJECT)).await?;
    }
    make_token(&admin, &layout.path("token"), "up", Scope::Admin).await?;
    Ok(report.open)
}

/// A way into the web pages that works once.
pub async fn invite(database: &Database) -> Result<String, UpError> {
    let admin = Db::direct(&database.admin_url, 1)?;
    Ok(pages::invite(&admin, Scope::Admin, INVITED).await?)
}

/// The cache's own token, where it is not open to everybody, for the private Nix store.
pub async fn builder_netrc(layout: &Layout, database: &Database, host: &str) -> Result<(), UpError> {
    let admin = Db::direct(&database.admin_url, 1)?;
    let token = make_token(&admin, &layout.secret("builder-token"), "up-builder", Scope::Read).await?;
    secrets::write(&layout.secret("netrc"), &format!("machine {host} login nix password {token}"))
}

async fn make_login(layout: &Layout, database: &Database, role: &str, group: Group) -> Result<(), UpError> {
    let password = secrets::once(&layout.secret(&format!("{role}-password")), secrets::password)?;
    let login = login(role);
    logins::ensure_in(&database.admin_url, group, &login, &password, CONNECTIONS).await?;
    secrets::write(&layout.secret(&url_file(role)), &database.url_of(&login, &password))
}

fn login(role: &str) -> String {
    format!("harmonia_up_{role}")
}

/// The token in the file if the database knows it; else a new one, also when the last start ended between the two.
async fn make_token(db: &Db, path: &Path, name: &str, scope: Scope) -> Result<String, UpError> {
    if let Ok(text) = fs::read_to_string(path)
        && people::token_scope(db, text.trim()).await?.is_some_and(|(_, known)| known == scope)
    {
        return Ok(text.trim().to_owned());
    }
    if people::list_tokens(db).await?.iter().any(|token| token.name == name) {
        people::revoke_token(db, name).await?;
    }
    let token = people::create_token(db, name, scope, None).await?;
    secrets::write(path, &token)?;
    Ok(token)
}

/// This machine, as Nix calls it.
fn system() -> String {
    let machine = match std::env::consts::ARCH {
        "x86" => "i686",
        "arm" => "armv7l",
        other => other,
    };
    let kernel = match std::env::consts::OS {
        "macos" => "darwin",
        other => other,
    };
    format!("{machine}-{kernel}")
}

/// Nix's own defaults.
fn features(kvm: bool) -> Vec<String> {
    let always = ["benchmark", "big-parallel", "nixos-test"];
    always.into_iter().chain(kvm.then_some("kvm")).map(str::to_owned).collect()
}
