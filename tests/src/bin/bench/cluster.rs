//! `./dev bench cluster`: a farm in a real Kubernetes of two nodes, against pods that do nothing and against a farm on one machine.

use std::time::{Duration, Instant};

use harmonia_tests::cluster::{Farm, NAMESPACE, Pool, Sleeper, install, json, sleeper, succeeded, type_in};
use harmonia_tests::kube::{eventually, kubectl, try_kubectl};
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::pg::{Options, Server};
use serde_json::{Value, json};

use crate::measure::median;
use crate::report::Report;
use crate::up;
use crate::up::farm::Up;

/// How often a ratio is taken; the median of them counts.
const ROUNDS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(240);

/// Measures what is asked for.
pub async fn run(report: &mut Report<'_>) {
    let farm = Farm::get().await;
    if report.wants(&["first_claim_vs_bare_pod", "zero_to_building_vs_bare_pod"]) {
        starts(&farm, report).await;
    }
    if report.wants(&["drain_idle_s"]) {
        report.put("drain_idle_s", drain_idle(&farm).await);
    }
    if report.wants(&["lost_build_seconds"]) {
        report.put("lost_build_seconds", lost(&farm).await);
    }
    if report.wants(&["farm_in_pods_vs_up"]) {
        report.put("farm_in_pods_vs_up", demo(&farm).await);
    }
}

/// From a pod to a build in it, over the same pod with nothing in it.
async fn starts(farm: &Farm, report: &mut Report<'_>) {
    let (mut claims, mut wakes) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let pool = farm.pool(&format!("start-{round}"), "  replicas: 0\n  slots: 1").await;
        let bare = bare_pod(&pool, &format!("bare-{round}")).await;
        claims.push(first_claim(farm, &pool).await / bare);
        drop(pool);
        let scaling = "  slots: 1\n  scaling: {min: 0, max: 1, stabilizationWindow: 5s}";
        let pool = farm.pool(&format!("wake-{round}"), scaling).await;
        wakes.push(zero_to_building(farm, &pool).await / bare);
    }
    report.put("first_claim_vs_bare_pod", median(claims));
    report.put("zero_to_building_vs_bare_pod", median(wakes));
}

/// How long a pod takes to be ready that has a builder's containers and volumes, each of which sleeps.
async fn bare_pod(pool: &Pool<'_>, name: &str) -> f64 {
    let workload = json(&["-n", NAMESPACE, "get", "deployment", &format!("{}-builder", pool.name)]).await;
    let mut spec = workload["spec"]["template"]["spec"].clone();
    spec["terminationGracePeriodSeconds"] = 0.into();
    for kind in ["containers", "initContainers"] {
        for container in spec[kind].as_array_mut().into_iter().flatten() {
            let lasts = kind == "containers" || container["restartPolicy"] == "Always";
            let seconds = if lasts { "infinity" } else { "0" };
            container["command"] = json!(["busybox", "sleep", seconds]);
            for field in ["args", "livenessProbe", "readinessProbe", "startupProbe"] {
                container.as_object_mut().expect("a container").remove(field);
            }
        }
    }
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec});
    let begun = Instant::now();
    try_kubectl(&["create", "--filename", "-"], &pod.to_string()).await.expect("a pod");
    let pod = format!("pod/{name}");
    kubectl(&["-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=120s", &pod]).await;
    let took = begun.elapsed().as_secs_f64();
    kubectl(&["-n", NAMESPACE, "delete", &pod]).await;
    eprintln!("   a bare pod is ready after {took:.2} s");
    took
}

/// From a builder's pod to what it builds first.
async fn first_claim(farm: &Farm, pool: &Pool<'_>) -> f64 {
    let build = sleeper("first", 1);
    pool.queue(std::slice::from_ref(&build)).await;
    waits(farm, &build).await;
    kubectl(&["-n", NAMESPACE, "scale", &format!("builderpool/{}", pool.name), "--replicas=1"]).await;
    eventually("there is a pod", PATIENCE, async || !pool.pods().await.is_empty()).await;
    let begun = Instant::now();
    begins(farm, &build, begun, "after its pod").await
}

/// From a build that nobody is there for to its beginning.
async fn zero_to_building(farm: &Farm, pool: &Pool<'_>) -> f64 {
    let build = sleeper("woken", 1);
    pool.queue(std::slice::from_ref(&build)).await;
    waits(farm, &build).await;
    begins(farm, &build, Instant::now(), "from nothing").await
}

async fn waits(farm: &Farm, build: &Sleeper) {
    eventually("it is known", PATIENCE, async || farm.build(&build.name).await.is_some()).await;
}

async fn begins(farm: &Farm, build: &Sleeper, begun: Instant, what: &str) -> f64 {
    let runs = |build: &Value| build["state"] == "building" || succeeded(build);
    farm.until(&build.name, runs).await;
    let took = begun.elapsed().as_secs_f64();
    eprintln!("   building {took:.2} s {what}");
    took
}

async fn drain_idle(farm: &Farm) -> f64 {
    let pool = farm.pool("idle", "  replicas: 2\n  slots: 1").await;
    let (_, node) = pool.pods().await.remove(0);
    let begun = Instant::now();
    pool.drain(&node).await;
    begun.elapsed().as_secs_f64()
}

/// What is done to builders that build: the lines 1 to 3, 6, 7 and 10 of the matrix in `docs/draining.md`.
const TROUBLES: [&str; 7] =
    ["cordon", "drain-the-idle", "drain", "drain-both", "scale-in", "rollout", "upgrade"];

/// Seconds of attempts that came to nothing.
async fn lost(farm: &Farm) -> f64 {
    let pool = farm.pool("lost", "  replicas: 2\n  slots: 1").await;
    let mut lost = 0.0;
    for trouble in TROUBLES {
        let mut builds = vec![sleeper(trouble, 15), sleeper(trouble, 15)];
        if trouble == "drain-the-idle" {
            builds.pop();
        }
        let busy = pool.run(&builds).await.remove(0);
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            pool.pods().await.into_iter().partition(|(name, _)| *name == busy);
        let node = |pods: Vec<(String, String)>| pods.into_iter().next().expect("a pod").1;
        let (busy, other) = (node(here), node(elsewhere));
        let told = |words: &'static [&'static str]| kubectl(words);
        match trouble {
            "cordon" => drop(kubectl(&["cordon", &busy]).await),
            "drain-the-idle" => pool.drain(&other).await,
            "drain" => pool.drain(&busy).await,
            "drain-both" => drop(tokio::join!(pool.drain(&busy), pool.drain(&other))),
            "scale-in" => drop(told(&["-n", NAMESPACE, "scale", "builderpool/lost", "--replicas=1"]).await),
            "rollout" => {
                drop(told(&["-n", NAMESPACE, "rollout", "restart", "deployment/lost-builder"]).await)
            }
            _ => install(NAMESPACE, &["--set", "imagePullSecrets={nobody}"]).await,
        }
        let mut wasted = 0.0;
        for build in &builds {
            let ended = farm.ends(build).await;
            let attempts = ended["attempts"].as_array().expect("attempts").iter();
            let interrupted = attempts.filter(|attempt| attempt["outcome"] != "succeeded");
            wasted += interrupted.filter_map(|attempt| attempt["seconds"].as_f64()).sum::<f64>();
        }
        eprintln!("   {trouble}: {wasted:.1} s lost");
        lost += wasted;
        told(&["uncordon", "node1", "node2"]).await;
        // From nothing, or both would stay on the node that the last of them fled to.
        for (count, words) in [(0, "--replicas=0"), (2, "--replicas=2")] {
            kubectl(&["-n", NAMESPACE, "scale", "builderpool/lost", words]).await;
            eventually("they are as many", PATIENCE, async || pool.pods().await.len() == count).await;
        }
        told(&["-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=180s", "builderpool/lost"]).await;
    }
    install(NAMESPACE, &[]).await;
    lost
}

/// The demo, asked for and waited for by the same words in pods and at a farm on this machine, which know nothing of it before.
async fn demo(farm: &Farm) -> f64 {
    let (slots, demo) = (up::evaluate::SLOTS, up::expressions::demo());
    let read = |file: &str| std::fs::read_to_string(demo.join(file)).expect("the demo");
    let (default, shell) = (read("default.nix"), read("sandbox-shell.nix"));
    let pool = farm.pool("demo", &format!("  replicas: 1\n  slots: {slots}")).await;
    let (nix, database) =
        (Nix::start(Version::Old), Server::start(Options::default()).empty_database().await);
    let up = Up::with(&nix, &database, slots).await;
    let project = format!("{NAMESPACE}/{}", pool.name);
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        // What was published once is not built again.
        let salted = default.replace("// attributes", &format!("// {{ round = {round}; }} // attributes"));
        let url =
            farm.serve(&format!("demo-{round}"), &[("default.nix", &salted), ("sandbox-shell.nix", &shell)]);
        let begun = Instant::now();
        farm.does(&["eval", &url, "--project", &project, "--wait"]).await;
        let in_pods = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        type_in(&up.url, &up.token, &["eval", &url, "--project", "default", "--wait"]).await;
        let by_up = begun.elapsed().as_secs_f64();
        eprintln!("   in pods {in_pods:.2} s, by `up` {by_up:.2} s");
        ratios.push(in_pods / by_up);
    }
    up.stop().await;
    median(ratios)
}
