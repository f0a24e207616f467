//! Waiting until every role says that it is ready.

use std::collections::BTreeMap;
use std::time::Duration;

use harmonia_builder::upload::local_http_client;
use tokio::time::{Instant, sleep};

use super::error::UpError;
use super::layout::Layout;
use super::supervise::{State, Supervisor};
use super::terminal::Terminal;

const LOOK: Duration = Duration::from_millis(25);
/// One question.
const ANSWER: Duration = Duration::from_secs(5);
/// After so long a person wants to know what is waited for.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// A role that ended so often before it was ready will not be.
const TRIES: u32 = 5;

/// Returns when all of them, by name and URL, are.
pub async fn ready(
    layout: &Layout,
    supervisor: &Supervisor,
    terminal: &Terminal,
    roles: &[(&'static str, String)],
) -> Result<(), UpError> {
    let http = local_http_client()?;
    let begun = Instant::now();
    let mut said = BTreeMap::new();
    let mut waiting: Vec<_> = roles.iter().collect();
    loop {
        let mut still = Vec::new();
        for role @ (name, url) in waiting {
            let answer = http.get(format!("{url}/readyz")).timeout(ANSWER).send().await;
            let reason = match answer {
                Ok(answer) if answer.status().is_success() => continue,
                Ok(answer) => answer.text().await.unwrap_or_default().trim().to_owned(),
                Err(_) => "it does not answer yet".to_owned(),
            };
            if begun.elapsed() > PATIENCE && said.get(name) != Some(&reason) {
                terminal.say(&format!("waiting for {name}: {reason}"));
                said.insert(*name, reason);
            }
            still.push(role);
        }
        if still.is_empty() {
            return Ok(());
        }
        if let Some((name, last)) = unstable(supervisor.states()) {
            return Err(UpError::Unstable { name, log: layout.log(name), last });
        }
        waiting = still;
        sleep(LOOK).await;
    }
}

fn unstable(states: Vec<(&'static str, State)>) -> Option<(&'static str, String)> {
    states.into_iter().find_map(|(name, state)| match state {
        State::Failed(TRIES.., last) => Some((name, last)),
        _ => None,
    })
}
