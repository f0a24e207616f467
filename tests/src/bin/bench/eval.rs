//! `./dev bench eval`: what the evaluator adds to Nix, and how early builds begin. The evaluator is a process of its own.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::routing::get;
use harmonia_builder::upload::http_client;
use harmonia_evaluator::substituters::Substituters;
use harmonia_nix::Sha256;
use harmonia_nix::key::SecretKey;
use harmonia_nix::narinfo::{self, Record};
use harmonia_nix::store_path;
use harmonia_queue::evaluations::Stage;
use harmonia_service::settings::Settings;
use harmonia_tests::desk;
use harmonia_tests::farm::SYSTEM;
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::press::Press;
use harmonia_tests::s3::{S3, Server};
use tempfile::TempDir;

use crate::baseline::{phase, press};
use crate::measure::{median, peak_mb_of};
use crate::report::Report;
use crate::upload::child::Child;

/// How often a ratio is taken; the median of them counts.
const ROUNDS: usize = 3;
/// Names that are looked up.
const NAMES: usize = 2_000;
/// How far away the substituter is: a round trip within a continent.
const DISTANCE: Duration = Duration::from_millis(10);

const MAKE: &str = r#"let make = name: more: derivation ({
  inherit name; system = "x86_64-linux"; builder = "/bin/sh"; args = [ "-c" "echo ${name} >$out" ];
} // more); in "#;

/// Measures what is asked for.
pub async fn run(report: &mut Report<'_>) {
    if report.wants(&["narinfo_lookup_per_s_vs_head"]) {
        report.put("narinfo_lookup_per_s_vs_head", phase("look-ups", lookups()).await);
    }
    if report.wants(&["eval_first_build_fraction"]) {
        let work = source(&wide(5_000));
        report.put("eval_first_build_fraction", phase("5,000 derivations", first_build(&work)).await);
    }
    if report.wants(&["eval_parallel_vs_nix"]) {
        let work = source(&heavy(40));
        let mut ratios = Vec::new();
        for _ in 0..ROUNDS {
            let nix = phase("40 attributes by Nix alone", async { bare(&work) }).await;
            let ours = phase("40 attributes by two processes", evaluated(&work, &[("eval_processes", "2")]))
                .await
                .seconds;
            eprintln!("   nix {nix:.2} s; ours {ours:.2} s");
            ratios.push(nix / ours);
        }
        report.put("eval_parallel_vs_nix", median(ratios));
    }
    if report.wants(&["eval_rss_vs_nix"]) {
        let work = source(&wide(60_000));
        let ours = phase(
            "60,000 derivations",
            evaluated(&work, &[("eval_max_attrs", "100000"), ("eval_timeout", "2h")]),
        )
        .await;
        report.put("eval_rss_vs_nix", ours.peak_mb);
    }
}

/// A directory to evaluate.
fn source(text: &str) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("default.nix"), format!("{MAKE}{text}\n")).expect("write an expression");
    directory
}

/// Derivations, each tenth of which needs those since the tenth before it.
fn wide(count: usize) -> String {
    format!(
        "builtins.listToAttrs (builtins.genList (i: {{ name = \"a${{toString i}}\"; value = make \"n${{toString i}}\" \
         (if i - 10 * (i / 10) == 9 then {{ inputs = map (n: make \"n${{toString (i - n)}}\" {{ }}) [ 1 2 3 4 5 6 7 8 9 ]; }} \
         else {{ }}); }}) {count})"
    )
}

/// Attributes that each take a part of a second to evaluate.
fn heavy(count: usize) -> String {
    let busy = "builtins.foldl' (a: _: a + 1) i (builtins.genList (x: x) 2000000)";
    format!(
        "builtins.listToAttrs (builtins.genList (i: {{ name = \"a${{toString i}}\"; \
         value = make \"n${{toString ({busy})}}\" {{ }}; }}) {count})"
    )
}

/// A farm with an evaluator that is a process.
struct Farm {
    press: Press,
    nix: Arc<Nix>,
    evaluator: Child,
    _state: TempDir,
}

impl Farm {
    async fn start(more: &[(&str, &str)]) -> Self {
        let press = press(S3::start_public(Server::InProcess).await).await;
        let nix = Arc::new(Nix::start(Version::Old));
        let state = tempfile::tempdir().expect("a directory");
        let settings = desk::settings(&press, &nix, "bench", state.path()).await;
        let settings =
            more.iter().fold(settings, |settings: Settings, (name, value)| settings.with(name, *value));
        let evaluator = Child::start("evaluator", &settings);
        Self { press, nix, evaluator, _state: state }
    }
}

/// What an evaluation took.
struct Ours {
    seconds: f64,
    peak_mb: f64,
}

async fn evaluated(work: &TempDir, more: &[(&str, &str)]) -> Ours {
    let farm = Farm::start(more).await;
    let _signer = farm.press.start_signer().await;
    let warm = source("{ }");
    farm.press.evaluated(farm.press.ask(&path(&warm), &[]).await).await;
    let begun = Instant::now();
    let id = farm.press.ask(&path(work), &[]).await;
    let evaluation = farm.press.evaluated(id).await;
    let seconds = begun.elapsed().as_secs_f64();
    assert_eq!((evaluation.stage, evaluation.error), (Stage::Complete, None));
    Ours { seconds, peak_mb: peak_mb_of(farm.evaluator.id()) }
}

/// The part of an evaluation after which its first build can be claimed.
async fn first_build(work: &TempDir) -> f64 {
    let farm = Farm::start(&[]).await;
    let _signer = farm.press.start_signer().await;
    let pool = farm.press.farm.pool("bench", &[SYSTEM], 1).await;
    let node = farm.press.farm.node(&pool, "bench").await;
    let begun = Instant::now();
    let id = farm.press.ask(&path(work), &[]).await;
    while farm.press.farm.claim_names(&node, 1).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let first = begun.elapsed().as_secs_f64();
    farm.press.evaluated(id).await;
    let all = begun.elapsed().as_secs_f64();
    eprintln!("   first build after {first:.2} s of {all:.2} s");
    drop(farm.nix);
    first / all
}

/// The same attributes by one Nix, into a store of the same kind.
fn bare(work: &TempDir) -> f64 {
    let nix = Nix::start(Version::Old);
    let mut command = nix.command("nix-instantiate");
    command.arg(work.path().join("default.nix")).stdout(Stdio::null()).stderr(Stdio::null());
    let begun = Instant::now();
    assert!(command.status().expect("start Nix").success(), "Nix evaluates it");
    begun.elapsed().as_secs_f64()
}

fn path(directory: &TempDir) -> String {
    PathBuf::from(directory.path()).display().to_string()
}

/// Paths that a substituter has, and their narinfos.
fn shelf(key: &SecretKey) -> Vec<(String, String)> {
    let one = |n: usize| {
        let path = store_path::parse(&format!("/nix/store/{n:032}-x")).expect("a path");
        let record = Record {
            path: path.clone(),
            nar_hash: Sha256([7; 32]),
            nar_size: 120,
            references: BTreeSet::new(),
            deriver: None,
            ca: None,
            url: "nar/x.nar.zst".to_owned(),
            file_hash: Sha256([7; 32]),
            file_size: 120,
        };
        let text = narinfo::write(&record, std::slice::from_ref(key)).expect("a narinfo");
        (path.to_string(), text)
    };
    (0..NAMES).map(one).collect()
}

/// How many more paths are looked up in a second than by one HEAD after the other.
async fn lookups() -> f64 {
    let key = SecretKey::generate("bench-1").expect("a key");
    let shelf = shelf(&key);
    let texts = shelf.iter().map(|(path, text)| (format!("{}.narinfo", &path[11..43]), text.clone()));
    let texts: Arc<std::collections::HashMap<String, String>> = Arc::new(texts.collect());
    let answer = move |Path(name): Path<String>| {
        let texts = Arc::clone(&texts);
        async move {
            tokio::time::sleep(DISTANCE).await;
            texts.get(&name).cloned().ok_or(StatusCode::NOT_FOUND)
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let server =
        tokio::spawn(async move { axum::serve(listener, Router::new().route("/{name}", get(answer))).await });
    let client = http_client().expect("a client");

    let some = &shelf[..NAMES / 20];
    let begun = Instant::now();
    for (path, _) in some {
        let head = client.head(format!("{url}/{}.narinfo", &path[11..43])).send().await.expect("an answer");
        assert!(head.status().is_success());
    }
    let each = begun.elapsed().as_secs_f64() / some.len() as f64;

    let substituters = Substituters::new(client, &[url], vec![key.public()]);
    let begun = Instant::now();
    let found = substituters.look_up(shelf.iter().map(|(path, _)| path.clone()).collect()).await;
    let bulk = begun.elapsed().as_secs_f64() / NAMES as f64;
    assert_eq!(found.len(), NAMES);
    server.abort();
    each / bulk
}
