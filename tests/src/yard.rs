//! Real builders beside a [`Press`]: each with a Nix daemon and a store of its own.

use std::borrow::Borrow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harmonia_builder::BuilderError;
use harmonia_service::settings::Settings;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::nixes::{Expression, Nix, Version};
use crate::press::{Press, RunningSigner, free_port, shared_nix};

/// A builder in this process, and its store.
pub struct RunningBuilder {
    /// Its name in the pool.
    pub name: String,
    /// Its store.
    pub nix: Arc<Nix>,
    stops: watch::Sender<u32>,
    task: JoinHandle<Result<(), BuilderError>>,
    _state: TempDir,
}

/// Further lines of `nix.conf` for a store that fetches from the press's bucket, which has to be public.
pub fn substitutes(press: &Press) -> String {
    format!(
        "substituters = {}\ntrusted-public-keys = {}\nnarinfo-cache-negative-ttl = 0\n",
        press.s3.url(),
        press.public_key()
    )
}

/// The settings of a builder.
pub fn settings(press: &Press, nix: &Nix, name: &str, state: &Path) -> Settings {
    Settings::default()
        .with("database_url", &press.pool.login.direct_url)
        .with("listen", format!("127.0.0.1:{}", free_port()))
        .with("node", name)
        .with("slots", "2")
        .with("state_dir", state.display().to_string())
        .with("nix_daemon", nix.socket().display().to_string())
        .with("nix_root", nix.root().display().to_string())
}

impl RunningBuilder {
    /// A builder with a new store.
    pub async fn start(press: &Press, version: Version, name: &str) -> RunningBuilder {
        let nix = Arc::new(Nix::start_with(version, &substitutes(press)));
        RunningBuilder::start_on(press, nix, name, |settings| settings).await
    }

    /// A builder with this store and further settings.
    pub async fn start_on(
        press: &Press,
        nix: Arc<Nix>,
        name: &str,
        more: impl FnOnce(Settings) -> Settings,
    ) -> RunningBuilder {
        let state = tempfile::tempdir().expect("a directory");
        let settings = more(settings(press, &nix, name, state.path()));
        let (stops, stopped) = watch::channel(0);
        let task = tokio::spawn(async move { harmonia_builder::run(&settings, stopped).await });
        RunningBuilder { name: name.to_owned(), nix, stops, task, _state: state }
    }

    /// As SIGTERM does.
    pub fn term(&self) {
        self.stops.send_modify(|stops| *stops += 1);
    }

    /// Waits for its end.
    pub async fn ended(mut self) -> Result<(), BuilderError> {
        (&mut self.task).await.expect("the builder ends without a panic")
    }

    /// Stops it as SIGTERM would, and waits for its end.
    pub async fn stop(self) {
        self.term();
        self.ended().await.expect("the builder ends well");
    }
}

impl Drop for RunningBuilder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Words of a script: says that the build is there, and goes on when it is let.
pub const WAIT: &str = ": >/gates/$name.here; while ! [ -e /gates/$name.go ]; do sleep 0.02; done";

/// Where builds wait until a test lets them go on: a directory that all of them see.
pub struct Gates(TempDir);

impl Gates {
    /// None is open.
    pub fn new() -> Gates {
        Gates(tempfile::tempdir().expect("a directory"))
    }

    /// A line of `nix.conf` for stores whose builds wait here.
    pub fn setting(&self) -> String {
        format!("extra-sandbox-paths = /gates={}\n", self.0.path().display())
    }

    /// A derivation that says that it is there, and goes on with its script when it is let.
    pub fn before(name: &str, script: &str) -> Expression {
        Expression::new(name, &format!("{WAIT}; {script}"))
    }

    /// Waits until a build is there.
    pub async fn arrived(&self, name: &str) {
        let mark = self.mark(name);
        crate::eventually(&format!("{name} is being built"), || async { mark.exists() }).await;
    }

    /// Forgets that a build was there.
    pub fn forget(&self, name: &str) {
        std::fs::remove_file(self.mark(name)).expect("it was there");
    }

    /// Lets builds of that name go on, those to come too.
    pub fn open(&self, name: &str) {
        std::fs::write(self.0.path().join(format!("{name}.go")), "").expect("open the gate");
    }

    fn mark(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("{name}.here"))
    }
}

impl Default for Gates {
    fn default() -> Self {
        Self::new()
    }
}

/// A derivation that succeeds when it is let.
pub fn waiting(name: &str) -> Expression {
    Gates::before(name, "echo \"$name\" >$out")
}

impl Press {
    /// Wants these built; their derivations.
    pub async fn want(&self, signer: &RunningSigner, expressions: &[impl Borrow<Expression>]) -> Vec<String> {
        let evaluator = shared_nix();
        let drvs: Vec<String> = expressions.iter().map(|one| evaluator.instantiate(one.borrow())).collect();
        let all: Vec<&str> = drvs.iter().map(String::as_str).collect();
        self.evaluate_all(evaluator, signer, &all).await;
        drvs
    }

    /// The job of a derivation.
    pub async fn job(&self, drv: &str) -> i64 {
        let query = sqlx::query_scalar("SELECT id FROM ci.job WHERE drv_path = $1").bind(drv);
        query.fetch_one(&self.farm.database.admin()).await.expect("a job")
    }

    /// Waits until a derivation's job is in this state, as [`crate::farm::Farm::state`] calls it.
    pub async fn becomes(&self, drv: &str, state: &str) {
        let job = self.job(drv).await;
        let what = format!("{drv} becomes {state}");
        crate::eventually(&what, || async { self.farm.state(job).await == state }).await;
    }

    /// How the attempts at a job ended that have ended, the first one first.
    pub async fn outcomes(&self, drv: &str) -> Vec<String> {
        let query = "SELECT a.outcome FROM ci.attempt a JOIN ci.job j ON j.id = a.job_id
                     WHERE j.drv_path = $1 ORDER BY a.ended_at, a.id";
        let outcomes = sqlx::query_scalar(query).bind(drv).fetch_all(&self.farm.database.admin()).await;
        outcomes.expect("the attempts")
    }

    /// Every attempt that has ended, for who reads what went wrong.
    pub async fn history(&self) -> Vec<(String, String, Option<String>)> {
        let admin = self.farm.database.admin();
        let query = "SELECT coalesce(n.name, '') || ' ' || j.drv_path, a.outcome, a.message FROM ci.attempt a
                     JOIN ci.job j ON j.id = a.job_id LEFT JOIN ci.session s ON s.id = a.session_id
                     LEFT JOIN ci.node n ON n.id = s.node_id ORDER BY a.ended_at, a.id";
        sqlx::query_as(query).fetch_all(&admin).await.expect("the attempts")
    }

    /// Waits for the end of all jobs, which is a good one, and looks at everything in the cache and the queue.
    pub async fn ends_well(&self) {
        let settled = tokio::time::timeout(crate::PATIENCE, self.settled()).await;
        let well = settled.as_ref().is_ok_and(|states| states.values().all(|state| state == "succeeded"));
        assert!(well, "{settled:#?}\n{:#?}", self.history().await);
        self.check().await;
    }

    /// Waits until no job is open, and says how each ended.
    pub async fn settled(&self) -> std::collections::BTreeMap<String, String> {
        let admin = self.farm.database.admin();
        loop {
            let states: Vec<(String, String)> = sqlx::query_as("SELECT drv_path, state::text FROM ci.job")
                .fetch_all(&admin)
                .await
                .expect("the jobs");
            if states.iter().all(|(_, state)| state != "open") {
                return states.into_iter().collect();
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
}
