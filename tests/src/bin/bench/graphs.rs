//! What is queued: the real nixpkgs, and synthetic graphs of any size.

use std::collections::HashMap;
use std::sync::Arc;

use harmonia_queue::builder::Claim;
use harmonia_queue::ingest::{KnownPath, Node, record_paths};
use harmonia_queue::people::{self, Project};
use harmonia_queue::signer::Output;
use harmonia_tests::graph::Graph;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use sha2::{Digest, Sha256};

use crate::farm::{Farm, Outputs, project};

/// Systems and features of the five classes, all of which the pool's nodes fit.
pub const CLASSES: [(&str, &[&str]); 5] = [
    ("x86_64-linux", &[]),
    ("x86_64-linux", &["big-parallel"]),
    ("i686-linux", &[]),
    ("builtin", &[]),
    ("x86_64-linux", &["kvm"]),
];
/// Features of a pool that fits them.
pub const FEATURES: &[&str] = &["benchmark", "big-parallel", "kvm", "nixos-test"];
/// Projects that share the farm.
pub const PROJECTS: usize = 20;
/// Derivations that are done before anything begins: every synthetic job has three of them as inputs.
const SOURCES: usize = 300;

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// A store path that follows from its seed.
fn store_path(seed: &str, name: &str) -> String {
    const DIGITS: &[u8; 32] = b"0123456789abcdfghijklmnpqrsvwxyz";
    let hash: String = digest(seed).iter().map(|byte| char::from(DIGITS[usize::from(byte % 32)])).collect();
    format!("/nix/store/{hash}-{name}")
}

fn output_path(drv_path: &str, output: &str) -> String {
    let name = drv_path["/nix/store/".len() + 33..].trim_end_matches(".drv");
    let name = if output == "out" { name.to_owned() } else { format!("{name}-{output}") };
    store_path(&format!("{drv_path}!{output}"), &name)
}

fn output(drv_path: &str, name: &str, references: Vec<String>) -> Output {
    let path = output_path(drv_path, name);
    let hash = digest(&path).to_vec();
    let (nar_hash, file_hash) = (hash.clone(), hash);
    Output {
        name: name.to_owned(),
        path,
        nar_hash,
        nar_size: 123_456,
        references,
        file_hash,
        file_size: 34_567,
        content_address: None,
        made_by: None,
    }
}

// ---------------------------------------------------------------------------------------------- synthetic

/// A synthetic derivation with one output.
pub fn job(name: &str, class: usize, inputs: Vec<String>) -> Node {
    let drv_path = store_path(name, &format!("{name}.drv"));
    let (system, features) = CLASSES[class];
    let out = output_path(&drv_path, "out");
    let aterm = format!(
        "Derive([(\"out\",\"{out}\",\"\",\"\")],[],[],\"{system}\",\"/bin/sh\",[],[(\"out\",\"{out}\")])"
    );
    Node {
        system: system.to_owned(),
        features: features.iter().map(|&feature| feature.to_owned()).collect(),
        aterm: Some(aterm.into_bytes()),
        outputs: vec![("out".to_owned(), Some(out))],
        inputs,
        drv_path,
        cached: false,
        sources: Vec::new(),
    }
}

/// A synthetic derivation that a substituter has.
pub fn done(name: &str, class: usize) -> Node {
    Node { cached: true, ..job(name, class, Vec::new()) }
}

/// Jobs of which each needs the one before it.
pub async fn chain(farm: &Farm, project: &str, jobs: usize) {
    let mut nodes: Vec<Node> = Vec::with_capacity(jobs);
    for i in 0..jobs {
        let inputs = nodes.last().map(|below| below.drv_path.clone()).into_iter().collect();
        nodes.push(job(&format!("c{i}"), 0, inputs));
    }
    farm.evaluate(project, nodes).await;
}

/// What is known of a derivation's output that is done.
pub fn known(node: &Node, references: Vec<String>) -> KnownPath {
    let path = output_path(&node.drv_path, "out");
    KnownPath { nar_hash: digest(&path).to_vec(), nar_size: 123_456, references, path }
}

/// Done derivations for others to need. Each path refers to the first, as to a libc.
pub async fn sources(farm: &Farm) -> Vec<Node> {
    let nodes: Vec<Node> = (0..SOURCES).map(|n| done(&format!("source{n}"), 0)).collect();
    let libc = output_path(&nodes[0].drv_path, "out");
    let known: Vec<KnownPath> = nodes.iter().map(|node| known(node, vec![libc.clone()])).collect();
    record_paths(&farm.evaluator, &known).await.expect("record the sources");
    nodes
}

/// Three of the sources.
pub fn three(sources: &[Node], rng: &mut SmallRng) -> Vec<String> {
    let at = rng.random_range(0..sources.len() - 2);
    sources[at..at + 3].iter().map(|node| node.drv_path.clone()).collect()
}

/// So many ready jobs, spread over projects and classes, through the real ingest.
pub async fn independent(farm: &Farm, jobs: usize) {
    let sources = sources(farm).await;
    for n in 0..PROJECTS {
        let mut rng = SmallRng::seed_from_u64(n as u64);
        let fresh = (0..jobs / PROJECTS)
            .map(|i| job(&format!("p{n}x{i}"), i % CLASSES.len(), three(&sources, &mut rng)));
        let nodes = sources.iter().cloned().chain(fresh).collect();
        farm.evaluate(&project(n), nodes).await;
        farm.settle().await;
    }
}

/// A job, and so many that wait for nothing else.
pub async fn hub(farm: &Farm, project: &str, dependents: usize) {
    let hub = job("hub", 0, Vec::new());
    let waiting = |i: usize| job(&format!("h{i}"), i % CLASSES.len(), vec![hub.drv_path.clone()]);
    let nodes = (0..dependents).map(waiting).chain([hub.clone()]).collect();
    farm.evaluate(project, nodes).await;
    farm.settle().await;
}

/// Projects of these shares, each with more independent jobs than a day of 64 slots takes. Two hundred names: what is
/// known of a name says little about the next build of it.
pub async fn backlog(farm: &Farm, shares: &[i32]) {
    for (n, &shares) in shares.iter().enumerate() {
        let name = project(n);
        people::put_project(&farm.operator, &Project { shares, ..Project::new(&name) })
            .await
            .expect("make a project");
        let jobs = (0..26_000).map(|i| job(&format!("owner{n}name{}-{i}", i % 200), 0, Vec::new()));
        farm.evaluate(&name, jobs.collect()).await;
        farm.settle().await;
    }
}

/// Whose job of [`backlog`] it is.
pub fn backlog_owner(drv_path: &str) -> usize {
    let digit = drv_path.split("-owner").nth(1).and_then(|rest| rest.chars().next()?.to_digit(10));
    digit.expect("a job of the backlog") as usize
}

/// So many jobs that wait for one that nobody here can build.
pub async fn blocked(farm: &Farm, jobs: usize) {
    for n in 0..PROJECTS {
        let gate = Node { system: "riscv64-linux".to_owned(), ..job("gate", 0, Vec::new()) };
        let waiting = |i: usize| job(&format!("b{n}x{i}"), i % CLASSES.len(), vec![gate.drv_path.clone()]);
        let nodes = (0..jobs / PROJECTS).map(waiting).chain([gate.clone()]).collect();
        farm.evaluate(&project(n), nodes).await;
        farm.settle().await;
    }
}

/// Layers of jobs, each with three inputs in the layer below it, one of them in its own column.
pub async fn layered(farm: &Farm, width: usize, layers: usize) {
    let width = width / PROJECTS;
    for n in 0..PROJECTS {
        let mut rng = SmallRng::seed_from_u64(n as u64);
        let mut below: Vec<String> = Vec::new();
        let mut nodes = Vec::with_capacity(width * layers);
        for layer in 0..layers {
            let mut here = Vec::with_capacity(width);
            for column in 0..width {
                let mut inputs = Vec::new();
                if let Some(own) = below.get(column) {
                    inputs.extend([own.clone()]);
                    inputs.extend((0..2).map(|_| below[rng.random_range(0..width)].clone()));
                    inputs.sort();
                    inputs.dedup();
                }
                let node = job(&format!("l{n}x{layer}x{column}"), column % CLASSES.len(), inputs);
                here.push(node.drv_path.clone());
                nodes.push(node);
            }
            below = here;
        }
        farm.evaluate(&project(n), nodes).await;
        farm.settle().await;
    }
}

/// What a build of a synthetic job made.
pub fn synthetic_outputs() -> Outputs {
    Arc::new(|claim: &Claim| vec![output(&claim.drv_path, "out", Vec::new())])
}

// ---------------------------------------------------------------------------------------------- nixpkgs

/// The nixpkgs graph as an evaluator sends it.
pub struct Nixpkgs {
    pub nodes: Vec<Node>,
    outputs: Arc<HashMap<String, Vec<Output>>>,
}

impl Nixpkgs {
    /// `texts`: with ATerms of the real sizes, else with short ones.
    pub fn read(texts: bool) -> Self {
        let graph = Graph::nixpkgs();
        let path = |at: usize| format!("/nix/store/{}", graph.nodes[at].drv);
        let mut outputs = HashMap::new();
        let mut nodes = Vec::with_capacity(graph.nodes.len());
        for (at, node) in graph.nodes.iter().enumerate() {
            let drv_path = path(at);
            // A fixed output refers to nothing; others keep two of what they were built with.
            let built =
                node.inputs.iter().filter(|(input, _)| !node.fixed && !graph.nodes[*input].fixed).take(2);
            let references: Vec<String> =
                built.map(|(input, names)| output_path(&path(*input), &names[0])).collect();
            let made = node.outputs.iter().map(|name| output(&drv_path, name, references.clone()));
            let made: Vec<Output> = made.collect();
            nodes.push(Node {
                system: node.system.clone(),
                features: node.features.clone(),
                cached: false,
                aterm: Some(aterm(&graph, at, &made, if texts { node.bytes } else { 0 })),
                outputs: made.iter().map(|output| (output.name.clone(), Some(output.path.clone()))).collect(),
                inputs: node.inputs.iter().map(|(input, _)| path(*input)).collect(),
                drv_path: drv_path.clone(),
                sources: Vec::new(),
            });
            outputs.insert(drv_path, made);
        }
        Self { nodes, outputs: Arc::new(outputs) }
    }

    /// What a build made.
    pub fn outputs(&self) -> Outputs {
        let outputs = self.outputs.clone();
        let synthetic = synthetic_outputs();
        Arc::new(move |claim: &Claim| {
            outputs.get(&claim.drv_path).cloned().unwrap_or_else(|| synthetic(claim))
        })
    }
}

/// A text of the given length, as compressible as a real one: the inputs' own paths, then an environment that repeats
/// itself between hashes.
fn aterm(graph: &Graph, at: usize, made: &[Output], bytes: usize) -> Vec<u8> {
    let node = &graph.nodes[at];
    let mut text = String::from("Derive([");
    for output in made {
        text.push_str(&format!("(\"{}\",\"{}\",\"\",\"\"),", output.name, output.path));
    }
    text.push_str("],[");
    if bytes > 0 {
        for (input, names) in &node.inputs {
            text.push_str(&format!(
                "(\"/nix/store/{}\",[\"{}\"]),",
                graph.nodes[*input].drv,
                names.join("\",\"")
            ));
        }
    }
    text.push_str(&format!("],[],\"{}\",\"/bin/bash\",[\"-e\",\"builder.sh\"],[", node.system));
    let mut n = 0;
    while text.len() < bytes {
        const NAMES: [&str; 6] = [
            "buildInputs",
            "configureFlags",
            "depsBuildBuild",
            "doCheck",
            "nativeBuildInputs",
            "propagatedBuildInputs",
        ];
        let value = store_path(&format!("{at} {n}"), "dependency-1.2.3");
        text.push_str(&format!(
            "(\"{}\",\"{value}\"),(\"strictDeps\",\"\"),(\"outputs\",\"out\"),",
            NAMES[n % 6]
        ));
        n += 1;
    }
    let mut text = text.into_bytes();
    if bytes > 0 {
        text.truncate(bytes.saturating_sub(2));
    }
    text.extend(b"])");
    text
}
