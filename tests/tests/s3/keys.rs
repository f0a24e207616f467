//! Keys come and go while real clients look.

use std::fs;

use harmonia_nix::key::SecretKey;
use harmonia_nix::{narinfo, store_path};
use harmonia_service::layout;
use harmonia_service::settings::Settings;
use harmonia_signer::Signer;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, shared_nix};
use harmonia_tests::s3::{S3, Server};

async fn publish(press: &Press, signer: &RunningSigner, name: &str) -> String {
    let (nix, top) = (shared_nix(), Expression::trivial(name));
    let path = nix.build(&top);
    press.evaluate(nix, signer, &nix.instantiate(&top)).await;
    press.publish_all(nix, &press.uploader(&[&signer.url])).await;
    path
}

/// Whether a client that trusts this key alone gets a path.
fn gets(press: &Press, key: &SecretKey, path: &str) -> bool {
    let settings = format!(
        "substituters = {}\ntrusted-public-keys = {}\nrequire-sigs = true\nnarinfo-cache-negative-ttl = 0\n",
        press.s3.url(),
        key.public_text()
    );
    let client = Nix::start_with(Version::New, &settings);
    client.command("nix-store").args(["--realise", path]).status().unwrap().success()
}

async fn resign(settings: &Settings) -> usize {
    Signer::connect(settings).await.unwrap().resign(|_| {}).await.unwrap()
}

/// Names of the keys whose signatures a path carries.
async fn signers(press: &Press, path: &str) -> Vec<String> {
    let key = layout::narinfo(&store_path::parse(path).unwrap());
    let text = String::from_utf8(press.object(&key).await).unwrap();
    let signatures = text.lines().filter_map(|line| line.strip_prefix("Sig: "));
    signatures.filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_leaves_nobody_without_a_path() {
    let press = Press::with(S3::start_public(Server::Versitygw).await).await;
    let new = SecretKey::generate("press-2").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (old_file, new_file) = (directory.path().join("1"), directory.path().join("2"));
    fs::copy(press.key_file(), &old_file).unwrap();
    let settings =
        press.signer_settings().await.with("signing_key_files", directory.path().display().to_string());
    let signer = RunningSigner::start(&press.farm, settings.clone()).await;
    let before = publish(&press, &signer, "before").await;
    assert!(gets(&press, &press.key, &before) && !gets(&press, &new, &before));

    // Beside the old one: the signer that runs takes it up.
    fs::write(&new_file, new.to_text().as_bytes()).unwrap();
    let between = publish(&press, &signer, "between").await;
    assert_eq!(signers(&press, &between).await, ["press-1", "press-2"]);
    assert_eq!(resign(&settings).await, 4, "with busybox and its tools");
    for path in [&before, &between] {
        assert!(gets(&press, &press.key, path) && gets(&press, &new, path), "{path}");
    }

    // Clients have the new one: the old one goes.
    fs::remove_file(&old_file).unwrap();
    resign(&settings).await;
    for path in [&before, &between] {
        assert_eq!(signers(&press, path).await, ["press-2"]);
        assert!(gets(&press, &new, path) && !gets(&press, &press.key, path), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_leak_nothing_carries_the_old_signature() {
    let press = Press::with(S3::start_public(Server::InProcess).await).await;
    let signer = press.start_signer().await;
    let path = publish(&press, &signer, "path").await;
    // Somebody who has the key added a signature of another key of theirs, too.
    let key = layout::narinfo(&store_path::parse(&path).unwrap());
    let stranger = "Sig: stranger-1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA==\n";
    let text = [press.object(&key).await, stranger.as_bytes().to_vec()].concat();
    let put = press.s3.client().put_object().bucket(&press.s3.bucket).key(&key);
    put.body(text.into()).send().await.unwrap();

    let new = SecretKey::generate("press-2").unwrap();
    fs::write(press.key_file(), new.to_text().as_bytes()).unwrap();
    resign(&press.signer_settings().await).await;
    assert_eq!(signers(&press, &path).await, ["press-2"]);
    assert!(gets(&press, &new, &path) && !gets(&press, &press.key, &path));
    assert!(press.keys("").await.iter().filter(|key| key.ends_with(".narinfo")).count() >= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn signing_everything_again_goes_on_where_a_signer_that_died_stopped() {
    let press = Press::new(Server::InProcess).await;
    let signer = press.start_signer().await;
    let paths = [publish(&press, &signer, "one").await, publish(&press, &signer, "two").await];
    signer.stop().await;
    let new = SecretKey::generate("press-2").unwrap();
    fs::write(press.key_file(), new.to_text().as_bytes()).unwrap();
    let signer = Signer::connect(&press.signer_settings().await).await.unwrap();
    signer.ask_to_resign().await.unwrap();

    // It dies after the first path.
    let first = tokio::sync::Notify::new();
    tokio::select! {
        done = signer.resign_if_asked("one", 1, |_| first.notify_one()) => panic!("{done:?}"),
        () = first.notified() => {}
    }
    assert!(!signer.resign_if_asked("two", 1, |_| {}).await.unwrap(), "the first may still be at it");
    press.farm.database.execute("UPDATE ci.resign SET lease_until = '-infinity'").await;
    let halfway = signer.resigning().await.unwrap();
    assert!(halfway.done < halfway.total && halfway.ended_at.is_none(), "{halfway:?}");

    assert!(signer.resign_if_asked("two", 1, |_| {}).await.unwrap());
    let state = signer.resigning().await.unwrap();
    assert_eq!(
        (state.done, state.total, state.ended_at.is_some()),
        (4, 4, true),
        "with busybox and its tools"
    );
    for path in &paths {
        assert_eq!(signers(&press, path).await, ["press-2"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_keeps_its_deriver_although_its_job_went() {
    let press = Press::new(Server::InProcess).await;
    let signer = press.start_signer().await;
    let path = publish(&press, &signer, "path").await;
    let before = press.check_path(&path).await.deriver().cloned();
    assert!(before.is_some());
    press.farm.database.execute("UPDATE ci.canonical SET job_id = NULL").await;
    resign(&press.signer_settings().await).await;
    let info: narinfo::NarInfo = press.check_path(&path).await;
    assert_eq!(info.deriver().cloned(), before);
}
