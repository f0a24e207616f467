//! The seeds' own claim query, on tables of its own with the same graph, against ours.

use harmonia_queue::ingest::{KnownPath, Node, record_paths};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use sqlx::AssertSqlSafe;

use crate::baseline::{Bench, phase};
use crate::claim::Claimers;
use crate::farm::{Farm, project};
use crate::graphs::{CLASSES, FEATURES, PROJECTS, job, known};
use crate::measure::median;
use crate::report::Report;

const JOBS: usize = 100_000;
/// Mean number of inputs, as in nixpkgs.
const INPUTS: usize = 7;
/// Claims a round: one takes about a second.
const CLAIMS: usize = 3;
const ROUNDS: usize = 5;

const TABLES: &str = "
    CREATE SCHEMA seed; SET search_path = seed;
    CREATE TABLE projects (id int PRIMARY KEY, scheduling_shares int NOT NULL DEFAULT 100, consumed_seconds float8 NOT NULL DEFAULT 0);
    CREATE TABLE derivations (drv_path text PRIMARY KEY, system text NOT NULL, required_features text[] NOT NULL);
    CREATE TABLE derivation_inputs (referrer text NOT NULL, input_drv text NOT NULL, PRIMARY KEY (referrer, input_drv));
    CREATE TABLE build_jobs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, drv_path text NOT NULL UNIQUE, project_id int,
        status text NOT NULL, priority int NOT NULL DEFAULT 0, created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        claimed_by text, claimed_at timestamptz);
    INSERT INTO projects SELECT id FROM ci.project;
    INSERT INTO derivations SELECT j.drv_path, c.system, c.features FROM ci.job j JOIN ci.class c ON c.id = j.class_id;
    INSERT INTO derivation_inputs SELECT r.drv_path, i.drv_path FROM ci.job_input e JOIN ci.job r ON r.id = e.referrer JOIN ci.job i ON i.id = e.input;
    INSERT INTO build_jobs (drv_path, project_id, status)
    SELECT j.drv_path, (SELECT min(e.project_id) FROM ci.want w JOIN ci.evaluation e ON e.id = w.evaluation_id WHERE w.job_id = j.id),
           CASE j.state WHEN 'open' THEN 'pending' ELSE 'succeeded' END FROM ci.job j ORDER BY j.id;
    CREATE INDEX ON derivation_inputs (input_drv);
    CREATE INDEX ON build_jobs (priority DESC, created_at) WHERE status = 'pending';
    ANALYZE projects, derivations, derivation_inputs, build_jobs;
    RESET search_path;";

const CLAIM: &str = "
    WITH ready AS (
        SELECT bj.id, bj.drv_path, d.system, d.required_features
        FROM seed.build_jobs bj
        JOIN seed.derivations d USING (drv_path)
        LEFT JOIN seed.projects p ON p.id = bj.project_id
        WHERE bj.status = 'pending'
          AND d.system            = ANY($1::text[])
          AND d.required_features <@ $2::text[]
          AND NOT EXISTS (
              SELECT 1 FROM seed.derivation_inputs di
              JOIN seed.build_jobs dep ON dep.drv_path = di.input_drv
              WHERE di.referrer = bj.drv_path
                AND dep.status NOT IN ('succeeded')
          )
        ORDER BY
                 bj.priority DESC,
                 COALESCE(p.consumed_seconds / GREATEST(p.scheduling_shares, 1), 0) ASC,
                 bj.created_at ASC
        LIMIT 1
        FOR UPDATE OF bj SKIP LOCKED
    )
    UPDATE seed.build_jobs SET
        status     = 'building',
        claimed_by = $3,
        claimed_at = now()
    FROM ready
    WHERE build_jobs.id = ready.id
    RETURNING ready.*";

pub async fn run(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["claim_vs_literal_cpu"]) {
        return;
    }
    let farm = phase("a graph of 100,000 jobs, a third of them done", async {
        let farm = Farm::of(bench.server.database().await);
        farm.furnish(PROJECTS, Some(FEATURES)).await;
        fill(&farm).await;
        farm.tidy().await;
        farm.database.execute(TABLES).await;
        farm
    })
    .await;
    let claimers = Claimers::register(&farm, 8).await;
    claimers.warm_up(bench, &farm).await;
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let literal = literal(bench, &farm).await;
        let resolving = farm.resolve();
        let slice = claimers.slice(bench, 1).await;
        drop(resolving);
        eprintln!("   the literal query: {:.0} ms CPU", literal * 1e3);
        ratios.push(literal / slice.cpu_per_job());
        slice.undo(&farm).await;
    }
    report.put("claim_vs_literal_cpu", median(ratios));
    bench.drop(farm.database).await;
}

/// CPU seconds of one literal claim.
async fn literal(bench: &Bench, farm: &Farm) -> f64 {
    let systems: Vec<&str> = CLASSES.iter().map(|(system, _)| *system).collect();
    let before = bench.cpu();
    for _ in 0..CLAIMS {
        let query = sqlx::query(AssertSqlSafe(CLAIM)).bind(&systems).bind(FEATURES).bind("bench");
        query.fetch_one(&farm.database.admin()).await.expect("something is ready");
    }
    (bench.cpu() - before) / CLAIMS as f64
}

/// A graph for each project: derivation i needs some before it, and the first third is done.
async fn fill(farm: &Farm) {
    for n in 0..PROJECTS {
        let mut rng = SmallRng::seed_from_u64(n as u64);
        let jobs = JOBS / PROJECTS;
        let mut nodes: Vec<Node> = Vec::with_capacity(jobs);
        for i in 0..jobs {
            let count = if i == 0 { 0 } else { rng.random_range(1..2 * INPUTS) };
            // The square leans towards the front: a few are needed by very many.
            let inputs = (0..count).map(|_| (rng.random::<f64>().powi(2) * i as f64) as usize);
            let mut inputs: Vec<String> = inputs.map(|at| nodes[at].drv_path.clone()).collect();
            inputs.sort();
            inputs.dedup();
            nodes.push(Node { cached: i < jobs / 3, ..job(&format!("g{n}x{i}"), i % CLASSES.len(), inputs) });
        }
        let done: Vec<KnownPath> = nodes[..jobs / 3].iter().map(|node| known(node, Vec::new())).collect();
        record_paths(&farm.evaluator, &done).await.expect("record what is done");
        farm.evaluate(&project(n), nodes).await;
        farm.settle().await;
    }
}
