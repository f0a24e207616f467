//! `./dev bench queue`: what the queue costs, as ratios to `pgbench -N` ("SU") at the same number of clients in the same
//! run, on a private PostgreSQL. The other benches are modules of their names. `--only TEXT` runs the groups with a figure whose
//! name contains it.

mod background;
mod baseline;
mod build;
mod claim;
mod cluster;
mod cycle;
mod drain;
mod enqueue;
mod eval;
mod farm;
mod frontend;
mod gc;
mod graphs;
mod hub;
mod literal;
mod measure;
mod nixpkgs;
mod operator;
mod report;
mod simulation;
mod up;
mod upload;
mod wakeup;

use std::ffi::OsString;

use baseline::Bench;
use harmonia_service::sentence::sentence;
use report::Report;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|word| word == upload::child::CHILD).is_some() {
        return upload::child::run(arguments.next()).await;
    }
    if arguments.next_if(|word| word == "confine").is_some() {
        let spec = arguments.next().unwrap_or_default();
        let program: Vec<OsString> = std::env::args_os().skip(3).collect();
        let Err(error) = harmonia_evaluator::confine(&spec, &program) else { return };
        eprintln!("{}", sentence(&error));
        std::process::exit(1);
    }
    let options = report::Options::parse(arguments);
    let mut report = Report::new(&options);
    if options.measures("queue") {
        queue(&options, &mut report).await;
    }
    if options.measures("upload") {
        upload::run(&mut report).await;
    }
    if options.measures("build") {
        build::run(&mut report).await;
    }
    if options.measures("eval") {
        eval::run(&mut report).await;
    }
    if options.measures("up") {
        up::run(&mut report).await;
    }
    if options.measures("frontend") {
        frontend::run(&options, &mut report).await;
    }
    if options.measures("gc") {
        gc::run(&options, &mut report).await;
    }
    if options.measures("operator") {
        operator::run(&mut report).await;
    }
    if options.measures("cluster") {
        cluster::run(&mut report).await;
    }
    report.print();
    report.write();
}

async fn queue(options: &report::Options, report: &mut Report<'_>) {
    let bench = Bench::start(&options.settings).await;
    claim::among_a_million(&bench, report).await;
    claim::behind_blocked(&bench, report).await;
    literal::run(&bench, report).await;
    cycle::run(&bench, report).await;
    nixpkgs::run(&bench, report).await;
    hub::stall(&bench, report).await;
    hub::failure(&bench, report).await;
    wakeup::cost(&bench, report).await;
    wakeup::latency(&bench, report).await;
    background::logs(&bench, report).await;
    background::idle(&bench, report).await;
    simulation::makespan(&bench, report).await;
    simulation::fairness(&bench, report).await;
}
