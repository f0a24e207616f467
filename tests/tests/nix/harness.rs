//! The harness itself: what the other modules take for granted.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::s3::{S3, Server};

#[test]
fn each_version_builds_in_a_sandbox() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        // Outside a sandbox there would be a shell, and this machine's files.
        let seen =
            nix.build(&Expression::new("seen", "ls -d /bin /etc/shadow /home >$out 2>/dev/null || true"));
        assert_eq!(fs::read_to_string(nix.real(&seen)).unwrap(), "", "{version:?}");
    }
}

#[test]
fn versions_and_protocols_are_the_two_that_we_test() {
    for (version, least, protocol) in [(Version::Old, [2, 8], 34), (Version::New, [2, 34], 38)] {
        let nix = Nix::start(version);
        let text = nix.run("nix", &["--version"]);
        let numbers =
            text.rsplit(' ').next().unwrap().split('.').map(|number| number.parse::<u32>().unwrap());
        assert!(numbers.take(2).ge(least), "{text}");
        assert!(daemon_protocol(&nix) >= 0x100 + protocol);
    }
}

fn daemon_protocol(nix: &Nix) -> u64 {
    use std::io::{Read, Write};
    const HELLO: [u64; 2] = [0x6e69_7863, 0x6478_696f];
    let mut socket = std::os::unix::net::UnixStream::connect(nix.socket()).unwrap();
    socket.write_all(&HELLO[0].to_le_bytes()).unwrap();
    let mut word = || {
        let mut bytes = [0; 8];
        socket.read_exact(&mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    assert_eq!(word(), HELLO[1]);
    word()
}

#[test]
fn both_run_side_by_side_with_stores_of_their_own() {
    let built: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = [Version::Old, Version::New, Version::Old, Version::New]
            .map(|version| {
                scope.spawn(move || {
                    let nix = Nix::start(version);
                    let path = nix.build(&Expression::unreproducible("same"));
                    fs::read(nix.real(&path).join("file")).unwrap()
                })
            })
            .into_iter()
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(built.iter().collect::<std::collections::HashSet<_>>().len(), 4);
}

#[test]
fn expressions_build_what_they_say() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let read = |path: &str, file: &str| fs::read_to_string(nix.real(path).join(file)).unwrap();

        let trivial = Expression::trivial("trivial");
        assert_eq!(fs::read_to_string(nix.real(&nix.build(&trivial))).unwrap(), "trivial\n");

        let two = nix.build_all(&Expression::two_outputs("two"));
        assert_eq!(read(&two[0], "file"), "two\n");
        assert_eq!(fs::read_link(nix.real(&two[1]).join("link")).unwrap(), Path::new(&two[0]).join("file"));

        let fixed = nix.build(&Expression::fixed_output("fixed", "what we $knew"));
        assert_eq!(fs::read_to_string(nix.real(&fixed)).unwrap(), "what we $knew");

        let files = nix.build(&Expression::files("files", 25));
        assert_eq!(read(&files, "2/24"), "24\n");

        let above = Expression::new("above", "ln -s $below $out").input("below", &trivial);
        let above = nix.build(&above);
        let references = nix.run("nix-store", &["--query", "--references", &above]);
        assert!(references.ends_with("-trivial"), "{references}");
    }
}

#[test]
fn a_failing_expression_fails_with_its_log() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let file = nix.write(&Expression::failing("failing"));
        let output = nix.command("nix-build").arg("--no-out-link").arg(file).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains("this build fails"), "{errors}");
    }
}

#[test]
fn settings_reach_the_daemon() {
    for version in Version::ALL {
        let nix = Nix::start_with(version, "max-build-log-size = 10");
        let file = nix.write(&Expression::new("chatty", "seq 1000; echo >$out"));
        let output = nix.command("nix-build").arg("--no-out-link").arg(file).output().unwrap();
        assert!(!output.status.success(), "{version:?}");
    }
}

#[test]
fn a_killed_daemon_starts_again_on_its_store() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        let path = nix.build(&Expression::trivial("kept"));
        nix.kill_daemon();
        let refused = nix.command("nix-store").args(["--check-validity", &path]).output().unwrap();
        assert!(!refused.status.success());
        nix.start_daemon();
        nix.run("nix-store", &["--check-validity", &path]);
    }
}

#[test]
fn nothing_remains() {
    for version in Version::ALL {
        let nix = Nix::start(version);
        nix.build(&Expression::two_outputs("gone"));
        let root = nix.root().to_owned();
        drop(nix);
        assert!(!root.exists());
    }
}

#[tokio::test]
async fn each_version_substitutes_from_a_public_bucket() {
    for version in Version::ALL {
        let s3 = S3::start_public(Server::InProcess).await;
        let maker = Nix::start(version);
        let path = maker.build(&Expression::two_outputs("made"));
        let cache = maker.root().join("cache");
        maker.run("nix", &["copy", "--to", &format!("file://{}", cache.display()), &path]);
        let listing =
            Command::new("find").arg(&cache).args(["-type", "f", "-printf", "%P\\n"]).output().unwrap();
        for key in String::from_utf8(listing.stdout).unwrap().lines() {
            let body = fs::read(cache.join(key)).unwrap();
            s3.client().put_object().bucket(&s3.bucket).key(key).body(body.into()).send().await.unwrap();
        }
        let user = Nix::start_with(version, &format!("substituters = {}\nrequire-sigs = false", s3.url()));
        user.run("nix-store", &["--realise", &path]);
        assert_eq!(fs::read_to_string(user.real(&path).join("file")).unwrap(), "made\n", "{version:?}");
    }
}
