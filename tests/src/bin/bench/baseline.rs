//! The server that is measured, and SU: `pgbench -N -M prepared -s 10` in a database of its own.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use harmonia_queue::logins;
use harmonia_tests::pg::{Database, Options, Server};
use harmonia_tests::press::Press;
use harmonia_tests::s3::S3;

use crate::farm::{Farm, PASSWORD, POOL_LOGIN};
use crate::measure::cpu_of;

/// How often a ratio is taken; the median counts.
pub const ROUNDS: usize = 5;
/// How long SU is measured each time.
const SU_SECONDS: u32 = 3;

/// What everything is measured on.
pub struct Bench {
    pub server: Arc<Server>,
}

/// One slice of SU.
#[derive(Debug, Clone, Copy)]
pub struct Su {
    /// Transactions a second.
    pub tps: f64,
    /// Mean latency in seconds.
    pub latency: f64,
    /// CPU seconds of PostgreSQL per transaction.
    pub cpu: f64,
}

impl Bench {
    /// PostgreSQL as a user would tune it on 2 cores.
    pub async fn start(settings: &[(String, String)]) -> Self {
        let mut options = Options::default()
            .set("shared_buffers", "2GB")
            .set("effective_cache_size", "6GB")
            .set("work_mem", "16MB")
            .set("maintenance_work_mem", "256MB")
            .set("max_wal_size", "8GB")
            .set("min_wal_size", "2GB")
            .set("wal_buffers", "64MB")
            .set("wal_compression", "on")
            .set("checkpoint_timeout", "30min")
            .set("random_page_cost", "1.1")
            .set("synchronous_commit", "on")
            .set("fsync", "on")
            .set("jit", "off")
            .set("max_connections", "400");
        options.settings.extend_from_slice(settings);
        let bench = Self { server: Server::start(options) };
        bench.server.execute("CREATE DATABASE su").await;
        bench.pgbench(&["--initialize", "--quiet", "--scale=10"]);
        // Making a database migrates the template, which makes the groups.
        bench.drop(bench.server.database().await).await;
        logins::ensure(&bench.server.url("postgres"), POOL_LOGIN, PASSWORD, 1000)
            .await
            .expect("make the pool's login");
        for role in ["operator", "signer", "evaluator"] {
            let sql = format!("CREATE ROLE bench_{role} LOGIN PASSWORD '{PASSWORD}' IN ROLE harmonia_{role}");
            bench.server.execute(&sql).await;
        }
        bench
    }

    /// CPU seconds that PostgreSQL has used so far.
    pub fn cpu(&self) -> f64 {
        cpu_of(self.server.postmaster())
    }

    /// One slice of SU.
    pub async fn su(&self, clients: usize) -> Su {
        let before = self.cpu();
        let arguments = [
            "--skip-some-updates",
            "--protocol=prepared",
            "--no-vacuum",
            &format!("--client={clients}"),
            "--jobs=2",
            &format!("--time={SU_SECONDS}"),
        ];
        let output = tokio::task::block_in_place(|| self.pgbench(&arguments));
        let number = |label: &str| -> f64 {
            let rest = output
                .lines()
                .find_map(|line| line.strip_prefix(label))
                .unwrap_or_else(|| panic!("{output}"));
            rest.split_whitespace()
                .next()
                .and_then(|word| word.parse().ok())
                .unwrap_or_else(|| panic!("{output}"))
        };
        let su = Su {
            tps: number("tps = "),
            latency: number("latency average = ") / 1000.0,
            cpu: (self.cpu() - before) / number("number of transactions actually processed: "),
        };
        eprintln!(
            "   SU at {clients}: {:.0}/s, {:.2} ms, {:.3} ms CPU",
            su.tps,
            su.latency * 1e3,
            su.cpu * 1e3
        );
        su
    }

    fn pgbench(&self, arguments: &[&str]) -> String {
        let output = Command::new(Server::program("pgbench"))
            .arg("--host")
            .arg(self.server.sockets())
            .args(["--port", &self.server.port().to_string(), "--username", "postgres"])
            .args(arguments)
            .arg("su")
            .output()
            .expect("pgbench is installed");
        assert!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Makes a farm into a template; answers its name.
    pub async fn template(&self, farm: Farm) -> String {
        farm.tidy().await;
        let name = farm.database.name().to_owned();
        let sql = format!(
            "ALTER DATABASE {name} ALLOW_CONNECTIONS false;
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        );
        self.server.execute(&sql).await;
        name
    }

    /// A copy of a template.
    pub async fn copy(&self, template: &str) -> Farm {
        let farm = Farm::of(self.server.clone_of(template).await);
        farm.database.execute("CHECKPOINT").await;
        farm
    }

    /// Removes a database, connections and all.
    pub async fn drop(&self, database: Database) {
        self.server.execute(&format!("DROP DATABASE {} WITH (FORCE)", database.name())).await;
    }
}

/// A farm with a bucket, on a server of its own: unlike the one that tests share, it keeps what it is told.
pub async fn press(s3: S3) -> Press {
    let database = Server::start(Options::default()).database().await;
    Press::on(harmonia_tests::farm::Farm::on(database).await, s3).await
}

/// Says what is going on, and afterwards how long it took.
pub async fn phase<T>(what: &str, work: impl Future<Output = T>) -> T {
    eprintln!("-- {what}");
    let start = Instant::now();
    let result = work.await;
    let took = start.elapsed();
    if took > Duration::from_secs(1) {
        eprintln!("   {:.1} s", took.as_secs_f64());
    }
    result
}
