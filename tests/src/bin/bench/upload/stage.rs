//! A farm, a bucket and claims, everything up to the moment when outputs are published.

use std::fmt;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Instant;

use harmonia_nix::store_path::{self, StorePath};
use harmonia_queue::builder::{self, Session};
use harmonia_queue::ingest::Node;
use harmonia_queue::replica;
use harmonia_service::protocol::{Claim, Token};
use harmonia_tests::press::{Press, SYSTEM, wire};
use harmonia_tests::s3::{S3, Server};

use super::child::{Child, Published, Task, Upload};
use super::goods::Goods;
use crate::baseline::press;
use crate::measure::{cpu_of_children, cpu_of_process};

/// As many jobs as a node may hold.
const SLOTS: i32 = 1024;

/// What some work took.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Seconds.
    pub wall: f64,
    /// Seconds of CPU.
    pub cpu: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} s ({:.2} s CPU)", self.wall, self.cpu)
    }
}

/// Our side of a publication.
pub struct Ours {
    /// Of the builder's process from its start to its end, and of the signer in that time.
    pub cost: Cost,
    /// Peak memory of the builder's process.
    pub peak_mb: f64,
}

/// A farm in which the goods are claimed, and a signer.
pub struct Stage<'a> {
    goods: &'a Goods,
    pub press: Press,
    pub session: Session,
    /// Each claim with the only output of its job.
    pub claims: Vec<(Claim, StorePath)>,
    pub signer: Child,
    pub signer_url: String,
}

impl<'a> Stage<'a> {
    /// Evaluates, publishes what the goods are built from, and claims the goods.
    pub async fn set(goods: &'a Goods) -> Self {
        let press = press(S3::start(Server::Versitygw).await).await;
        let signer = press.start_signer().await;
        press.evaluate(&goods.nix, &signer, &goods.drv).await;
        let uploader = press.uploader(&[&signer.url]);
        let tools = press.claim().await;
        press.publish(&goods.nix, &uploader, &tools).await.expect("publish the tools");
        signer.stop().await;
        press.farm.settle().await;

        let pool = press.farm.pool("wide", &[SYSTEM], SLOTS).await;
        let session = press.farm.node(&pool, "wide").await;
        press.farm.settle().await;
        let mut claims: Vec<builder::Claim> = Vec::new();
        while claims.len() < goods.paths.len() {
            let more = session.claim(64).await.expect("claim");
            assert!(!more.is_empty(), "{} of {} jobs can be claimed", claims.len(), goods.paths.len());
            claims.extend(more);
        }
        let fences: Vec<_> = claims.iter().map(|claim| claim.fence).collect();
        session.start_upload(&fences).await.expect("start the upload");

        let claims = claims.iter().map(|claim| (wire(claim), output_of(claim))).collect();
        let signer = Child::start("signer", &press.signer_settings().await);
        let signer_url = url_of(&press, "signer").await;
        Self { goods, press, session, claims, signer, signer_url }
    }

    /// The token of the node that has the claims.
    pub fn token(&self) -> String {
        let (session, secret) = (self.session.id, self.session.secret.clone());
        Token::Builder { session, secret }.to_text()
    }

    /// The whole way: from paths on disk to signed narinfos and jobs that are done.
    pub async fn publish(&self) -> Ours {
        let uploads = self.claims.iter().map(|(claim, path)| {
            let info = &self.goods.paths[path];
            Upload {
                claim: *claim,
                path: path.to_string(),
                real_path: self.goods.nix.real(&path.to_string()),
                nar_hash: info.nar_hash,
                nar_size: info.nar_size,
            }
        });
        let task = Task { signer: self.signer_url.clone(), token: self.token(), uploads: uploads.collect() };
        let task = serde_json::to_vec(&task).expect("JSON");
        let before = cpu_of_process(self.signer.id());
        let mut uploader = Child::command("uploader");
        let (mut cost, answer) = tokio::task::block_in_place(|| timed(&mut uploader, &task));
        let signer = cpu_of_process(self.signer.id()) - before;
        eprintln!("   uploader {cost}, signer {signer:.2} s CPU");
        cost.cpu += signer;
        let published: Published = serde_json::from_slice(&answer).expect("an answer");
        assert_eq!(published.count, self.claims.len(), "not everything is published");
        Ours { cost, peak_mb: published.peak_mb }
    }
}

fn output_of(claim: &builder::Claim) -> StorePath {
    let node = Node::parse(&claim.drv_path, claim.aterm.clone()).expect("a derivation");
    let path = node.outputs.into_iter().find_map(|(_, path)| path).expect("a path known before the build");
    store_path::parse(&path).expect("a store path")
}

/// Where the only replica of a role is, once it is there.
pub async fn url_of(press: &Press, role: &str) -> String {
    let found = || async {
        let replicas = replica::healthy(&press.farm.operator).await.expect("replicas");
        replicas.into_iter().find(|replica| replica.role == role).map(|replica| replica.url)
    };
    harmonia_tests::eventually(&format!("the {role} registers"), || async { found().await.is_some() }).await;
    found().await.expect("it is registered")
}

/// Runs a command to its success; what it took and said.
pub fn timed(command: &mut Command, input: &[u8]) -> (Cost, Vec<u8>) {
    let (cpu, start) = (cpu_of_children(), Instant::now());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start the command");
    child.stdin.take().expect("an input").write_all(input).expect("write the input");
    let output = child.wait_with_output().expect("the command ends");
    let cost = Cost { wall: start.elapsed().as_secs_f64(), cpu: cpu_of_children() - cpu };
    assert!(output.status.success(), "{command:?}: {}", output.status);
    (cost, output.stdout)
}
