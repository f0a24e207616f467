//! Ingest of the whole graph over a bare COPY of the very rows that it wrote. One big operation each time: the median of
//! three counts.

use std::time::Instant;

use futures::TryStreamExt;
use harmonia_queue::ingest::{Ingest, Node};
use sqlx::postgres::PgPoolCopyExt;

use crate::baseline::{Bench, phase};
use crate::farm::{Farm, project};
use crate::graphs::Nixpkgs;
use crate::measure::median;
use crate::report::Report;

pub const FIGURES: &[&str] = &["enqueue_vs_copy", "enqueue_known_vs_copy"];
const ROUNDS: usize = 3;

pub async fn run(bench: &Bench, report: &mut Report<'_>, nixpkgs: &Nixpkgs) {
    if !report.wants(FIGURES) {
        return;
    }
    let (mut fresh, mut known) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let farm = farm(bench).await;
        let before = tables(&farm).await;
        let first = phase("ingest", ingest(&farm, nixpkgs.nodes.clone())).await;
        let written: Vec<_> =
            tables(&farm).await.into_iter().filter(|table| !before.contains(table)).collect();
        let rows =
            phase("read its rows", dump(&farm, written.into_iter().map(|(table, _)| table).collect())).await;
        // The same project evaluates the same again, after the resolver has seen to the first time.
        farm.settle().await;
        let again = phase("ingest again", ingest(&farm, nixpkgs.nodes.clone())).await;
        bench.drop(farm.database).await;

        let empty = self::farm(bench).await;
        let copy = phase("copy", load(&empty, rows)).await;
        bench.drop(empty.database).await;
        eprintln!("   ingest {first:.2} s, known {again:.2} s, copy {copy:.2} s");
        fresh.push(first / copy);
        known.push(again / copy);
    }
    report.put("enqueue_vs_copy", median(fresh));
    report.put("enqueue_known_vs_copy", median(known));
}

async fn farm(bench: &Bench) -> Farm {
    let farm = Farm::of(bench.server.database().await);
    farm.furnish(1, None).await;
    farm.tidy().await;
    farm
}

/// Seconds for a whole evaluation.
async fn ingest(farm: &Farm, nodes: Vec<Node>) -> f64 {
    let mut ingest = Ingest::begin(&farm.evaluator, &project(0), "bench", None, None, false)
        .await
        .expect("begin an evaluation");
    let start = Instant::now();
    ingest.add(nodes).await.expect("ingest");
    ingest.complete(&[]).await.expect("complete");
    start.elapsed().as_secs_f64()
}

/// The queue's tables, each with its number of rows. Identity is by both: a table with more rows was written.
async fn tables(farm: &Farm) -> Vec<(String, i64)> {
    let sql = "SELECT relname::text, (xpath('/row/n/text()', query_to_xml(format('SELECT count(*) AS n FROM %s', oid::regclass), \
               false, true, '')))[1]::text::bigint FROM pg_class WHERE relnamespace = 'ci'::regnamespace AND relkind = 'r' \
               ORDER BY oid";
    sqlx::query_as(sql).fetch_all(&farm.database.admin()).await.expect("count the rows")
}

/// Rows in the binary form, the fastest there is.
async fn dump(farm: &Farm, tables: Vec<String>) -> Vec<(String, Vec<u8>)> {
    let mut rows = Vec::new();
    for table in tables {
        let sql = format!("COPY ci.{table} TO STDOUT (FORMAT binary)");
        let admin = farm.database.admin();
        let stream = admin.copy_out_raw(&sql).await.expect("read the rows");
        let bytes = stream.try_fold(Vec::new(), |mut all, piece| async move {
            all.extend_from_slice(&piece);
            Ok(all)
        });
        rows.push((table, bytes.await.expect("read the rows")));
    }
    rows
}

/// Seconds to copy the rows in, a transaction a table.
async fn load(farm: &Farm, rows: Vec<(String, Vec<u8>)>) -> f64 {
    let admin = farm.database.admin();
    let start = Instant::now();
    for (table, bytes) in rows {
        let sql = format!("COPY ci.{table} FROM STDIN (FORMAT binary)");
        let mut copy = admin.copy_in_raw(&sql).await.expect("copy");
        for piece in bytes.chunks(1 << 20) {
            copy.send(piece).await.expect("copy");
        }
        copy.finish().await.expect("copy");
    }
    start.elapsed().as_secs_f64()
}
