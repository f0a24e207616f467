//! What fixed-output builds, which alone have a network, do not reach: with an enforcer of NetworkPolicies on every node.

use std::process::Command;

use harmonia_tests::cluster::{Farm, HOST, Pool, Sleeper, sleeper, succeeded};
use harmonia_tests::kube::{eventually, in_node};
use harmonia_tests::{PATIENCE, skip};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Where clouds tell a node's credentials, and an address that stands for the internet.
const METADATA: &str = "169.254.169.254";
const INTERNET: &str = "192.0.2.1";
/// The API server's Service.
const API: &str = "10.96.0.1";
const NODES: [&str; 2] = ["node1", "node2"];
/// As processes are called: no more letters than this.
const ENFORCER: &str = "kube-network-po";

#[tokio::test]
async fn a_build_reaches_the_internet_and_neither_metadata_nor_the_api_server() {
    let Some(enforcer) = find("kube-network-policies") else {
        return skip("kube-network-policies could not be made: that policies hold is not proven");
    };
    let farm = Farm::get().await;
    // What cannot be reached is given up soon.
    let nix = "{substituters: [], settings: {connect-timeout: '3', download-attempts: '1'}}";
    let pool = farm.pool("fence", &format!("  replicas: 1\n  slots: 4\n  nix: {nix}")).await;
    let _servers = [Server::start(METADATA).await, Server::start(INTERNET).await];

    // Without an enforcer a policy is a word: whatever is not reached afterwards can be reached.
    for (build, _) in tries(&pool).await {
        assert!(reached(&farm, &build).await, "{} is not reached without an enforcer", build.name);
    }
    let _enforcers = Enforcers::start(&enforcer).await;
    for (build, reachable) in tries(&pool).await {
        assert_eq!(reached(&farm, &build).await, reachable, "{}", build.name);
    }
}

/// Queues a fetch from each place, and says whether it should be reached where policies hold.
async fn tries(pool: &Pool<'_>) -> Vec<(Sleeper, bool)> {
    let places = [
        ("internet", format!("http://{INTERNET}/"), true),
        ("metadata", format!("http://{METADATA}/"), false),
        ("api", format!("http://{HOST}:6443/"), false),
        ("service", format!("http://{API}:443/"), false),
    ];
    let (expected, fetches): (Vec<bool>, Vec<(Sleeper, String)>) =
        places.into_iter().map(|(name, url, reachable)| (reachable, (sleeper(name, 0), url))).unzip();
    pool.queue_fetches(&fetches).await;
    fetches.into_iter().map(|(build, _)| build).zip(expected).collect()
}

/// Whether somebody answered: with what was asked for, or, from who speaks TLS, with a complaint.
async fn reached(farm: &Farm, build: &Sleeper) -> bool {
    let ended = |build: &Value| build["attempts"][0]["outcome"].is_string();
    let build = farm.until(&build.name, ended).await;
    succeeded(&build) || farm.does(&["logs", &build["id"].to_string()]).await.contains("HTTP error 400")
}

fn find(program: &str) -> Option<String> {
    let places = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&places).map(|place| place.join(program)).find(|file| file.is_file());
    Some(found?.display().to_string())
}

/// Who answers `hello` at an address of this machine's that the nodes reach.
struct Server {
    address: &'static str,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(address: &'static str) -> Server {
        ip(&["addr", "add", &format!("{address}/32"), "dev", "hci0"]);
        let listener = TcpListener::bind((address, 80)).await.unwrap();
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhello\n").await;
                // What was asked is read, or closing would take the answer back.
                let _ = stream.shutdown().await;
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            }
        });
        Server { address, task }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        ip(&["addr", "del", &format!("{}/32", self.address), "dev", "hci0"]);
    }
}

fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().unwrap();
    assert!(output.status.success(), "ip {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// One on each node. It asks for packets by nftables' `queue`, which not every kernel has: iptables' NFQUEUE gives it the same ones.
struct Enforcers;

const QUEUE: &str = "POSTROUTING -m conntrack --ctstate NEW -j NFQUEUE --queue-num 100 --queue-bypass";

impl Enforcers {
    async fn start(program: &str) -> Enforcers {
        let kubeconfig = std::env::var("KUBECONFIG").unwrap();
        for node in NODES {
            let run = format!(
                "setsid {program} --kubeconfig={kubeconfig} --hostname-override={node} --disable-nri \
                 >/run/node/log/policies.log 2>&1 </dev/null & iptables -t mangle -A {QUEUE}"
            );
            in_node(node, &["sh", "-c", &run]).await;
        }
        for node in NODES {
            eventually("the enforcer takes packets", PATIENCE, async || {
                in_node(node, &["cat", "/proc/self/net/netfilter/nfnetlink_queue"]).await.trim() != ""
            })
            .await;
        }
        Enforcers
    }
}

impl Drop for Enforcers {
    fn drop(&mut self) {
        let script = format!("pkill -KILL {ENFORCER}; iptables -t mangle -D {QUEUE}");
        for node in NODES {
            let in_node = concat!(env!("CARGO_MANIFEST_DIR"), "/cluster/in-node");
            let _ = Command::new(in_node).args([node, "sh", "-c", &script]).output();
        }
    }
}
