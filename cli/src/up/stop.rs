//! The way down: builders first, so that what they have is published; the database last.

use std::cell::Cell;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::lead::Leader;
use super::supervise::Supervisor;
use super::terminal::Terminal;
use super::{nix, postgres, s3};

/// Who is stopped when, and how long it is waited for before it is killed. A builder is waited for until a person has enough.
const ORDER: &[(&str, Option<Duration>)] = &[
    ("builder", None),
    ("evaluator", Some(Duration::from_secs(30))),
    ("signer", Some(Duration::from_secs(10))),
    // Somebody may be following a log for ever.
    ("frontend", Some(Duration::from_secs(2))),
    (s3::NAME, Some(Duration::from_secs(5))),
    (nix::NAME, Some(Duration::from_secs(10))),
    (postgres::NAME, Some(Duration::from_secs(60))),
];
const LOOK: Duration = Duration::from_secs(1);

/// Stops all parts. `stops` counts how often the person asked for it: once more, and what is being built is given back; twice
/// more, and everything is killed. Answers whether nothing had to be.
pub async fn stop(
    supervisor: &Supervisor,
    leader: Option<&Leader>,
    terminal: &Terminal,
    mut stops: watch::Receiver<u32>,
) -> bool {
    terminal.hush();
    let asked = (*stops.borrow()).max(1);
    let mut killed = stops.clone();
    let was_killed = Cell::new(false);
    let kill = async {
        told(&mut killed, asked + 2).await;
        terminal.say("killing what is left");
        was_killed.set(true);
        ORDER.iter().for_each(|(name, _)| supervisor.kill(name));
        std::future::pending().await
    };
    let hurry = async {
        told(&mut stops, asked + 1).await;
        terminal.say("stopping at once: running builds are given back");
        supervisor.stop("builder");
        std::future::pending().await
    };
    tokio::select! {
        () = in_order(supervisor, leader, terminal) => {}
        never = hurry => never,
        never = kill => never,
    }
    !was_killed.get()
}

async fn in_order(supervisor: &Supervisor, leader: Option<&Leader>, terminal: &Terminal) {
    for (name, patience) in ORDER {
        supervisor.stop(name);
        match patience {
            Some(patience) => {
                if timeout(*patience, supervisor.stopped(name)).await.is_err() {
                    supervisor.kill(name);
                    supervisor.stopped(name).await;
                }
            }
            None => tokio::select! {
                () = supervisor.stopped(name) => {}
                () = count_down(leader, terminal) => {}
            },
        }
        if *name == "signer"
            && let Some(leader) = leader
        {
            leader.leave().await;
        }
    }
}

/// Says how many builds are left, whenever that changes.
async fn count_down(leader: Option<&Leader>, terminal: &Terminal) {
    let mut said = 0;
    loop {
        let left = match leader {
            Some(leader) => leader.builds_left().await.unwrap_or(said),
            None => 0,
        };
        if left != said {
            terminal.say(&sentence(left));
            said = left;
        }
        sleep(LOOK).await;
    }
}

fn sentence(left: i64) -> String {
    match left {
        0 => "no build is left".to_owned(),
        1 => "waiting for 1 build; Ctrl-C again gives it back".to_owned(),
        _ => format!("waiting for {left} builds; Ctrl-C again gives them back"),
    }
}

async fn told(stops: &mut watch::Receiver<u32>, times: u32) {
    if stops.wait_for(|stops| *stops >= times).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_database_goes_last_and_the_builder_first() {
        assert_eq!(ORDER.first().map(|(name, _)| *name), Some("builder"));
        assert_eq!(ORDER.last().map(|(name, _)| *name), Some(postgres::NAME));
    }

    #[test]
    fn one_build_is_not_many() {
        assert_eq!(sentence(1), "waiting for 1 build; Ctrl-C again gives it back");
        assert!(sentence(3).contains("3 builds"));
    }
}
