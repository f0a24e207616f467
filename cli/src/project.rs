//! `harmonia-ci project`

use clap::{Args, Subcommand};
use harmonia_service::api::{Changed, GitChange, Project, ProjectChange, Trust};
use reqwest::Method;

use crate::client::{Farm, word};
use crate::outcome::Failure;
use crate::output::Output;
use crate::table::{self, table};

/// List, add, change and remove projects
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,

    #[command(flatten)]
    farm: Farm,
}

#[derive(Subcommand)]
enum Verb {
    /// List the projects: what they may use, and what they do
    List {
        /// How to print
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
    /// Add a project
    Add(Wish),
    /// Change a project; what is not given stays as it is
    Set(Wish),
    /// Remove a project: its evaluations are cancelled, its history stays
    Remove {
        /// Its name
        name: String,
    },
}

#[derive(Args)]
struct Wish {
    /// Its name
    name: String,

    /// Its part of the builders' time against the others', 100 if nothing else is said
    #[arg(long, value_name = "N")]
    shares: Option<i32>,

    /// Builds at once, at most; `none` for no limit
    #[arg(long, value_name = "N", value_parser = limit)]
    max_concurrent: Option<Limit>,

    /// Only in these pools, separated by commas; `any` for all
    #[arg(long, value_name = "POOLS")]
    pools: Option<String>,

    /// Pools for changes from outside, separated by commas
    #[arg(long, value_name = "POOLS", value_delimiter = ',')]
    untrusted_pools: Option<Vec<String>>,

    /// Evaluate and claim nothing for it
    #[arg(long, value_name = "true|false")]
    paused: Option<bool>,

    /// How long its evaluations are kept, such as 90d
    #[arg(long, value_name = "TIME")]
    retention: Option<String>,

    /// Evaluate every commit of this repository; `none` to follow none
    #[arg(long, value_name = "URL")]
    git: Option<String>,

    /// Which branch of it; `default` for the repository's own
    #[arg(long = "ref", value_name = "BRANCH")]
    branch: Option<String>,

    /// How often to look for new commits, such as 5m
    #[arg(long, value_name = "TIME")]
    poll: Option<String>,

    /// Build this attribute of it; may be given several times
    #[arg(long = "attr", value_name = "ATTR")]
    attrs: Vec<String>,

    /// The name of the credential by which evaluators read it; `none` for none
    #[arg(long, value_name = "NAME")]
    credential: Option<String>,

    /// Whose pull requests from outside are built without anybody's word
    #[arg(long, value_name = "collaborators|all|none", value_parser = trust)]
    pull_requests: Option<Trust>,
}

/// A number of builds, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit(Option<i32>);

fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "none" => Ok(Limit(None)),
        _ => text.parse().map(|number| Limit(Some(number))).map_err(|_| "write a number, or none".to_owned()),
    }
}

fn trust(text: &str) -> Result<Trust, String> {
    match text {
        "collaborators" => Ok(Trust::Collaborators),
        "all" => Ok(Trust::All),
        "none" => Ok(Trust::None),
        _ => Err("write collaborators, all or none".to_owned()),
    }
}

impl Wish {
    fn change(self) -> (String, ProjectChange) {
        let pools = self.pools.map(|pools| match pools.as_str() {
            "any" => None,
            _ => Some(pools.split(',').map(str::to_owned).collect()),
        });
        let change = ProjectChange {
            name: None,
            shares: self.shares,
            max_concurrent: self.max_concurrent.map(|Limit(limit)| limit),
            pools,
            untrusted_pools: self.untrusted_pools,
            paused: self.paused,
            git: match self.git.as_deref() {
                Some("none") => Some(None),
                url => Some(GitChange {
                    url: url.map(str::to_owned),
                    r#ref: self.branch.map(|name| Some(name).filter(|name| name != "default")),
                    poll: self.poll,
                    attrs: Some(self.attrs).filter(|attrs| !attrs.is_empty()),
                    credential: self.credential.map(|name| Some(name).filter(|name| name != "none")),
                    pull_requests: self.pull_requests,
                })
                .filter(|change| *change != GitChange::default())
                .map(Some),
            },
            retention: self.retention,
        };
        (self.name, change)
    }
}

pub async fn run(arguments: Arguments) -> Result<(), Failure> {
    let client = arguments.farm.client()?;
    match arguments.verb {
        Verb::List { output } => {
            let projects: Vec<Project> = client.get("projects").await?;
            output.print(&projects, || describe(&projects, table::width()));
        }
        Verb::Add(wish) => {
            let (name, change) = wish.change();
            let change = ProjectChange { name: Some(name.clone()), ..change };
            let _: Project = client.send(Method::POST, "projects", Some(&change)).await?;
            println!("added {name}");
        }
        Verb::Set(wish) => {
            let (name, change) = wish.change();
            let _: Project =
                client.send(Method::PATCH, &format!("projects/{}", word(&name)), Some(&change)).await?;
            println!("changed {name}");
        }
        Verb::Remove { name } => {
            let path = format!("projects/{}", word(&name));
            let _: Changed = client.send(Method::DELETE, &path, None::<&()>).await?;
            println!("removed {name}");
        }
    }
    Ok(())
}

fn describe(projects: &[Project], width: Option<usize>) -> String {
    let row = |project: &Project| {
        vec![
            project.name.clone(),
            project.shares.to_string(),
            project.max_concurrent.map_or_else(|| "none".to_owned(), |limit| limit.to_string()),
            project.running.to_string(),
            project.ready.to_string(),
            format!("{:.0} s", project.used),
            project.pools.as_ref().map_or_else(|| "any".to_owned(), |pools| pools.join(", ")),
            project.git.as_ref().map_or_else(String::new, |git| git.url.clone()),
            if project.paused { "paused".to_owned() } else { String::new() },
        ]
    };
    let rows: Vec<Vec<String>> = projects.iter().map(row).collect();
    table(&["NAME", "SHARES", "LIMIT", "RUNNING", "READY", "USED", "POOLS", "GIT", ""], &rows, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_or_none() {
        assert_eq!(limit("none"), Ok(Limit(None)));
        assert_eq!(limit("8"), Ok(Limit(Some(8))));
        assert!(limit("many").is_err());
    }
}
