//! A private PostgreSQL (and, on demand, a PgBouncer before it) that vanishes with the process that started it.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use harmonia_queue::{Db, migrate};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool};
use tokio::runtime::Builder;
use tokio::sync::OnceCell;

const SUPERUSER: &str = "postgres";
/// PgBouncer asks for a password even where PostgreSQL trusts.
const SUPERUSER_PASSWORD: &str = "postgres";
const PORT: u16 = 5432;
const POOLER_PORT: u16 = 6432;
const TEMPLATE: &str = "harmonia_template";
const GROUPS: &str = "harmonia_owner, harmonia_operator, harmonia_signer, harmonia_frontend, harmonia_evaluator, harmonia_builder";

/// Whether logins go through PgBouncer in transaction mode.
pub fn pooled() -> bool {
    env::var("HARMONIA_CI_TEST_POOLER").is_ok_and(|value| value == "1")
}

/// How a server differs from the default one.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// An address to listen on besides the unix socket; `*` for all.
    pub listen: Option<String>,
    /// Further lines of `postgresql.conf`; the last of a name wins.
    pub settings: Vec<(String, String)>,
}

impl Options {
    /// Adds one setting.
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// For many short lives: nothing would survive the machine's end, and nobody tidies up in the background.
    pub fn fleeting(self) -> Self {
        self.set("fsync", "off").set("full_page_writes", "off").set("autovacuum", "off")
    }

    /// Keeps all that is written, for [`Server::recover`].
    pub fn archived(self) -> Self {
        self.set("archive_mode", "on").set("archive_command", "mkdir -p ../archive && cp %p ../archive/%f")
    }
}

/// A running PostgreSQL cluster in a temporary directory.
pub struct Server {
    directory: PathBuf,
    user: Option<User>,
    guard: Child,
    template: OnceCell<()>,
    pooler: OnceLock<()>,
    counter: AtomicUsize,
}

static SHARED: OnceLock<Arc<Server>> = OnceLock::new();

impl Server {
    /// The one server that the tests of this process share.
    pub fn shared() -> Arc<Server> {
        SHARED.get_or_init(|| Server::start(Options::default().fleeting())).clone()
    }

    /// Makes and starts a cluster of its own.
    pub fn start(options: Options) -> Arc<Server> {
        let user = User::unprivileged();
        let directory =
            tempfile::Builder::new().prefix("harmonia-pg-").tempdir().expect("make a directory").keep();
        if let Some(user) = &user {
            chown(&directory, Some(user.uid), Some(user.gid)).expect("give the directory away");
        }
        let guard = guard(&directory, user.as_ref());
        let server = Server {
            directory,
            user,
            guard,
            template: OnceCell::new(),
            pooler: OnceLock::new(),
            counter: AtomicUsize::new(0),
        };
        let password_file = server.write("password", SUPERUSER_PASSWORD);
        server.run(
            server
                .command("initdb")
                .args(["--username", SUPERUSER, "--encoding", "UTF8", "--locale", "C", "--no-sync"])
                .arg("--pwfile")
                .arg(password_file)
                .arg("--pgdata")
                .arg(server.data()),
        );
        server.write("data/pg_hba.conf", HBA);
        server.write("data/postgresql.conf", &server.settings(&options));
        server.start_postgres();
        Arc::new(server)
    }

    /// Ends PostgreSQL as a crash would.
    pub async fn stop_immediate(self: &Arc<Self>) {
        let server = self.clone();
        tokio::task::spawn_blocking(move || server.run(server.pg_ctl().args(["-m", "immediate", "stop"])))
            .await
            .expect("stop PostgreSQL");
    }

    /// Starts PostgreSQL again on the same data.
    pub async fn start_again(self: &Arc<Self>) {
        let server = self.clone();
        tokio::task::spawn_blocking(move || server.start_postgres()).await.expect("start PostgreSQL");
    }

    /// Makes a base backup, from which an archived server can be recovered.
    pub async fn back_up(self: &Arc<Self>) {
        let server = self.clone();
        let backup = move || {
            let mut command = server.command("pg_basebackup");
            command.args(["--checkpoint=fast", "--wal-method=none", "--dbname", &server.url("postgres")]);
            server.run(command.arg("--pgdata").arg(server.directory.join("base")));
        };
        tokio::task::spawn_blocking(backup).await.expect("a base backup");
    }

    /// Is again what it was at a restore point: the base backup, and what the archive has of the time from then on.
    pub async fn recover(self: &Arc<Self>, point: &str) {
        let is_archived = "
            DO $$ DECLARE v_last text := pg_walfile_name(pg_switch_wal()); BEGIN
              WHILE (SELECT last_archived_wal FROM pg_stat_archiver) < v_last LOOP PERFORM pg_sleep(0.05), pg_stat_clear_snapshot(); END LOOP;
            END $$";
        self.execute(is_archived).await;
        self.stop_immediate().await;
        fs::remove_dir_all(self.data()).expect("lose the data");
        fs::rename(self.directory.join("base"), self.data()).expect("take the backup");
        let settings = format!(
            "restore_command = 'cp ../archive/%f %p'\nrecovery_target_name = '{point}'\nrecovery_target_action = 'promote'\n"
        );
        self.write("data/postgresql.auto.conf", &settings);
        self.write("data/recovery.signal", "");
        self.start_again().await;
        let recovers = "DO $$ BEGIN WHILE pg_is_in_recovery() LOOP PERFORM pg_sleep(0.05); END LOOP; END $$";
        self.execute(recovers).await;
    }

    /// The superuser's URL of a database, past the pooler.
    pub fn url(&self, database: &str) -> String {
        self.url_at(PORT, SUPERUSER, SUPERUSER_PASSWORD, database)
    }

    /// The directory of the unix sockets.
    pub fn sockets(&self) -> &Path {
        &self.directory
    }

    /// The port, also part of the unix socket's name.
    pub fn port(&self) -> u16 {
        PORT
    }

    /// The path of one of PostgreSQL's programs, such as `pgbench`.
    pub fn program(name: &str) -> PathBuf {
        programs().join(name)
    }

    /// The process that all backends are children of.
    pub fn postmaster(&self) -> u32 {
        let file = fs::read_to_string(self.data().join("postmaster.pid")).expect("PostgreSQL runs");
        file.lines().next().and_then(|line| line.parse().ok()).expect("a process id")
    }

    /// What PostgreSQL has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("postgres.log")).unwrap_or_default()
    }

    /// A fresh clone of the migrated template.
    pub async fn database(self: &Arc<Self>) -> Database {
        self.template
            .get_or_init(|| async {
                self.execute(&format!("CREATE DATABASE {TEMPLATE}")).await;
                migrate::migrate_with(&self.url(TEMPLATE), mutant).await.expect("migrate the template");
                // A database with a connection cannot be cloned.
                self.execute(&format!("ALTER DATABASE {TEMPLATE} ALLOW_CONNECTIONS false")).await;
            })
            .await;
        self.clone_of(TEMPLATE).await
    }

    /// A clone of any database of this server to which nobody is connected.
    pub async fn clone_of(self: &Arc<Self>, template: &str) -> Database {
        let database = self.empty_database_from(template).await;
        migrate::harden(&database.direct_url()).await.expect("harden the clone");
        database
    }

    /// A database without our schema.
    pub async fn empty_database(self: &Arc<Self>) -> Database {
        self.empty_database_from("template1").await
    }

    pub(crate) async fn empty_database_from(self: &Arc<Self>, template: &str) -> Database {
        let name = self.unique("test");
        // As files: otherwise every page of it would go into the log too.
        self.execute(&format!("CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")).await;
        let admin = pool(&self.url(&name), 4);
        Database { server: self.clone(), name, admin }
    }

    /// Runs SQL as the superuser in the database `postgres`.
    pub async fn execute(&self, sql: &str) {
        let options: PgConnectOptions = self.url("postgres").parse().expect("a URL");
        let mut connection: PgConnection = options.connect().await.expect("connect as the superuser");
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut connection)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
        connection.close().await.expect("close the connection");
    }

    /// A name that this server has not seen: roles and databases are shared by all tests.
    pub fn unique(&self, prefix: &str) -> String {
        format!("{prefix}_{}", self.counter.fetch_add(1, Ordering::Relaxed))
    }

    fn url_at(&self, port: u16, user: &str, password: &str, database: &str) -> String {
        let sockets = self.directory.to_str().expect("a path in UTF-8").replace('/', "%2F");
        format!("postgres://{user}:{password}@{sockets}:{port}/{database}")
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn settings(&self, options: &Options) -> String {
        let sockets = self.directory.display();
        let listen = options.listen.as_deref().unwrap_or_default();
        let mut text =
            format!("{SETTINGS}unix_socket_directories = '{sockets}'\nlisten_addresses = '{listen}'\n");
        for (name, value) in &options.settings {
            text.push_str(&format!("{name} = '{}'\n", value.replace('\'', "''")));
        }
        text
    }

    fn start_postgres(&self) {
        let log = self.directory.join("postgres.log");
        self.run(self.pg_ctl().arg("-l").arg(&log).arg("start"));
    }

    fn start_pooler(&self) {
        let sockets = self.directory.display();
        let users = self.write("pgbouncer.users", &format!("\"{SUPERUSER}\" \"{SUPERUSER_PASSWORD}\"\n"));
        let ini = self.write(
            "pgbouncer.ini",
            &format!(
                "[databases]\n\
                 * = host={sockets} port={PORT}\n\
                 [pgbouncer]\n\
                 listen_port = {POOLER_PORT}\n\
                 unix_socket_dir = {sockets}\n\
                 logfile = {sockets}/pgbouncer.log\n\
                 pidfile = {sockets}/pgbouncer.pid\n\
                 pool_mode = transaction\n\
                 default_pool_size = 4\n\
                 max_client_conn = 1000\n\
                 server_login_retry = 1\n\
                 server_idle_timeout = 2\n\
                 query_wait_timeout = 120\n\
                 auth_type = scram-sha-256\n\
                 auth_user = {SUPERUSER}\n\
                 auth_file = {users}\n\
                 auth_query = SELECT usename, passwd FROM pg_catalog.pg_shadow WHERE usename = $1\n\
                 ignore_startup_parameters = extra_float_digits, options\n",
                users = users.display()
            ),
        );
        let program = which("pgbouncer").expect("pgbouncer is installed");
        self.run(self.as_user(program).arg("--daemon").arg(ini));
        // It returns before it listens.
        let socket = self.directory.join(format!(".s.PGSQL.{POOLER_PORT}"));
        crate::until("PgBouncer listens", || UnixStream::connect(&socket).is_ok());
    }

    fn pg_ctl(&self) -> Command {
        let mut command = self.command("pg_ctl");
        command.arg("--wait").arg("--silent").arg("--pgdata").arg(self.data());
        command
    }

    fn command(&self, program: &str) -> Command {
        self.as_user(Self::program(program))
    }

    fn as_user(&self, program: PathBuf) -> Command {
        as_user(program, &self.directory, self.user.as_ref())
    }

    /// Output goes to a file: a daemon would hold a pipe open for ever.
    fn run(&self, command: &mut Command) {
        let path = self.directory.join("commands.log");
        let log = fs::File::options().append(true).create(true).open(&path).expect("open the log");
        let errors = log.try_clone().expect("open the log twice");
        let status = command.stdin(Stdio::null()).stdout(log).stderr(errors).status();
        if !status.as_ref().is_ok_and(|status| status.success()) {
            let output = fs::read_to_string(&path).unwrap_or_default();
            panic!("{command:?}: {status:?}\n{output}\n{}", self.log());
        }
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.join(name);
        fs::write(&path, text).expect("write a file");
        if let Some(user) = &self.user {
            chown(&path, Some(user.uid), Some(user.gid)).expect("give the file away");
        }
        path
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

/// One database of a [`Server`].
pub struct Database {
    server: Arc<Server>,
    name: String,
    admin: PgPool,
}

impl Database {
    /// The same by new connections, after its server has ended and begun again.
    pub fn again(&self) -> Database {
        Database {
            server: self.server.clone(),
            name: self.name.clone(),
            admin: pool(&self.server.url(&self.name), 4),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server it lives in.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Connections of the superuser, past the pooler.
    pub fn admin(&self) -> PgPool {
        self.admin.clone()
    }

    /// The superuser's URL by the configured route.
    pub fn url(&self) -> String {
        self.url_as(SUPERUSER, SUPERUSER_PASSWORD)
    }

    /// The superuser's URL past the pooler.
    pub fn direct_url(&self) -> String {
        self.server.url(&self.name)
    }

    /// A role's URL by the configured route.
    pub fn url_as(&self, role: &str, password: &str) -> String {
        if pooled() { self.pooled_url_as(role, password) } else { self.direct_url_as(role, password) }
    }

    /// A role's URL through PgBouncer, whatever the configured route is.
    pub fn pooled_url_as(&self, role: &str, password: &str) -> String {
        self.server.pooler.get_or_init(|| self.server.start_pooler());
        self.server.url_at(POOLER_PORT, role, password, &self.name)
    }

    /// A role's URL past the pooler.
    pub fn direct_url_as(&self, role: &str, password: &str) -> String {
        self.server.url_at(PORT, role, password, &self.name)
    }

    /// Makes a login in a group, such as `harmonia_builder`.
    pub async fn make_login(&self, group: &str) -> Login {
        let role = self.server.unique(group.trim_start_matches("harmonia_"));
        let password = format!("{role}_secret");
        self.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD '{password}' IN ROLE {group}")).await;
        self.known_login(&role, &password)
    }

    /// A login that was made otherwise.
    pub fn known_login(&self, role: &str, password: &str) -> Login {
        Login {
            url: self.url_as(role, password),
            direct_url: self.direct_url_as(role, password),
            role: role.to_owned(),
            password: password.to_owned(),
        }
    }

    /// Connections of a fresh login in a group, by the configured route.
    pub async fn login(&self, group: &str) -> PgPool {
        self.make_login(group).await.pool()
    }

    /// Connections of a fresh login in a group, past the pooler.
    pub async fn direct_login(&self, group: &str) -> PgPool {
        pool(&self.make_login(group).await.direct_url, POOL_SIZE)
    }

    /// Runs SQL as the superuser.
    pub async fn execute(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&self.admin)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    /// From here on, this database's clock moves by [`Database::advance`] only.
    pub async fn freeze_clock(&self) {
        let volatility: String = sqlx::query_scalar(
            "SELECT CASE provolatile WHEN 'v' THEN 'VOLATILE' ELSE 'STABLE' END FROM pg_proc WHERE oid = 'ci.clock'::regproc",
        )
        .fetch_one(&self.admin)
        .await
        .expect("ci.clock exists");
        self.execute(&format!(
            "CREATE TABLE public.test_clock (t timestamptz NOT NULL);
             INSERT INTO public.test_clock VALUES (clock_timestamp());
             GRANT USAGE ON SCHEMA public TO {GROUPS};
             GRANT SELECT ON public.test_clock TO {GROUPS};
             CREATE OR REPLACE FUNCTION ci.clock() RETURNS timestamptz LANGUAGE sql {volatility}
                 RETURN (SELECT t FROM public.test_clock);"
        ))
        .await;
    }

    /// Moves a frozen clock.
    pub async fn advance(&self, seconds: f64) {
        sqlx::query("UPDATE public.test_clock SET t = t + make_interval(secs => $1)")
            .bind(seconds)
            .execute(&self.admin)
            .await
            .expect("the clock is frozen");
    }
}

impl Drop for Database {
    /// Those of the shared server would pile up; any other server takes its own along. Nobody waits for it.
    fn drop(&mut self) {
        if SHARED.get().is_some_and(|shared| Arc::ptr_eq(shared, &self.server)) {
            let (server, name) = (self.server.clone(), self.name.clone());
            thread::spawn(move || {
                let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
                runtime.block_on(server.execute(&format!("DROP DATABASE {name} WITH (FORCE)")));
            });
        }
    }
}

/// A database login made for a test.
#[derive(Debug, Clone)]
pub struct Login {
    /// Its role.
    pub role: String,
    /// Its password.
    pub password: String,
    /// Its URL by the configured route.
    pub url: String,
    /// Its URL past the pooler.
    pub direct_url: String,
}

impl Login {
    /// The queue by the configured route.
    pub fn db(&self) -> Db {
        let connect = if pooled() { Db::pooled } else { Db::direct };
        connect(&self.url, POOL_SIZE).expect("a URL")
    }

    /// Connections by the configured route.
    pub fn pool(&self) -> PgPool {
        pool(&self.url, POOL_SIZE)
    }
}

/// A mutant's text of a migration, where `HARMONIA_CI_TEST_MIGRATIONS` names a directory that has one.
fn mutant(file: &str, sql: &str) -> String {
    let directory = env::var_os("HARMONIA_CI_TEST_MIGRATIONS").map(PathBuf::from);
    directory
        .and_then(|directory| fs::read_to_string(directory.join(file)).ok())
        .unwrap_or_else(|| sql.to_owned())
}

const POOL_SIZE: u32 = 8;

/// Lazily connecting, so that it can be made anywhere; the URL is one of ours.
fn pool(url: &str, connections: u32) -> PgPool {
    PgPoolOptions::new().max_connections(connections).connect_lazy(url).expect("a URL")
}

const HBA: &str = "\
local all,replication postgres trust
local all all scram-sha-256
host all all all scram-sha-256
";

const SETTINGS: &str = "\
port = 5432
max_connections = 400
shared_buffers = '256MB'
max_wal_size = '4GB'
fsync = on
autovacuum = on
jit = off
log_line_prefix = '%m [%p] %q%u@%d '
";

/// An account that PostgreSQL agrees to run as.
struct User {
    uid: u32,
    gid: u32,
}

impl User {
    /// `None` if this process is not root's and can run PostgreSQL itself.
    fn unprivileged() -> Option<User> {
        use std::os::unix::fs::MetadataExt;
        let own = fs::metadata("/proc/self").expect("read /proc").uid();
        if own != 0 {
            return None;
        }
        let accounts = fs::read_to_string("/etc/passwd").expect("read /etc/passwd");
        let find = |name: &str| {
            let mut fields = accounts.lines().map(|line| line.split(':').collect::<Vec<_>>());
            let fields = fields.find(|fields| fields[0] == name)?;
            Some(User { uid: fields.get(2)?.parse().ok()?, gid: fields.get(3)?.parse().ok()? })
        };
        Some(find("postgres").or_else(|| find("nobody")).expect("an unprivileged account"))
    }
}

fn as_user(program: PathBuf, directory: &Path, user: Option<&User>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory).env("LC_ALL", "C").env_remove("PGDATA");
    if let Some(user) = user {
        command.uid(user.uid).gid(user.gid);
    }
    command
}

/// A shell that waits for the end of its input, which is the end of this process however it came, and cleans up. In a
/// group of its own, so that an interrupt at the terminal does not end it first. A server that was only about to start
/// ends when it misses its files.
fn guard(directory: &Path, user: Option<&User>) -> Child {
    let script = r#"
        cat >/dev/null
        cd /
        test ! -e "$1/pgbouncer.pid" || kill -KILL "$(cat "$1/pgbouncer.pid")"
        "$2" --pgdata "$1/data" --mode immediate stop
        rm -rf "$1"
    "#;
    as_user("/bin/sh".into(), directory, user)
        .args(["-c", script, "guard"])
        .arg(directory)
        .arg(Server::program("pg_ctl"))
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start the guard")
}

/// Debian keeps PostgreSQL's programs out of PATH, one directory a version; elsewhere they are in it.
fn programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        newest_debian()
            .ok()
            .flatten()
            .or_else(|| Some(which("initdb")?.parent()?.to_owned()))
            .expect("PostgreSQL is installed")
    })
}

fn newest_debian() -> io::Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/usr/lib/postgresql")? {
        let entry = entry?;
        let version = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let programs = entry.path().join("bin");
        if let Some(version) = version
            && programs.join("initdb").exists()
        {
            found.push((version, programs));
        }
    }
    Ok(found.into_iter().max().map(|(_, programs)| programs))
}

fn which(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    directories.map(|directory| directory.join(program)).find(|path| path.exists())
}
