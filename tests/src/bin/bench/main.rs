//! `./dev bench queue`: what the queue costs, as ratios to `pgbench -N` ("SU") at the same number of clients in the same
//! run, on a private PostgreSQL. `--only TEXT` runs the groups with a figure whose name contains it.

mod background;
mod baseline;
mod claim;
mod cycle;
mod drain;
mod enqueue;
mod farm;
mod graphs;
mod hub;
mod literal;
mod measure;
mod nixpkgs;
mod report;
mod simulation;
mod wakeup;

use baseline::Bench;
use report::Report;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let options = report::Options::parse(std::env::args().skip(1));
    let bench = Bench::start(&options.settings).await;
    let mut report = Report::new(&options);

    claim::among_a_million(&bench, &mut report).await;
    claim::behind_blocked(&bench, &mut report).await;
    literal::run(&bench, &mut report).await;
    cycle::run(&bench, &mut report).await;
    nixpkgs::run(&bench, &mut report).await;
    hub::stall(&bench, &mut report).await;
    hub::failure(&bench, &mut report).await;
    wakeup::cost(&bench, &mut report).await;
    wakeup::latency(&bench, &mut report).await;
    background::logs(&bench, &mut report).await;
    background::idle(&bench, &mut report).await;
    simulation::makespan(&bench, &mut report).await;
    simulation::fairness(&bench, &mut report).await;

    report.print();
    report.write();
}
