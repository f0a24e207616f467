//! A database that was restored from a backup, under a bucket that went on.

use std::process::Command;

use harmonia_nix::store_path;
use harmonia_queue::signer;
use harmonia_service::layout;
use harmonia_signer::{Resynced, Signer};
use harmonia_tests::farm::{Farm, PoolHandle};
use harmonia_tests::nixes::{Expression, Nix};
use harmonia_tests::pg::{Database, Options, Server as Postgres};
use harmonia_tests::press::{Press, RunningSigner, shared_nix};
use harmonia_tests::s3::{S3, Server};

/// `pg_dump` of a database, as a person would keep it.
fn dump(database: &Database) -> Vec<u8> {
    let output = Command::new(Postgres::program("pg_dump"))
        .args(["--format=custom", "--dbname", &database.direct_url()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

async fn restore(database: &Database, dump: &[u8]) -> Database {
    let restored = database.server().empty_database().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), dump).unwrap();
    let output = Command::new(Postgres::program("pg_restore"))
        .args(["--exit-on-error", "--dbname", &restored.direct_url()])
        .arg(file.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    restored
}

/// The same press on another database, with a new life of its node.
async fn move_to(press: &mut Press, database: Database) {
    press.farm = Farm::on(database).await;
    let login = &press.pool.login;
    let login = press.farm.database.known_login(&login.role, &login.password);
    press.pool = PoolHandle { id: press.pool.id, name: press.pool.name.clone(), db: login.db(), login };
    press.session = press.farm.node(&press.pool, "node").await;
    press.farm.settle().await;
}

async fn publish(press: &Press, signer: &RunningSigner, nix: &Nix, top: &Expression) -> Vec<String> {
    let outputs = nix.build_all(top);
    press.evaluate(nix, signer, &nix.instantiate(top)).await;
    press.publish_all(nix, &press.uploader(&[&signer.url])).await;
    outputs
}

async fn resync(press: &Press) -> Resynced {
    let control = Signer::connect(&press.signer_settings().await).await.unwrap();
    control.resync("test", |_| {}).await.unwrap().expect("nobody sweeps")
}

async fn put(press: &Press, key: &str, bytes: &[u8]) {
    let put = press.s3.client().put_object().bucket(&press.s3.bucket).key(key).body(bytes.to_vec().into());
    put.send().await.unwrap();
}

async fn remove(press: &Press, key: &str) {
    press.s3.client().delete_object().bucket(&press.s3.bucket).key(key).send().await.unwrap();
}

async fn adopts_and_reopens(server: Server) {
    let (nix, mut press) = (shared_nix(), Press::new(server).await);
    let signer = press.start_signer().await;
    let before = Expression::two_outputs("before").input("base", &Expression::files("base", 5));
    let lost = Expression::trivial("lost");
    publish(&press, &signer, nix, &before).await;
    let lost_path = publish(&press, &signer, nix, &lost).await.remove(0);
    // Known to the backup, built after it; and a build that had begun.
    let later = Expression::two_outputs("later").input("before", &before);
    nix.build_all(&later);
    press.evaluate(nix, &signer, &nix.instantiate(&later)).await;
    let backup = dump(&press.farm.database);

    let known: Vec<String> = press.publish_all(nix, &press.uploader(&[&signer.url])).await;
    assert_eq!(known.len(), 1);
    let after = Expression::two_outputs("after").input("later", &later);
    publish(&press, &signer, nix, &after).await;
    let hash = layout::narinfo(&store_path::parse(&lost_path).unwrap());
    let nar = press.check_path(&lost_path).await.url().to_owned();
    remove(&press, &nar).await;
    signer.stop().await;

    let restored = restore(&press.farm.database, &backup).await;
    move_to(&mut press, restored).await;
    let done = resync(&press).await;
    assert_eq!(
        (done.adopted, done.lost, done.foreign, done.unproven, done.violations),
        (4, 1, 0, 0, 0),
        "{done:?}"
    );
    assert!(!press.keys("").await.contains(&hash), "a narinfo without its NAR is removed");
    assert_eq!(
        resync(&press).await,
        Resynced { same: done.same + 4, adopted: 0, lost: 0, objects: done.objects - 1, ..done }
    );

    // What came after the backup needs no build; what was lost does.
    let signer = press.start_signer().await;
    press.evaluate(nix, &signer, &nix.instantiate(&after)).await;
    let built = press.publish_all(nix, &press.uploader(&[&signer.url])).await;
    assert_eq!(built, [nix.instantiate(&lost)]);
    press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_database_adopts_what_is_published_and_builds_what_is_lost() {
    adopts_and_reopens(Server::InProcess).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_holds_for_another_server() {
    adopts_and_reopens(Server::Versitygw).await;
}

/// A base backup and an archive, as CloudNativePG and others keep them. What no backup keeps, such as the tails of logs, is lost with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_recovered_to_a_moment_adopts_what_came_after_it() {
    let (nix, postgres) = (shared_nix(), Postgres::start(Options::default().archived()));
    let farm = Farm::on(postgres.database().await).await;
    let mut press = Press::on(farm, S3::start(Server::InProcess).await).await;
    postgres.back_up().await;
    let signer = press.start_signer().await;
    let before = Expression::files("before", 5);
    publish(&press, &signer, nix, &before).await;
    postgres.execute("SELECT pg_create_restore_point('moment')").await;
    let after = Expression::two_outputs("after").input("before", &before);
    publish(&press, &signer, nix, &after).await;
    signer.stop().await;

    postgres.recover("moment").await;
    let recovered = press.farm.database.again();
    move_to(&mut press, recovered).await;
    let done = resync(&press).await;
    assert_eq!((done.adopted, done.lost, done.violations), (2, 0, 0), "{done:?}");
    let signer = press.start_signer().await;
    press.evaluate(nix, &signer, &nix.instantiate(&after)).await;
    assert_eq!(press.publish_all(nix, &press.uploader(&[&signer.url])).await, [""; 0]);
    press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_published_without_half_of_its_outputs_is_built_again() {
    let (nix, press) = (shared_nix(), Press::new(Server::InProcess).await);
    let signer = press.start_signer().await;
    let outputs = publish(&press, &signer, nix, &Expression::two_outputs("pair")).await;
    press.farm.database.execute("DELETE FROM ci.canonical WHERE path LIKE '%-pair%'").await;
    press
        .farm
        .database
        .execute("UPDATE ci.job SET state = 'cancelled' WHERE drv_path LIKE '%-pair.drv'")
        .await;
    remove(&press, &layout::narinfo(&store_path::parse(&outputs[1]).unwrap())).await;
    let done = resync(&press).await;
    assert_eq!((done.adopted, done.lost), (0, 1), "{done:?}");
    assert!(!press.keys("").await.contains(&layout::narinfo(&store_path::parse(&outputs[0]).unwrap())));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_signed_or_no_derivation_of_ours_makes_is_not_adopted() {
    let (nix, press) = (shared_nix(), Press::new(Server::InProcess).await);
    let signer = press.start_signer().await;
    let outputs = publish(&press, &signer, nix, &Expression::trivial("trivial")).await;
    let key = layout::narinfo(&store_path::parse(&outputs[0]).unwrap());
    let text = String::from_utf8(press.object(&key).await).unwrap();
    let unsigned: String =
        text.lines().filter(|line| !line.starts_with("Sig:")).map(|line| format!("{line}\n")).collect();
    let put = press.s3.client().put_object().bucket(&press.s3.bucket).key(&key);
    put.body(unsigned.into_bytes().into()).send().await.unwrap();
    press.farm.database.execute("DELETE FROM ci.canonical WHERE path LIKE '%-trivial'").await;
    press
        .farm
        .database
        .execute("UPDATE ci.job SET state = 'cancelled' WHERE drv_path LIKE '%-trivial.drv'")
        .await;
    let done = resync(&press).await;
    assert_eq!((done.adopted, done.foreign), (0, 1), "{done:?}");
    assert_eq!(signer::to_forget(&press.farm.signer, &outputs, None).await.unwrap(), [""; 0]);
}

/// `nix copy --to 's3://…?secret-key=…'` with the farm's own key: another place for the NAR, and another compression.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_tool_wrote_with_the_same_key_is_left_alone() {
    let (nix, press) = (shared_nix(), Press::new(Server::InProcess).await);
    let signer = press.start_signer().await;
    let copied = publish(&press, &signer, nix, &Expression::trivial("copied")).await.remove(0);
    let known = publish(&press, &signer, nix, &Expression::trivial("known")).await.remove(0);
    let mut written = Vec::new();
    for (path, there) in [(&copied, true), (&known, false)] {
        let info = press.check_path(path).await;
        let key = layout::narinfo(&store_path::parse(path).unwrap());
        let url = info.url().replace("nar/", "nar/copied-").replace(".zst", ".xz");
        let text = String::from_utf8(press.object(&key).await).unwrap();
        let text = text.replace(info.url(), &url).replace("zstd", "xz");
        if there {
            put(&press, &url, &press.object(info.url()).await).await;
        }
        put(&press, &key, text.as_bytes()).await;
        written.push((key, text.into_bytes()));
    }
    press.farm.database.execute("DELETE FROM ci.canonical WHERE path LIKE '%-copied'").await;
    let done = resync(&press).await;
    assert_eq!((done.adopted, done.lost, done.foreign), (0, 0, 2), "{done:?}");
    for (key, text) in written {
        assert_eq!(press.object(&key).await, text, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_for_its_size_is_left_alone() {
    let (nix, press) = (shared_nix(), Press::new(Server::InProcess).await);
    let signer = press.start_signer().await;
    publish(&press, &signer, nix, &Expression::trivial("beside")).await;
    let key = "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz.narinfo";
    put(&press, key, &vec![b'x'; harmonia_nix::narinfo::MAX_NARINFO_SIZE + 1]).await;
    let done = resync(&press).await;
    assert_eq!((done.lost, done.foreign), (0, 1), "{done:?}");
    assert!(done.same > 0 && press.keys("").await.contains(&key.to_owned()));
}
