//! The daemon client against real daemons. Each operation is followed by another on the same connection: a word
//! too many or too few shows only there.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use harmonia_nix::daemon::{
    ActivityKind, BasicDerivation, BuildResult, BuildStatus, Connection, Daemon, Error, Field, Garbage,
    Message, Options, Quiet, Sink, Trust,
};
use harmonia_tests::nixes::{Expression, Nix, Version};
use nix_derivation::{Derivation, StorePath};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(120);

async fn connect(nix: &Nix) -> Connection {
    connect_with(nix, &Options::default()).await
}

async fn connect_with(nix: &Nix, options: &Options) -> Connection {
    Connection::connect(&nix.socket(), options).await.unwrap()
}

async fn start(version: Version) -> Nix {
    start_with(version, "").await
}

/// The first connections to an empty store make it, and stumble over each other: waits until one got through.
async fn start_with(version: Version, settings: &str) -> Nix {
    let nix = Nix::start_with(version, settings);
    wait_until(|| async { Connection::connect(&nix.socket(), &Options::default()).await.is_ok() }).await;
    nix
}

/// The path of no file.
fn nothing() -> StorePath {
    path("/nix/store/00000000000000000000000000000000-nothing")
}

fn path(text: &str) -> StorePath {
    text.parse().unwrap()
}

/// The second operation on a connection.
async fn assert_in_step(connection: &mut Connection) {
    assert!(!connection.is_valid_path(&nothing()).await.unwrap());
}

fn derivation(nix: &Nix, drv: &StorePath) -> Derivation {
    let text = fs::read(nix.real(&drv.to_string())).unwrap();
    Derivation::from_aterm_bytes(&text, drv.name().strip_suffix(".drv").unwrap()).unwrap()
}

/// A derivation as it is built by value, with its inputs in the store.
fn resolved(nix: &Nix, expression: &Expression) -> (StorePath, BasicDerivation) {
    let drv = path(&nix.instantiate(expression));
    let derivation = derivation(nix, &drv);
    let inputs: Vec<StorePath> = derivation
        .input_derivations()
        .keys()
        .map(|input| path(nix.run("nix-store", &["--realise", &input.to_string()]).lines().next().unwrap()))
        .collect();
    (drv, BasicDerivation::resolve(&derivation, inputs).unwrap())
}

async fn build(
    connection: &mut Connection,
    (drv, derivation): &(StorePath, BasicDerivation),
    sink: &mut impl Sink,
) -> BuildResult {
    connection.build_derivation(drv, derivation, LIMIT, sink).await.unwrap()
}

/// Builds to the end and returns the result and the lines of the build's log.
async fn build_with_log(
    nix: &Nix,
    options: &Options,
    expression: &Expression,
) -> (BuildResult, Vec<Vec<u8>>) {
    let mut connection = connect_with(nix, options).await;
    let mut lines = Vec::new();
    let mut keep = |message: Message| {
        if let Some(line) = message.log_line() {
            lines.push(line.to_vec());
        }
    };
    let result = build(&mut connection, &resolved(nix, expression), &mut keep).await;
    assert_in_step(&mut connection).await;
    (result, lines)
}

#[tokio::test]
async fn a_daemon_says_what_it_is() {
    // The new one is what Debian has when `./dev` gets it.
    for (version, minor, nix_version, trust) in
        [(Version::Old, 34, (2, 8), Trust::Unknown), (Version::New, 38, (2, 34), Trust::Trusted)]
    {
        let nix = start(version).await;
        let connection = connect(&nix).await;
        let server = connection.server();
        assert!(server.minor >= minor, "1.{}", server.minor);
        assert_eq!(server.trust, trust);
        let mut numbers = server.nix_version.split('.').map(|number| number.parse().unwrap_or(0));
        let found = (numbers.next().unwrap(), numbers.next().unwrap());
        assert!(found >= nix_version, "{}", server.nix_version);
    }
}

#[tokio::test]
async fn a_new_daemon_is_understood_in_every_older_version() {
    let nix = start(Version::New).await;
    for minor in 34..=38 {
        let stream = UnixStream::connect(nix.socket()).await.unwrap();
        let mut connection = Connection::open_as(stream, &Options::default(), minor).await.unwrap();
        assert_eq!(connection.server().minor, minor);
        let expression = Expression::two_outputs(&format!("at-{minor}"));
        let result = build(&mut connection, &resolved(&nix, &expression), &mut Quiet).await;
        assert_eq!(result.status, BuildStatus::Built, "{result:?}");
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn valid_paths_are_told_from_others() {
    for version in Version::ALL {
        let nix = start(version).await;
        let valid = path(&nix.build(&Expression::trivial("valid")));
        let mut connection = connect(&nix).await;
        assert!(connection.is_valid_path(&valid).await.unwrap());
        assert!(!connection.is_valid_path(&nothing()).await.unwrap());
        for substitute in [false, true] {
            let both = BTreeSet::from([valid.clone(), nothing()]);
            let found = connection.query_valid_paths(&both, substitute, LIMIT, &mut Quiet).await.unwrap();
            assert_eq!(found, BTreeSet::from([valid.clone()]));
        }
        assert_in_step(&mut connection).await;
    }
}

/// A binary cache with one path.
async fn binary_cache(version: Version) -> (tempfile::TempDir, StorePath) {
    let nix = start(version).await;
    let built = nix.build(&Expression::trivial("substitutable"));
    let cache = tempfile::tempdir().unwrap();
    nix.run("nix", &["copy", "--to", &format!("file://{}", cache.path().display()), &built]);
    (cache, path(&built))
}

fn substitutes(cache: &tempfile::TempDir) -> String {
    format!("substituters = file://{}\nrequire-sigs = false\n", cache.path().display())
}

#[tokio::test]
async fn a_path_is_substituted() {
    for version in Version::ALL {
        let (cache, substitutable) = binary_cache(version).await;
        let nix = start_with(version, &substitutes(&cache)).await;
        let mut connection = connect(&nix).await;
        let (mut sender, mut receiver) = mpsc::channel(1000);
        connection.ensure_path(&substitutable, LIMIT, &mut sender).await.unwrap();
        assert!(connection.is_valid_path(&substitutable).await.unwrap());
        drop(sender);
        let mut substituted = false;
        while let Some(message) = receiver.recv().await {
            substituted |= matches!(message, Message::Start { kind: ActivityKind::Substitute, fields, .. }
                if fields[0] == Field::Text(substitutable.to_string().into()));
        }
        assert!(substituted);
    }
}

#[tokio::test]
async fn paths_are_substituted_on_the_way_to_their_validity() {
    for version in Version::ALL {
        let (cache, substitutable) = binary_cache(version).await;
        let nix = start_with(version, &substitutes(&cache)).await;
        let mut connection = connect(&nix).await;
        let wanted = BTreeSet::from([substitutable]);
        let found = connection.query_valid_paths(&wanted, true, LIMIT, &mut Quiet).await.unwrap();
        assert_eq!(found, wanted);
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn substituters_say_which_paths_they_have() {
    for version in Version::ALL {
        let (cache, substitutable) = binary_cache(version).await;
        let both = BTreeSet::from([substitutable.clone(), nothing()]);
        let here = format!("file://{}", cache.path().display());
        for (settings, expected) in [
            (format!("substituters = {here}?want-mass-query=true"), BTreeSet::from([substitutable])),
            // One that does not want to be asked for many at once is not.
            (format!("substituters = {here}"), BTreeSet::new()),
            ("substituters =".to_owned(), BTreeSet::new()),
        ] {
            let nix = start_with(version, &settings).await;
            let mut connection = connect(&nix).await;
            let offered = connection.query_substitutable_paths(&both).await.unwrap();
            assert_eq!(offered, expected, "{version:?} with {settings}");
            assert_in_step(&mut connection).await;
        }
    }
}

#[tokio::test]
async fn an_error_of_the_daemon_leaves_the_connection_usable() {
    for version in Version::ALL {
        let nix = start(version).await;
        let mut connection = connect(&nix).await;
        let error = connection.ensure_path(&nothing(), LIMIT, &mut Quiet).await.unwrap_err();
        assert!(matches!(&error, Error::Daemon(_)) && error.to_string().contains("nothing"), "{error}");
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn a_temporary_root_holds_while_its_connection_lasts() {
    for version in Version::ALL {
        let nix = start(version).await;
        let held = path(&nix.build(&Expression::trivial("held")));
        let daemon = Daemon::new(nix.socket(), Options::default());
        let mut connection = connect(&nix).await;
        connection.add_temp_root(&held).await.unwrap();
        assert_in_step(&mut connection).await;
        let error = daemon.delete_with_referrers(&held, LIMIT).await.unwrap_err();
        assert!(
            matches!(&error, Error::Alive { alive, root, .. }
            if *alive == held && root.starts_with("{temp:")),
            "{error}"
        );
        drop(connection);
        wait_until(|| async { daemon.delete_with_referrers(&held, LIMIT).await.is_ok() }).await;
    }
}

/// Looks again until it is so: what a process does when its connection closes gives no event.
async fn wait_until<F: Future<Output = bool>>(mut so: impl FnMut() -> F) {
    let looking = async {
        while !so().await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, looking).await.expect("it should have come to be so");
}

#[tokio::test]
async fn a_path_is_deleted_with_all_that_refers_to_it() {
    for version in Version::ALL {
        // The setting that lets outputs hold what they were made from must not matter.
        let nix = start_with(version, "keep-outputs = true\nkeep-derivations = true").await;
        let below = Expression::trivial("below");
        let middle = Expression::new("middle", "echo $below $out >$out").input("below", &below);
        let above = Expression::new("above", "echo $middle >$out").input("middle", &middle);
        let above = path(&nix.build(&above));
        let [below, middle] = [below, middle].map(|expression| path(&nix.build(&expression)));
        let daemon = Daemon::new(nix.socket(), Options::default());
        let freed = daemon.delete_with_referrers(&below, LIMIT).await.unwrap();
        assert_eq!(freed.paths, BTreeSet::from([below.clone(), middle, above]));
        assert!(freed.bytes > 0);
        assert!(!connect(&nix).await.is_valid_path(&below).await.unwrap());
    }
}

#[tokio::test]
async fn a_source_is_deleted_with_the_derivations_of_valid_outputs() {
    for version in Version::ALL {
        let nix = start(version).await;
        let built = path(&nix.build(&Expression::trivial("kept")));
        let drv = path(&nix.run("nix-store", &["--query", "--deriver", &built.to_string()]));
        let source = derivation(&nix, &drv).input_sources().first().unwrap().clone();
        let daemon = Daemon::new(nix.socket(), Options::default());
        let freed = daemon.delete_with_referrers(&source, LIMIT).await.unwrap();
        assert!(freed.paths.contains(&source) && freed.paths.contains(&drv), "{freed:?}");
        assert!(connect(&nix).await.is_valid_path(&built).await.unwrap());
    }
}

#[tokio::test]
async fn nothing_is_deleted_where_a_referrer_is_alive_and_it_is_named() {
    for version in Version::ALL {
        let nix = start(version).await;
        let below = Expression::trivial("below");
        let above = Expression::new("above", "echo $below >$out").input("below", &below);
        let loose = Expression::new("loose", "echo $below >$out").input("below", &below);
        let [below, above, loose] = [below, above, loose].map(|expression| path(&nix.build(&expression)));
        let roots = nix.root().join("nix/var/nix/gcroots");
        std::os::unix::fs::symlink(above.to_string(), roots.join("mine")).unwrap();
        let mut connection = connect(&nix).await;
        let error = connection.delete_with_referrers(&below, LIMIT).await.unwrap_err();
        assert!(
            matches!(&error, Error::Alive { path, alive, root }
            if *path == below && *alive == above && root.ends_with("gcroots/mine")),
            "{error}"
        );
        for path in [below, above, loose] {
            assert!(connection.is_valid_path(&path).await.unwrap(), "{path}");
        }
    }
}

#[tokio::test]
async fn a_single_path_that_others_refer_to_is_refused() {
    for version in Version::ALL {
        let nix = start(version).await;
        let below = Expression::trivial("below");
        let above = Expression::new("above", "echo $below >$out").input("below", &below);
        nix.build(&above);
        let below = path(&nix.build(&below));
        let mut connection = connect(&nix).await;
        let garbage = Garbage::Paths(BTreeSet::from([below.clone()]));
        let error = connection.collect_garbage(&garbage, LIMIT).await.unwrap_err();
        assert!(matches!(&error, Error::Daemon(_)) && error.to_string().contains("below"), "{error}");
        assert!(connection.is_valid_path(&below).await.unwrap());
    }
}

#[tokio::test]
async fn garbage_is_collected() {
    for version in Version::ALL {
        let nix = start(version).await;
        let dead = path(&nix.build(&Expression::trivial("dead")));
        fs::write(nix.root().join("nix/store/leftover"), "").unwrap();
        let mut connection = connect(&nix).await;
        let freed = connection.collect_garbage(&Garbage::Dead { max_freed: u64::MAX }, LIMIT).await.unwrap();
        assert!(freed.paths.contains(&dead), "{freed:?}");
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn a_derivation_is_built_by_value() {
    for version in Version::ALL {
        let nix = start(version).await;
        let expression = Expression::two_outputs("two");
        let resolved = resolved(&nix, &expression);
        let mut connection = connect(&nix).await;
        let mut activities = Vec::new();
        let mut keep = |message: Message| {
            if let Message::Start { kind: ActivityKind::Build, fields, .. } = message {
                activities.extend(fields.into_iter().next());
            }
        };
        let result = build(&mut connection, &resolved, &mut keep).await;
        assert_eq!((result.status, result.message.as_str()), (BuildStatus::Built, ""));
        // Nix 2.34 leaves them empty.
        if version == Version::Old {
            assert!(result.start_time > 0 && result.stop_time >= result.start_time, "{result:?}");
        }
        assert_eq!(activities, [Field::Text(resolved.0.to_string().into())]);
        for output in resolved.1.outputs.values() {
            assert!(connection.is_valid_path(output.path.as_ref().unwrap()).await.unwrap());
        }
        assert!(result.built_outputs.iter().all(|built| built.path.is_some()), "{result:?}");
        let again = build(&mut connection, &resolved, &mut Quiet).await;
        assert_eq!(again.status, BuildStatus::AlreadyValid);
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn structured_attributes_reach_the_build() {
    for version in Version::ALL {
        let nix = start(version).await;
        // Neither $out nor PATH are in the environment now.
        let script = r#"read -r json <.attrs.json || true
            out=${json#*\"outputs\":{\"out\":\"}; out=${out%%\"*}
            echo "$json" >$out"#;
        let expression = Expression::new("structured", script)
            .attribute("__structuredAttrs", "true")
            .attribute("nested", "{ deep = [ 1 2 ]; }");
        let resolved = resolved(&nix, &expression);
        let mut connection = connect(&nix).await;
        let result = build(&mut connection, &resolved, &mut Quiet).await;
        assert_eq!(result.status, BuildStatus::Built, "{result:?}");
        let out = resolved.1.outputs["out"].path.as_ref().unwrap().to_string();
        let attributes = fs::read_to_string(nix.real(&out)).unwrap();
        assert!(attributes.contains(r#""deep":[1,2]"#), "{attributes}");
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn a_failing_build_has_a_status_an_error_and_its_log() {
    for version in Version::ALL {
        let nix = start(version).await;
        let (result, lines) =
            build_with_log(&nix, &Options::default(), &Expression::failing("failing")).await;
        assert_eq!(result.status, BuildStatus::PermanentFailure);
        assert!(result.message.contains("exit code 7") && !result.message.contains('\u{1b}'), "{result:?}");
        assert_eq!(lines, [b"this build fails"]);
    }
}

#[tokio::test]
async fn a_silent_build_times_out() {
    for version in Version::ALL {
        let nix = start(version).await;
        let options = Options { max_silent: Duration::from_secs(1), ..Options::default() };
        let (result, _) =
            build_with_log(&nix, &options, &Expression::new("silent", "echo begun; sleep 1000")).await;
        assert_eq!(result.status, BuildStatus::TimedOut, "{result:?}");
        assert!(result.message.contains("after 1 seconds"), "{result:?}");
    }
}

#[tokio::test]
async fn a_long_build_times_out() {
    for version in Version::ALL {
        let nix = start(version).await;
        let options = Options { timeout: Duration::from_secs(1), ..Options::default() };
        let script = "while echo still here; do sleep 0.1; done";
        let (result, _) = build_with_log(&nix, &options, &Expression::new("long", script)).await;
        assert_eq!(result.status, BuildStatus::TimedOut, "{result:?}");
    }
}

#[tokio::test]
async fn a_fixed_output_with_another_hash_is_rejected() {
    for version in Version::ALL {
        let nix = start(version).await;
        let expression = Expression::fixed_output("fixed", "expected").attribute("extra", "1");
        let mut resolved = resolved(&nix, &expression);
        resolved.1.env.insert("content".to_owned(), b"something else".to_vec());
        let mut connection = connect(&nix).await;
        let result = build(&mut connection, &resolved, &mut Quiet).await;
        assert!(!result.status.is_success());
        assert!(
            matches!(result.status, BuildStatus::OutputRejected | BuildStatus::HashMismatch),
            "{:?}",
            result.status
        );
        assert!(result.message.contains("hash mismatch"), "{result:?}");
        assert_in_step(&mut connection).await;
    }
}

#[tokio::test]
async fn a_fixed_output_is_built_by_value() {
    for version in Version::ALL {
        let nix = start(version).await;
        let expression = Expression::fixed_output("fixed", "expected");
        let (result, _) = build_with_log(&nix, &Options::default(), &expression).await;
        assert_eq!(result.status, BuildStatus::Built, "{result:?}");
    }
}

#[tokio::test]
async fn the_cores_of_a_build_are_those_of_the_options() {
    for version in Version::ALL {
        let nix = start(version).await;
        let options = Options { build_cores: 3, ..Options::default() };
        let expression = Expression::new("cores", "echo $NIX_BUILD_CORES; echo >$out");
        let (_, lines) = build_with_log(&nix, &options, &expression).await;
        assert_eq!(lines, [b"3"]);
    }
}

#[tokio::test]
async fn an_override_reaches_the_build() {
    for version in Version::ALL {
        let nix = start(version).await;
        let options = Options::default().with("max-build-log-size", "100");
        let expression = Expression::new("chatty", "seq 1000; sleep 1000");
        let (result, _) = build_with_log(&nix, &options, &expression).await;
        assert_eq!(result.status, BuildStatus::LogLimitExceeded, "{result:?}");
    }
}

#[tokio::test]
async fn every_line_of_a_long_log_arrives_in_order() {
    for version in Version::ALL {
        let nix = start(version).await;
        let (result, lines) =
            build_with_log(&nix, &Options::default(), &Expression::new("chatty", "seq 20000; echo >$out"))
                .await;
        assert_eq!(result.status, BuildStatus::Built);
        let expected: Vec<Vec<u8>> = (1..=20000).map(|number| number.to_string().into()).collect();
        assert!(lines == expected, "{} lines", lines.len());
    }
}

#[tokio::test]
async fn a_slow_reader_slows_the_build_and_loses_nothing() {
    for version in Version::ALL {
        let nix = start(version).await;
        let resolved = resolved(&nix, &Expression::new("chatty", "seq 20000; echo >$out"));
        let mut connection = connect(&nix).await;
        let (mut sender, mut receiver) = mpsc::channel(1);
        let building = async move {
            let result = build(&mut connection, &resolved, &mut sender).await;
            assert_in_step(&mut connection).await;
            result
        };
        let counting = async {
            let mut lines = 0;
            while let Some(message) = receiver.recv().await {
                lines += u32::from(message.log_line().is_some());
            }
            lines
        };
        let (result, lines) = tokio::join!(building, counting);
        assert_eq!((result.status, lines), (BuildStatus::Built, 20000));
    }
}

#[tokio::test]
async fn a_log_of_any_bytes_arrives_as_it_is() {
    for version in Version::ALL {
        let nix = start(version).await;
        let script = r"printf 'caf\351 \377\376\001\n'; echo >$out";
        let (_, lines) = build_with_log(&nix, &Options::default(), &Expression::new("bytes", script)).await;
        assert_eq!(lines, [b"caf\xe9 \xff\xfe\x01"]);
    }
}

#[tokio::test]
async fn a_line_that_never_ends_is_cut_and_the_build_goes_on() {
    for version in Version::ALL {
        let nix = start(version).await;
        let script = "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo after; echo >$out";
        let (result, lines) =
            build_with_log(&nix, &Options::default(), &Expression::new("wide", script)).await;
        assert_eq!(result.status, BuildStatus::Built, "{result:?}");
        let widths: Vec<usize> = lines.iter().map(Vec::len).collect();
        assert_eq!(widths, [1 << 20, 5]);
    }
}

/// Nix takes lines that begin with `@nix` for messages, whoever printed them.
#[tokio::test]
async fn messages_that_a_build_forges_break_nothing() {
    for version in Version::ALL {
        let nix = start(version).await;
        let fields = vec!["7"; 5000].join(",");
        let script = format!(
            r#"echo '@nix {{"action":"start","id":1,"level":0,"type":101,"text":"x","fields":[{fields}]}}'
            echo '@nix {{"action":"result","id":1,"type":105,"fields":[{fields}]}}'
            echo '@nix {{"action":"setPhase","phase":"configure"}}'
            echo '@nix {{"action":"stop","id":1}}'
            echo >$out"#
        );
        let resolved = resolved(&nix, &Expression::new("forger", &script));
        let mut connection = connect(&nix).await;
        let result = build(&mut connection, &resolved, &mut Quiet).await;
        assert_eq!(result.status, BuildStatus::Built, "{result:?}");
        assert_in_step(&mut connection).await;
    }
}

/// A daemon that is about to wait for a build's next output when a connection closes can miss it, and goes on
/// waiting. With a mark of free space it looks every 10 s.
const LOOKS: &str = "min-free = 1";

/// A build of a process that never ends, and a word that only its command line has.
fn endless(nix: &Nix) -> (String, (StorePath, BasicDerivation)) {
    let seconds = rand::random_range(1_000_000..2_000_000_000_u32).to_string();
    let expression = Expression::new("endless", &format!("echo begun; sleep {seconds}"));
    (seconds, resolved(nix, &expression))
}

/// Whether a process of this machine has the word in its command line.
fn runs(word: &str) -> bool {
    let has = |line: Vec<u8>| line.windows(word.len()).any(|part| part == word.as_bytes());
    fs::read_dir("/proc").unwrap().flatten().any(|process| {
        // A zombie has no command line any more.
        fs::read(process.path().join("cmdline")).is_ok_and(has)
    })
}

async fn has_begun(messages: &mut mpsc::Receiver<Message>) {
    while let Some(message) = messages.recv().await {
        if message.log_line() == Some(b"begun") {
            return;
        }
    }
    panic!("the build ended before its first line");
}

#[tokio::test]
async fn a_cancelled_build_ends_and_leaves_the_daemon_usable() {
    for version in Version::ALL {
        let nix = start_with(version, LOOKS).await;
        let (word, resolved) = endless(&nix);
        let mut connection = connect(&nix).await;
        let (mut sender, mut receiver) = mpsc::channel(100);
        let begun = async {
            has_begun(&mut receiver).await;
            assert!(runs(&word));
        };
        tokio::select! {
            result = build(&mut connection, &resolved, &mut sender) => panic!("{result:?}"),
            () = begun => {}
        }
        wait_until(|| async { !runs(&word) }).await;
        assert!(matches!(connection.is_valid_path(&nothing()).await, Err(Error::Broken)));
        let other = build_with_log(&nix, &Options::default(), &Expression::trivial("other")).await;
        assert_eq!(other.0.status, BuildStatus::Built);
    }
}

#[tokio::test]
async fn an_operation_beyond_its_limit_closes_its_connection() {
    for version in Version::ALL {
        let nix = start_with(version, LOOKS).await;
        let (word, (drv, derivation)) = endless(&nix);
        let mut daemon = Daemon::new(nix.socket(), Options::default());
        let connection = daemon.connection().await.unwrap();
        let limit = Duration::from_millis(500);
        let error = connection.build_derivation(&drv, &derivation, limit, &mut Quiet).await.unwrap_err();
        assert!(matches!(error, Error::TimedOut { operation: "BuildDerivation", .. }), "{error}");
        wait_until(|| async { !runs(&word) }).await;
        assert_in_step(daemon.connection().await.unwrap()).await;
        assert_eq!(daemon.connections(), 2);
    }
}

#[tokio::test]
async fn a_build_under_a_dying_daemon_is_lost_and_the_handle_connects_again() {
    for version in Version::ALL {
        let nix = start(version).await;
        let (_, (drv, derivation)) = endless(&nix);
        let mut daemon = Daemon::new(nix.socket(), Options::default());
        let connection = daemon.connection().await.unwrap();
        let (mut sender, mut receiver) = mpsc::channel(100);
        let building = connection.build_derivation(&drv, &derivation, LIMIT, &mut sender);
        let killing = async {
            has_begun(&mut receiver).await;
            nix.kill_daemon();
        };
        let (lost, ()) = tokio::join!(building, killing);
        assert!(lost.as_ref().is_err_and(Error::is_lost), "{lost:?}");
        assert!(daemon.connection().await.is_err_and(|error| error.is_lost()));
        nix.start_daemon();
        assert_in_step(daemon.connection().await.unwrap()).await;
    }
}

#[tokio::test]
async fn a_handle_notices_that_the_daemon_left_while_it_was_idle() {
    for version in Version::ALL {
        let nix = start(version).await;
        let mut daemon = Daemon::new(nix.socket(), Options::default());
        assert_in_step(daemon.connection().await.unwrap()).await;
        assert_in_step(daemon.connection().await.unwrap()).await;
        assert_eq!(daemon.connections(), 1);
        nix.kill_daemon();
        nix.start_daemon();
        assert_in_step(daemon.connection().await.unwrap()).await;
        assert_eq!(daemon.connections(), 2);
    }
}

#[tokio::test]
async fn builds_run_side_by_side() {
    for version in Version::ALL {
        let nix = start(version).await;
        let builds = (0..4).map(|number| {
            let resolved = resolved(&nix, &Expression::new(&format!("n{number}"), "sleep 1; echo >$out"));
            let socket = nix.socket();
            tokio::spawn(async move {
                let mut daemon = Daemon::new(socket, Options::default());
                build(daemon.connection().await.unwrap(), &resolved, &mut Quiet).await.status
            })
        });
        for build in builds.collect::<Vec<_>>() {
            assert_eq!(build.await.unwrap(), BuildStatus::Built);
        }
    }
}
