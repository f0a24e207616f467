//! `harmonia-ci`: the person's tool and every role of the build farm.

// Before those that use its macros.
#[macro_use]
mod output;

mod audit;
mod builder;
mod cache;
mod cancel;
mod client;
mod confine;
mod crds;
mod database;
mod doctor;
mod drain;
mod eval;
mod evaluator;
mod frontend;
mod key;
mod logs;
mod manual;
mod migrate;
mod nodes;
mod operator;
mod outcome;
mod pin;
mod progress;
mod project;
mod queue;
mod rebuild;
mod resync;
mod role;
mod s3;
mod signer;
mod sse;
mod status;
mod style;
mod table;
mod target;
mod token;
mod up;
mod wait;
mod why;

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
    Up(Box<up::Arguments>),
    Eval(eval::Arguments),
    Status(status::Arguments),
    Why(why::Arguments),
    Logs(logs::Arguments),
    Rebuild(rebuild::Arguments),
    Cancel(cancel::Arguments),
    Pin(pin::Arguments),
    Queue(queue::Arguments),
    Nodes(nodes::Arguments),
    Drain(drain::Arguments),
    Project(project::Arguments),
    Token(token::Arguments),
    Cache(cache::Arguments),
    Resync(resync::Arguments),
    Key(key::Arguments),
    Doctor(doctor::Arguments),
    Migrate(migrate::Arguments),
    Crds(crds::Arguments),
    Audit(audit::Arguments),
    Operator(operator::Arguments),
    Signer(signer::Arguments),
    Evaluator(evaluator::Arguments),
    Frontend(frontend::Arguments),
    Builder(builder::Arguments),
    #[command(hide = true)]
    Confine(confine::Arguments),
    #[command(hide = true)]
    S3(s3::Arguments),
    Completions(manual::Completions),
    Man(manual::Man),
    #[command(hide = true)]
    Reference(manual::Reference),
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::Up(arguments) => up::run(*arguments).await,
        Verb::Eval(arguments) => eval::run(arguments).await,
        Verb::Status(arguments) => status::run(arguments).await,
        Verb::Why(arguments) => why::run(arguments).await,
        Verb::Logs(arguments) => logs::run(arguments).await,
        Verb::Rebuild(arguments) => rebuild::run(arguments).await,
        Verb::Cancel(arguments) => cancel::run(arguments).await,
        Verb::Pin(arguments) => pin::run(arguments).await,
        Verb::Queue(arguments) => queue::run(arguments).await,
        Verb::Nodes(arguments) => nodes::run(arguments).await,
        Verb::Drain(arguments) => drain::run(arguments).await,
        Verb::Project(arguments) => project::run(arguments).await,
        Verb::Token(arguments) => token::run(arguments).await,
        Verb::Cache(arguments) => cache::run(arguments).await,
        Verb::Resync(arguments) => resync::run(arguments).await,
        Verb::Key(arguments) => key::run(arguments),
        Verb::Doctor(arguments) => doctor::run(arguments).await,
        Verb::Migrate(arguments) => migrate::run(arguments).await,
        Verb::Crds(arguments) => crds::run(arguments),
        Verb::Audit(arguments) => audit::run(arguments).await,
        Verb::Operator(arguments) => operator::run(arguments).await,
        Verb::Signer(arguments) => signer::run(arguments).await,
        Verb::Evaluator(arguments) => evaluator::run(arguments).await,
        Verb::Frontend(arguments) => frontend::run(arguments).await,
        Verb::Builder(arguments) => builder::run(arguments).await,
        Verb::Confine(arguments) => confine::run(&arguments),
        Verb::S3(arguments) => s3::run(arguments).await,
        Verb::Completions(arguments) => manual::completions(&arguments),
        Verb::Man(arguments) => manual::man(&arguments),
        Verb::Reference(arguments) => manual::reference(&arguments),
    };
    outcome::exit_code(outcome)
}
