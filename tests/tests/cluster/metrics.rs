//! What Prometheus gets from a farm.

use std::io::Write;
use std::process::{Command, Stdio};

use harmonia_tests::cluster::{Farm, NAMESPACE, json, sleeper};

#[tokio::test]
async fn every_role_tells_prometheus_what_the_reference_says_in_the_form_that_it_wants() {
    let farm = Farm::get().await;
    let pool = farm.pool("metrics", "  replicas: 1\n  slots: 1").await;
    let build = sleeper("counted", 1);
    pool.queue(std::slice::from_ref(&build)).await;
    farm.ends(&build).await;

    let reference = include_str!("../../../docs/reference/metrics.md");
    for role in ["operator", "signer", "frontend", "evaluator", "builder"] {
        let text = scrape(role).await;
        check(role, &text);
        let (_, section) = reference.split_once(&format!("\n## {role}\n")).unwrap();
        let section = section.split("\n## ").next().unwrap();
        for row in section.lines().filter_map(|line| line.strip_prefix("| `")) {
            let mut cells = row.split(" | ");
            let (name, labels) = (cells.next().unwrap().trim_end_matches('`'), cells.nth(1).unwrap());
            // What has labels is not told before there is something to tell.
            let told = text.contains(&format!("# HELP {name} "));
            assert!(told || !labels.trim().is_empty(), "{role} does not tell {name}:\n{text}");
        }
        for name in text.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next()) {
            assert!(section.contains(&format!("| `{name}` |")), "the reference does not know {name}");
        }
    }
}

/// `/metrics` of a role's pod, where the chart's monitors look for it: at its port `http`.
async fn scrape(role: &str) -> String {
    let selector = format!("app.kubernetes.io/name=harmonia-ci,app.kubernetes.io/component={role}");
    let pods = json(&["-n", NAMESPACE, "get", "pods", "--selector", &selector]).await;
    let running = pods["items"].as_array().unwrap().iter().find(|pod| pod["status"]["phase"] == "Running");
    let pod = running.unwrap_or_else(|| panic!("no pod of {role} runs"));
    let containers = pod["spec"]["containers"].as_array().unwrap();
    let mut ports =
        containers.iter().flat_map(|container| container["ports"].as_array().into_iter().flatten());
    let port = ports.find(|port| port["name"] == "http").unwrap_or_else(|| panic!("{role}: no port http"));
    let address = pod["status"]["podIP"].as_str().unwrap();
    let url = format!("http://{address}:{}/metrics", port["containerPort"]);
    reqwest::get(url).await.unwrap().error_for_status().unwrap().text().await.unwrap()
}

/// `promtool check metrics`, which also knows what a good name is.
fn check(role: &str, text: &str) {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, which `./dev test` puts into PATH");
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{role}: {said}\n{text}");
}
