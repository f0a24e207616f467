//! The drain matrix, what nobody announces: pods and processes that are gone from one moment to the next. Each build ends with one
//! signed result.

use std::time::Duration;

use harmonia_tests::PATIENCE;
use harmonia_tests::cluster::{
    Farm, NAMESPACE, RELEASE, json, kill_container, lose_operator, outcomes, pod_of, sleeper, version,
};
use harmonia_tests::kube::{eventually, in_node, kubectl, node_off, node_on};
use tokio::time::Instant;

const TWO: &str = "  replicas: 2\n  slots: 1";

#[tokio::test]
async fn a_pod_that_has_five_seconds_gives_back_what_it_builds() {
    let farm = Farm::get().await;
    let pool = farm.pool("five", TWO).await;
    let long = sleeper("long", 30);
    let pod = pool.run(std::slice::from_ref(&long)).await.remove(0);
    let begun = Instant::now();
    kubectl(&["-n", NAMESPACE, "delete", "pod", &pod, "--grace-period=5", "--wait=false"]).await;
    eventually("it is given back", PATIENCE, async || {
        let build = farm.build(&long.name).await.unwrap();
        build["attempts"].as_array().unwrap().iter().any(|attempt| attempt["outcome"] == "interrupted")
    })
    .await;
    eprintln!("given back {} ms after kubectl delete", begun.elapsed().as_millis());
    let build = farm.ends(&long).await;
    assert_eq!(outcomes(&build), ["interrupted", "succeeded"], "{build:#}");
}

#[tokio::test]
async fn a_grace_that_is_too_short_for_what_a_build_usually_takes_is_not_waited_for() {
    let farm = Farm::get().await;
    let pool = farm.pool("usual", &format!("{TWO}\n  drain: {{gracePeriod: 2h, margin: 2s}}")).await;
    let before = version("usual", 30);
    pool.queue(std::slice::from_ref(&before)).await;
    farm.ends(&before).await;
    // What it took is known a second later.
    tokio::time::sleep(Duration::from_secs(3)).await;

    let again = version("usual", 30);
    let pod = pool.run(std::slice::from_ref(&again)).await.remove(0);
    kubectl(&["-n", NAMESPACE, "delete", "pod", &pod, "--grace-period=15", "--wait=false"]).await;
    let build = farm.ends(&again).await;
    assert_eq!(outcomes(&build), ["interrupted", "succeeded"], "{build:#}");
    // Of one of which nothing is known, no more than the margin would be left.
    let left = build["attempts"][0]["message"]
        .as_str()
        .unwrap()
        .split(' ')
        .find_map(|word| word.parse::<u64>().ok());
    assert!(left.unwrap() > 2, "{build:#}");

    let enough = version("usual", 30);
    let pod = pool.run(std::slice::from_ref(&enough)).await.remove(0);
    kubectl(&["-n", NAMESPACE, "delete", "pod", &pod, "--grace-period=300", "--wait=false"]).await;
    farm.end_undisturbed(std::slice::from_ref(&enough)).await;
}

#[tokio::test]
async fn a_builder_that_is_killed_goes_on_in_its_pod_at_once() {
    let farm = Farm::get().await;
    let pool = farm.pool("killed", TWO).await;
    let build = sleeper("killed", 30);
    let pod = pool.run(std::slice::from_ref(&build)).await.remove(0);
    let begun = Instant::now();
    pool.kill(&pod, "builder").await;
    let ended = farm.ends(&build).await;
    eprintln!("built {:.0} s after its builder was killed", begun.elapsed().as_secs_f32());
    // It was not waited for its lease to end.
    assert_ne!(outcomes(&ended)[0], "node_died", "{ended:#}");
    assert_eq!(outcomes(&ended).last().unwrap(), "succeeded", "{ended:#}");
}

#[tokio::test]
async fn a_nix_daemon_that_is_killed_is_started_again_and_builds_again() {
    let farm = Farm::get().await;
    let pool = farm.pool("daemon", "  replicas: 1\n  slots: 2").await;
    let builds = [sleeper("one", 10), sleeper("two", 10)];
    let pod = pool.run(&builds).await.remove(0);
    pool.kill(&pod, "nix-daemon").await;
    // Nobody knows whose fault it was: each was tried again alone.
    farm.end_undisturbed(&builds).await;
}

#[tokio::test]
async fn a_pod_that_is_deleted_by_force_is_replaced_and_its_build_is_claimed_elsewhere() {
    let farm = Farm::get().await;
    let pool = farm.pool("force", TWO).await;
    let build = sleeper("forced", 30);
    let pod = pool.run(std::slice::from_ref(&build)).await.remove(0);
    let begun = Instant::now();
    kubectl(&["-n", NAMESPACE, "delete", "pod", &pod, "--force", "--grace-period=0"]).await;
    let ended = farm.ends(&build).await;
    eprintln!("built {:.0} s after its pod was deleted by force", begun.elapsed().as_secs_f32());
    // The kubelet leaves it two seconds, in which it may give the build back; nothing of that is the build's fault.
    let [first, last] = &outcomes(&ended)[..] else { panic!("two attempts: {ended:#}") };
    assert!(["interrupted", "node_died"].contains(&first.as_str()), "{ended:#}");
    assert_eq!(last, "succeeded", "{ended:#}");
}

#[tokio::test]
async fn what_a_node_built_that_lost_its_power_is_claimed_elsewhere_when_its_lease_has_ended() {
    let farm = Farm::get().await;
    // On the node that loses its power, and on another one afterwards.
    let there = "{key: kubernetes.io/hostname, operator: In, values: [node2]}";
    let preference = format!("{{weight: 100, preference: {{matchExpressions: [{there}]}}}}");
    let affinity =
        format!("{{nodeAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: [{preference}]}}}}");
    let spec = format!("  replicas: 1\n  slots: 1\n  template: {{spec: {{affinity: {affinity}}}}}");
    let pool = farm.pool("power", &spec).await;
    let build = sleeper("lost", 30);
    pool.queue(std::slice::from_ref(&build)).await;
    assert_eq!(farm.runs_on(&build.name).await, "node2");
    let begun = Instant::now();
    let _off = node_off("node2").await;
    farm.until(&build.name, |build| build["attempts"].as_array().unwrap().len() == 2).await;
    eprintln!("claimed elsewhere {:.0} s after the power failure", begun.elapsed().as_secs_f32());
    let ended = farm.ends(&build).await;
    node_on("node2").await;
    kubectl(&["wait", "--for=condition=Ready", "node/node2", "--timeout=180s"]).await;
    assert_eq!(outcomes(&ended), ["node_died", "succeeded"], "{ended:#}");
}

#[tokio::test]
async fn whatever_goes_away_and_comes_back_costs_no_attempt() {
    let farm = Farm::get().await;
    let pool = farm.pool("away", "  replicas: 2\n  slots: 2").await;
    let builds = [sleeper("first", 10), sleeper("second", 25), sleeper("third", 45), sleeper("fourth", 60)];
    let pods = pool.run(&builds).await;

    kill_container(&pod_of("operator").await, "operator").await;
    let node = json(&["-n", NAMESPACE, "get", "pod", &pods[0]]).await["spec"]["nodeName"].clone();
    in_node(node.as_str().unwrap(), &["pkill", "-KILL", "kubelet"]).await;
    kill_container(&pod_of("signer").await, "signer").await;
    let postgres = json(&["-n", NAMESPACE, "get", "pod", &format!("{RELEASE}-postgres-0")]).await;
    kill_container(&postgres, "postgres").await;
    // Frozen rather than gone: requests hang until it goes on.
    let s3 = json(&["-n", NAMESPACE, "get", "pod", &format!("{RELEASE}-s3-0")]).await;
    let frozen = s3["spec"]["nodeName"].as_str().unwrap();
    signal(frozen, "STOP", "harmonia-ci s3").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    signal(frozen, "CONT", "harmonia-ci s3").await;
    kill_container(&pod_of("operator").await, "operator").await;

    farm.end_undisturbed(&builds).await;
}

/// A signal to the processes of a node whose command line has these words.
async fn signal(node: &str, name: &str, words: &str) {
    in_node(node, &["pkill", &format!("-{name}"), "-f", words]).await;
}

#[tokio::test]
async fn an_operator_that_is_killed_during_a_drain_loses_nothing() {
    let farm = Farm::get().await;
    let pool = farm.pool("during", TWO).await;
    let builds = [sleeper("one", 20), sleeper("two", 20)];
    pool.run(&builds).await;
    let drain = pool.drain("node2");
    let kill = async {
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_secs(3)).await;
            lose_operator().await;
        }
    };
    tokio::join!(drain, kill);
    farm.end_undisturbed(&builds).await;
}
