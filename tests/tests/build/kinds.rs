//! Every kind of derivation, built by an old and a new Nix and substituted by clean clients of both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use harmonia_tests::gateway::Gateway;
use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::press::{Press, RunningSigner};
use harmonia_tests::repository::{FEATURES, Repository};
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard::{RunningBuilder, substitutes};

/// A repository that a builder has built.
struct Built {
    press: Press,
    repository: Repository,
    /// Derivations by attribute.
    drvs: BTreeMap<String, String>,
    gateway: Gateway,
    _signer: RunningSigner,
}

impl Built {
    async fn new(seed: u64, evaluated_by: Version, built_by: Version) -> Built {
        let press = Press::with(S3::start_public(Server::Versitygw).await).await;
        let signer = press.start_signer().await;
        let repository = Repository::generate(seed);
        let evaluator = Nix::start_with(evaluated_by, FEATURES);
        let drvs = evaluator.instantiate_all(&repository.text);
        let all: Vec<&str> = drvs.values().map(String::as_str).collect();
        press.evaluate_all(&evaluator, &signer, &all).await;
        let builder = builder(&press, built_by).await;
        press.settled().await;
        let failed = failures(&press).await;
        assert!(failed.is_empty(), "seed {seed}: {failed:#?}");
        builder.stop().await;
        let gateway = Gateway::start(&press).await;
        Built { press, repository, drvs, gateway, _signer: signer }
    }

    /// Every output on record, by derivation and name.
    async fn outputs(&self) -> Vec<(String, String, String)> {
        let outputs = "SELECT drv_path, name, path FROM ci.output JOIN ci.job ON job.id = job_id";
        sqlx::query_as(outputs).fetch_all(&self.press.farm.database.admin()).await.unwrap()
    }

    /// A client with an empty store that builds nothing and takes only what our key signed.
    fn client(&self, version: Version) -> Nix {
        let settings = self.gateway.settings(&self.press);
        Nix::start_with(version, &format!("{FEATURES}{settings}max-jobs = 0\n"))
    }
}

async fn builder(press: &Press, version: Version) -> RunningBuilder {
    let nix = Arc::new(Nix::start_with(version, &format!("{FEATURES}{}", substitutes(press))));
    RunningBuilder::start_on(press, nix, "one", |settings| settings).await
}

/// Derivations that did not succeed: how they ended, and why.
async fn failures(press: &Press) -> BTreeMap<String, (String, Option<String>, Option<String>)> {
    let ends = "SELECT drv_path, state::text, failure, error FROM ci.job WHERE state <> 'succeeded'";
    let ends: Vec<(String, String, Option<String>, Option<String>)> =
        sqlx::query_as(ends).fetch_all(&press.farm.database.admin()).await.unwrap();
    ends.into_iter().map(|(drv, state, failure, error)| (drv, (state, failure, error))).collect()
}

async fn every_kind(seed: u64, evaluated_by: Version, built_by: Version) {
    let built = Built::new(seed, evaluated_by, built_by).await;
    let published = built.press.check().await;
    let outputs = built.outputs().await;
    let paths: BTreeSet<&str> = outputs.iter().map(|(.., path)| path.as_str()).collect();
    assert!(paths.iter().all(|path| published.contains_key(*path)), "something is not published");
    for version in Version::ALL {
        let client = built.client(version);
        realises(&built, &outputs, &client);
        let arguments: Vec<&str> = ["--realise"].into_iter().chain(paths.iter().copied()).collect();
        client.run("nix-store", &arguments);
        client.run("nix-store", &["--verify", "--check-contents"]);
    }
}

/// A client that evaluates the same finds by the derivations what only builds show.
fn realises(built: &Built, outputs: &[(String, String, String)], client: &Nix) {
    let drvs = client.instantiate_all(&built.repository.text);
    assert_eq!(drvs, built.drvs, "{:?} evaluates to something else", client.version());
    for attribute in &built.repository.realised {
        let drv = &drvs[attribute];
        let found = client.run("nix-store", &["--realise", drv]);
        let found: BTreeSet<&str> = found.lines().collect();
        let recorded = outputs.iter().filter(|(of, ..)| of == drv).map(|(.., path)| path.as_str());
        assert_eq!(found, recorded.collect(), "{:?} {attribute}", client.version());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_is_built_by_an_old_nix() {
    every_kind(1, Version::New, Version::Old).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_is_built_by_a_new_nix() {
    every_kind(2, Version::Old, Version::New).await;
}

/// Builds one text whose first attribute cannot be built here; how its derivations ended.
async fn not_built(features: &str, text: &str) -> BTreeMap<String, (String, Option<String>, Option<String>)> {
    let press = Press::with(S3::start_public(Server::Versitygw).await).await;
    let signer = press.start_signer().await;
    let features = format!("experimental-features = nix-command ca-derivations {features}\n");
    let evaluator = Nix::start_with(Version::New, &features);
    let drvs = evaluator.instantiate_all(text);
    let all: Vec<&str> = drvs.values().map(String::as_str).collect();
    press.evaluate_all(&evaluator, &signer, &all).await;
    let nix = Arc::new(Nix::start_with(Version::New, &format!("{features}{}", substitutes(&press))));
    let builder = RunningBuilder::start_on(&press, nix, "one", |settings| settings).await;
    press.settled().await;
    builder.stop().await;
    let failures = failures(&press).await;
    let attribute = |(name, drv): (String, String)| Some((name, failures.get(&drv)?.clone()));
    drvs.into_iter().filter_map(attribute).collect()
}

const MAKE: &str = r#"
let make = name: script: more: derivation ({
  inherit name;
  system = builtins.currentSystem;
  builder = "${bb}/busybox";
  PATH = "${tools}/bin";
  args = [ "sh" "-euc" script ];
} // more); in
"#;

fn assert_refused(end: &(String, Option<String>, Option<String>), sentence: &str) {
    let (state, failure, error) = end;
    assert_eq!((state.as_str(), failure.as_deref()), ("failed", Some("not_buildable")), "{end:?}");
    assert!(error.as_ref().is_some_and(|error| error.contains(sentence)), "{end:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impure_derivation_is_refused_with_a_sentence() {
    let text = format!("{MAKE}{{ impure = make \"impure\" \"date >$out\" {{ __impure = true; }}; }}");
    let ends = not_built("impure-derivations", &text).await;
    assert_refused(&ends["impure"], "impure derivations (__impure) are not built here");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_derivation_that_makes_another_is_refused_with_a_sentence() {
    let text = format!(
        "{MAKE}let producer = make \"producer.drv\" \"echo none >$out\" \
         {{ __contentAddressed = true; outputHashMode = \"text\"; outputHashAlgo = \"sha256\"; }}; in \
         {{ dynamic = make \"dynamic\" \"echo $x >$out\" {{ x = builtins.outputOf producer.outPath \"out\"; }}; \
         inherit producer; }}"
    );
    let ends = not_built("dynamic-derivations", &text).await;
    assert_refused(&ends["producer"], "content-addressed otherwise than by the SHA-256 of a NAR");
    assert_eq!(ends["dynamic"].0, "dep_failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_floating_output_that_refers_to_itself_is_refused_with_a_sentence() {
    let text = format!(
        "{MAKE}{{ itself = make \"itself\" \"echo $out >$out\" \
         {{ __contentAddressed = true; outputHashMode = \"recursive\"; outputHashAlgo = \"sha256\"; }}; }}"
    );
    let ends = not_built("", &text).await;
    assert_refused(&ends["itself"], "refers to itself");
}
