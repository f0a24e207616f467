//! How an evaluation writes its graph: in topologically closed chunks, while it still runs.

use std::collections::HashMap;

use nix_derivation::Derivation;
use sqlx::Row;
use thiserror::Error as ThisError;

use crate::people::Ending;
use crate::{Db, Error, Result};

/// A chunk is one short transaction: so many derivations at most,
const CHUNK_NODES: usize = 2_000;
/// or so many bytes of their texts, whichever comes first.
const CHUNK_BYTES: usize = 8 << 20;
/// The longest name of a system.
const SYSTEM_BYTES: usize = 100;
/// The longest list of features, as a chunk has it.
const FEATURES_BYTES: usize = 1000;

/// A derivation of the graph.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// Its path.
    pub drv_path: String,
    /// The system it is built on.
    pub system: String,
    /// The features its node must have.
    pub features: Vec<String>,
    /// A substituter has all its outputs: no job.
    pub cached: bool,
    /// Its text. What is cached can do without, but nothing above it can be signed then: proofs need the text of every
    /// derivation below.
    pub aterm: Option<Vec<u8>>,
    /// Names and, where known before the build, paths of its outputs.
    pub outputs: Vec<(String, Option<String>)>,
    /// Paths of the derivations it needs.
    pub inputs: Vec<String>,
    /// Paths it needs that no derivation makes. They are not stored: signers take them before the derivation is added.
    pub sources: Vec<String>,
}

/// Why a derivation's text is not taken.
#[derive(Debug, ThisError)]
pub enum NodeError {
    /// The path does not end in `.drv` or has no name.
    #[error("{0} is not the path of a derivation")]
    NotADerivation(String),
    /// It cannot be parsed.
    #[error("{path} is not a derivation's text")]
    Parse {
        /// Whose text.
        path: String,
        /// What is wrong with it.
        #[source]
        source: nix_derivation::Error,
    },
    /// The text belongs to another path.
    #[error("{claimed} does not name its text, whose path is {actual}: the file was changed or mixed up")]
    WrongPath {
        /// The path it came with.
        claimed: String,
        /// The path that its hash gives.
        actual: String,
    },
    /// No node could be like that.
    #[error(
        "{path} asks for a system of {system} bytes and features of {features}: a system has 1 to {SYSTEM_BYTES} bytes, and \
         features have {FEATURES_BYTES} at most together"
    )]
    Demands {
        /// Whose demands.
        path: String,
        /// The length of the system's name.
        system: usize,
        /// The length of the features' names, a blank between two of them.
        features: usize,
    },
}

impl Node {
    /// Reads a `.drv` file. Its path must follow from its text: an honest mistake is found here, a dishonest one by the
    /// signer, who proves it again.
    pub fn parse(drv_path: &str, aterm: Vec<u8>) -> std::result::Result<Self, NodeError> {
        let name = drv_path
            .rsplit('/')
            .next()
            .and_then(|base| base.get(33..))
            .and_then(|name| name.strip_suffix(".drv"))
            .ok_or_else(|| NodeError::NotADerivation(drv_path.to_owned()))?;
        let parse = |source| NodeError::Parse { path: drv_path.to_owned(), source };
        let derivation = Derivation::from_aterm_bytes(&aterm, name).map_err(parse)?;
        let actual = derivation.drv_path().map_err(parse)?.to_absolute_path();
        if actual != drv_path {
            return Err(NodeError::WrongPath { claimed: drv_path.to_owned(), actual });
        }
        let outputs = derivation.outputs().iter().map(|(name, output)| {
            let path =
                output.path(derivation.name(), name).ok().flatten().map(|path| path.to_absolute_path());
            (name.to_string(), path)
        });
        let outputs = outputs.collect();
        let inputs = derivation.input_derivations().keys().map(|path| path.to_absolute_path()).collect();
        let sources = derivation.input_sources().iter().map(|path| path.to_absolute_path()).collect();
        let features = required_features(&derivation);
        let system = derivation.system().to_owned();
        let (long, longs) = (system.len(), features.join(" ").len());
        if !(1..=SYSTEM_BYTES).contains(&long) || longs > FEATURES_BYTES {
            return Err(NodeError::Demands { path: drv_path.to_owned(), system: long, features: longs });
        }
        Ok(Self {
            drv_path: drv_path.to_owned(),
            system,
            features,
            cached: false,
            aterm: Some(aterm),
            outputs,
            inputs,
            sources,
        })
    }
}

/// From the environment, or from structured attributes. The crate answers this for validated derivations only, and
/// validation needs the hashes of all inputs.
fn required_features(derivation: &Derivation) -> Vec<String> {
    const NAME: &str = "requiredSystemFeatures";
    let plain = derivation.environment().get(NAME).map(|value| String::from_utf8_lossy(value));
    let plain = plain.iter().flat_map(|value| value.split_ascii_whitespace());
    let structured =
        derivation.structured_attrs().and_then(|attrs| attrs.get(NAME)).and_then(|value| value.as_array());
    let structured = structured.into_iter().flatten().filter_map(|value| value.as_str());
    plain.chain(structured).map(str::to_owned).collect()
}

/// What a substituter or an uploaded source says a path is.
#[derive(Debug, Clone)]
pub struct KnownPath {
    /// The store path.
    pub path: String,
    /// SHA-256 of its NAR.
    pub nar_hash: Vec<u8>,
    /// Bytes of its NAR.
    pub nar_size: i64,
    /// Store paths it refers to.
    pub references: Vec<String>,
}

/// An attribute and what came of it.
#[derive(Debug, Clone)]
pub struct Attr {
    /// Its path, `checks.x86_64-linux.unit` for one.
    pub name: String,
    /// The derivation it evaluated to,
    pub drv_path: Option<String>,
    /// or Nix's own words.
    pub error: Option<String>,
}

/// Records what paths are; the first word stands. Answers how many were new.
pub async fn record_paths(db: &Db, paths: &[KnownPath]) -> Result<i32> {
    let query = sqlx::query("SELECT ci.record_paths($1, $2, $3, $4)")
        .bind(paths.iter().map(|p| p.path.clone()).collect::<Vec<_>>())
        .bind(paths.iter().map(|p| p.nar_hash.clone()).collect::<Vec<_>>())
        .bind(paths.iter().map(|p| p.nar_size).collect::<Vec<_>>())
        .bind(paths.iter().map(|p| p.references.join(" ")).collect::<Vec<_>>());
    db.value(query).await
}

/// An evaluation that is being written.
#[derive(Debug)]
pub struct Ingest {
    db: Db,
    /// The evaluation's id.
    pub evaluation: i64,
    index: HashMap<String, usize>,
    placed: Vec<Placed>,
}

#[derive(Debug)]
struct Placed {
    id: i64,
    depth: i32,
    /// As the database has it.
    height: i32,
    inputs: Vec<usize>,
}

impl Ingest {
    /// Begins an evaluation of a project.
    pub async fn begin(
        db: &Db,
        project: &str,
        source: &str,
        branch: Option<&str>,
        commit: Option<&str>,
        untrusted: bool,
    ) -> Result<Self> {
        let query = sqlx::query("SELECT ci.create_evaluation($1, $2, $3, $4, $5)").bind(project).bind(source);
        let evaluation = db.value(query.bind(branch).bind(commit).bind(i16::from(untrusted))).await?;
        Ok(Self::of(db, evaluation))
    }

    /// Goes on with one that was claimed. What an earlier attempt at it added is known.
    pub fn of(db: &Db, evaluation: i64) -> Self {
        Self { db: db.clone(), evaluation, index: HashMap::new(), placed: Vec::new() }
    }

    /// A secret that makes signers take this evaluation's sources. The last one counts.
    pub async fn token(&self) -> Result<String> {
        self.db.value(sqlx::query("SELECT ci.evaluation_token($1)").bind(self.evaluation)).await
    }

    /// The job of a derivation that was added.
    pub fn job(&self, drv_path: &str) -> Option<i64> {
        self.index.get(drv_path).map(|&at| self.placed[at].id)
    }

    /// Wants derivations that the queue knows with all below them. Answers the others, which have to be added.
    pub async fn want_known(&mut self, drv_paths: Vec<String>) -> Result<Vec<String>> {
        let query = sqlx::query("SELECT drv_path, job_id, depth, height FROM ci.known_closure($1)");
        let mut chunk = Chunk::default();
        for row in self.db.rows(query.bind(&drv_paths)).await? {
            let drv_path: String = row.try_get(0)?;
            if self.index.contains_key(&drv_path) {
                continue;
            }
            let (id, depth, height) = (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
            self.index.insert(drv_path, self.placed.len());
            chunk.known.push(self.placed.len());
            self.placed.push(Placed { id, depth, height, inputs: Vec::new() });
            if chunk.is_full() {
                self.send(std::mem::take(&mut chunk)).await?;
            }
        }
        self.send(chunk).await?;
        Ok(drv_paths.into_iter().filter(|path| !self.index.contains_key(path)).collect())
    }

    /// Adds derivations. Inputs must be among them or have been added before. What the database knows is not sent again.
    pub async fn add(&mut self, nodes: Vec<Node>) -> Result<()> {
        let order = self.sort(&nodes)?;
        let known = self.ask_known(&nodes).await?;
        let heights = heights_within(&nodes, &order);
        let mut nodes: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
        let mut chunk = Chunk::default();
        for at in order {
            let Some(node) = nodes[at].take() else { continue };
            if let Some(&at) = self.index.get(&node.drv_path) {
                self.link(at, &node.inputs);
                continue;
            }
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for input in &node.inputs {
                inputs.push(*self.index.get(input).ok_or_else(|| dangling(&node.drv_path, input))?);
            }
            let below = inputs.iter().map(|&input| self.placed[input].depth + 1).max().unwrap_or(0);
            let (id, depth, height) = known.get(&node.drv_path).copied().unwrap_or((0, below, heights[at]));
            self.index.insert(node.drv_path.clone(), self.placed.len());
            self.placed.push(Placed { id, depth, height, inputs });
            match id {
                0 => chunk.send(self.placed.len() - 1, node),
                _ => chunk.known.push(self.placed.len() - 1),
            }
            if chunk.is_full() {
                self.send(std::mem::take(&mut chunk)).await?;
            }
        }
        self.send(chunk).await
    }

    /// What was wanted as known came without its inputs; a longer chain above it is longer for them too.
    fn link(&mut self, at: usize, inputs: &[String]) {
        if self.placed[at].inputs.is_empty() {
            let below = inputs.iter().filter_map(|input| self.index.get(input).copied());
            self.placed[at].inputs = below.filter(|&input| input < at).collect();
        }
    }

    /// The graph is whole. Chains that grew since their derivations were sent are raised.
    pub async fn complete(mut self, attrs: &[Attr]) -> Result<i64> {
        let raised = self.raise_heights();
        let (jobs, heights): (Vec<i64>, Vec<i32>) = raised.into_iter().unzip();
        let query = sqlx::query("SELECT ci.complete_evaluation($1, $2, $3, $4, $5, $6)")
            .bind(self.evaluation)
            .bind(attrs.iter().map(|a| a.name.as_str()).collect::<Vec<_>>())
            .bind(
                attrs
                    .iter()
                    .map(|a| a.drv_path.as_deref().and_then(|path| self.job(path)))
                    .collect::<Vec<_>>(),
            )
            .bind(attrs.iter().map(|a| a.error.as_deref()).collect::<Vec<_>>())
            .bind(jobs)
            .bind(heights);
        self.db.row(query).await?;
        Ok(self.evaluation)
    }

    /// It cannot be finished: what only it wanted is cancelled.
    pub async fn abort(self, error: &str) -> Result<()> {
        crate::people::end_evaluation(&self.db, self.evaluation, Ending::Aborted, Some(error)).await?;
        Ok(())
    }

    /// Inputs before what needs them; a cycle or an input that is nowhere is an error.
    fn sort(&self, nodes: &[Node]) -> Result<Vec<usize>> {
        let here: HashMap<&str, usize> =
            nodes.iter().enumerate().map(|(at, node)| (node.drv_path.as_str(), at)).collect();
        let mut order = Vec::with_capacity(nodes.len());
        let mut waits = vec![0_usize; nodes.len()];
        let mut above = vec![Vec::new(); nodes.len()];
        for (at, node) in nodes.iter().enumerate() {
            for input in &node.inputs {
                match here.get(input.as_str()) {
                    Some(&below) => {
                        waits[at] += 1;
                        above[below].push(at);
                    }
                    None if self.index.contains_key(input) => {}
                    None => return Err(dangling(&node.drv_path, input)),
                }
            }
        }
        order.extend((0..nodes.len()).filter(|&at| waits[at] == 0));
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            next += 1;
            for &referrer in &above[at] {
                waits[referrer] -= 1;
                if waits[referrer] == 0 {
                    order.push(referrer);
                }
            }
        }
        match waits.iter().position(|&left| left > 0) {
            Some(at) => {
                Err(Error::Graph(format!("{} is, through its inputs, its own input", nodes[at].drv_path)))
            }
            None => Ok(order),
        }
    }

    async fn ask_known(&self, nodes: &[Node]) -> Result<HashMap<String, (i64, i32, i32)>> {
        let mut known = HashMap::new();
        for asked in nodes.chunks(20_000) {
            let paths: Vec<&str> = asked.iter().map(|node| node.drv_path.as_str()).collect();
            for row in self
                .db
                .rows(sqlx::query("SELECT drv_path, job_id, depth, height FROM ci.known($1)").bind(paths))
                .await?
            {
                known.insert(row.try_get(0)?, (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?));
            }
        }
        Ok(known)
    }

    async fn send(&mut self, chunk: Chunk) -> Result<()> {
        if chunk.fresh.is_empty() && chunk.known.is_empty() {
            return Ok(());
        }
        // Positions as ci.ingest counts them: the chunk's own from 1, then what is known.
        let mut position: HashMap<usize, i32> =
            (1..).zip(&chunk.fresh).map(|(n, (at, _))| (*at, n)).collect();
        let mut known = chunk.known.iter().map(|&at| self.placed[at].id).collect::<Vec<_>>();
        let (mut edge_of, mut edge_to) = (Vec::new(), Vec::new());
        let (mut output_of, mut output_names, mut output_paths) = (Vec::new(), Vec::new(), Vec::new());
        let count = i32::try_from(chunk.fresh.len()).unwrap_or(i32::MAX);
        for (n, (at, node)) in (1..).zip(&chunk.fresh) {
            for &input in &self.placed[*at].inputs {
                let to = *position.entry(input).or_insert_with(|| {
                    known.push(self.placed[input].id);
                    count + i32::try_from(known.len()).unwrap_or(i32::MAX)
                });
                edge_of.push(n);
                edge_to.push(to);
            }
            for (name, path) in &node.outputs {
                output_of.push(n);
                output_names.push(name.as_str());
                output_paths.push(path.as_deref());
            }
        }
        let fresh = || chunk.fresh.iter();
        let query =
            sqlx::query("SELECT ci.ingest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)")
                .bind(self.evaluation)
                .bind(fresh().map(|(_, node)| node.drv_path.as_str()).collect::<Vec<_>>())
                .bind(fresh().map(|(_, node)| node.system.as_str()).collect::<Vec<_>>())
                .bind(fresh().map(|(_, node)| node.features.join(" ")).collect::<Vec<_>>())
                .bind(fresh().map(|(_, node)| node.cached).collect::<Vec<_>>())
                .bind(fresh().map(|(at, _)| self.placed[*at].depth).collect::<Vec<_>>())
                .bind(fresh().map(|(at, _)| self.placed[*at].height).collect::<Vec<_>>())
                .bind(fresh().map(|(_, node)| node.aterm.as_deref()).collect::<Vec<_>>())
                .bind(output_of)
                .bind(output_names)
                .bind(output_paths)
                .bind(edge_of)
                .bind(edge_to)
                .bind(known);
        let ids: Vec<i64> = self.db.value(query).await?;
        for ((at, _), id) in chunk.fresh.iter().zip(ids) {
            self.placed[*at].id = id;
        }
        Ok(())
    }

    /// Heights over everything added; answers those that are more than was sent.
    fn raise_heights(&mut self) -> Vec<(i64, i32)> {
        let mut heights = vec![0; self.placed.len()];
        // Inputs were placed before what needs them, so one pass from the end sees every referrer first.
        for at in (0..self.placed.len()).rev() {
            for &input in &self.placed[at].inputs {
                heights[input] = heights[input].max(heights[at] + 1);
            }
        }
        let all = self.placed.iter().zip(&heights);
        all.filter(|(placed, height)| **height > placed.height)
            .map(|(placed, height)| (placed.id, *height))
            .collect()
    }
}

#[derive(Debug, Default)]
struct Chunk {
    fresh: Vec<(usize, Node)>,
    known: Vec<usize>,
    bytes: usize,
}

impl Chunk {
    fn send(&mut self, at: usize, node: Node) {
        self.bytes += node.aterm.as_ref().map_or(0, Vec::len);
        self.fresh.push((at, node));
    }

    fn is_full(&self) -> bool {
        self.fresh.len() >= CHUNK_NODES || self.bytes >= CHUNK_BYTES || self.known.len() >= 10 * CHUNK_NODES
    }
}

fn dangling(drv_path: &str, input: &str) -> Error {
    Error::Graph(format!("{drv_path} needs {input}, which was not added: add inputs first"))
}

fn heights_within(nodes: &[Node], order: &[usize]) -> Vec<i32> {
    let here: HashMap<&str, usize> =
        nodes.iter().enumerate().map(|(at, node)| (node.drv_path.as_str(), at)).collect();
    let mut heights = vec![0; nodes.len()];
    for &at in order.iter().rev() {
        for &input in nodes[at].inputs.iter().filter_map(|input| here.get(input.as_str())) {
            heights[input] = heights[input].max(heights[at] + 1);
        }
    }
    heights
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const PATH: &str = "/nix/store/vbb1lilif8558y8qx1m16hz3yn7zpax5-above.drv";
    const TEXT: &[u8] =
        include_bytes!("../../nix/tests/data/derivations/vbb1lilif8558y8qx1m16hz3yn7zpax5-above.drv");

    #[test]
    fn a_text_is_read_under_its_own_path() {
        assert_eq!(Node::parse(PATH, TEXT.to_vec()).unwrap().system, "x86_64-linux");
    }

    proptest! {
        #[test]
        fn a_text_under_any_other_path_is_refused(path in "(/nix/store/)?.{0,50}(\\.drv)?") {
            prop_assert!(Node::parse(&path, TEXT.to_vec()).is_err());
        }

        #[test]
        fn a_text_with_other_bytes_is_refused(edits in vec((0..TEXT.len(), any::<u8>()), 1..5)) {
            let mut text = TEXT.to_vec();
            edits.into_iter().for_each(|(at, byte)| text[at] = byte);
            prop_assume!(text != TEXT);
            prop_assert!(Node::parse(PATH, text).is_err());
        }
    }
}
