//! `harmonia-ci`: the person's tool and, in time, every role of the build farm.

mod audit;
mod builder;
mod cache;
mod database;
mod drain;
mod frontend;
mod key;
mod migrate;
mod nodes;
mod outcome;
mod output;
mod role;
mod signer;
mod token;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A Nix CI and build farm that pulls its work from PostgreSQL.
///
/// Exit codes: 0 success, 1 failure, 2 wrong usage, 3 the service cannot be reached.
#[derive(Parser)]
#[command(name = "harmonia-ci", version)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Migrate(migrate::Arguments),
    Audit(audit::Arguments),
    Signer(signer::Arguments),
    Builder(builder::Arguments),
    Nodes(nodes::Arguments),
    Drain(drain::Arguments),
    Cache(cache::Arguments),
    Key(key::Arguments),
    Token(token::Arguments),
    Frontend(frontend::Arguments),
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::Migrate(arguments) => migrate::run(arguments).await,
        Verb::Audit(arguments) => audit::run(arguments).await,
        Verb::Signer(arguments) => signer::run(arguments).await,
        Verb::Builder(arguments) => builder::run(arguments).await,
        Verb::Nodes(arguments) => nodes::run(arguments).await,
        Verb::Drain(arguments) => drain::run(arguments).await,
        Verb::Cache(arguments) => cache::run(arguments).await,
        Verb::Key(arguments) => key::run(arguments),
        Verb::Token(arguments) => token::run(arguments).await,
        Verb::Frontend(arguments) => frontend::run(arguments).await,
    };
    outcome::exit_code(outcome)
}
