//! Connections to a daemon that says what the test tells it.

use std::time::Duration;

use harmonia_nix::daemon::{Connection, Error, Options, Quiet, Verbosity, wire};
use nix_derivation::StorePath;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::bytes::{Bytes, LAST, PATH, READ, WRITE};

fn path() -> StorePath {
    PATH.parse().unwrap()
}

/// A connection that was greeted, and the daemon's side of it with everything read that the client sent.
async fn connected() -> (Connection, UnixStream) {
    let (client, mut daemon) = UnixStream::pair().unwrap();
    let greeting = Bytes::hello(38).n(LAST).n(LAST);
    daemon.write_all(&greeting.0).await.unwrap();
    let options = Options::default();
    let connection = Connection::open(client, &options).await.unwrap();
    daemon.read_exact(&mut vec![0; hello(38).0.len() + options_bytes(&options).0.len()]).await.unwrap();
    (connection, daemon)
}

/// What the client sends in a handshake.
fn hello(minor: u64) -> Bytes {
    let hello = Bytes::new().n(0x6e69_7863).n(0x126);
    if minor >= 38 { hello.n(0).n(0).n(0) } else { hello.n(0).n(0) }
}

fn options_bytes(options: &Options) -> Bytes {
    let timeout = options.timeout.as_secs().to_string();
    let mut overrides = options.overrides.clone();
    overrides.insert("timeout".to_owned(), timeout);
    let fixed = Bytes::new()
        .n(19)
        .n(0)
        .n(0)
        .n(0)
        .n(options.verbosity as u64)
        .n(options.max_build_jobs)
        .n(options.max_silent.as_secs())
        .n(1)
        .n(if options.verbose_build { 0 } else { 7 })
        .n(0)
        .n(0)
        .n(options.build_cores)
        .n(options.use_substitutes.into())
        .n(overrides.len() as u64);
    overrides.iter().fold(fixed, |bytes, (name, value)| bytes.s(name).s(value))
}

#[tokio::test]
async fn a_client_says_its_half_of_the_handshake_and_all_options() {
    let options = Options {
        verbosity: Verbosity::Warn,
        max_build_jobs: 5,
        max_silent: Duration::from_secs(60),
        timeout: Duration::from_secs(3600),
        verbose_build: false,
        build_cores: 7,
        use_substitutes: false,
        ..Options::default()
    }
    .with("builders", "");
    for minor in 34..=38 {
        let (client, mut daemon) = UnixStream::pair().unwrap();
        daemon.write_all(&Bytes::hello(minor).n(LAST).n(LAST).0).await.unwrap();
        drop(Connection::open(client, &options).await.unwrap());
        let mut sent = Vec::new();
        daemon.read_to_end(&mut sent).await.unwrap();
        let mut expected = hello(minor).0;
        expected.extend(options_bytes(&options).0);
        assert_eq!(sent, expected, "{minor}");
    }
}

#[tokio::test]
async fn a_refusal_at_the_start_is_told() {
    let (client, mut daemon) = UnixStream::pair().unwrap();
    let mut refusal = Bytes::hello(38).0;
    refusal.extend(Bytes::error("not you").0);
    daemon.write_all(&refusal).await.unwrap();
    let error = Connection::open(client, &Options::default()).await.unwrap_err();
    assert!(matches!(&error, Error::Daemon(_)) && error.to_string() == "not you", "{error}");
}

#[tokio::test]
async fn an_error_stands_for_the_answer_and_the_next_one_is_read() {
    let (mut connection, mut daemon) = connected().await;
    let mut answers = Bytes::error("no").0;
    answers.extend(Bytes::new().n(LAST).n(1).0);
    daemon.write_all(&answers).await.unwrap();
    assert!(matches!(connection.is_valid_path(&path()).await, Err(Error::Daemon(_))));
    assert!(connection.is_valid_path(&path()).await.unwrap());
}

#[tokio::test]
async fn the_word_after_an_acknowledgement_is_read() {
    let (mut connection, mut daemon) = connected().await;
    daemon.write_all(&Bytes::new().n(LAST).n(1).n(LAST).n(0).0).await.unwrap();
    connection.add_temp_root(&path()).await.unwrap();
    assert!(!connection.is_valid_path(&path()).await.unwrap());
}

#[tokio::test]
async fn data_outside_an_answer_is_refused_and_ends_the_connection() {
    for unasked in [Bytes::new().n(READ).n(100), Bytes::new().n(WRITE).s("data"), Bytes::new().n(42)] {
        let (mut connection, mut daemon) = connected().await;
        daemon.write_all(&unasked.0).await.unwrap();
        let error = connection.is_valid_path(&path()).await.unwrap_err();
        assert!(matches!(error, Error::Wire(wire::Error::Unexpected { .. })), "{error}");
        assert!(matches!(connection.is_valid_path(&path()).await, Err(Error::Broken)));
    }
}

#[tokio::test]
async fn an_operation_that_is_dropped_closes_the_socket_and_breaks_the_connection() {
    let (mut connection, mut daemon) = connected().await;
    // Half an answer.
    daemon.write_all(&Bytes::new().n(LAST).0).await.unwrap();
    let request = Bytes::new().n(1).s(PATH).0;
    let path = path();
    tokio::select! {
        _ = connection.is_valid_path(&path) => panic!("there is no answer yet"),
        read = async { daemon.read_exact(&mut vec![0; request.len()]).await } => { read.unwrap(); }
    }
    // The end of the input, or an error, as half of what was written was not read.
    assert!(matches!(daemon.read(&mut [0]).await, Ok(0) | Err(_)));
    assert!(matches!(connection.is_valid_path(&path).await, Err(Error::Broken)));
}

#[tokio::test]
async fn an_operation_beyond_its_limit_closes_the_socket() {
    let (mut connection, _daemon) = connected().await;
    let error = connection.ensure_path(&path(), Duration::from_millis(1), &mut Quiet).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { operation: "EnsurePath", .. }), "{error}");
    assert!(matches!(connection.is_valid_path(&path()).await, Err(Error::Broken)));
}

#[tokio::test]
async fn a_daemon_that_leaves_is_lost() {
    let (mut connection, daemon) = connected().await;
    drop(daemon);
    let error = connection.is_valid_path(&path()).await.unwrap_err();
    assert!(error.is_lost(), "{error}");
}
