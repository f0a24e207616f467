//! Real clients, old and new, through `/cache`.

use harmonia_tests::gateway::Gateway;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::Press;
use harmonia_tests::s3::Server;

async fn through_the_gateway(server: Server, built_by: Version, by: Version) {
    let press = Press::new(server).await;
    let (signer, gateway, builder) =
        (press.start_signer().await, Gateway::start(&press).await, Nix::start(built_by));
    let top = Expression::two_outputs("top").input("base", &Expression::files("base", 30));
    let outputs = builder.build_all(&top);
    let client = Nix::start_with(by, &gateway.settings(&press));
    let realise = |path: &String| client.command("nix-store").args(["--realise", path]).output().unwrap();
    // Missed before it is published, found a moment after.
    assert!(!realise(&outputs[0]).status.success());

    let drv = builder.instantiate(&top);
    press.evaluate(&builder, &signer, &drv).await;
    press.publish_all(&builder, &press.uploader(&[&signer.url])).await;
    for path in &outputs {
        let answer = realise(path);
        assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        assert!(client.real(path).exists());
    }
    let log = client.run(
        "nix",
        &["--extra-experimental-features", "nix-command", "log", "--store", &gateway.url, &outputs[0]],
    );
    assert!(log.contains(&drv), "{log}");
    press.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_client_substitutes_what_a_new_nix_built() {
    through_the_gateway(Server::Versitygw, Version::New, Version::Old).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_client_substitutes_what_an_old_nix_built() {
    through_the_gateway(Server::InProcess, Version::Old, Version::New).await;
}
