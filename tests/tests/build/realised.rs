//! Outputs of which only a build shows where they are: what is on record of them, and in the bucket.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use harmonia_nix::key::SecretKey;
use harmonia_nix::realisation::{Name, Realisation, There};
use harmonia_nix::store_path;
use harmonia_queue::ingest::Node;
use harmonia_service::layout;
use harmonia_service::protocol::Token;
use harmonia_signer::Signer;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, publish_source};
use harmonia_tests::repository::FEATURES;
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard::{RunningBuilder, substitutes};

/// Another one at every build.
fn changing() -> Expression {
    Expression::new("changing", "head -c 32 /dev/urandom | od >$out").floating()
}

async fn start() -> (Press, RunningSigner, Nix) {
    let press = Press::with(S3::start_public(Server::Versitygw).await).await;
    let signer = press.start_signer().await;
    (press, signer, Nix::start_with(Version::Old, FEATURES))
}

async fn builder(press: &Press) -> RunningBuilder {
    let nix = Arc::new(Nix::start_with(Version::New, &format!("{FEATURES}{}", substitutes(press))));
    RunningBuilder::start_on(press, nix, "one", |settings| settings).await
}

async fn recorded(press: &Press, drv: &str) -> Option<String> {
    let path =
        "SELECT path FROM ci.output JOIN ci.job ON job.id = job_id WHERE drv_path = $1 AND name = 'out'";
    sqlx::query_scalar(path).bind(drv).fetch_one(&press.farm.database.admin()).await.unwrap()
}

/// What the bucket says that an output is, by the newer name.
fn realisation(drv: &str, path: &str) -> Realisation {
    let (drv, path) = (store_path::parse(drv).unwrap(), store_path::parse(path).unwrap());
    Realisation { name: Name::Derivation(drv), output: "out".to_owned(), path }
}

/// A press that has published what [`changing`] came out as.
async fn built() -> (Press, RunningSigner, String) {
    let (press, signer, evaluator) = start().await;
    let drv = evaluator.instantiate(&changing());
    press.evaluate(&evaluator, &signer, &drv).await;
    let building = builder(&press).await;
    press.settled().await;
    building.stop().await;
    (press, signer, drv)
}

async fn realisations(press: &Press) -> Vec<String> {
    [press.keys("realisations/").await, press.keys("build-trace-v2/").await].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_forgotten_may_come_out_otherwise() {
    let (press, _signer, drv) = built().await;
    let first = recorded(&press, &drv).await.expect("a path");
    assert_eq!(realisations(&press).await.len(), 2);

    let control = Signer::connect(&press.signer_settings().await).await.unwrap();
    control.forget(std::slice::from_ref(&first), None).await.unwrap();
    assert_eq!(realisations(&press).await, [""; 0]);
    assert_eq!(recorded(&press, &drv).await, None);

    press.farm.settle().await;
    let building = builder(&press).await;
    let states = press.settled().await;
    building.stop().await;
    assert_eq!(states[&drv], "succeeded");
    let second = recorded(&press, &drv).await.expect("a path");
    assert_ne!(first, second);
    let realisation = realisation(&drv, &second);
    let text = press.object(&realisation.object_name()).await;
    assert_eq!(realisation.compare(&text, &[press.key.public()]), There::Same);
}

#[tokio::test(flavor = "multi_thread")]
async fn new_keys_sign_realisations_too() {
    let (press, _signer, drv) = built().await;
    let realisation = realisation(&drv, &recorded(&press, &drv).await.expect("a path"));

    let key = SecretKey::generate("press-2").unwrap();
    fs::write(press.key_file(), key.to_text().as_bytes()).unwrap();
    let control = Signer::connect(&press.signer_settings().await).await.unwrap();
    control.resign(|_| {}).await.unwrap();
    let text = press.object(&realisation.object_name()).await;
    assert_eq!(realisation.compare(&text, &[key.public()]), There::Same);
}

/// An evaluator says where a floating output is, before anybody built it.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_evaluator_says_of_a_floating_output_counts_for_nothing() {
    let (press, signer, evaluator) = start().await;
    let floating = Expression::trivial("floating").floating();
    let top = evaluator.instantiate(&Expression::new("top", "ln -s $below $out").input("below", &floating));
    let closure = evaluator.run("nix-store", &["--query", "--requisites", &top]);
    let (drvs, sources): (Vec<&str>, Vec<&str>) = closure.lines().partition(|path| path.ends_with(".drv"));
    let mut ingest = press.farm.begin("main").await;
    let token = Token::Evaluation { id: ingest.evaluation, secret: ingest.token().await.unwrap() };
    for source in &sources {
        publish_source(&evaluator, &signer, &token, source).await;
    }
    let nodes = drvs.iter().map(|drv| {
        let mut node = Node::parse(drv, fs::read(evaluator.real(drv)).unwrap()).unwrap();
        for (_, path) in node.outputs.iter_mut().filter(|_| drv.ends_with("-floating.drv")) {
            *path = Some(sources[0].to_owned());
        }
        node
    });
    ingest.add(nodes.collect()).await.unwrap();
    ingest.complete(&[]).await.unwrap();
    press.farm.settle().await;

    let building = builder(&press).await;
    press.settled().await;
    building.stop().await;
    let ends = "SELECT drv_path, coalesce(error, '') FROM ci.job WHERE state = 'failed'";
    let ends: Vec<(String, String)> =
        sqlx::query_as(ends).fetch_all(&press.farm.database.admin()).await.unwrap();
    let ends: BTreeMap<String, String> = ends.into_iter().collect();
    let lie = ends.get(&top).unwrap_or_else(|| panic!("{ends:?}"));
    assert!(lie.contains("-floating.drv is, is not known"), "{lie}");
    assert_eq!(realisations(&press).await, [""; 0]);
}

/// The bucket says something else of the output: nothing is visible until that is gone, and nothing has to be built again.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_realisation_stands_in_the_way_until_it_is_gone() {
    let (press, signer, evaluator) = start().await;
    let drv = evaluator.instantiate(&changing());
    press.evaluate(&evaluator, &signer, &drv).await;
    let foreign = realisation(&drv, "/nix/store/yndr0gyxnaqh51pfyg3w1war85cgp9i8-changing");
    let (client, bucket, key) = (press.s3.client(), &press.s3.bucket, foreign.object_name());
    let text = foreign.write(&[SecretKey::generate("foreign-1").unwrap()]);
    client.put_object().bucket(bucket).key(&key).body(text.into()).send().await.unwrap();

    let building = builder(&press).await;
    let admin = press.farm.database.admin();
    let accepted = "SELECT count(*) FROM ci.running JOIN ci.job ON id = job_id \
                    WHERE drv_path = $1 AND phase = 'accepted'";
    eventually("it is accepted", || async {
        sqlx::query_scalar::<_, i64>(accepted).bind(&drv).fetch_one(&admin).await.unwrap() == 1
    })
    .await;
    let path = recorded(&press, &drv).await.expect("a path");
    let narinfo = layout::narinfo(&store_path::parse(&path).unwrap());
    assert!(!press.keys("").await.contains(&narinfo), "{path} is visible");

    client.delete_object().bucket(bucket).key(&key).send().await.unwrap();
    press.settled().await;
    building.stop().await;
    assert_eq!(recorded(&press, &drv).await, Some(path.clone()));
    let realisation = realisation(&drv, &path);
    let text = press.object(&key).await;
    assert_eq!(realisation.compare(&text, &[press.key.public()]), There::Same);
    press.check().await;
}
