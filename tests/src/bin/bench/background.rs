//! What a farm costs beside claims: the tails of logs, and doing nothing.

use std::time::{Duration, Instant};

use harmonia_queue::Fence;
use harmonia_queue::builder::{LogPiece, Session};
use rand::RngExt;

use crate::baseline::{Bench, ROUNDS, phase};
use crate::farm::{Farm, project, together};
use crate::graphs::{self, CLASSES, FEATURES, PROJECTS};
use crate::measure::median;
use crate::report::Report;

const CONNECTIONS: usize = 8;
/// 1,000 running jobs: 125 builders of 8 slots.
const BUILDERS: usize = 125;
const SLOTS: i32 = 8;
/// A builder sends what was added to all its logs in one call, every two seconds: 500 pieces a second.
const EVERY: Duration = Duration::from_secs(2);
const PIECE: usize = 2048;
const SLICE: Duration = Duration::from_secs(3);
const WATCHED: Duration = Duration::from_secs(20);

/// A builder with what it runs and how long their logs are.
struct Builder {
    session: Session,
    held: Vec<Fence>,
    offset: i64,
}

impl Builder {
    /// 2 KiB more of every log.
    async fn append(&mut self) -> usize {
        let data: Vec<u8> = (0..PIECE).map(|at| b"checking for working C compiler... "[at % 35]).collect();
        let pieces: Vec<LogPiece> = self
            .held
            .iter()
            .map(|&fence| LogPiece { fence, offset: self.offset, data: data.clone() })
            .collect();
        self.session.log_append(&pieces).await.expect("append");
        self.offset += PIECE as i64;
        pieces.len()
    }
}

/// 1,000 jobs write logs: at the usual pace, and as fast as it goes.
pub async fn logs(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["logtail_500_core_percent", "logtail_vs_su"]) {
        return;
    }
    let farm = phase("1,000 running jobs", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(PROJECTS, Some(FEATURES)).await;
        graphs::independent(&farm, 2_000).await;
        farm
    })
    .await;
    let mut builders = Vec::new();
    for connection in 0..CONNECTIONS {
        let db = farm.builder();
        let mut share = Vec::new();
        for n in (connection..BUILDERS).step_by(CONNECTIONS) {
            let session = farm.session(&db, &format!("builder-{n}"), SLOTS).await;
            farm.settle().await;
            let held = session.claim(SLOTS).await.expect("claim").iter().map(|claim| claim.fence).collect();
            share.push(Builder { session, held, offset: 0 });
        }
        builders.push(share);
    }
    farm.tidy().await;

    let start = Instant::now();
    let cpu = bench.cpu();
    builders = together(builders.into_iter().map(|mut share| async move {
        let pause = EVERY / share.len() as u32;
        for turn in 0_u32.. {
            let count = share.len();
            tokio::time::sleep_until((start + pause * turn).into()).await;
            if start.elapsed() > WATCHED {
                break;
            }
            share[turn as usize % count].append().await;
        }
        share
    }))
    .await;
    report.put("logtail_500_core_percent", (bench.cpu() - cpu) / start.elapsed().as_secs_f64() * 100.0);

    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let su = bench.su(CONNECTIONS).await;
        let start = Instant::now();
        let results = together(builders.into_iter().map(|mut share| async move {
            let mut pieces = 0;
            while start.elapsed() < SLICE {
                for builder in &mut share {
                    pieces += builder.append().await;
                }
            }
            (share, pieces)
        }))
        .await;
        let elapsed = start.elapsed().as_secs_f64();
        let pieces: usize = results.iter().map(|(_, pieces)| pieces).sum();
        builders = results.into_iter().map(|(share, _)| share).collect();
        eprintln!("   {:.0} appends/s", pieces as f64 / elapsed);
        ratios.push(pieces as f64 / elapsed / su.tps);
    }
    report.put("logtail_vs_su", median(ratios));
    bench.drop(farm.database).await;
}

const SESSIONS: usize = 500;
const IDLE_PROJECTS: usize = 100;
const POLL: Duration = Duration::from_secs(5);
const HEARTBEAT: Duration = Duration::from_secs(30);

/// 500 builders with nothing to do: each asks about every 5 s and says every 30 s that it lives.
pub async fn idle(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["idle_500_sessions_core_percent"]) {
        return;
    }
    let farm = phase("500 idle sessions, 100 projects", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(IDLE_PROJECTS, Some(FEATURES)).await;
        // Every project has been here: it has a lane in every class.
        let done: Vec<_> =
            (0..CLASSES.len()).map(|class| graphs::done(&format!("done{class}"), class)).collect();
        for n in 0..IDLE_PROJECTS {
            farm.evaluate(&project(n), done.clone()).await;
        }
        farm.settle().await;
        farm
    })
    .await;
    // The connections are few, the calls are those of 500.
    let ways: Vec<_> = (0..16).map(|_| farm.builder()).collect();
    let mut sessions = Vec::new();
    for n in 0..SESSIONS {
        sessions.push(farm.session(&ways[n % ways.len()], &format!("idle-{n}"), SLOTS).await);
    }
    farm.settle().await;
    farm.tidy().await;
    let resolving = farm.resolve();
    let start = Instant::now();
    let until = tokio::time::Instant::from(start + WATCHED + POLL);
    let calls = tokio::spawn(together(sessions.into_iter().map(move |session| async move {
        let mut poll = tokio::time::Instant::now() + POLL.mul_f64(rand::rng().random());
        let mut heartbeat = tokio::time::Instant::now() + HEARTBEAT.mul_f64(rand::rng().random());
        loop {
            tokio::time::sleep_until(poll.min(heartbeat).min(until)).await;
            let now = tokio::time::Instant::now();
            if now >= until {
                return;
            }
            if now >= poll {
                assert!(session.claim(1).await.expect("claim").is_empty());
                poll = now + POLL.mul_f64(0.75 + 0.5 * rand::rng().random::<f64>());
            }
            if now >= heartbeat {
                session.heartbeat(&[], None).await.expect("heartbeat");
                heartbeat = now + HEARTBEAT;
            }
        }
    })));
    // Once all have asked, connections and plans are made.
    tokio::time::sleep(POLL).await;
    let (cpu, start) = (bench.cpu(), Instant::now());
    calls.await.expect("the sessions");
    report.put("idle_500_sessions_core_percent", (bench.cpu() - cpu) / start.elapsed().as_secs_f64() * 100.0);
    drop(resolving);
    bench.drop(farm.database).await;
}
