//! Parts that are killed, and `up` itself.

use harmonia_tests::eventually;

use crate::machine::{Machine, get, signal};

#[tokio::test]
async fn every_part_that_is_killed_is_started_again() {
    let machine = Machine::new();
    let mut up = machine.up().await;
    for name in ["signer", "frontend", "builder", "s3", "nix", "postgres"] {
        let (pid, _) = machine.part(name).unwrap();
        signal(pid, "KILL");
        up.says(&format!("{name} ended: signal 9")).await;
        eventually(&format!("{name} runs again"), || async {
            machine.part(name).is_some_and(|(new, _)| new != pid)
        })
        .await;
    }
    for role in ["signer", "frontend", "builder"] {
        eventually(&format!("{role} is ready again"), || async {
            let Some((_, Some(listen))) = machine.part(role) else { return false };
            get(listen, "/readyz").await.is_some_and(|(status, _)| status == 200)
        })
        .await;
    }
}

#[tokio::test]
async fn nothing_outlives_a_killed_one_and_a_new_start_is_ready() {
    let machine = Machine::new();
    machine.up().await.kill();
    eventually("everything ends", || async { machine.processes().is_empty() }).await;
    machine.up().await;
}

#[tokio::test]
async fn one_that_is_killed_can_be_started_again_at_once() {
    let machine = Machine::new();
    machine.up().await.kill();
    machine.up().await;
}

#[tokio::test]
async fn a_third_interrupt_kills_what_does_not_stop() {
    let machine = Machine::new();
    let mut up = machine.up().await;
    let (builder, _) = machine.part("builder").unwrap();
    signal(builder, "STOP");
    up.interrupt();
    up.says("stopping").await;
    up.interrupt();
    up.says("stopping at once").await;
    up.interrupt();
    assert_eq!(up.ended().await.code(), Some(1), "{}", machine.printed());
    eventually("nothing is left", || async { machine.processes().is_empty() }).await;
}
