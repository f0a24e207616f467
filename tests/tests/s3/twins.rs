//! Several who publish the same paths at once.

use std::time::Duration;

use harmonia_builder::upload::{BuiltOutput, Ending, Limits, Uploader};
use harmonia_nix::store_path;
use harmonia_queue::builder::{Claim, Session};
use harmonia_queue::ingest::{self, KnownPath};
use harmonia_service::layout;
use harmonia_service::protocol::{Bytes, CompleteRequest, Outcome, Slot, Source, StoredSource, Token, Wish};
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, outputs_of, put, shared_nix, wire};
use harmonia_tests::s3::Server;

/// The same output by two derivations, which differ in where they would fetch something from.
fn twins(top: &Expression) -> [Expression; 2] {
    ["here", "there"].map(|mirror| {
        let fetched = Expression::fixed_output("fetched", "the same from everywhere");
        top.clone().input("fetched", &fetched.attribute("mirror", &format!("\"{mirror}\"")))
    })
}

/// Two nodes, each with one of the twins.
struct Pair {
    press: Press,
    signer: RunningSigner,
    sessions: [Session; 2],
    claims: [Claim; 2],
    paths: Vec<String>,
}

impl Pair {
    /// Built by each of the stores.
    async fn new(top: &Expression, stores: [&Nix; 2]) -> Pair {
        let twins = twins(top);
        for nix in stores {
            for twin in &twins {
                nix.build(twin);
            }
        }
        let paths = stores[0].build_all(&twins[0]);
        let drvs = [stores[0].instantiate(&twins[0]), stores[0].instantiate(&twins[1])];
        assert_ne!(drvs[0], drvs[1]);
        assert_eq!(paths, stores[0].build_all(&twins[1]));

        let press = Press::new(Server::Versitygw).await;
        let signer = press.start_signer().await;
        press.evaluate_all(stores[0], &signer, &[&drvs[0], &drvs[1]]).await;
        // The queue has one of them wait for the other, as long as it knows. What if it does not?
        let twins = "CREATE TABLE public.twins AS SELECT * FROM ci.twin; DELETE FROM ci.twin;
                     INSERT INTO ci.event (kind, subject) SELECT 'e', job_id FROM ci.blocked";
        press.farm.database.execute(twins).await;
        press.farm.settle().await;
        let uploader = press.uploader(&[&signer.url]);
        let mut waiting = Vec::new();
        while waiting.len() < 2 {
            let claim = press.claim().await;
            if drvs.contains(&claim.drv_path) {
                waiting.push(claim.fence);
            } else {
                press.publish(stores[0], &uploader, &claim).await.unwrap();
                press.farm.settle().await;
            }
        }
        // Now one each.
        press.session.deregister().await.unwrap();
        let sessions =
            [press.farm.node(&press.pool, "first").await, press.farm.node(&press.pool, "second").await];
        press.farm.settle().await;
        let claims = [press.farm.claim(&sessions[0]).await, press.farm.claim(&sessions[1]).await];
        press.farm.database.execute("INSERT INTO ci.twin SELECT * FROM public.twins").await;
        for (session, claim) in sessions.iter().zip(&claims) {
            session.start_upload(&[claim.fence]).await.unwrap();
        }
        Pair { press, signer, sessions, claims, paths }
    }

    fn uploader(&self, which: usize, level: i32) -> Uploader {
        let session = &self.sessions[which];
        let token = Token::Builder { session: session.id, secret: session.secret.clone() };
        let limits = Limits { level, ..limits() };
        self.press.uploader_as(&token, &[&self.signer.url], limits)
    }

    async fn publish(&self, which: usize, nix: &Nix, level: i32) -> Ending {
        let claim = &self.claims[which];
        let uploader = self.uploader(which, level);
        uploader.publish(wire(claim), &outputs_of(nix, claim), None).await.unwrap()
    }

    /// Both jobs have ended and each path is one thing.
    async fn assert_published(&self) {
        self.press.farm.settle().await;
        for claim in &self.claims {
            let state = self.press.farm.state(claim.fence.job).await;
            assert!(matches!(state.as_str(), "succeeded" | "cached"), "{state}");
        }
        let infos = self.press.check().await;
        assert!(self.paths.iter().all(|path| infos.contains_key(path)));
    }
}

fn limits() -> Limits {
    Limits { pause: Duration::from_millis(10), patience: Duration::from_secs(30), ..Limits::default() }
}

fn assert_done(endings: &[Ending]) {
    // Whoever comes last may find the job ended with the other's output.
    let done = |ending: &Ending| matches!(ending, Ending::Published | Ending::Adopted | Ending::Stale);
    assert!(endings.iter().all(done) && endings.contains(&Ending::Published), "{endings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_derivations_with_one_output_is_built() {
    let (press, nix) = (Press::new(Server::InProcess).await, shared_nix());
    let signer = press.start_signer().await;
    let drvs = twins(&Expression::two_outputs("built-once")).map(|twin| {
        nix.build(&twin);
        nix.instantiate(&twin)
    });
    press.evaluate_all(nix, &signer, &[&drvs[0], &drvs[1]]).await;
    let published = press.publish_all(nix, &press.uploader(&[&signer.url])).await;
    assert_eq!(published.iter().filter(|drv| drvs.contains(drv)).count(), 1);
    for drv in drvs {
        let state: String = sqlx::query_scalar("SELECT state::text FROM ci.job WHERE drv_path = $1")
            .bind(drv)
            .fetch_one(&press.farm.database.admin())
            .await
            .unwrap();
        assert_eq!(state, "succeeded");
    }
    press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_derivations_with_one_output_are_published_at_once() {
    let nix = shared_nix();
    let pair = Pair::new(&Expression::two_outputs("twin"), [nix, nix]).await;
    let endings = tokio::join!(pair.publish(0, nix, 3), pair.publish(1, nix, 3));
    assert_done(&[endings.0, endings.1]);
    pair.assert_published().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn different_compressions_race() {
    let nix = shared_nix();
    let pair = Pair::new(&Expression::files("compressed", 60), [nix, nix]).await;
    let endings = tokio::join!(pair.publish(0, nix, 1), pair.publish(1, nix, 19));
    assert_done(&[endings.0, endings.1]);
    pair.assert_published().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn different_builds_race() {
    let (one, other) = (shared_nix(), Nix::start(Version::Old));
    let pair = Pair::new(&Expression::unreproducible("different"), [one, &other]).await;
    let endings = tokio::join!(pair.publish(0, one, 3), pair.publish(1, &other, 3));
    assert_done(&[endings.0, endings.1]);
    pair.assert_published().await;
    let infos = pair.press.check().await;
    let is_of = |nix: &Nix| {
        outputs_of(nix, &pair.claims[0])
            .iter()
            .all(|output| infos[&output.path].nar_hash().digest_as_bytes() == output.nar_hash.0)
    };
    assert!(is_of(one) != is_of(&other), "mixed");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_narinfo_names_is_not_replaced() {
    let nix = shared_nix();
    let pair = Pair::new(&Expression::files("named", 60), [nix, nix]).await;
    assert_eq!(pair.publish(0, nix, 1).await, Ending::Published);
    let output = outputs_of(nix, &pair.claims[0]).remove(0);
    let key = layout::nar(&store_path::parse(&output.path).unwrap(), &output.nar_hash);
    let before = pair.press.object(&key).await;
    assert_done(&[pair.publish(1, nix, 19).await, Ending::Published]);
    assert_eq!(pair.press.object(&key).await, before);
    pair.assert_published().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_signers_complete_one_claim() {
    let nix = shared_nix();
    let pair = Pair::new(&Expression::two_outputs("one-claim"), [nix, nix]).await;
    let second = pair.press.start_signer().await;
    let session = &pair.sessions[0];
    let token = Token::Builder { session: session.id, secret: session.secret.clone() };
    let publish = async |signer: &RunningSigner| {
        let uploader = pair.press.uploader_as(&token, &[&signer.url], limits());
        let outputs = outputs_of(nix, &pair.claims[0]);
        uploader.publish(wire(&pair.claims[0]), &outputs, None).await.unwrap()
    };
    let (a, b) = tokio::join!(publish(&pair.signer), publish(&second));
    assert_done(&[a, b, pair.publish(1, nix, 3).await]);
    pair.assert_published().await;
}

/// What a substituter said of the first output of a claim.
async fn substituted(pair: &Pair, nar_hash: impl Fn(&BuiltOutput) -> Vec<u8>) -> String {
    let output = outputs_of(shared_nix(), &pair.claims[0]).remove(0);
    let known = KnownPath {
        nar_hash: nar_hash(&output),
        path: output.path.clone(),
        nar_size: i64::try_from(output.nar_size).unwrap(),
        references: output.references,
    };
    ingest::record_paths(&pair.press.farm.evaluator, &[known]).await.unwrap();
    output.path
}

/// It is on record without a file of ours, and the other output needs it in our bucket.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_substituter_has_is_published_with_the_rest() {
    let nix = shared_nix();
    let pair = Pair::new(&Expression::two_outputs("substituted"), [nix, nix]).await;
    substituted(&pair, |output| output.nar_hash.0.to_vec()).await;
    let endings = [pair.publish(0, nix, 3).await, pair.publish(1, nix, 3).await];
    assert_eq!(endings, [Ending::Adopted, Ending::Adopted]);
    pair.assert_published().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_substituter_has_otherwise_is_left_to_it() {
    let nix = shared_nix();
    let pair = Pair::new(&Expression::files("elsewhere", 3), [nix, nix]).await;
    let path = substituted(&pair, |_| vec![1; 32]).await;
    let endings = [pair.publish(0, nix, 3).await, pair.publish(1, nix, 3).await];
    assert_eq!(endings, [Ending::Adopted, Ending::Adopted]);
    for claim in &pair.claims {
        assert_eq!(pair.press.farm.state(claim.fence.job).await, "succeeded");
    }
    assert!(!pair.press.check().await.contains_key(&path));
}

/// Two evaluators have the same source, compressed differently.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_is_taken_however_it_was_compressed() {
    let press = Press::new(Server::InProcess).await;
    let (signer, nix) = (press.start_signer().await, shared_nix());
    let directory = nix.root().join("expressions");
    let path = nix.run("nix-store", &["--add", directory.join("bb").to_str().unwrap()]);
    let nar = nix.command("nix-store").arg("--dump").arg(nix.real(&path)).output().unwrap().stdout;
    let nar_hash = harmonia_nix::Sha256::of(&nar);
    let source =
        Source { path: path.clone(), nar_hash, nar_size: nar.len() as u64, references: vec![], text: None };
    for level in [1, 7] {
        let ingest = press.farm.begin("main").await;
        let token =
            Token::Evaluation { id: ingest.evaluation, secret: ingest.token().await.unwrap() }.to_text();
        let body = zstd::encode_all(nar.as_slice(), level).unwrap();
        let file = Bytes { size: body.len() as u64, sha256: harmonia_nix::Sha256::of(&body) };
        let wish = Wish::Source { source: source.clone(), file };
        match signer.slots(&token, vec![wish]).await.remove(0) {
            Slot::Put { url, headers } => assert!(put(&url, &headers, body).await.is_success()),
            slot => assert_eq!(slot, Slot::Present),
        }
        let sources = vec![StoredSource { source: source.clone(), file }];
        let request = CompleteRequest { sources, ..CompleteRequest::default() };
        let outcome = signer.complete(&token, &request).await.sources.remove(0);
        assert!(matches!(outcome, Outcome::Published | Outcome::Adopted), "{level}: {outcome:?}");
    }
    assert!(press.check().await.contains_key(&path));
}
