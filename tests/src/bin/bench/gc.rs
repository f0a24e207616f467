//! `./dev bench gc`: what keeping house costs. A sweep's plan against reading the same rows, claims while one runs against
//! claims alone, and a resync against HEADs of the same objects.

use std::time::{Duration, Instant};

use aws_sdk_s3::Client;
use futures::stream::{self, StreamExt};
use harmonia_nix::narinfo::{self, Record};
use harmonia_nix::{Sha256, store_path};
use harmonia_queue::Db;
use harmonia_queue::sweep::{Sweep, pass};
use harmonia_service::layout;
use harmonia_signer::{Signer, paced};
use harmonia_tests::farm::store_path as made_up;
use harmonia_tests::press::Press;
use harmonia_tests::s3::{S3, Server};

use crate::baseline::{Bench, ROUNDS, phase, press};
use crate::claim::{Claimers, SESSIONS, furnished};
use crate::farm::{Farm, Task};
use crate::graphs;
use crate::measure::median;
use crate::report::{Options, Report};

/// As a signer plans.
const PAGE: i32 = 20_000;
const CONFIRMED: i32 = 2_000;
const GRACE: Duration = Duration::from_secs(86_400);
/// Paths of the bucket that is compared: a narinfo and a NAR each.
const PATHS: usize = 3_000;
/// S3 calls at once, as a signer makes them.
const AT_ONCE: usize = 32;

pub async fn run(options: &Options, report: &mut Report<'_>) {
    if report.wants(&["gc_plan_vs_scan", "gc_claim_impact"]) {
        let bench = Bench::start(&options.settings).await;
        plan(&bench, report).await;
        impact(&bench, report).await;
    }
    if report.wants(&["resync_objects_per_s_vs_head"]) {
        let mut ratios = vec![];
        for (name, server) in
            [("the embedded S3 server", Server::InProcess), ("versitygw", Server::Versitygw)]
        {
            ratios.push(phase(&format!("a resync at {name}"), resync(server)).await);
        }
        report.put("resync_objects_per_s_vs_head", ratios.into_iter().fold(f64::INFINITY, f64::min));
    }
}

/// Records of paths that each refer to ten others recorded before. Jobs make nine of ten; the rest nobody makes, and only
/// the rest refers to it.
async fn record(farm: &Farm, paths: usize) {
    let sql = format!(
        "CREATE FUNCTION public.path(n bigint) RETURNS text LANGUAGE sql IMMUTABLE AS
           $$ SELECT '/nix/store/' || translate(md5(n::text), 'e', 'z') || '-package-' || n $$;
         INSERT INTO ci.canonical (path, nar_hash, nar_size, refs, file_hash, file_size, recorded_at)
         SELECT public.path(n), sha256(n::text::bytea), 1000, ARRAY(
             SELECT public.path(t + (n % 10 > 0 AND t % 10 = 0)::int)
             FROM generate_series(1, least(n - 1, 10)) k CROSS JOIN LATERAL (SELECT 1 + (n * 7919 + k * 104729) % (n - 1) AS t) x),
           sha256(n::text::bytea), 500, ci.clock() - interval '1 year' FROM generate_series(1::bigint, {paths}) n;
         INSERT INTO ci.output (job_id, name, path)
         SELECT -n, 'out', public.path(n) FROM generate_series(1::bigint, {paths}) n WHERE n % 10 > 0;"
    );
    farm.database.execute(&sql).await;
    farm.tidy().await;
}

async fn plan(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["gc_plan_vs_scan"]) {
        return;
    }
    let farm = furnished(bench).await;
    phase("a million records", record(&farm, 1_000_000)).await;
    let mut ratios = vec![];
    for _ in 0..3 {
        farm.database.execute("TRUNCATE ci.dying").await;
        farm.database.execute("VACUUM ANALYZE ci.dying").await;
        let scan = Instant::now();
        farm.database
            .execute("SELECT count(r) FROM ci.canonical c LEFT JOIN LATERAL unnest(c.refs) r ON true; SELECT count(path) FROM ci.output")
            .await;
        let scan = scan.elapsed().as_secs_f64();
        let planning = Instant::now();
        let sweep = Sweep::begin(&farm.signer, "bench", None).await.expect("begin").expect("nobody sweeps");
        plan_once(&sweep, false).await;
        sweep.end().await.expect("end");
        let planning = planning.elapsed().as_secs_f64();
        eprintln!("   scan {scan:.2} s, plan {planning:.2} s");
        ratios.push(planning / scan);
    }
    report.put("gc_plan_vs_scan", median(ratios));
    bench.drop(farm.database).await;
}

/// All passes of a plan; `resting` as a signer does.
async fn plan_once(sweep: &Sweep<'_>, resting: bool) {
    async fn step<T>(resting: bool, step: impl Future<Output = T>) -> T {
        if resting { paced(step).await } else { step.await }
    }
    while step(resting, sweep.read_sources(500)).await.expect("a step") {}
    let marked =
        pass(|after| async move { step(resting, sweep.mark_candidates(&after, PAGE, GRACE)).await }).await;
    let spared = pass(|after| async move { step(resting, sweep.spare_references(&after, PAGE)).await }).await;
    let confirmed = pass(|after| async move { step(resting, sweep.confirm(&after, CONFIRMED)).await }).await;
    marked.and(spared).and(confirmed).expect("a pass");
}

/// Claims a second while sweeps follow each other, over claims a second without, in turn.
async fn impact(bench: &Bench, report: &mut Report<'_>) {
    if !report.wants(&["gc_claim_impact"]) {
        return;
    }
    let farm = furnished(bench).await;
    phase("a million ready jobs and 300,000 records", async {
        graphs::independent(&farm, 1_000_000).await;
        record(&farm, 300_000).await;
    })
    .await;
    let claimers = Claimers::register(&farm, SESSIONS).await;
    let _resolving = farm.resolve();
    claimers.warm_up(bench, &farm).await;
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let alone = claimers.slice(bench, 1).await;
        let without = alone.rate();
        alone.undo(&farm).await;
        let sweeping = Task(tokio::spawn(sweep_on(farm.signer.clone())));
        let beside = claimers.slice(bench, 1).await;
        drop(sweeping);
        farm.database.execute("UPDATE ci.sweep SET lease_until = '-infinity'; TRUNCATE ci.dying").await;
        ratios.push(beside.rate() / without);
        beside.undo(&farm).await;
    }
    report.put("gc_claim_impact", median(ratios));
    bench.drop(farm.database).await;
}

async fn sweep_on(db: Db) {
    loop {
        let sweep = Sweep::begin(&db, "bench", None).await.expect("begin").expect("nobody sweeps");
        plan_once(&sweep, true).await;
        while !paced(sweep.condemn(Duration::ZERO, 500)).await.expect("condemn").is_empty() {}
        sweep.end().await.expect("end");
    }
}

/// Objects a second that a resync looks at over HEADs a second of the same objects.
async fn resync(server: Server) -> f64 {
    let press = press(S3::start(server).await).await;
    let client = press.s3.client();
    let published = stream::iter(0..PATHS).map(|n| publish(&press, &client, n)).buffer_unordered(AT_ONCE);
    let keys: Vec<String> = published.collect::<Vec<_>>().await.concat();
    let signer = Signer::connect(&press.signer_settings().await).await.expect("a signer");
    let resync = || async {
        let start = Instant::now();
        let done = signer.resync("bench", |_| {}).await.expect("resync").expect("nobody sweeps");
        assert_eq!(done.objects as usize, keys.len());
        keys.len() as f64 / start.elapsed().as_secs_f64()
    };
    resync().await;
    let mut ratios = vec![];
    for _ in 0..ROUNDS {
        let heads = heads(&press, &keys).await;
        let resynced = resync().await;
        eprintln!("   {heads:.0} HEADs/s, {resynced:.0} objects/s");
        ratios.push(resynced / heads);
    }
    median(ratios)
}

async fn heads(press: &Press, keys: &[String]) -> f64 {
    let (client, bucket) = (press.s3.client(), &press.s3.bucket);
    let start = Instant::now();
    let heads = stream::iter(keys).map(|key| client.head_object().bucket(bucket).key(key).send());
    let there = heads.buffer_unordered(AT_ONCE).filter(|head| std::future::ready(head.is_ok())).count().await;
    assert_eq!(there, keys.len(), "a HEAD failed");
    keys.len() as f64 / start.elapsed().as_secs_f64()
}

/// A path as it would have been published; answers the keys of its narinfo and its NAR.
async fn publish(press: &Press, client: &Client, n: usize) -> Vec<String> {
    let path = store_path::parse(&made_up(&format!("bench {n}"), "package")).expect("a store path");
    let (nar, file) = (Sha256::of(n.to_string()), b"a NAR".to_vec());
    let record = Record {
        url: layout::nar(&path, &nar),
        nar_hash: nar,
        nar_size: 5,
        references: [path.clone()].into(),
        deriver: None,
        ca: None,
        file_hash: Sha256::of(&file),
        file_size: file.len() as u64,
        path,
    };
    let text = narinfo::write(&record, std::slice::from_ref(&press.key)).expect("a narinfo");
    let keys = vec![layout::narinfo(&record.path), record.url];
    for (key, body) in keys.iter().zip([text.into_bytes(), file]) {
        let put = client.put_object().bucket(&press.s3.bucket).key(key);
        put.body(body.into()).send().await.expect("store it");
    }
    keys
}
