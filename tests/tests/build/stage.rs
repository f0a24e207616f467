//! A press whose builds can be made to wait until a test lets them go on, and what became of them.

use std::sync::Arc;
use std::time::Duration;

use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, shared_nix};
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard::{RunningBuilder, substitutes};
use tempfile::TempDir;
use tokio::time::{Instant, timeout};

const PATIENCE: Duration = Duration::from_secs(60);

pub struct Scene {
    pub press: Press,
    /// Seen as `/gate` by all builds.
    gate: TempDir,
}

/// How a job ended.
#[derive(Debug, PartialEq, Eq)]
pub struct End {
    pub state: String,
    pub failure: Option<String>,
    pub error: Option<String>,
}

/// Says that a build is there, and goes on when it is let.
pub const WAIT: &str = ": >/gate/$name.here; while ! [ -e /gate/$name.go ]; do sleep 0.05; done";

/// A build that succeeds when it is let.
pub fn waiting(name: &str) -> Expression {
    Expression::new(name, &format!("{WAIT}; echo $name >$out"))
}

pub fn unchanged(settings: Settings) -> Settings {
    settings
}

/// Whether a process has this argument.
pub fn runs(argument: &str) -> bool {
    std::fs::read_dir("/proc").expect("processes").flatten().any(|process| {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes())
    })
}

impl Scene {
    pub async fn new() -> (Scene, RunningSigner) {
        let scene = Scene::on(Press::with(S3::start_public(Server::InProcess).await).await);
        let signer = scene.press.start_signer().await;
        (scene, signer)
    }

    pub fn on(press: Press) -> Scene {
        Scene { press, gate: tempfile::tempdir().expect("a directory") }
    }

    /// A builder with a store of its own.
    pub async fn builder(
        &self,
        version: Version,
        name: &str,
        more: impl FnOnce(Settings) -> Settings,
    ) -> RunningBuilder {
        self.builder_with(version, name, "", more).await
    }

    /// The same with further lines of `nix.conf`.
    pub async fn builder_with(
        &self,
        version: Version,
        name: &str,
        conf: &str,
        more: impl FnOnce(Settings) -> Settings,
    ) -> RunningBuilder {
        let gate = self.gate.path().display();
        let conf = format!("{}extra-sandbox-paths = /gate={gate}\n{conf}", substitutes(&self.press));
        let nix = Arc::new(Nix::start_with(version, &conf));
        RunningBuilder::start_on(&self.press, nix, name, more).await
    }

    /// Evaluates them all; answers their derivations.
    pub async fn queue(&self, signer: &RunningSigner, expressions: &[Expression]) -> Vec<String> {
        let drvs: Vec<String> = expressions.iter().map(|it| shared_nix().instantiate(it)).collect();
        let all: Vec<&str> = drvs.iter().map(String::as_str).collect();
        self.press.evaluate_all(shared_nix(), signer, &all).await;
        drvs
    }

    /// Evaluates one.
    pub async fn queue_one(&self, signer: &RunningSigner, expression: &Expression) -> String {
        self.queue(signer, std::slice::from_ref(expression)).await.remove(0)
    }

    /// A waiting build is there.
    pub async fn arrived(&self, name: &str) {
        let file = self.gate.path().join(format!("{name}.here"));
        eventually(&format!("{name} is being built"), async || file.exists()).await;
    }

    /// Forgets that a waiting build was there.
    pub fn forget(&self, name: &str) {
        std::fs::remove_file(self.gate.path().join(format!("{name}.here"))).expect("it was there");
    }

    /// Lets a waiting build go on.
    pub fn let_go(&self, name: &str) {
        std::fs::write(self.gate.path().join(format!("{name}.go")), "").expect("open the gate");
    }

    pub async fn job(&self, drv: &str) -> i64 {
        let query = sqlx::query_scalar("SELECT id FROM ci.job WHERE drv_path = $1").bind(drv);
        query.fetch_one(&self.press.farm.database.admin()).await.expect("a job")
    }

    /// Waits for a job's end.
    pub async fn end(&self, drv: &str) -> End {
        let job = self.job(drv).await;
        let farm = &self.press.farm;
        eventually("the job ends", async || {
            farm.value::<String>("SELECT state::text FROM ci.job WHERE id = $1", job).await != "open"
        })
        .await;
        End {
            state: farm.value("SELECT state::text FROM ci.job WHERE id = $1", job).await,
            failure: farm.value("SELECT failure FROM ci.job WHERE id = $1", job).await,
            error: farm.value("SELECT error FROM ci.job WHERE id = $1", job).await,
        }
    }

    /// Waits until a job is in this state, as [`harmonia_tests::farm::Farm::state`] calls it.
    pub async fn becomes(&self, drv: &str, state: &str) {
        let (job, begun) = (self.job(drv).await, Instant::now());
        loop {
            let now = self.press.farm.state(job).await;
            if now == state {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{drv} does not become {state} but stays {now}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// How its attempts ended, the first one first.
    pub async fn attempts(&self, drv: &str) -> Vec<String> {
        let job = self.job(drv).await;
        self.press
            .farm
            .value("SELECT array_agg(outcome ORDER BY id) FROM ci.attempt WHERE job_id = $1", job)
            .await
    }

    /// The node of a builder that is registered, or will be.
    pub async fn node(&self, name: &str) -> i32 {
        let admin = self.press.farm.database.admin();
        let find = async || {
            let query = sqlx::query_scalar("SELECT id FROM ci.node WHERE name = $1").bind(name);
            query.fetch_optional(&admin).await.expect("an answer")
        };
        eventually("the builder registers", async || find().await.is_some()).await;
        find().await.expect("a node")
    }

    /// The sessions of a node, and whether each has ended.
    pub async fn sessions(&self, name: &str) -> Vec<(i64, bool)> {
        sqlx::query_as(
            "SELECT s.id, s.ended_at IS NOT NULL FROM ci.session s JOIN ci.node n ON n.id = s.node_id \
             WHERE n.name = $1 ORDER BY s.id",
        )
        .bind(name)
        .fetch_all(&self.press.farm.database.admin())
        .await
        .expect("the sessions")
    }

    /// Makes builders ask at once what they would ask within half a minute.
    pub async fn hint(&self) {
        let stop = harmonia_queue::listen::Channel::Stop;
        harmonia_queue::listen::notify(&self.press.farm.operator, stop, "").await.expect("a hint");
    }

    /// Everything has succeeded, and the cache and the queue are sound.
    pub async fn all_is_well(&self) {
        let states = timeout(PATIENCE, self.press.settled()).await.expect("everything ends");
        assert!(states.values().all(|state| state == "succeeded"), "{states:#?}");
        self.press.check().await;
    }
}
