//! `harmonia-ci eval`

use std::path::Path;

use clap::Args;
use harmonia_service::api::{Evaluation, NewEvaluation};
use reqwest::Method;

use crate::client::Farm;
use crate::outcome::Failure;
use crate::output::Output;
use crate::wait;

/// Evaluate a source and build what it offers
#[derive(Args)]
pub struct Arguments {
    /// A directory, a git URL with an optional ?ref= or ?rev=, or a flake reference
    source: String,

    /// Whose builders' time it takes
    #[arg(long, value_name = "NAME", default_value = "default")]
    project: String,

    /// Build this attribute, and what is below it, instead of what the source offers by default
    #[arg(long = "attr", short = 'A', value_name = "ATTR")]
    attrs: Vec<String>,

    /// The branch it counts for
    #[arg(long, value_name = "NAME")]
    branch: Option<String>,

    /// Wait until everything is built; exit 1 if something failed
    #[arg(long)]
    wait: bool,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    farm: Farm,
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    let new = NewEvaluation {
        project: arguments.project,
        source: absolute(&arguments.source),
        branch: arguments.branch,
        attrs: arguments.attrs,
    };
    let evaluation: Evaluation = client.send(Method::POST, "evals", Some(&new)).await?;
    if arguments.wait {
        return wait::until_done(&client, evaluation.id, arguments.output).await;
    }
    arguments.output.print(&evaluation, || {
        let id = evaluation.id;
        format!("evaluation {id} of {} is queued; `harmonia-ci status {id}` says how far it is\n", new.source)
    });
    Ok(())
}

/// A directory of this machine by its whole path; whatever else is meant stays as it is.
fn absolute(source: &str) -> String {
    let path = Path::new(source);
    let looks_like_one = source.starts_with(['.', '/']) || path.is_dir();
    match path.canonicalize() {
        Ok(path) if looks_like_one => path.to_string_lossy().into_owned(),
        _ => source.to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_named_whole() {
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(absolute("."), here.to_string_lossy());
        assert_eq!(absolute("src"), here.join("src").to_string_lossy());
    }

    #[test]
    fn what_is_no_directory_stays_as_it_is() {
        for source in ["github:acme/dotfiles", "https://example.org/x.git?ref=main", "/nowhere/at/all"] {
            assert_eq!(absolute(source), source);
        }
    }
}
