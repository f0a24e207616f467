//! The derivation graph of a real nixpkgs; `tests/data/README.md` describes the file.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

/// One derivation.
#[derive(Debug, Clone)]
pub struct Node {
    /// Base name of the `.drv` file, with its hash.
    pub drv: String,
    /// Platform, or `builtin`.
    pub system: String,
    /// Required system features.
    pub features: Vec<String>,
    /// Whether its output's hash is fixed.
    pub fixed: bool,
    /// Names of its outputs.
    pub outputs: Vec<String>,
    /// Number of input sources.
    pub n_srcs: usize,
    /// Length of the `.drv` file.
    pub bytes: usize,
    /// Indexes of its input derivations, with the outputs that it uses.
    pub inputs: Vec<(usize, Vec<String>)>,
}

/// Derivations by index.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Every derivation; inputs refer to positions.
    pub nodes: Vec<Node>,
}

impl Graph {
    /// The nixpkgs of `tests/data/`, read once.
    pub fn nixpkgs() -> Arc<Graph> {
        static NIXPKGS: OnceLock<Arc<Graph>> = OnceLock::new();
        NIXPKGS.get_or_init(|| Arc::new(Graph::read(&data().join("nixpkgs-dag.tsv.xz")))).clone()
    }

    fn read(path: &Path) -> Graph {
        let mut xz = Command::new("xz")
            .args(["--decompress", "--stdout"])
            .arg(path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("xz is installed");
        let text = BufReader::new(xz.stdout.take().expect("a pipe"));
        let lines = text.lines().map(|line| line.expect("text"));
        let nodes: Vec<Node> = lines
            .filter(|line| !line.starts_with('#'))
            .enumerate()
            .map(|(id, line)| Node::parse(id, &line))
            .collect();
        assert!(xz.wait().expect("xz ends").success(), "{} is damaged", path.display());
        Graph { nodes }
    }

    /// Indexes with every input before its dependents.
    pub fn topological(&self) -> Vec<usize> {
        let dependents = self.dependents();
        let mut missing: Vec<usize> = self.nodes.iter().map(|node| node.inputs.len()).collect();
        let mut order: Vec<usize> = (0..self.nodes.len()).filter(|&id| missing[id] == 0).collect();
        let mut next = 0;
        while let Some(&id) = order.get(next) {
            next += 1;
            for &dependent in &dependents[id] {
                missing[dependent] -= 1;
                if missing[dependent] == 0 {
                    order.push(dependent);
                }
            }
        }
        assert_eq!(order.len(), self.nodes.len(), "the graph has a cycle");
        order
    }

    /// For each node, who has it as an input.
    pub fn dependents(&self) -> Vec<Vec<usize>> {
        let mut dependents = vec![Vec::new(); self.nodes.len()];
        for (id, node) in self.nodes.iter().enumerate() {
            for (input, _) in &node.inputs {
                dependents[*input].push(id);
            }
        }
        dependents
    }

    /// For each node, the edges of the longest chain below it, down to a leaf.
    pub fn depth(&self) -> Vec<u32> {
        let mut depth = vec![0; self.nodes.len()];
        for id in self.topological() {
            depth[id] = self.nodes[id].inputs.iter().map(|(input, _)| depth[*input] + 1).max().unwrap_or(0);
        }
        depth
    }

    /// For each node, the edges of the longest chain above it, up to a root.
    pub fn height(&self) -> Vec<u32> {
        let mut height = vec![0; self.nodes.len()];
        for id in self.topological().into_iter().rev() {
            for (input, _) in &self.nodes[id].inputs {
                height[*input] = height[*input].max(height[id] + 1);
            }
        }
        height
    }

    /// Derivations that nothing depends on.
    pub fn roots(&self) -> Vec<usize> {
        let dependents = self.dependents();
        (0..self.nodes.len()).filter(|&id| dependents[id].is_empty()).collect()
    }

    /// The part of the graph below some nodes, with fresh indexes in topological order.
    pub fn closure(&self, tops: &[usize]) -> Graph {
        let mut wanted = vec![false; self.nodes.len()];
        let mut open = tops.to_vec();
        while let Some(id) = open.pop() {
            if !std::mem::replace(&mut wanted[id], true) {
                open.extend(self.nodes[id].inputs.iter().map(|(input, _)| *input));
            }
        }
        let order: Vec<usize> = self.topological().into_iter().filter(|&id| wanted[id]).collect();
        let mut fresh = vec![usize::MAX; self.nodes.len()];
        for (new, &old) in order.iter().enumerate() {
            fresh[old] = new;
        }
        let mut nodes: Vec<Node> = order.iter().map(|&id| self.nodes[id].clone()).collect();
        for (input, _) in nodes.iter_mut().flat_map(|node| &mut node.inputs) {
            *input = fresh[*input];
        }
        Graph { nodes }
    }
}

impl Node {
    fn parse(id: usize, line: &str) -> Node {
        let fields: Vec<&str> = line.split('\t').collect();
        let [number, drv, system, features, fixed, outputs, n_srcs, bytes, inputs] = fields[..] else {
            panic!("line {id} has {} fields", fields.len());
        };
        assert_eq!(number.parse(), Ok(id), "lines are numbered in order");
        Node {
            drv: drv.to_owned(),
            system: system.to_owned(),
            features: list(features, '+').map(str::to_owned).collect(),
            fixed: fixed == "1",
            outputs: list(outputs, '+').map(str::to_owned).collect(),
            n_srcs: n_srcs.parse().expect("a number of sources"),
            bytes: bytes.parse().expect("a length"),
            inputs: list(inputs, ',').map(parse_input).collect(),
        }
    }
}

fn parse_input(text: &str) -> (usize, Vec<String>) {
    let (id, outputs) = text.split_once(':').expect("an input and its outputs");
    (id.parse().expect("an index"), list(outputs, '+').map(str::to_owned).collect())
}

fn list(text: &str, separator: char) -> impl Iterator<Item = &str> {
    text.split(separator).filter(|item| !item.is_empty())
}

/// The directory of the test data.
pub fn data() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/data"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nixpkgs_has_the_known_shape() {
        let graph = Graph::nixpkgs();
        let dependents = graph.dependents();
        let depth = graph.depth();
        assert_eq!(graph.nodes.len(), 61_427);
        assert_eq!(graph.nodes.iter().map(|node| node.inputs.len()).sum::<usize>(), 426_699);
        assert_eq!(graph.roots().len(), 7_826);
        assert_eq!(depth.iter().filter(|&&depth| depth == 0).count(), 95);
        assert_eq!(depth.iter().max(), graph.height().iter().max());
        assert_eq!(dependents.iter().map(Vec::len).max(), Some(59_360));
        assert_eq!(graph.nodes.iter().map(|node| node.inputs.len()).max(), Some(3_501));
    }

    #[test]
    fn a_closure_is_complete_and_ordered() {
        let graph = Graph::nixpkgs();
        let part = graph.closure(&graph.roots()[..3]);
        assert!(!part.nodes.is_empty() && part.nodes.len() < graph.nodes.len());
        for (id, node) in part.nodes.iter().enumerate() {
            assert!(node.inputs.iter().all(|(input, _)| *input < id));
        }
    }
}
