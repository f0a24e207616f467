//! One round: the work in a new farm with one builder, or in a new store without a farm.

use std::time::Instant;

use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::press::shared_nix;
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard;

use super::graphs::Work;
use crate::baseline::press;
use crate::measure::{cpu_of, cpu_of_process, peak_mb_of};
use crate::upload::child::Child;
use crate::upload::stage::url_of;

/// What a builder did.
pub struct Ours {
    /// When the first job was claimed,
    begin: f64,
    /// and when each ended, in their order.
    pub ends: Vec<f64>,
    /// CPU seconds of builder, signer and PostgreSQL.
    pub cpu: f64,
    /// Peak memory of the builder.
    pub peak_mb: f64,
}

impl Ours {
    /// From the first claim to the last signature.
    pub fn wall(&self) -> f64 {
        self.ends.last().expect("something was built") - self.begin
    }
}

/// Seconds that Nix takes with so many builds at once, with what all of them need built before. It keeps no logs, as our
/// daemon does not, though ours go to the bucket.
pub fn realise(work: &Work, slots: u32) -> f64 {
    let nix = Nix::start(Version::New);
    let drv = nix.instantiate(&work.top);
    let all = nix.run("nix-store", &["--query", "--requisites", &drv]);
    let (measured, others): (Vec<&str>, Vec<&str>) =
        all.lines().filter(|path| path.ends_with(".drv")).partition(|path| work.measures(path));
    let others: Vec<&str> = others.into_iter().filter(|path| *path != drv).collect();
    nix.run("nix-store", &[&["--realise"], &others[..]].concat());
    let start = Instant::now();
    let options = ["--realise", "-j", &slots.to_string(), "--option", "keep-build-log", "false"];
    nix.run("nix-store", &[&options[..], &measured[..]].concat());
    start.elapsed().as_secs_f64()
}

/// The same by a builder. Everything is in the queue before it starts; it has claimed nothing but what others need when
/// the first measured job is.
pub async fn build(work: &Work, slots: u32) -> Ours {
    let press = press(S3::start_public(Server::Versitygw).await).await;
    let (evaluator, signer) = (shared_nix(), press.start_signer().await);
    let drv = evaluator.instantiate(&work.top);
    press.evaluate(evaluator, &signer, &drv).await;
    signer.stop().await;
    let signer = Child::start("signer", &press.signer_settings().await);
    url_of(&press, "signer").await;
    let nix = Nix::start_with(Version::New, &yard::substitutes(&press));
    let state = tempfile::tempdir().expect("a directory");
    let settings = yard::settings(&press, &nix, "one", state.path()).with("slots", slots.to_string());
    let postmaster = press.farm.database.server().postmaster();
    let before = cpu_of(postmaster) + cpu_of_process(signer.id());
    let builder = Child::start("builder", &settings);
    press.settled().await;
    let cpu = cpu_of(postmaster) + cpu_of_process(signer.id()) - before + cpu_of_process(builder.id());
    let peak_mb = peak_mb_of(builder.id());
    let attempts: Vec<(String, f64, f64)> = sqlx::query_as(
        "SELECT j.drv_path, extract(epoch FROM a.claimed_at)::float8, extract(epoch FROM a.ended_at)::float8 \
         FROM ci.attempt a JOIN ci.job j ON j.id = a.job_id ORDER BY a.ended_at",
    )
    .fetch_all(&press.farm.database.admin())
    .await
    .expect("the attempts");
    let measured: Vec<_> = attempts.into_iter().filter(|(drv, ..)| work.measures(drv)).collect();
    let begin = measured.iter().map(|(_, claimed, _)| *claimed).fold(f64::INFINITY, f64::min);
    Ours { begin, ends: measured.into_iter().map(|(.., ended)| ended).collect(), cpu, peak_mb }
}
