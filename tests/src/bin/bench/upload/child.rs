//! The processes that are measured: this program, started again as one of our roles.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use futures::future::try_join_all;
use harmonia_builder::upload::{BuiltOutput, Ending, Limits, Uploader, http_client};
use harmonia_nix::Sha256;
use harmonia_service::protocol::Claim;
use harmonia_service::settings::{KNOWN, Settings};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::measure::peak_mb;

/// The first word of a child's command line.
pub const CHILD: &str = "child";

/// What an uploader is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    pub signer: String,
    pub token: String,
    pub uploads: Vec<Upload>,
}

/// A job with one output, which refers to nothing.
#[derive(Debug, Serialize, Deserialize)]
pub struct Upload {
    pub claim: Claim,
    pub path: String,
    pub real_path: PathBuf,
    pub nar_hash: Sha256,
    pub nar_size: u64,
}

/// What an uploader has done.
#[derive(Debug, Serialize, Deserialize)]
pub struct Published {
    pub count: usize,
    pub peak_mb: f64,
}

/// A role that serves until it is dropped.
pub struct Child(std::process::Child);

impl Child {
    /// How a child is started.
    pub fn command(role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args([CHILD, role]);
        command
    }

    /// Starts one with these settings.
    pub fn start(role: &str, settings: &Settings) -> Self {
        let mut command = Self::command(role);
        for (name, _, _) in KNOWN {
            if let Some(value) = settings.get(name) {
                command.env(format!("HARMONIA_CI_{}", name.to_ascii_uppercase()), value);
            }
        }
        Self(command.stdin(Stdio::piped()).spawn().expect("start this program"))
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Is a child.
pub async fn run(role: Option<String>) {
    match role.as_deref() {
        Some("signer") => harmonia_signer::run(&settings(), input_ends()).await.expect("sign"),
        Some("frontend") => harmonia_frontend::run(&settings(), input_ends()).await.expect("answer"),
        Some("evaluator") => harmonia_evaluator::run(&settings(), input_ends()).await.expect("evaluate"),
        Some("uploader") => upload().await,
        Some("builder") => build().await,
        _ => panic!("a child without a role"),
    }
}

fn settings() -> Settings {
    Settings::load().expect("settings")
}

/// With the process that started this one, at the latest.
async fn input_ends() {
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let _ = ended.await;
}

/// Until it is told to stop; what it holds then is given back.
async fn build() {
    let (stops, stopped) = watch::channel(0);
    let settings = settings();
    let building = harmonia_builder::run(&settings, stopped);
    let ends = async {
        input_ends().await;
        stops.send_replace(2);
        std::future::pending().await
    };
    tokio::select! {
        built = building => built.expect("build"),
        () = ends => {}
    }
}

async fn upload() {
    let mut task = Vec::new();
    std::io::stdin().read_to_end(&mut task).expect("read the task");
    let task: Task = serde_json::from_slice(&task).expect("a task");
    let token = task.token.parse().expect("a token");
    let signers = watch::channel(vec![task.signer]).1;
    let uploader = Uploader::new(http_client().expect("a client"), signers, &token, Limits::default());
    let published = task.uploads.into_iter().map(|upload| publish(&uploader, upload));
    let count = try_join_all(published).await.expect("publish").len();
    let published = Published { count, peak_mb: peak_mb() };
    std::io::stdout().write_all(&serde_json::to_vec(&published).expect("JSON")).expect("answer");
}

async fn publish(uploader: &Uploader, upload: Upload) -> Result<(), String> {
    let output = BuiltOutput {
        name: "out".to_owned(),
        path: upload.path,
        real_path: upload.real_path,
        nar_hash: upload.nar_hash,
        nar_size: upload.nar_size,
        references: Vec::new(),
        ca: None,
    };
    match uploader.publish(upload.claim, &[output], None).await {
        Ok(Ending::Published) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}
