//! From a real build to what a real client substitutes.

use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::Press;
use harmonia_tests::s3::{S3, Server};

/// A derivation with two outputs on top of another, built by `builder` and published.
async fn published(press: &Press, builder: &Nix) -> (String, Vec<String>) {
    let signer = press.start_signer().await;
    let base = Expression::files("base+x?y=1", 30);
    let top = Expression::two_outputs("top").input("base", &base);
    let outputs = builder.build_all(&top);
    let drv = builder.instantiate(&top);
    press.evaluate(builder, &signer, &drv).await;
    press.publish_all(builder, &press.uploader(&[&signer.url])).await;
    (drv, outputs)
}

/// A client with an empty store that trusts our key alone.
fn client(version: Version, substituter: &str, key: &str) -> Nix {
    let settings = format!(
        "substituters = {substituter}\ntrusted-public-keys = {key}\nrequire-sigs = true\n\
         narinfo-cache-negative-ttl = 0\n"
    );
    Nix::start_with(version, &settings)
}

async fn is_substituted(server: Server, built_by: Version, by: Version) {
    let press = Press::with(S3::start_public(server).await).await;
    let builder = Nix::start(built_by);
    let (drv, outputs) = published(&press, &builder).await;
    press.check().await;
    let client = client(by, &press.s3.url(), &press.public_key());
    for path in &outputs {
        client.run("nix-store", &["--realise", path]);
        assert!(client.real(path).exists());
    }
    let log = client.run(
        "nix",
        &["--extra-experimental-features", "nix-command", "log", "--store", &press.s3.url(), &outputs[0]],
    );
    assert!(log.contains(&drv), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_old_nix_built_a_new_one_substitutes_from_a_public_bucket() {
    is_substituted(Server::Versitygw, Version::Old, Version::New).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_new_nix_built_an_old_one_substitutes_from_a_public_bucket() {
    is_substituted(Server::InProcess, Version::New, Version::Old).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_signed_is_not_substituted() {
    let press = Press::with(S3::start_public(Server::InProcess).await).await;
    let builder = Nix::start(Version::Old);
    let (_, outputs) = published(&press, &builder).await;
    let stranger = harmonia_nix::key::SecretKey::generate("press-1").unwrap().public_text();
    let client = client(Version::New, &press.s3.url(), &stranger);
    assert!(!client.command("nix-store").args(["--realise", &outputs[0]]).status().unwrap().success());
}
