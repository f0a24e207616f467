//! Repositories that mean harm: each ends in a sentence for its author, and nothing for anybody else.

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::process::{Command, Output};

use harmonia_queue::evaluations::Stage;
use harmonia_tests::desk::confine;
use harmonia_tests::eventually;
use harmonia_tests::nixes::Version;
use serde_json::json;
use tokio::net::TcpListener;

use crate::scene::{Scene, git};

const SECRET: &str = "the-very-secret";
/// Somebody who owns a repository on this machine.
const SOMEBODY: u32 = 64_999;

/// The directory, committed and somebody's own: what is in it is evaluated as that user.
fn repository(scene: &Scene) -> String {
    scene.commit();
    let everything =
        Command::new("chown").args(["-R", &format!("{SOMEBODY}:{SOMEBODY}"), scene.path()]).status();
    assert!(everything.unwrap().success());
    format!("file://{}", scene.path())
}

/// Evaluates files that each attribute tries to read; none may, and nobody sees what is in them.
async fn cannot_read(scene: &Scene, paths: &[String]) {
    let attempt = |(n, path): (usize, &String)| format!("r{n} = make (builtins.readFile (/. + {path:?}));");
    let attempts: String = paths.iter().enumerate().map(attempt).collect();
    scene.write("default.nix", &format!("{{ ok = make \"ok\"; {attempts} }}"));
    let evaluation = scene.evaluate(&repository(scene), &[]).await;
    assert_eq!(evaluation.error, None);
    let attributes = scene.press.attributes(evaluation.id).await;
    assert_eq!(attributes["ok"], None);
    for (n, path) in paths.iter().enumerate() {
        let error = attributes[&format!("r{n}")].as_ref().unwrap_or_else(|| panic!("{path} was read"));
        let refused = ["No such file", "does not exist", "Permission denied", "denied"];
        assert!(
            refused.iter().any(|word| error.contains(word)) && !error.contains(SECRET),
            "{path}: {error}"
        );
    }
    assert!(scene.jobs().await.iter().all(|job| !job.contains(SECRET)));
}

#[tokio::test]
async fn secrets_of_the_machine_and_of_the_evaluator_are_not_read() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
        let secret = elsewhere.path().join("token");
        fs::write(&secret, SECRET).unwrap();
        chown(&secret, Some(SOMEBODY), None).unwrap();
        chown(elsewhere.path(), Some(SOMEBODY), None).unwrap();
        let other = scene.evaluator.state().join("work/other-project");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("source"), SECRET).unwrap();
        let paths = [
            secret.display().to_string(),
            other.join("source").display().to_string(),
            format!("/proc/{}/environ", std::process::id()),
            format!("/proc/{}/root/etc/shadow", std::process::id()),
            "/etc/shadow".to_owned(),
            "/root/.bashrc".to_owned(),
            "/var/run/secrets/kubernetes.io/serviceaccount/token".to_owned(),
        ];
        cannot_read(&scene, &paths).await;
    }
}

#[tokio::test]
async fn links_out_of_the_tree_lead_nowhere() {
    let scene = Scene::start(Version::Old).await;
    let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(elsewhere.path().join("token"), SECRET).unwrap();
    symlink(elsewhere.path().join("token"), scene.directory.path().join("link")).unwrap();
    cannot_read(&scene, &[format!("{}/link", scene.path())]).await;
    scene.write("default.nix", "{ a = make (builtins.readFile ./link); }");
    symlink(elsewhere.path().join("token"), scene.directory.path().join(".harmonia-ci.toml")).unwrap();
    let error = scene.refused(&repository(&scene)).await;
    assert!(error.contains(".harmonia-ci.toml is not TOML") && !error.contains(SECRET), "{error}");
}

#[tokio::test]
async fn sockets_of_the_machine_are_not_there() {
    let scene = Scene::start(Version::Old).await;
    let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
    let socket = elsewhere.path().join("postgres");
    let _listener = UnixListener::bind(&socket).unwrap();
    let found = format!("builtins.pathExists (/. + {:?})", socket.display().to_string());
    scene.write("default.nix", &format!("{{ a = make (if {found} then \"there\" else \"gone\"); }}"));
    let evaluation = scene.evaluate(&repository(&scene), &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["a"]);
    assert!(scene.jobs().await[0].ends_with("-gone.drv"));
}

#[tokio::test]
async fn neither_metadata_nor_this_machine_is_reached() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let fetch = |url: String| format!("make (builtins.readFile (builtins.fetchurl {url:?}))");
        scene.write(
            "default.nix",
            &format!(
                "{{ metadata = {}; own = {}; }}",
                fetch("http://169.254.169.254/latest/meta-data".to_owned()),
                fetch(format!("http://127.0.0.1:{port}/file"))
            ),
        );
        let evaluation = scene.evaluate(&repository(&scene), &[]).await;
        let attributes = scene.press.attributes(evaluation.id).await;
        for name in ["metadata", "own"] {
            let error = attributes[name].as_ref().expect("it is an error");
            assert!(error.contains("unable to download") && error.contains("403"), "{version:?} {error}");
        }
        let knocked = tokio::time::timeout(std::time::Duration::ZERO, server.accept()).await;
        assert!(knocked.is_err(), "somebody came");
    }
}

#[tokio::test]
async fn files_named_like_options_and_modules_elsewhere_are_only_files() {
    let scene = Scene::start(Version::Old).await;
    for name in ["--help", "-rf", "--upload-pack=touch x", "--version.nix"] {
        fs::write(scene.directory.path().join(name), "x").unwrap();
    }
    let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(elsewhere.path().join("file"), SECRET).unwrap();
    git(elsewhere.path(), &["init", "--quiet", "--initial-branch=main"]);
    git(elsewhere.path(), &["add", "--all"]);
    git(elsewhere.path(), &["commit", "--quiet", "--message", "x"]);
    let module = elsewhere.path().display().to_string();
    scene.git(&["init", "--quiet", "--initial-branch=main"]);
    scene.git(&["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", &module, "module"]);
    scene.write(
        "default.nix",
        "{ a = make (if builtins.pathExists ./module/file then \"there\" else \"gone\"); }",
    );
    let evaluation = scene.evaluate(&repository(&scene), &[]).await;
    assert_eq!(scene.built(&evaluation).await, ["a"]);
    assert!(scene.jobs().await[0].ends_with("-gone.drv"));
}

/// 2 MB in a pack, and all else as people have it.
#[tokio::test]
async fn a_file_of_two_gigabytes_is_refused_before_it_is_written() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", "{ }");
    let large = fs::File::create(scene.directory.path().join("large")).unwrap();
    large.set_len(2 << 30).unwrap();
    scene.git(&["init", "--quiet", "--initial-branch=main"]);
    scene.git(&["config", "core.compression", "1"]);
    let url = repository(&scene);
    fs::remove_file(scene.directory.path().join("large")).unwrap();
    let error = scene.refused(&url).await;
    assert!(error.contains("bytes in 2 files") && error.contains("HARMONIA_CI_EVAL_MAX_SOURCE"), "{error}");
}

#[tokio::test]
async fn a_git_bomb_is_refused_before_it_goes_off() {
    let scene = Scene::start(Version::Old).await;
    scene.write("default.nix", "{ }");
    scene.commit();
    let path = scene.directory.path();
    // Ten of ten of ten …: ten thousand million files in a few objects.
    let mut entry = format!("100644 blob {}", git(path, &["rev-parse", "HEAD:default.nix"]));
    for _ in 0..10 {
        let lines: String = (0..10).map(|n| format!("{entry}\tdefault-{n}.nix\n")).collect();
        fs::write(path.join("tree"), lines).unwrap();
        let made = Command::new("sh").current_dir(path).args(["-c", "git mktree <tree"]).output().unwrap();
        entry = format!("040000 tree {}", String::from_utf8(made.stdout).unwrap().trim());
    }
    let tree = entry.strip_prefix("040000 tree ").unwrap();
    let commit = git(path, &["commit-tree", "-m", "x", tree]);
    git(path, &["update-ref", "refs/heads/bomb", &commit]);
    let error = scene.refused(&format!("file://{}?ref=bomb", scene.path())).await;
    assert!(error.contains("more files than can be counted"), "{error}");
}

#[tokio::test]
async fn recursion_without_end_fails_its_own_attribute() {
    for version in Version::ALL {
        let scene = Scene::start(version).await;
        scene.write(
            "default.nix",
            "{ deep = let f = n: 1 + f (n + 1); in make (toString (f 0)); z = make \"z\"; }",
        );
        let evaluation = scene.evaluate(&repository(&scene), &[]).await;
        let attributes = scene.press.attributes(evaluation.id).await;
        assert!(attributes["deep"].is_some() && attributes["z"].is_none(), "{version:?} {attributes:?}");
    }
}

/// A repository whose evaluation needs a build.
fn needs_a_build(scene: &Scene) {
    let busybox = scene.nix.root().join("expressions/bb/busybox");
    fs::create_dir_all(scene.directory.path().join("bb")).unwrap();
    fs::copy(busybox, scene.directory.path().join("bb/busybox")).unwrap();
    let built = r#"derivation {
      name = "built"; system = builtins.currentSystem; builder = "${./bb}/busybox"; args = [ "sh" "-c" "echo -n name >$out" ];
    }"#;
    scene.write("default.nix", &format!("{{ a = make (builtins.readFile ({built})); }}"));
}

#[tokio::test]
async fn what_needs_a_build_is_refused_unless_the_default_branch_allows_it() {
    let scene = Scene::start(Version::Old).await;
    needs_a_build(&scene);
    let url = repository(&scene);
    let evaluation = scene.evaluate(&url, &[]).await;
    let error = scene.press.attributes(evaluation.id).await["a"].clone().unwrap();
    assert!(error.contains("allow-ifd = true into .harmonia-ci.toml of the default branch"), "{error}");

    scene.git(&["checkout", "--quiet", "-b", "next"]);
    scene.write(".harmonia-ci.toml", "allow-ifd = true");
    repository(&scene);
    let own = scene.evaluate(&format!("{url}?ref=next"), &[]).await;
    assert_eq!(own.error, None);
    scene.git(&["checkout", "--quiet", "main"]);
    let other = scene.evaluate(&format!("{url}?ref=next"), &[]).await;
    let error = scene.press.attributes(other.id).await["a"].clone().unwrap();
    assert!(error.contains("which is off here"), "{error}");

    scene.git(&["merge", "--quiet", "next"]);
    repository(&scene);
    let allowed = scene.evaluate(&url, &[]).await;
    assert_eq!(scene.built(&allowed).await, ["a"]);
}

/// A program in the whole sandbox, as a user of its own.
fn confined(script: &str, port: u16) -> Output {
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let root = place.path().join("root");
    let work = place.path().join("work");
    fs::create_dir_all(&root).unwrap();
    fs::create_dir_all(&work).unwrap();
    chown(&work, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    let spec = json!({
        "read": ["/usr", "/bin", "/lib", "/lib64", "/etc/passwd", "/dev/null"],
        "write": [work],
        "root": root,
        "user": SOMEBODY,
        "port": port,
        "memory": 1u64 << 30,
        "processes": 40,
        "file": 1 << 20,
    });
    let unshare =
        ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--propagation", "private", "--"];
    let mut command = Command::new("unshare");
    command.args(unshare).arg(confine()).args(["confine", &spec.to_string(), "perl", "-e", script]);
    command.env("SECRET", SECRET).current_dir(&work).output().unwrap()
}

fn said(script: &str) -> String {
    let output = confined(script, 9);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_fork_bomb_stops_at_the_limit() {
    let script = "my $n = 0; for (1..500) { my $p = fork(); last unless defined $p; if (!$p) { sleep 60; exit } $n++ } print $n";
    let children: u32 = said(script).parse().unwrap();
    assert!(children < 40, "{children}");
}

#[test]
fn a_confined_program_is_another_user_without_rights() {
    let script = r#"open F, "/proc/self/status"; print join " ", map { /^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):\s+(\S+)/ ? "$1=$2" : () } <F>"#;
    let status = said(script);
    for word in [&format!("Uid={SOMEBODY}"), "CapEff=0000000000000000", "NoNewPrivs=1", "Seccomp=2"] {
        assert!(status.contains(word), "{status}");
    }
}

#[test]
fn a_confined_program_knows_who_it_is() {
    assert_eq!(
        said("print join ' ', (getpwuid($<))[0, 2], defined getpwuid(0)"),
        format!("evaluation {SOMEBODY} 1")
    );
}

#[test]
fn a_confined_program_sees_no_process_but_its_own_and_no_file_but_those_named() {
    // The one that waits, and the program.
    assert_eq!(said(r#"print scalar(my @all = glob "/proc/[0-9]*")"#), "2");
    let there = r#"print join " ", grep { -e } qw(/usr /etc/passwd /etc/shadow /root /home /tmp /var/tmp/x /sys /dev/sda /dev/null)"#;
    assert_eq!(said(there), "/usr /etc/passwd /dev/null");
}

#[test]
fn a_confined_program_writes_where_it_works_and_no_more_than_it_may() {
    assert_eq!(
        said(
            r#"for my $f ("mine", "/usr/x", "/etc/passwd", "/x") { print open(F, ">>", $f) ? "yes " : "no " }"#
        ),
        "yes no no no"
    );
    let large =
        r#"$SIG{XFSZ} = "IGNORE"; open F, ">", "f"; for (1..64) { syswrite F, "x" x 65536 } print -s "f""#;
    assert_eq!(said(large), (1u32 << 20).to_string());
}

#[test]
fn a_confined_program_connects_to_the_proxy_alone() {
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, wrong) = (proxy.local_addr().unwrap().port(), other.local_addr().unwrap().port());
    let script = format!(
        "use Socket; for my $p ({port}, {wrong}) {{ socket(my $s, PF_INET, SOCK_STREAM, 0); \
         print connect($s, pack_sockaddr_in($p, inet_aton('127.0.0.1'))) ? 'yes ' : 'no ' }} \
         print socket(my $u, PF_INET, SOCK_DGRAM, 0) ? 'yes' : 'no'"
    );
    let output = confined(&script, port);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "yes no no",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test]
async fn the_whole_sandbox_is_in_force_here() {
    let scene = Scene::with(Version::Old, |settings| settings.with("eval_sandbox", "full")).await;
    scene.write("default.nix", "{ a = make \"a\"; }");
    let evaluation = scene.evaluate(&repository(&scene), &[]).await;
    assert_eq!((evaluation.stage, scene.built(&evaluation).await), (Stage::Complete, vec!["a".to_owned()]));
}

#[tokio::test]
async fn what_is_in_force_is_shown() {
    let scene = Scene::start(Version::Old).await;
    let page = format!("{}/readyz", scene.evaluator.url);
    let shown = || async { reqwest::get(&page).await.ok()?.text().await.ok() };
    eventually("the evaluator is ready", || async {
        shown().await.is_some_and(|text| text.starts_with("ok"))
    })
    .await;
    let shown = shown().await.unwrap();
    let line = shown.lines().find_map(|line| line.strip_prefix("sandbox: ")).unwrap_or_default();
    for layer in [
        "namespaces",
        "another user",
        "Landlock ",
        "no network but the proxy",
        "seccomp",
        "processes",
        "memory",
    ] {
        assert!(line.contains(layer), "{layer}: {shown}");
    }
    assert!(!line.contains("without"), "{shown}");
}
