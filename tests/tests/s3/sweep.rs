//! Sweeps of real buckets, and what real clients find afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use harmonia_builder::upload::Ending;
use harmonia_nix::{Sha256, store_path};
use harmonia_queue::ingest::Node;
use harmonia_queue::{evaluations, janitor, people};
use harmonia_service::layout;
use harmonia_signer::{Keeping, Signer, Swept};
use harmonia_tests::gateway::Gateway;
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::press::{Press, RunningSigner};
use harmonia_tests::s3::Server;

/// As if a day had passed since everything was written and marked.
const NOW: Keeping = Keeping { every: None, grace: Duration::ZERO, logs: Duration::from_secs(30 * 86_400) };

/// Built derivations whose outputs refer to each other, all published.
struct Works {
    press: Press,
    signer: RunningSigner,
    gateway: Gateway,
    nodes: Vec<Node>,
}

impl Works {
    /// Of `count` derivations; each refers to up to three of those before it.
    async fn new(server: Server, count: usize) -> Works {
        let press = Press::new(server).await;
        let (signer, gateway) = (press.start_signer().await, Gateway::start(&press).await);
        let nix = Nix::start(Version::Old);
        let drvs = nix.instantiate_all(&expressions(count));
        let paths: Vec<&str> = drvs.values().map(String::as_str).collect();
        nix.run("nix-store", &[&["--realise"], &paths[..]].concat());
        press.evaluate_all(&nix, &signer, &paths).await;
        press.publish_all(&nix, &press.uploader(&[&signer.url])).await;
        let nodes = nix.run("nix-store", &[&["--query", "--requisites"], &paths[..]].concat());
        let nodes = nodes.lines().filter(|path| path.ends_with(".drv"));
        let nodes = nodes.map(|drv| Node::parse(drv, std::fs::read(nix.real(drv)).unwrap()).unwrap());
        Works { nodes: nodes.collect(), press, signer, gateway }
    }

    /// The derivations of some names, and all below them.
    fn closure(&self, names: &BTreeSet<String>) -> Vec<Node> {
        let mut wanted: BTreeSet<&str> = BTreeSet::new();
        let named = |node: &&Node| names.iter().any(|name| node.drv_path.ends_with(&format!("-{name}.drv")));
        let mut open: Vec<&str> =
            self.nodes.iter().filter(named).map(|node| node.drv_path.as_str()).collect();
        while let Some(drv) = open.pop() {
            if wanted.insert(drv) {
                let node = self.nodes.iter().find(|node| node.drv_path == drv).unwrap();
                open.extend(node.inputs.iter().map(String::as_str));
            }
        }
        self.nodes.iter().filter(|node| wanted.contains(node.drv_path.as_str())).cloned().collect()
    }

    async fn evaluate(&self, names: &BTreeSet<String>) -> i64 {
        let mut ingest = self.press.farm.begin("main").await;
        ingest.add(self.closure(names)).await.unwrap();
        ingest.complete(&[]).await.unwrap()
    }

    /// All evaluations but pinned ones, and the last, are past their retention.
    async fn retain(&self) {
        let farm = &self.press.farm;
        farm.database.execute("UPDATE ci.evaluation SET created_at = created_at - interval '1 year'").await;
        let lead = farm.lead().await;
        while janitor::retain(&farm.operator, lead.generation).await.unwrap() > 0 {
            farm.settle().await;
        }
    }

    async fn control(&self) -> Arc<Signer> {
        Signer::connect(&self.press.signer_settings().await).await.unwrap()
    }

    async fn sweep(&self) -> Swept {
        self.control().await.sweep("test", &NOW, None, |_| {}).await.unwrap().expect("nobody else sweeps")
    }

    /// A client with an empty store that trusts our key alone.
    fn client(&self) -> Nix {
        Nix::start_with(Version::New, &self.gateway.settings(&self.press))
    }
}

fn expressions(count: usize) -> String {
    let mut text = String::from("rec {\n");
    for n in 0..count {
        let inputs: BTreeSet<usize> = [1, 3, 7]
            .into_iter()
            .filter(|step| (n * step) % 4 != 1)
            .filter_map(|step| n.checked_sub(step))
            .collect();
        let inputs: Vec<String> = inputs.iter().map(|input| format!("n{input}")).collect();
        let _ = writeln!(
            text,
            "n{n} = derivation {{ system = builtins.currentSystem; builder = \"${{bb}}/busybox\"; name = \"n{n}\"; \
             inputs = [ {} ]; args = [ \"sh\" \"-euc\" \"echo $name $inputs >$out\" ]; }};",
            inputs.join(" ")
        );
    }
    text + "}"
}

fn output_of(node: &Node) -> String {
    node.outputs[0].1.clone().unwrap()
}

/// Evaluations of overlapping closures, some of which are kept: those are whole for a client, of the others nothing is left.
async fn keeps_what_is_kept(server: Server, derivations: usize, evaluations: usize) {
    let works = Works::new(server, derivations).await;
    let mut kept: BTreeMap<String, Node> = BTreeMap::new();
    for round in 0..evaluations {
        // Two tops each, spread over all that are not among the last: those only the first evaluation has.
        let tops = [round * 7 % (derivations - 10), round * 11 % (derivations - 10)];
        let names: BTreeSet<String> = tops.iter().map(|top| format!("n{top}")).collect();
        let id = works.evaluate(&names).await;
        if round % 20 == 3 || round + 1 == evaluations {
            evaluations::pin(&works.press.farm.frontend, id, true).await.unwrap();
            kept.extend(works.closure(&names).into_iter().map(|node| (output_of(&node), node)));
        }
    }
    works.press.farm.settle().await;
    works.retain().await;

    let before = works.control().await.would_sweep("test", &NOW).await.unwrap().expect("nobody sweeps");
    let objects = works.press.keys("").await;
    let swept = works.sweep().await;
    let dead = works.nodes.len() - kept.len();
    assert!(dead >= 10, "something is to be removed");
    assert_eq!((swept.paths.count, before.waiting.count), (dead as u64, dead as u64));
    assert_eq!(swept.paths.bytes, before.waiting.bytes);

    let infos = works.press.check().await;
    let sources = infos.keys().filter(|path| !works.nodes.iter().any(|node| output_of(node) == **path));
    assert_eq!(sources.count(), 1, "busybox, which the kept derivations name");
    let left: BTreeSet<String> = works.press.keys("").await.into_iter().collect();
    for node in &works.nodes {
        let (path, drv) =
            (store_path::parse(&output_of(node)).unwrap(), store_path::parse(&node.drv_path).unwrap());
        let is_kept = kept.contains_key(&output_of(node));
        for key in [layout::narinfo(&path), layout::listing(&path), layout::log(&drv)] {
            assert_eq!(left.contains(&key), is_kept, "{key}");
        }
    }
    assert!(left.len() < objects.len());
    let nars = left.iter().filter(|key| key.starts_with("nar/")).count();
    assert_eq!(nars, infos.len(), "no NAR without a narinfo");

    let client = works.client();
    let paths: Vec<&str> = kept.keys().map(String::as_str).collect();
    client.run("nix-store", &[&["--realise"], &paths[..]].concat());
    client.run("nix-store", &["--verify", "--check-contents"]);
    let gone = works.nodes.iter().map(output_of).find(|path| !kept.contains_key(path)).unwrap();
    assert!(!client.command("nix-store").args(["--realise", &gone]).status().unwrap().success());
    works.signer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_hundred_overlapping_evaluations_those_that_are_kept_are_whole() {
    keeps_what_is_kept(Server::InProcess, 40, 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_holds_for_another_server() {
    keeps_what_is_kept(Server::Versitygw, 16, 12).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_swept_is_built_and_published_again_when_it_is_wanted() {
    let works = Works::new(Server::InProcess, 2).await;
    works.evaluate(&BTreeSet::from(["n0".to_owned()])).await;
    works.retain().await;
    works.sweep().await;
    works.press.farm.database.execute("UPDATE ci.condemned SET buried_at = '-infinity'").await;
    works.evaluate(&BTreeSet::from(["n1".to_owned()])).await;
    works.press.farm.settle().await;
    let nix = Nix::start(Version::Old);
    let drvs = nix.instantiate_all(&expressions(2));
    nix.run("nix-store", &["--realise", &drvs["n1"]]);
    let published = works.press.publish_all(&nix, &works.press.uploader(&[&works.signer.url])).await;
    assert_eq!(published, [drvs["n1"].clone()]);
    works.press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leftovers_go_and_what_is_not_ours_stays() {
    for server in Server::FIT {
        let works = Works::new(server, 1).await;
        let (hash, stranger) = ("7h7qgvs4kgzsn8a6rb273saxyqh4jxlz", Sha256::of("x").nix32());
        let own = output_of(&works.nodes[0]);
        let own = store_path::hash_part(&store_path::parse(&own).unwrap());
        let gone = [
            format!("nar/{hash}-{stranger}.nar.zst"),
            format!("listings/{hash}-1.ls"),
            format!("{hash}.ls"),
            format!("log/{hash}-a.drv"),
            format!("log-attempts/{hash}-a.drv.1"),
            format!("build-trace-v2/{hash}-a.drv/out.doi"),
            format!("realisations/sha256:{}!out.doi", "0f".repeat(32)),
            "probe/0".to_owned(),
        ];
        // A narinfo of which the database knows nothing, and what it may name: to be adopted by a resync.
        let lost = "0c5b8vw40dy178xlpddw65q9gf1h2186";
        // A job makes that path: whatever is there of it may be needed in a moment.
        let stays = [
            format!("{lost}.narinfo"),
            format!("nar/{lost}-{stranger}.nar.zst"),
            format!("listings/{lost}-1.ls"),
            format!("{lost}.ls"),
            format!("nar/{own}-{stranger}.nar.zst"),
            "index.html".to_owned(),
            "debuginfo/0f".to_owned(),
        ];
        let realisation = format!("{{\"outPath\":\"{hash}-a\"}}");
        for key in gone.iter().chain(&stays) {
            let put = works.press.s3.client().put_object().bucket(&works.press.s3.bucket).key(key);
            put.body(realisation.clone().into_bytes().into()).send().await.unwrap();
        }
        let swept = works.sweep().await;
        assert_eq!((swept.paths.count, swept.unknown.count), (0, 1), "{swept:?}");
        let left = works.press.keys("").await;
        assert!(gone.iter().all(|key| !left.contains(key)), "{server:?}: {left:?}");
        assert!(stays.iter().all(|key| left.contains(key)), "{server:?}: {left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_young_is_left_alone() {
    let works = Works::new(Server::InProcess, 1).await;
    works.press.farm.database.execute("DELETE FROM ci.output; DELETE FROM ci.aterm").await;
    let before = works.press.keys("").await;
    let day = Keeping { grace: Duration::from_secs(86_400), ..NOW };
    let swept = works.control().await.sweep("test", &day, None, |_| {}).await.unwrap().unwrap();
    assert_eq!((swept.removed().count, works.press.keys("").await), (0, before));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_sweep_that_broke_off_had_forgotten_the_next_one_removes() {
    let works = Works::new(Server::InProcess, 1).await;
    let own = output_of(&works.nodes[0]);
    works.press.farm.database
        .execute(
            "WITH gone AS (DELETE FROM ci.canonical WHERE path LIKE '%-n0' RETURNING *)
             INSERT INTO ci.condemned SELECT path, nar_hash, attempt, file_size FROM gone; DELETE FROM ci.output",
        )
        .await;
    assert_eq!(works.sweep().await.paths.count, 1);
    let hash = store_path::hash_part(&store_path::parse(&own).unwrap());
    let left = works.press.keys("").await;
    assert!(!left.iter().any(|key| key.contains(&hash) && !key.starts_with("log")), "{left:?}");
}

/// The bucket came to hold a narinfo that nobody here has written, such as of a database before this one.
#[tokio::test(flavor = "multi_thread")]
async fn a_path_of_which_the_bucket_says_otherwise_fails_with_its_remedy() {
    let press = Press::new(Server::InProcess).await;
    let signer = press.start_signer().await;
    let nix = Nix::start(Version::Old);
    let drvs = nix.instantiate_all(&expressions(1));
    nix.run("nix-store", &["--realise", &drvs["n0"]]);
    press.evaluate(&nix, &signer, &drvs["n0"]).await;
    let claim = press.claim().await;
    let path = claim_output(&nix, &drvs["n0"]);
    let put = press.s3.client().put_object().bucket(&press.s3.bucket);
    let put = put.key(layout::narinfo(&store_path::parse(&path).unwrap()));
    put.body(format!("StorePath: {path}\n").into_bytes().into()).send().await.unwrap();

    let uploader = press.uploader(&[&signer.url]);
    let ending = press.publish(&nix, &uploader, &claim).await.unwrap();
    assert_eq!(ending, Ending::Stale);
    let job = claim.fence.job;
    assert_eq!(press.farm.state(job).await, "failed");
    let error: String = press.farm.value("SELECT error FROM ci.job WHERE id = $1", job).await;
    assert!(error.contains(&format!("`harmonia-ci cache forget {path}`")), "{error}");
    press.farm.assert_sound().await;

    // As it says.
    let control = Signer::connect(&press.signer_settings().await).await.unwrap();
    control.forget(&[path], None).await.unwrap();
    assert!(people::rebuild(&press.farm.frontend, job).await.unwrap());
    press.farm.settle().await;
    assert_eq!(press.publish_all(&nix, &uploader).await, [drvs["n0"].clone()]);
    press.check().await;
    signer.stop().await;
}

fn claim_output(nix: &Nix, drv: &str) -> String {
    nix.run("nix-store", &["--query", "--outputs", drv]).trim().to_owned()
}
