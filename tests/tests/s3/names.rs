//! Odd names and odd shapes, from a build to both versions of Nix that substitute it.

use std::time::Duration;

use harmonia_nix::store_path;
use harmonia_service::layout;
use harmonia_signer::{Keeping, Signer};
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, shared_nix};
use harmonia_tests::s3::{S3, Server};

/// A public bucket, and a client with an empty store that trusts its key alone.
struct Shop {
    press: Press,
    signer: RunningSigner,
    clients: Vec<Nix>,
}

impl Shop {
    async fn open(server: Server) -> Shop {
        let press = Press::with(S3::start_public(server).await).await;
        let signer = press.start_signer().await;
        let settings = format!(
            "substituters = {}\ntrusted-public-keys = {}\nrequire-sigs = true\n",
            press.s3.url(),
            press.public_key()
        );
        let clients = Version::ALL.map(|version| Nix::start_with(version, &settings)).into();
        Shop { press, signer, clients }
    }

    /// Publishes all outputs and has each client fetch and verify them.
    async fn sells(&self, expression: &Expression) -> Vec<String> {
        let builder = shared_nix();
        let outputs = builder.build_all(expression);
        let drv = builder.instantiate(expression);
        self.press.evaluate(builder, &self.signer, &drv).await;
        let published = self.press.publish_all(builder, &self.press.uploader(&[&self.signer.url])).await;
        assert!(published.contains(&drv));
        let infos = self.press.check().await;
        for client in &self.clients {
            for path in &outputs {
                client.run("nix-store", &["--realise", path]);
                client.run("nix-store", &["--verify-path", path]);
                let hash = client.run("nix-store", &["--query", "--hash", path]);
                assert_eq!(hash, builder.run("nix-store", &["--query", "--hash", path]), "{path}");
                assert!(infos.contains_key(path));
            }
        }
        outputs
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sign_that_a_name_may_have() {
    let shop = Shop::open(Server::Versitygw).await;
    // Nix asks for a log without escaping its name, so that a bucket never sees what follows a question mark.
    let outputs = shop.sells(&Expression::two_outputs("a+b=c.d_e-1.0")).await;
    for client in &shop.clients {
        let words = ["--extra-experimental-features", "nix-command", "log", "--store", &shop.press.s3.url()];
        let log = client.run("nix", &[&words[..], &[&outputs[0]]].concat());
        assert!(log.starts_with("the log of /nix/store/") && log.contains("-a+b=c.d_e-1.0.drv"), "{log}");
    }
    for name in ["+", "=", "?", "_", "a+b?c=d.e_f-1.0", "a..b", &"x".repeat(200)] {
        shop.sells(&Expression::trivial(name)).await;
    }
}

/// On a server that cuts the key of its log.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_long_name_is_not_swept() {
    let shop = Shop::open(Server::InProcess).await;
    let name = "x".repeat(200);
    let drv = shared_nix().instantiate(&Expression::trivial(&name));
    shop.sells(&Expression::trivial(&name)).await;
    let log = layout::log(&store_path::parse(&drv).unwrap());
    let before = shop.press.object(&log).await;
    let keeping = Keeping { every: None, grace: Duration::ZERO, logs: Duration::ZERO };
    let signer = Signer::connect(&shop.press.signer_settings().await).await.unwrap();
    let swept = signer.sweep("test", &keeping, None, |_| {}).await.unwrap().unwrap();
    assert!(!swept.leftovers.contains_key("logs"), "{swept}");
    assert_eq!(shop.press.object(&log).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_whose_names_are_no_text() {
    let shop = Shop::open(Server::InProcess).await;
    let script = r#"mkdir "$out"; cd "$out"
        for name in '\377\376' 'ok' '\303\050' 'new\nline' ' ' 'quo"te' '\001' 'a\\b'; do
            echo "$name" >"$(printf "$name")x"
        done
        mkdir "$(printf '\200')"; ln -s "$(printf '\377')" "$(printf '\200/\201')""#;
    shop.sells(&Expression::new("no-text", script)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_of_every_shape() {
    let shop = Shop::open(Server::InProcess).await;
    for (name, script) in [
        ("empty-directory", "mkdir $out"),
        ("empty-file", ": >$out"),
        ("file", "echo content >$out"),
        ("program", "echo content >$out; chmod +x $out"),
        ("link-to-nowhere", "ln -s /nowhere $out"),
        ("link-to-itself", "ln -s $out $out"),
        ("refers-to-itself", "mkdir $out; echo $out >$out/file"),
        ("deep", "d=$out; i=0; while [ $i -lt 60 ]; do d=$d/d; i=$((i + 1)); done; mkdir -p $d"),
    ] {
        shop.sells(&Expression::new(name, script)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_chain() {
    let shop = Shop::open(Server::Versitygw).await;
    let mut chain = Expression::trivial("link-0");
    for number in 1..12 {
        let next = Expression::new(&format!("link-{number}"), "mkdir $out; ln -s $before $out/before");
        chain = next.input("before", &chain);
    }
    let outputs = shop.sells(&chain).await;
    for client in &shop.clients {
        let closure = client.run("nix-store", &["--query", "--requisites", &outputs[0]]);
        assert_eq!(closure.lines().count(), 12);
    }
}
