//! What a role says about itself while it runs.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

/// Lines for a person at a terminal, JSON elsewhere. `RUST_LOG` chooses what; without it, what an operator wants to see.
pub fn init() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    if stderr().is_terminal() { logs.init() } else { logs.json().init() }
}
