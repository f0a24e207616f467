//! `harmonia-ci resync`

use clap::Args;
use harmonia_service::settings::Settings;
use harmonia_signer::{Resynced, Signer};

use crate::outcome::Failure;
use crate::output::Output;
use crate::progress::Progress;

/// Compare database and bucket after a restore: adopt what is published, build again what is lost
///
/// Runs with a signer's configuration. What the bucket has and one of our keys signed is recorded; what only the database
/// believes to be published is forgotten, and built again if an evaluation wants it. Fails if the queue is not sound
/// afterwards.
#[derive(Args)]
pub struct Arguments {
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let signer = Signer::connect(&Settings::load()?).await?;
    let progress = Progress::default();
    let show = |done: &Resynced| progress.show(&format!("{} objects looked at", done.objects));
    let done = signer.resync("harmonia-ci resync", show).await?.ok_or(Failure::Sweeping)?;
    progress.end();
    arguments.output.print(&done, || describe(&done));
    if done.violations == 0 { Ok(()) } else { Err(Failure::Reported) }
}

fn describe(done: &Resynced) -> String {
    let always = [
        (done.objects, "narinfos and NARs in the bucket"),
        (done.same, "paths of which database and bucket say the same"),
        (done.adopted, "paths adopted from the bucket"),
        (done.lost, "paths that the bucket lacks: built again if somebody wants them"),
    ];
    let trouble = [
        (done.foreign, "narinfos that none of our keys signed: left alone"),
        (done.unproven, "narinfos that do not follow from their derivations: left alone"),
        (done.violations, "violations in the queue, see `harmonia-ci audit`"),
    ];
    let lines = always.into_iter().chain(trouble.into_iter().filter(|(count, _)| *count > 0));
    lines.map(|(count, what)| format!("{count:>10}  {what}\n")).collect()
}
