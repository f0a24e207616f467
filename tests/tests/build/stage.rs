//! A press whose builds can be made to wait until a test lets them go on, and what became of them.

use std::sync::Arc;

use harmonia_service::settings::Settings;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner};
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard::{Gates, RunningBuilder, substitutes};

pub struct Scene {
    pub press: Press,
    pub gates: Gates,
}

/// How a job ended.
#[derive(Debug, PartialEq, Eq)]
pub struct End {
    pub state: String,
    pub failure: Option<String>,
    pub error: Option<String>,
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
        Scene { press, gates: Gates::new() }
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
        let conf = format!("{}{}{conf}", substitutes(&self.press), self.gates.setting());
        let nix = Arc::new(Nix::start_with(version, &conf));
        RunningBuilder::start_on(&self.press, nix, name, more).await
    }

    /// Evaluates one.
    pub async fn queue_one(&self, signer: &RunningSigner, expression: &Expression) -> String {
        self.press.want(signer, &[expression]).await.remove(0)
    }

    /// Waits for a job's end.
    pub async fn end(&self, drv: &str) -> End {
        let job = self.press.job(drv).await;
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
}
