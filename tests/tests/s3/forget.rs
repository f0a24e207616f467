//! What is taken back: all that was made together, and nothing of it comes back by itself.

use std::fs;
use std::sync::Arc;

use harmonia_nix::key::SecretKey;
use harmonia_nix::store_path;
use harmonia_service::layout;
use harmonia_service::protocol::{Slot, Token, Wish};
use harmonia_signer::Signer;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, outputs_of, publish_source, shared_nix, wire};
use harmonia_tests::proxy::Fault;
use harmonia_tests::s3::Server;

fn narinfo(path: &str) -> String {
    layout::narinfo(&store_path::parse(path).unwrap())
}

async fn control(press: &Press) -> Arc<Signer> {
    Signer::connect(&press.signer_settings().await).await.unwrap()
}

/// Two outputs that differ whenever they are built, published as the first of two stores has them.
struct Pair {
    press: Press,
    signer: RunningSigner,
    second: Nix,
    outputs: Vec<String>,
}

impl Pair {
    async fn published() -> Pair {
        let (first, second) = (shared_nix(), Nix::start(Version::Old));
        let top = Expression::unreproducible("pair");
        let outputs = first.build_all(&top);
        assert!(outputs.len() > 1 && second.build_all(&top) == outputs);
        let press = Press::new(Server::InProcess).await;
        let signer = press.start_signer().await;
        press.evaluate(first, &signer, &first.instantiate(&top)).await;
        press.publish_all(first, &press.uploader(&[&signer.url])).await;
        Pair { press, signer, second, outputs }
    }

    /// What another node builds is published, as that one has it.
    async fn assert_built_again(&self) {
        let Pair { press, signer, second, outputs } = self;
        press.farm.settle().await;
        let built = press.publish_all(second, &press.uploader(&[&signer.url])).await;
        assert_eq!(built.len(), 1);
        let infos = press.check().await;
        for path in outputs {
            let hash = second.run("nix-store", &["--query", "--hash", path]);
            let hash: harmonia_nix::Sha256 = hash.trim().parse().unwrap();
            assert_eq!(infos[path].nar_hash().digest_as_bytes(), hash.0, "{path}");
        }
        press.farm.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_is_forgotten_takes_the_others_along() {
    let pair = Pair::published().await;
    let forgotten = control(&pair.press).await.forget(&pair.outputs[..1], None).await.unwrap();
    let mut all = pair.outputs.clone();
    all.sort();
    assert_eq!(forgotten, all);
    let keys = pair.press.keys("").await;
    assert!(pair.outputs.iter().all(|path| !keys.contains(&narinfo(path))), "{keys:?}");
    pair.assert_built_again().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_is_lost_takes_the_others_along() {
    let pair = Pair::published().await;
    let Pair { press, outputs, .. } = &pair;
    press
        .s3
        .client()
        .delete_object()
        .bucket(&press.s3.bucket)
        .key(narinfo(&outputs[0]))
        .send()
        .await
        .unwrap();
    let report = format!(
        "INSERT INTO ci.missing (path, job_id) SELECT path, job_id FROM ci.output WHERE path = '{}'",
        outputs[0]
    );
    press.farm.database.execute(&report).await;
    eventually("the report is settled", || async {
        press.farm.value::<i64>("SELECT count(*) + 0 * $1 FROM ci.missing", 0).await == 0
    })
    .await;
    assert!(!press.keys("").await.contains(&narinfo(&outputs[1])));
    pair.assert_built_again().await;
}

/// Its record goes while its narinfos are on their way, and its builder with it.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_forgotten_while_it_is_published_does_not_stay() {
    let (nix, press) = (shared_nix(), Press::new(Server::InProcess).await);
    let (bucket, database) = (press.before_bucket(), press.before_database());
    let signer = RunningSigner::start(&press.farm, press.settings_by(&bucket, &database).await).await;
    let top = Expression::two_outputs("withdrawn");
    let outputs = nix.build_all(&top);
    let drv = nix.instantiate(&top);
    press.evaluate(nix, &signer, &drv).await;
    let uploader = press.uploader(&[&signer.url]);
    let claim = loop {
        let claim = press.claim().await;
        if claim.drv_path == drv {
            break claim;
        }
        press.publish(nix, &uploader, &claim).await.unwrap();
        press.farm.settle().await;
    };
    bucket.reset();
    let (release, hold) = Fault::hold();
    let is_put = |name: &str| name.starts_with("PUT") && name.ends_with(".narinfo");
    bucket.on_matching(1, is_put, hold);
    press.session.start_upload(&[claim.fence]).await.unwrap();
    let built = outputs_of(nix, &claim);
    let mut publishing = Box::pin(uploader.publish(wire(&claim), &built, None));
    tokio::select! {
        ending = &mut publishing => panic!("published: {ending:?}"),
        () = eventually("a narinfo is written", || async { bucket.requests().iter().any(|name| is_put(name)) }) => {}
    }
    drop(publishing);
    let forgotten = control(&press).await.forget(&[], Some("node")).await.unwrap();
    assert!(outputs.iter().all(|path| forgotten.contains(path)), "{forgotten:?}");
    release.send(()).unwrap();
    eventually("the narinfos are removed", || async {
        let removed = |path| bucket.requests().contains(&format!("DELETE /bucket/{}", narinfo(path)));
        outputs.iter().all(|path| removed(path))
    })
    .await;
    let keys = press.keys("").await;
    assert!(outputs.iter().all(|path| !keys.contains(&narinfo(path))), "{keys:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_forgotten_while_it_is_signed_again_does_not_come_back() {
    let pair = Pair::published().await;
    let Pair { press, outputs, .. } = &pair;
    let (bucket, database) = (press.before_bucket(), press.before_database());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("key");
    fs::write(&file, SecretKey::generate("press-2").unwrap().to_text().as_bytes()).unwrap();
    let settings = press.settings_by(&bucket, &database).await;
    let resigner =
        Signer::connect(&settings.with("signing_key_files", file.display().to_string())).await.unwrap();
    let (release, hold) = Fault::hold();
    let name = format!("PUT /bucket/{}", narinfo(&outputs[0]));
    let held = name.clone();
    bucket.on_matching(1, move |request| request == held, hold);
    let resigning = tokio::spawn(async move { resigner.resign(|_| {}).await });
    eventually("it is signed", || async { bucket.requests().contains(&name) }).await;
    control(press).await.forget(&outputs[..1], None).await.unwrap();
    release.send(()).unwrap();
    resigning.await.unwrap().unwrap();
    let keys = press.keys("").await;
    assert!(outputs.iter().all(|path| !keys.contains(&narinfo(path))), "{keys:?}");
}

/// A source that a sweep has marked, and an evaluation is about to name.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_evaluation_is_told_of_is_kept_for_it() {
    let (nix, press) = (shared_nix(), Press::new(Server::InProcess).await);
    let signer = press.start_signer().await;
    let ingest = press.farm.begin("main").await;
    let token = Token::Evaluation { id: ingest.evaluation, secret: ingest.token().await.unwrap() };
    let path = nix.run("nix-store", &["--add", nix.root().join("expressions/bb").to_str().unwrap()]);
    publish_source(nix, &signer, &token, &path).await;
    let mark =
        "INSERT INTO ci.dying (path, recorded_at, since) SELECT path, recorded_at, now() FROM ci.canonical";
    press.farm.database.execute(mark).await;
    let ask = async || signer.slots(&token.to_text(), vec![Wish::Published { path: path.clone() }]).await;
    assert_eq!(ask().await, [Slot::Present]);
    let marked = async || press.farm.value::<i64>("SELECT count(*) + 0 * $1 FROM ci.dying", 0).await;
    assert_eq!(marked().await, 0);
    // Its record went, its objects are about to.
    press.farm.database.execute("DELETE FROM ci.canonical").await;
    assert_eq!(ask().await, [Slot::Absent]);
}
