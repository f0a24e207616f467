use std::fmt::Write as _;

use clap::{Args, Subcommand};
use harmonia_queue::resign::State;
use harmonia_service::settings::Settings;
use harmonia_signer::{Keeping, Signer, Swept, Tally};

use crate::outcome::Failure;
use crate::output::Output;
use crate::progress::Progress;

/// Who sweeps, as others see it.
const HOLDER: &str = "harmonia-ci cache sweep";

/// Change what the cache has; with a signer's configuration
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Unpublishes store paths, or all that a node built; what is wanted is built again
    Forget {
        /// Store paths
        #[arg(required_unless_present = "built_by")]
        paths: Vec<String>,
        /// A node's name, or pool/name
        #[arg(long, value_name = "NODE")]
        built_by: Option<String>,
    },
    /// Signs everything again with the keys of today, and with no other
    Resign {
        /// Ask the signers to do it, and do not wait
        #[arg(long)]
        background: bool,
        /// Only say how far the signers are
        #[arg(long, conflicts_with = "background")]
        status: bool,
        /// How to print the status
        #[arg(short, long, value_enum, default_value_t, requires = "status")]
        output: Output,
    },
    /// Removes from the bucket what no kept evaluation needs; signers do so by themselves once a day
    Sweep {
        /// Only say what would be removed now and later
        #[arg(long)]
        dry_run: bool,
        /// How to print
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let settings = Settings::load()?;
    let signer = Signer::connect(&settings).await?;
    match arguments.verb {
        Verb::Forget { paths, built_by } => {
            let forgotten = signer.forget(&paths, built_by.as_deref()).await?;
            for path in &forgotten {
                println!("{path}");
            }
            eprintln!("{} forgotten", forgotten.len());
            Ok(())
        }
        Verb::Resign { background: true, .. } => {
            signer.ask_to_resign().await?;
            println!("signers will do it; `harmonia-ci cache resign --status` says how far they are");
            Ok(())
        }
        Verb::Resign { status: true, output, .. } => {
            let state = signer.resigning().await?;
            output.print(&state, || describe_resigning(&state));
            Ok(())
        }
        Verb::Resign { .. } => {
            let progress = Progress::default();
            let count = signer.resign(|done| progress.show(&format!("{done} signed"))).await?;
            progress.end();
            println!("{count} narinfos signed again");
            Ok(())
        }
        Verb::Sweep { dry_run, output } => sweep(&signer, &Keeping::of(&settings)?, dry_run, output).await,
    }
}

async fn sweep(signer: &Signer, keeping: &Keeping, dry_run: bool, output: Output) -> Result<(), Failure> {
    let progress = Progress::default();
    let show = |swept: &Swept| {
        let (paths, objects) = (swept.paths.count, swept.objects.count);
        progress.show(&format!("{paths} paths removed, {objects} objects looked at"));
    };
    let swept = match dry_run {
        true => signer.would_sweep(HOLDER, keeping).await?,
        false => signer.sweep(HOLDER, keeping, None, show).await?,
    };
    progress.end();
    let swept = swept.ok_or(Failure::Sweeping)?;
    output.print(&swept, || describe(&swept, dry_run));
    Ok(())
}

fn describe(swept: &Swept, dry_run: bool) -> String {
    let verb = if dry_run { "would be removed" } else { "removed" };
    let mut text = String::new();
    let mut line = |tally: &Tally, what: &str| {
        let _ = writeln!(text, "{:>10} {:>10}  {what}", tally.count, size(tally.bytes));
    };
    line(&swept.paths, &format!("paths that nobody needs: {verb}"));
    for (kind, tally) in &swept.leftovers {
        line(tally, &format!("{kind} that belong to nothing: {verb}"));
    }
    line(&swept.waiting, "paths that nobody needs, whose grace is not over");
    if swept.unknown.count > 0 {
        line(&swept.unknown, "narinfos that the database does not know: `harmonia-ci resync` adopts them");
    }
    line(&swept.objects, "objects in the bucket");
    text
}

fn describe_resigning(state: &State) -> String {
    let State { asked_at: Some(asked), done, total, .. } = state else {
        return "nobody has asked the signers to sign everything again\n".to_owned();
    };
    let how = match (&state.ended_at, &state.holder) {
        (Some(ended), _) => {
            return format!("{done} signed again, as asked for at {asked}; done at {ended}\n");
        }
        (None, Some(holder)) if state.running => format!("{holder} is at it"),
        (None, _) => "a signer with the keys that it was asked for with goes on".to_owned(),
    };
    format!("{done} of {total} signed again, as asked for at {asked}; {how}\n")
}

/// In the unit that leaves up to four digits.
fn size(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 10_000 && unit + 1 < units.len() {
        value /= 1000;
        unit += 1;
    }
    format!("{value} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        assert_eq!([0, 9_999, 10_000, 12_345_678].map(size), ["0 B", "9999 B", "10 kB", "12 MB"]);
    }

    #[test]
    fn how_far_a_resigning_is() {
        let asked = State {
            asked_at: Some("2026-01-02T03:04:05Z".to_owned()),
            holder: Some("http://signer".to_owned()),
            running: true,
            done: 7,
            total: 9,
            ended_at: None,
        };
        let said = describe_resigning(&asked);
        assert_eq!(
            said,
            "7 of 9 signed again, as asked for at 2026-01-02T03:04:05Z; http://signer is at it\n"
        );
        let said = describe_resigning(&State { running: false, ..asked.clone() });
        assert!(said.ends_with("a signer with the keys that it was asked for with goes on\n"), "{said}");
        let said = describe_resigning(&State { ended_at: Some("later".to_owned()), ..asked.clone() });
        assert!(said.ends_with("; done at later\n"), "{said}");
        assert!(describe_resigning(&State { asked_at: None, ..asked }).starts_with("nobody has asked"));
    }

    #[test]
    fn a_dry_run_says_would() {
        let swept = Swept { paths: Tally { count: 2, bytes: 50_000 }, ..Swept::default() };
        let text = describe(&swept, true);
        assert!(
            text.starts_with("         2      50 kB  paths that nobody needs: would be removed\n"),
            "{text}"
        );
        assert!(!text.contains("resync"), "{text}");
    }
}
