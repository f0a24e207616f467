//! A farm on a database, a bucket and a daemon that exist.

use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::pg;
use harmonia_tests::s3::{S3, Server};

use crate::machine::Machine;

#[tokio::test]
async fn a_database_that_exists_is_used_instead_of_a_private_one() {
    let machine = Machine::new();
    // Of its own: logins are shared by all databases of a server.
    let server = pg::Server::start(pg::Options::default());
    let database = server.empty_database().await;
    let _up = machine.up_with(&["--database", &database.direct_url()]).await;
    assert!(machine.part("postgres").is_none());
    let projects: Vec<String> =
        sqlx::query_scalar("SELECT name FROM ci.project").fetch_all(&database.admin()).await.unwrap();
    assert_eq!(projects, ["default"]);
}

#[tokio::test]
async fn a_bucket_that_exists_is_used_instead_of_a_private_one() {
    let machine = Machine::new();
    let s3 = S3::start(Server::InProcess).await;
    let key = format!("http://{}:{}@", s3.access_key, s3.secret_key);
    let url = format!("{}/{}?region=us-east-1", s3.endpoint.replace("http://", &key), s3.bucket);
    let _up = machine.up_with(&["--s3", &url]).await;
    assert!(machine.part("s3").is_none());
    let info = s3.client().get_object().bucket(&s3.bucket).key("nix-cache-info").send().await;
    assert!(info.is_ok(), "the signer has furnished it");
}

#[tokio::test]
async fn a_daemon_that_exists_is_used_instead_of_a_private_one() {
    let machine = Machine::new();
    let nix = Nix::start(Version::Old);
    let address = format!("unix://{}?root={}", nix.socket().display(), nix.root().display());
    let _up = machine.up_with(&["--nix-daemon", &address]).await;
    assert!(machine.part("nix").is_none());
    assert!(!machine.data().join("nix").exists());
}
