//! Real clients, old and new, through `/cache`.

use std::fs;

use harmonia_frontend::Frontend;
use harmonia_queue::people::{Scope, create_token};
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::Press;
use harmonia_tests::s3::Server;
use tokio::task::JoinHandle;

/// A frontend before the press's private bucket.
struct Gateway {
    url: String,
    task: JoinHandle<()>,
}

impl Gateway {
    async fn start(press: &Press) -> Gateway {
        let login = press.farm.database.make_login("harmonia_frontend").await;
        let settings =
            press.bucket_settings().with("database_url", login.direct_url).with("listen", "127.0.0.1:0");
        let frontend = Frontend::start(&settings).await.unwrap();
        let url = format!("http://{}/cache", frontend.address());
        let task = tokio::spawn(async move { frontend.serve(std::future::pending()).await.unwrap() });
        Gateway { url, task }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A client with an empty store, a read token in its netrc, that trusts our key alone and forgets what it missed.
async fn client(press: &Press, gateway: &Gateway, version: Version) -> (Nix, tempfile::TempDir) {
    let token = create_token(&press.farm.frontend, "client", Scope::Read, None).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let netrc = directory.path().join("netrc");
    fs::write(&netrc, format!("machine 127.0.0.1 login nix password {token}\n")).unwrap();
    let settings = format!(
        "substituters = {}\ntrusted-public-keys = {}\nrequire-sigs = true\nnetrc-file = {}\n\
         narinfo-cache-negative-ttl = 0\n",
        gateway.url,
        press.public_key(),
        netrc.display()
    );
    (Nix::start_with(version, &settings), directory)
}

async fn through_the_gateway(server: Server, built_by: Version, by: Version) {
    let press = Press::new(server).await;
    let (signer, gateway, builder) =
        (press.start_signer().await, Gateway::start(&press).await, Nix::start(built_by));
    let top = Expression::two_outputs("top").input("base", &Expression::files("base", 30));
    let outputs = builder.build_all(&top);
    let (client, _netrc) = client(&press, &gateway, by).await;
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
