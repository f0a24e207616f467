//! Parts of the farm that go away while builders build.

use harmonia_queue::janitor;
use harmonia_tests::eventually;
use harmonia_tests::farm::Farm;
use harmonia_tests::nixes::{Expression, Version};
use harmonia_tests::pg::{Options, Server};
use harmonia_tests::press::{Press, RunningSigner};
use harmonia_tests::proxy::{Fault, Proxy};
use harmonia_tests::yard::{WAIT, waiting};
use harmonia_tests::{press, s3};

use crate::stage::{Scene, unchanged};

/// Whether clients may connect.
async fn let_in(farm: &Farm, open: bool) {
    let right = if open { "LOGIN" } else { "NOLOGIN" };
    let sql = format!(
        "DO $$ DECLARE r text; BEGIN FOR r IN SELECT rolname FROM pg_roles \
           WHERE NOT rolsuper AND rolname !~ '^(pg|harmonia)_' LOOP \
         EXECUTE format('ALTER ROLE %I {right}', r); END LOOP; END $$"
    );
    farm.database.execute(&sql).await;
}

/// Where the only output of a derivation will be.
fn output_of(drv: &str) -> String {
    press::shared_nix().run("nix-store", &["--query", "--outputs", drv])
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ends_while_postgresql_is_away_is_told_when_it_is_back() {
    let server = Server::start(Options::default());
    let s3 = s3::S3::start_public(s3::Server::InProcess).await;
    let scene = Scene::on(Press::on(Farm::on(server.database().await).await, s3).await);
    let farm = &scene.press.farm;
    farm.freeze().await;
    let signer = scene.press.start_signer().await;
    let fails = Expression::new("fails", &format!("{WAIT}; exit 5"));
    let others = ["a", "b", "c", "d", "e"];
    let all = [waiting("ends"), waiting("goes-on"), fails].into_iter().chain(others.map(waiting));
    let drvs = scene.press.want(&signer, &all.collect::<Vec<_>>()).await;
    let builder = scene.builder(Version::New, "one", |set| set.with("slots", "8")).await;
    for name in ["ends", "goes-on", "fails"].into_iter().chain(others) {
        scene.gates.arrived(name).await;
    }
    let_in(farm, false).await;
    server.stop_immediate().await;
    scene.gates.open("ends");
    scene.gates.open("fails");
    others.iter().for_each(|name| scene.gates.open(name));
    let file = builder.nix.real(&output_of(&drvs[0]));
    eventually("it is built", async || file.exists()).await;
    server.start_again().await;
    farm.advance(300.0).await;
    let_in(farm, true).await;
    // It has led for less than a lease, and judges nobody.
    let lead = farm.lead().await;
    let reaped = loop {
        match janitor::reap(&farm.operator, lead.generation).await {
            // A connection of before, which was used less than a second ago and so was not tried first.
            Err(error) if error.is_transient() => {}
            other => break other.expect("reap"),
        }
    };
    assert_eq!(reaped, 0);
    assert_eq!(scene.end(&drvs[0]).await.state, "succeeded");
    assert_eq!(scene.end(&drvs[2]).await.failure.as_deref(), Some("build_error"));
    scene.gates.open("goes-on");
    assert_eq!(scene.end(&drvs[1]).await.state, "succeeded");
    for drv in &drvs[3..] {
        assert_eq!(scene.end(drv).await.state, "succeeded");
    }
    for drv in &drvs {
        let outcome = if *drv == drvs[2] { "build_error" } else { "succeeded" };
        assert_eq!(scene.press.outcomes(drv).await, [outcome], "{drv}");
    }
    scene.press.check().await;
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_ends_a_builder_although_postgresql_is_away() {
    let server = Server::start(Options::default());
    let s3 = s3::S3::start_public(s3::Server::InProcess).await;
    let scene = Scene::on(Press::on(Farm::on(server.database().await).await, s3).await);
    let signer = scene.press.start_signer().await;
    scene.queue_one(&signer, &waiting("held")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("held").await;
    server.stop_immediate().await;
    builder.term();
    builder.term();
    builder.ended().await.expect("it ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_whose_login_is_refused_waits_for_the_password_to_arrive() {
    let server = Server::start(Options::default());
    let s3 = s3::S3::start_public(s3::Server::InProcess).await;
    let scene = Scene::on(Press::on(Farm::on(server.database().await).await, s3).await);
    let signer = scene.press.start_signer().await;
    let drv = scene.queue_one(&signer, &Expression::trivial("later")).await;
    let address = format!("127.0.0.1:{}", press::free_port());
    let_in(&scene.press.farm, false).await;
    let builder = scene.builder(Version::New, "one", |set| set.with("listen", &address)).await;
    eventually("it is refused", async || {
        let Ok(ready) = reqwest::get(format!("http://{address}/readyz")).await else { return false };
        ready.text().await.is_ok_and(|text| text.contains("not permitted to log in"))
    })
    .await;
    let_in(&scene.press.farm, true).await;
    assert_eq!(scene.end(&drv).await.state, "succeeded");
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_has_two_connections_whatever_it_does() {
    let (scene, signer) = Scene::new().await;
    let names: Vec<String> = (0..12).map(|number| format!("one-of-many-{number}")).collect();
    let talkative = |name: &String| Expression::new(name, &format!("{WAIT}; seq 100; echo >$out"));
    let many: Vec<Expression> = names.iter().map(talkative).collect();
    scene.press.want(&signer, &many).await;
    let admin = scene.press.farm.database.admin();
    let connections = async || -> i64 {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1";
        let role = &scene.press.pool.login.role;
        sqlx::query_scalar(query).bind(role).fetch_one(&admin).await.expect("a count")
    };
    // The farm's own node has the same login.
    let others = connections().await;
    let builder = scene.builder(Version::New, "one", |set| set.with("slots", "8")).await;
    names.iter().for_each(|name| scene.gates.open(name));
    let (mut most, mut settled) = (0, std::pin::pin!(scene.press.settled()));
    while futures::poll!(settled.as_mut()).is_pending() {
        most = most.max(connections().await - others);
    }
    assert!((1..=2).contains(&most), "{most}");
    scene.press.ends_well().await;
    builder.stop().await;
}

/// How often the NAR of a derivation's output was sent.
fn sent(bucket: &Proxy, drv: &str) -> usize {
    let hash = &output_of(drv)["/nix/store/".len()..][..32];
    let prefix = format!("PUT /bucket/nar/{hash}");
    bucket.requests().iter().filter(|request| request.starts_with(&prefix)).count()
}

/// A signer whose slots lead through the proxy.
async fn signer_by(scene: &Scene, bucket: &Proxy, database: &Proxy) -> RunningSigner {
    RunningSigner::start(&scene.press.farm, scene.press.settings_by(bucket, database).await).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_waits_for_a_signer() {
    let scene = Scene::on(Press::with(s3::S3::start_public(s3::Server::InProcess).await).await);
    let (bucket, database) = (scene.press.before_bucket(), scene.press.before_database());
    let signer = signer_by(&scene, &bucket, &database).await;
    let drv = scene.queue_one(&signer, &waiting("built")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("built").await;
    signer.stop().await;
    scene.gates.open("built");
    scene.press.becomes(&drv, "uploading").await;
    let _signer = signer_by(&scene, &bucket, &database).await;
    scene.hint().await;
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
    assert_eq!(sent(&bucket, &drv), 1);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_signer_completes_what_the_first_gave_slots_for() {
    let scene = Scene::on(Press::with(s3::S3::start_public(s3::Server::InProcess).await).await);
    let (bucket, database) = (scene.press.before_bucket(), scene.press.before_database());
    let signer = signer_by(&scene, &bucket, &database).await;
    let drv = scene.queue_one(&signer, &waiting("built")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("built").await;
    let (release, held) = Fault::hold();
    bucket.on_matching(1, |name| name.starts_with("PUT /bucket/nar/"), held);
    scene.gates.open("built");
    eventually("its NAR is on the way", async || sent(&bucket, &drv) == 1).await;
    signer.stop().await;
    let _signer = signer_by(&scene, &bucket, &database).await;
    scene.hint().await;
    drop(release);
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["succeeded"]);
    assert_eq!(sent(&bucket, &drv), 1);
    builder.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_whose_session_was_ended_registers_anew() {
    let (scene, signer) = Scene::new().await;
    let drv = scene.queue_one(&signer, &waiting("built")).await;
    let builder = scene.builder(Version::New, "one", unchanged).await;
    scene.gates.arrived("built").await;
    scene.gates.forget("built");
    let session = scene.sessions("one").await[0].0;
    scene.press.farm.value::<i32>("SELECT ci.release_session($1)", session).await;
    scene.hint().await;
    scene.gates.arrived("built").await;
    scene.gates.open("built");
    scene.press.ends_well().await;
    assert_eq!(scene.press.outcomes(&drv).await, ["interrupted", "succeeded"]);
    let sessions = scene.sessions("one").await;
    assert_eq!(sessions.iter().map(|(_, ended)| *ended).collect::<Vec<_>>(), [true, false]);
    builder.stop().await;
}

/// Paths in a store that a canary left.
fn canaries(builder: &harmonia_tests::yard::RunningBuilder) -> usize {
    let store = std::fs::read_dir(builder.nix.root().join("nix/store")).expect("a store");
    store.flatten().filter(|path| path.file_name().to_string_lossy().ends_with("-harmonia-ci-canary")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_fails_for_its_own_reasons_proves_itself_again() {
    for version in Version::ALL {
        proves_itself(version).await;
    }
}

async fn proves_itself(version: Version) {
    let (scene, signer) = Scene::new().await;
    let demanding =
        |name: &str| Expression::trivial(name).attribute("requiredSystemFeatures", "[ \"big-parallel\" ]");
    let builder = scene.builder_with(version, "one", "system-features =\n", unchanged).await;
    let running = scene.queue_one(&signer, &waiting("running")).await;
    scene.gates.arrived("running").await;
    let drvs = scene.press.want(&signer, &["a", "b", "c"].map(demanding)).await;
    for drv in &drvs {
        scene.press.becomes(drv, "blocked").await;
        assert_eq!(scene.press.outcomes(drv).await, ["missing_feature"]);
    }
    let (sessions, sung) = (scene.sessions("one").await, canaries(&builder));
    assert_eq!((sessions.len(), sung), (1, 1));
    scene.hint().await;
    // What it holds ends in the old life.
    scene.gates.open("running");
    assert_eq!(scene.end(&running).await.state, "succeeded");
    assert_eq!(scene.press.outcomes(&running).await, ["succeeded"]);
    eventually("it registers anew", async || scene.sessions("one").await.len() == 2).await;
    assert!(scene.sessions("one").await[0].1);
    assert_eq!(canaries(&builder), 2);
    scene.press.check().await;
    builder.stop().await;
}
