//! The drain matrix, what changes the number of builders or the builders themselves: only idle ones go, and no build is lost.

use std::time::Duration;

use harmonia_tests::cluster::{Farm, NAMESPACE, Pool, install, json, lose_operator, outcomes, sleeper};
use harmonia_tests::kube::{eventually, kubectl, try_kubectl};
use serde_json::Value;
use tokio::time::Instant;

const SOON: Duration = harmonia_tests::PATIENCE;

async fn replicas(pool: &str) -> Value {
    json(&["-n", NAMESPACE, "get", "deployment", &format!("{pool}-builder")]).await["spec"]["replicas"]
        .clone()
}

async fn has_builders(pool: &str, count: i32) {
    eventually(&format!("{pool} has {count}"), SOON, async || replicas(pool).await == count).await;
}

#[tokio::test]
async fn a_pool_comes_from_nothing_and_goes_to_nothing_and_only_idle_builders_go() {
    let farm = Farm::get().await;
    let scaling = "  slots: 1\n  scaling: {min: 0, max: 3, stabilizationWindow: 3s}";
    let pool = farm.pool("zero", scaling).await;
    assert_eq!(replicas("zero").await, 0);
    let begun = Instant::now();
    let builds = [sleeper("short", 15), sleeper("shorter", 15), sleeper("long", 75)];
    pool.queue(&builds).await;
    has_builders("zero", 3).await;
    farm.begun_by(&builds[2].name).await;
    eprintln!("from nothing to building in {:.1} s", begun.elapsed().as_secs_f32());
    // The short ones end; an operator that is killed at each moment of what follows changes nothing.
    let meddle = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_secs(4)).await;
            lose_operator().await;
        }
    };
    tokio::join!(meddle, has_builders("zero", 1));
    farm.end_undisturbed(&builds).await;
    has_builders("zero", 0).await;
    let again = sleeper("again", 1);
    pool.queue(std::slice::from_ref(&again)).await;
    farm.end_undisturbed(std::slice::from_ref(&again)).await;
}

#[tokio::test]
async fn a_rollout_replaces_builders_after_what_they_build() {
    let farm = Farm::get().await;
    let pool = farm.pool("rollout", "  replicas: 2\n  slots: 1").await;
    let builds = [sleeper("one", 20), sleeper("two", 20)];
    let before = pool.run(&builds).await;
    let patch = r#"{"spec": {"template": {"metadata": {"annotations": {"example.org/new": "yes"}}}}}"#;
    kubectl(&["-n", NAMESPACE, "patch", "builderpool", "rollout", "--type=merge", "--patch", patch]).await;
    kubectl(&["-n", NAMESPACE, "rollout", "restart", "deployment/rollout-builder"]).await;
    // Those to come claim while those to go finish.
    let more = [sleeper("three", 1), sleeper("four", 1)];
    pool.queue(&more).await;
    farm.end_undisturbed(&builds).await;
    farm.end_undisturbed(&more).await;
    eventually("all builders are new", SOON, async || {
        let pods = pool.pods().await;
        pods.len() == 2 && pods.iter().all(|(name, _)| !before.contains(name))
    })
    .await;
    // Whoever took the mark of the restart away would begin another wave.
    let deployment = json(&["-n", NAMESPACE, "get", "deployment", "rollout-builder"]).await;
    let marks = &deployment["spec"]["template"]["metadata"]["annotations"];
    assert!(marks["kubectl.kubernetes.io/restartedAt"].is_string(), "{marks:#}");
}

#[tokio::test]
async fn an_upgrade_of_the_release_disturbs_no_build() {
    let farm = Farm::get().await;
    let pool = farm.pool("upgrade", "  replicas: 2\n  slots: 1").await;
    let builds = [sleeper("one", 25), sleeper("two", 25)];
    pool.run(&builds).await;
    let more = [sleeper("three", 2), sleeper("four", 2)];
    pool.queue(&more).await;
    // Another value of the installation, with which builders are made anew; whoever is there claims what waits.
    install(NAMESPACE, &["--set", "imagePullSecrets={nobody}"]).await;
    farm.end_undisturbed(&builds).await;
    farm.end_undisturbed(&more).await;
    install(NAMESPACE, &[]).await;
}

#[tokio::test]
async fn the_budget_holds_back_the_second_busy_node_and_never_an_idle_one() {
    let farm = Farm::get().await;
    let pool = farm.pool("budget", "  replicas: 2\n  slots: 1").await;
    let builds = [sleeper("one", 60), sleeper("two", 60)];
    let pods = pool.run(&builds).await;
    // Both nodes leave at once: the first pod goes, the second has to wait for its replacement.
    kubectl(&["cordon", "node1", "node2"]).await;
    evict(&pods[0]).await.unwrap();
    let refused = evict(&pods[1]).await.unwrap_err();
    assert!(refused.contains("disruption budget"), "{refused}");
    farm.end_undisturbed(&builds).await;
    // Idle by now, it is nobody's loss.
    eventually("the idle one may go", SOON, async || evict(&pods[1]).await.is_ok()).await;
    kubectl(&["uncordon", "node1", "node2"]).await;
    kubectl(&["-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=180s", "builderpool/budget"])
        .await;
}

/// As `kubectl drain` does, once.
async fn evict(pod: &str) -> Result<String, String> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction");
    let body = format!(
        "{{apiVersion: policy/v1, kind: Eviction, metadata: {{name: {pod}, namespace: {NAMESPACE}}}}}"
    );
    let words = ["create", "--raw", &path, "--filename", "-"];
    try_kubectl(&words, &serde_json::to_string(&serde_saphyr::from_str::<Value>(&body).unwrap()).unwrap())
        .await
}

#[tokio::test]
async fn of_two_cordoned_nodes_the_idle_one_is_empty_in_seconds() {
    let farm = Farm::get().await;
    let pool = farm.pool("both", "  replicas: 2\n  slots: 1").await;
    let build = sleeper("busy", 90);
    let busy = pool.run(std::slice::from_ref(&build)).await.remove(0);
    let (idle, _) = pool.pods().await.into_iter().find(|(name, _)| *name != busy).unwrap();
    kubectl(&["cordon", "node1", "node2"]).await;
    let begun = Instant::now();
    eventually("the idle one may go", SOON, async || evict(&idle).await.is_ok()).await;
    eventually("it is gone", SOON, async || !pool.pods().await.iter().any(|(name, _)| *name == idle)).await;
    eprintln!("the idle pod was gone after {:.1} s", begun.elapsed().as_secs_f32());
    assert_eq!(
        outcomes(&farm.build(&build.name).await.unwrap()),
        ["runs"],
        "the busy one was not waited for"
    );
    kubectl(&["uncordon", "node1", "node2"]).await;
    farm.end_undisturbed(std::slice::from_ref(&build)).await;
}

/// What makes a builder drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trigger {
    Cordon,
    ByHand,
    Delete,
    ScaleIn,
    Rollout,
}

const ALL: [Trigger; 5] =
    [Trigger::Cordon, Trigger::ByHand, Trigger::Delete, Trigger::ScaleIn, Trigger::Rollout];

impl Trigger {
    async fn pull(self, farm: &Farm, pool: &Pool<'_>, pod: &str) {
        let name = &pool.name;
        match self {
            Self::Cordon => {
                let node = json(&["-n", NAMESPACE, "get", "pod", pod]).await["spec"]["nodeName"].clone();
                drop(kubectl(&["cordon", node.as_str().unwrap()]).await);
            }
            Self::ByHand => drop(farm.does(&["drain", pod]).await),
            Self::Delete => drop(kubectl(&["-n", NAMESPACE, "delete", "pod", pod, "--wait=false"]).await),
            Self::ScaleIn => {
                drop(
                    kubectl(&["-n", NAMESPACE, "scale", &format!("builderpool/{name}"), "--replicas=0"])
                        .await,
                );
            }
            Self::Rollout => {
                drop(
                    kubectl(&["-n", NAMESPACE, "rollout", "restart", &format!("deployment/{name}-builder")])
                        .await,
                );
            }
        }
    }
}

/// One builder with one build, and these triggers one after the other.
async fn pull_all(name: &str, triggers: &[Trigger]) {
    let farm = Farm::get().await;
    let pool = farm.pool(name, "  replicas: 1\n  slots: 1").await;
    let build = sleeper("drained", 12);
    let pod = pool.run(std::slice::from_ref(&build)).await.remove(0);
    for trigger in triggers {
        trigger.pull(&farm, &pool, &pod).await;
    }
    eprintln!("{triggers:?}");
    farm.end_undisturbed(std::slice::from_ref(&build)).await;
    eventually("the builder goes", SOON, async || {
        let nodes = farm.api("/api/nodes").await;
        let here = nodes.as_array().unwrap().iter().find(|node| node["name"] == pod.as_str());
        here.is_none_or(|node| node["state"] != "active")
    })
    .await;
}

/// So many pools at once: a cordon reaches those of others too, which is one more reason to drain and no worse.
const AT_ONCE: usize = 5;

#[test]
fn two_reasons_to_drain_are_no_worse_than_one_in_either_order() {
    let pairs = ALL.into_iter().flat_map(|first| ALL.map(|second| [first, second]));
    let pairs: Vec<[Trigger; 2]> = pairs.filter(|[first, second]| first != second).collect();
    for (round, pairs) in pairs.chunks(AT_ONCE).enumerate() {
        std::thread::scope(|threads| {
            for (number, pair) in pairs.iter().enumerate() {
                let name = format!("pair-{round}-{number}");
                threads.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(pull_all(&name, pair));
                });
            }
        });
    }
}

#[tokio::test]
async fn a_cordon_a_scale_in_and_a_rollout_at_once_lose_nothing() {
    pull_all("three", &[Trigger::Cordon, Trigger::ScaleIn, Trigger::Rollout]).await;
}

#[tokio::test]
async fn the_last_of_a_persistent_pool_drain_before_they_go() {
    let farm = Farm::get().await;
    let pool =
        farm.pool_with_store("warmer", "{mode: Persistent, size: 2Gi}", "  replicas: 2\n  slots: 1").await;
    let builds = [sleeper("one", 20), sleeper("two", 20)];
    pool.run(&builds).await;
    kubectl(&["-n", NAMESPACE, "scale", "builderpool/warmer", "--replicas=1"]).await;
    let set = async || {
        json(&["-n", NAMESPACE, "get", "statefulset", "warmer-builder"]).await["spec"]["replicas"].clone()
    };
    farm.end_undisturbed(&builds).await;
    eventually("the last one goes", SOON, async || set().await == 1).await;
}
