//! The database of a farm that has been in use for a while: a million jobs, half of them built within the last day.

use harmonia_queue::ingest::{Attr, Ingest, Node};

use crate::baseline::{Bench, phase};
use crate::farm::{Farm, project};
use crate::graphs::{self, FEATURES, PROJECTS};

/// Jobs that come through the real ingest, and how often each is copied: 940,000 together. Through the ingest all of them would
/// take longer than everything that is measured.
const ORIGINALS: usize = 20_000;
const COPIES: usize = 46;
/// Builds of the one evaluation that is looked at; a tenth of them are attributes.
const BUILDS: usize = 60_000;
const LAYERS: usize = 30;

/// Such a farm, its large evaluation, and the build at the top of that.
pub async fn load(bench: &Bench) -> (Farm, i64, i64) {
    let farm = Farm::of(bench.server.database().await);
    farm.furnish(PROJECTS, Some(FEATURES)).await;
    graphs::independent(&farm, ORIGINALS).await;
    let node = farm.session(&farm.builder(), "builder", 1).await;
    phase("copies of 20,000 jobs", farm.database.execute(&copies(node.id))).await;
    let (evaluation, build) = phase("an evaluation with 60,000 builds", large(&farm)).await;
    farm.tidy().await;
    (farm, evaluation, build)
}

/// Every row that a ready job has, once more for each copy. Every second copy has been built: it has an attempt and a record
/// of its output instead of a place in the line.
fn copies(session: i64) -> String {
    format!(
        "CREATE FUNCTION public.another(path text, k int) RETURNS text LANGUAGE sql IMMUTABLE AS
           $$ SELECT '/nix/store/' || translate(md5(path || k), 'e', 'z') || substr(path, 44) $$;
         CREATE UNLOGGED TABLE public.copy AS
         SELECT k, j.id AS original, j.id + k * s.step AS id, k % 2 = 0 AS built,
           ci.clock() - interval '1 day' * (1 - (j.id + k * s.step)::float8 / (({COPIES} + 1) * s.step)) AS ended_at
         FROM ci.job j CROSS JOIN generate_series(1, {COPIES}) k CROSS JOIN (SELECT max(id) AS step FROM ci.job) s
         WHERE j.state = 'open' ORDER BY k, j.id;
         ANALYZE public.copy;

         INSERT INTO ci.job (id, drv_path, class_id, depth, height, state, created_at, ended_at) OVERRIDING SYSTEM VALUE
         SELECT c.id, public.another(j.drv_path, c.k), j.class_id, j.depth, j.height, CASE WHEN c.built THEN 'succeeded' ELSE 'open' END::ci.job_state,
           j.created_at - interval '1 day', CASE WHEN c.built THEN c.ended_at END
         FROM public.copy c JOIN ci.job j ON j.id = c.original;
         SELECT setval(pg_get_serial_sequence('ci.job', 'id'), max(id)) FROM ci.job;
         INSERT INTO ci.aterm (job_id, text) SELECT c.id, a.text FROM public.copy c JOIN ci.aterm a ON a.job_id = c.original;
         INSERT INTO ci.job_input (referrer, input) SELECT c.id, i.input FROM public.copy c JOIN ci.job_input i ON i.referrer = c.original;
         INSERT INTO ci.output (job_id, name, path)
         SELECT c.id, o.name, public.another(o.path, c.k) FROM public.copy c JOIN ci.output o ON o.job_id = c.original;
         INSERT INTO ci.want (job_id, evaluation_id) SELECT c.id, w.evaluation_id FROM public.copy c JOIN ci.want w ON w.job_id = c.original;

         INSERT INTO ci.canonical (path, nar_hash, nar_size, file_hash, file_size, job_id, attempt, recorded_at)
         SELECT o.path, sha256(o.path::bytea), 123456, sha256(o.path::bytea), 34567, c.id, c.id, c.ended_at
         FROM public.copy c JOIN ci.output o ON o.job_id = c.id WHERE c.built;
         INSERT INTO ci.attempt (id, job_id, session_id, lane_id, claimed_at, ended_at, outcome)
         SELECT c.id, c.id, {session}, o.lane_id, c.ended_at - interval '1 minute', c.ended_at, 'succeeded'
         FROM public.copy c JOIN ci.offer o ON o.job_id = c.original WHERE c.built ORDER BY c.id;
         INSERT INTO ci.ready (job_id, class_id, estimate, since)
         SELECT c.id, r.class_id, r.estimate, r.since FROM public.copy c JOIN ci.ready r ON r.job_id = c.original WHERE NOT c.built;
         INSERT INTO ci.offer (project_id, lane_id, urgency, evaluation_id, shortness, job_id)
         SELECT o.project_id, o.lane_id, o.urgency, o.evaluation_id, o.shortness, c.id
         FROM public.copy c JOIN ci.offer o ON o.job_id = c.original WHERE NOT c.built;
         DROP TABLE public.copy"
    )
}

/// Thirty layers, through the real ingest.
async fn large(farm: &Farm) -> (i64, i64) {
    let mut ingest = Ingest::begin(&farm.evaluator, &project(0), "bench", Some("main"), None, false)
        .await
        .expect("begin an evaluation");
    let nodes = layered();
    let attrs: Vec<Attr> = nodes
        .iter()
        .step_by(10)
        .enumerate()
        .map(|(n, node)| Attr {
            name: format!("checks.x86_64-linux.n{n}"),
            drv_path: Some(node.drv_path.clone()),
            error: None,
        })
        .collect();
    let last = nodes.last().expect("a node").drv_path.clone();
    ingest.add(nodes).await.expect("ingest");
    let build = ingest.job(&last).expect("a job");
    let evaluation = ingest.complete(&attrs).await.expect("complete");
    farm.settle().await;
    (evaluation, build)
}

fn layered() -> Vec<Node> {
    let width = BUILDS / LAYERS;
    let mut nodes: Vec<Node> = Vec::with_capacity(BUILDS);
    for n in 0..BUILDS {
        let below = n.checked_sub(width).map(|at| nodes[at].drv_path.clone());
        nodes.push(graphs::job(&format!("layer{}x{}", n / width, n % width), 0, below.into_iter().collect()));
    }
    nodes
}
