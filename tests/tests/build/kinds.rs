//! Every kind of derivation, built by an old and a new Nix and substituted by a clean client.

use harmonia_tests::nixes::{Expression, Version};
use harmonia_tests::press::{Press, shared_nix};
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard::RunningBuilder;

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_is_built_and_published() {
    let press = Press::with(S3::start_public(Server::Versitygw).await).await;
    let signer = press.start_signer().await;
    let evaluator = shared_nix();
    let top = Expression::two_outputs("top").input("base", &Expression::files("base", 30));
    let drv = evaluator.instantiate(&top);
    press.evaluate(evaluator, &signer, &drv).await;
    let builder = RunningBuilder::start(&press, Version::New, "one").await;
    let states = press.settled().await;
    assert!(states.values().all(|state| state == "succeeded"), "{states:#?}");
    press.check().await;
    builder.stop().await;
}
