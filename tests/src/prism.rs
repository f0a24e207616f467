//! A server that holds every request against the description that GitHub publishes of its API, refuses what does not fit with
//! 422, and answers with the examples that are in it, some of which do not fit it themselves. GitHub itself cannot run here.

use std::net::TcpStream;
use std::process::Command;

use crate::guard::{Guard, cache};
use crate::press::free_port;

/// As `./dev` has them.
const PROGRAM: &str = "prism-5.16.0/node_modules/.bin/prism";
const DESCRIPTION: &str = "github-description-23.0.2/api.json";

/// The server; it stops when it is dropped.
pub struct Prism {
    /// Its address.
    pub url: String,
    guard: Guard,
}

impl Prism {
    /// None: `./dev test api` has not got it.
    pub async fn start() -> Option<Prism> {
        let (program, description) = (cache().join(PROGRAM), cache().join(DESCRIPTION));
        if !program.exists() || !description.exists() {
            return None;
        }
        let (guard, port) = (Guard::new("prism-"), free_port());
        let mut command = Command::new(program);
        command.args(["mock", "--host", "127.0.0.1", "--port", &port.to_string()]);
        guard.start(command.arg(description));
        let prism = Prism { url: format!("http://127.0.0.1:{port}"), guard };
        crate::eventually("prism listens", || async {
            assert!(prism.guard.runs(), "{}", prism.guard.log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
        .await;
        Some(prism)
    }

    /// What was asked that does not fit.
    pub fn violations(&self) -> Vec<String> {
        let log = self.guard.log();
        log.lines().filter(|line| line.contains("Violation: request")).map(str::to_owned).collect()
    }
}
