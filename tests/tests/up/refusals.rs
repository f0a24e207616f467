//! What it does not do, in a sentence.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use harmonia_tests::eventually;

use crate::machine::{Machine, errors, take};

#[tokio::test]
async fn a_second_one_on_the_same_data_names_the_first() {
    let machine = Machine::new();
    let up = machine.up().await;
    let second = machine.run(&mut machine.command("up"));
    assert_eq!(second.status.code(), Some(2));
    assert!(errors(&second).contains(&format!("as process {}", up.pid())), "{}", errors(&second));
}

#[tokio::test]
async fn a_taken_port_is_named_before_anything_is_started() {
    let machine = Machine::new();
    let _taken = take(machine.listen);
    let refused = machine.run(&mut machine.command("up"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(errors(&refused).contains(&machine.listen.to_string()), "{}", errors(&refused));
    assert!(!machine.data().join("postgres").exists());
}

#[tokio::test]
async fn data_of_a_newer_release_is_left_alone() {
    let machine = Machine::new();
    fs::create_dir(machine.data()).unwrap();
    fs::write(machine.data().join("version"), "1000\n").unwrap();
    let refused = machine.run(&mut machine.command("up"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(errors(&refused).contains("newer release"), "{}", errors(&refused));
}

#[tokio::test]
async fn without_nix_it_says_what_to_install() {
    let machine = Machine::new();
    let refused = machine.run(machine.command("up").env("PATH", "/nowhere"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(errors(&refused).contains("nix-bin"), "{}", errors(&refused));
}

#[tokio::test]
async fn a_daemon_that_does_not_answer_is_named() {
    let machine = Machine::new();
    let refused = machine.run(machine.command("up").args(["--nix-daemon", "/nowhere/socket"]));
    assert_eq!(refused.status.code(), Some(1));
    assert!(errors(&refused).contains("/nowhere/socket"), "{}", errors(&refused));
    assert!(machine.processes().is_empty());
}

/// Listens where the daemon would, and speaks protocol 1.21.
const OLD_DAEMON: &str = r#"#!/usr/bin/perl
use IO::Socket::UNIX;
my $socket = IO::Socket::UNIX->new(Type => SOCK_STREAM, Local => $ENV{NIX_DAEMON_SOCKET_PATH}, Listen => 5) or die;
my @kept;
while (my $client = $socket->accept) { syswrite $client, pack("Q<Q<", 0x6478696f, 0x115); push @kept, $client }
"#;

#[tokio::test]
async fn a_nix_that_is_too_old_is_named() {
    let machine = Machine::new();
    let bin = machine.data().with_file_name("bin");
    fs::create_dir(&bin).unwrap();
    for (name, text) in [("nix-daemon", OLD_DAEMON), ("nix-store", "#!/bin/sh\n")] {
        fs::write(bin.join(name), text).unwrap();
        fs::set_permissions(bin.join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let refused = machine.run(machine.command("up").env("PATH", path));
    assert_eq!(refused.status.code(), Some(1));
    assert!(errors(&refused).contains("speaks protocol 1.21"), "{}", errors(&refused));
}

#[tokio::test]
async fn an_address_that_is_none_is_not_asked() {
    let machine = Machine::new();
    let refused = machine.run(machine.bare("status").env("HARMONIA_CI_URL", "ci.example.org"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(errors(&refused).contains("is not the address of a farm"), "{}", errors(&refused));
}

#[tokio::test]
async fn a_bucket_that_cannot_be_meant_is_explained() {
    let machine = Machine::new();
    let refused = machine.run(machine.command("up").args(["--s3", "http://host/bucket"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(errors(&refused).contains("KEY:SECRET@HOST"), "{}", errors(&refused));
}

#[tokio::test]
async fn a_setting_that_an_option_says_names_the_option() {
    let machine = Machine::new();
    fs::create_dir(machine.data()).unwrap();
    fs::write(machine.data().join("config.toml"), "listen = '127.0.0.1:1'\n").unwrap();
    let refused = machine.run(&mut machine.command("up"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(errors(&refused).contains("sets listen, which is for --listen to say"), "{}", errors(&refused));
}

#[tokio::test]
async fn a_lost_password_of_the_database_is_named() {
    let machine = Machine::new();
    machine.up().await.interrupt();
    eventually("everything ends", || async { machine.processes().is_empty() }).await;
    fs::remove_file(machine.data().join("secrets/postgres-password")).unwrap();
    let refused = machine.run(&mut machine.command("up"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(errors(&refused).contains("does not take the password in"), "{}", errors(&refused));
}

#[tokio::test]
async fn a_disk_that_is_nearly_full_is_named() {
    let machine = Machine::new();
    let (data, up) = (machine.data(), machine.command("up"));
    // A small disk that only this process and its children see.
    let mount = "mount -t tmpfs -o size=64m none \"$0\" && exec \"$@\"";
    let mut small = Command::new("unshare");
    small.args(["--mount", "--map-root-user", "sh", "-c", mount]).arg(data.parent().unwrap());
    let refused = machine.run(small.arg(up.get_program()).args(up.get_args()));
    assert_eq!(refused.status.code(), Some(1), "{}", errors(&refused));
    assert!(errors(&refused).contains("MiB"), "{}", errors(&refused));
}
