//! Every version of everything.

use std::time::Duration;

use harmonia_nix::daemon::wire::message::{self, Step};
use harmonia_nix::daemon::wire::{Error, handshake, parse};
use harmonia_nix::daemon::{
    ActivityKind, BuildResult, BuildStatus, DaemonError, Field, Message, ResultKind, Trust,
};

use crate::bytes::{Bytes, MAGIC, PATH};

#[test]
fn a_handshake_is_understood_in_each_version() {
    for minor in 34..=38 {
        let bytes = Bytes::hello(minor);
        let mut rest = bytes.0.as_slice();
        let server = handshake::parse(&mut rest).unwrap();
        assert_eq!((u64::from(server.minor), server.nix_version.as_str()), (minor, "2.99"));
        assert_eq!(server.trust, if minor >= 35 { Trust::NotTrusted } else { Trust::Unknown });
        assert_eq!(server.features.len(), if minor >= 38 { 2 } else { 0 });
        assert!(rest.is_empty());
    }
}

#[test]
fn a_newer_daemon_is_spoken_to_in_the_newest_version_known() {
    let mut bytes = Bytes::hello(38).0;
    bytes[8] = 45;
    assert_eq!(handshake::parse(&mut bytes.as_slice()).unwrap().minor, 38);
}

#[test]
fn an_older_daemon_is_refused_with_a_sentence() {
    for version in [0x121, 0x10a, 0x026, 0x226, u64::MAX] {
        let bytes = Bytes::new().n(MAGIC).n(version).0;
        let error = handshake::parse(&mut bytes.as_slice()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("1.34 (Nix 2.8)"), "{error}");
    }
}

#[test]
fn somebody_else_is_no_daemon() {
    let error = handshake::parse(&mut b"HTTP/1.1 400 Bad Request".as_slice()).unwrap_err();
    assert!(matches!(error, Error::NotADaemon(_)), "{error}");
}

#[test]
fn trust_has_three_values() {
    let bytes = |trust| Bytes::new().n(MAGIC).n(0x123).s("2.99").n(trust).0;
    for (word, trust) in [(0, Trust::Unknown), (1, Trust::Trusted), (2, Trust::NotTrusted)] {
        assert_eq!(handshake::parse(&mut bytes(word).as_slice()).unwrap().trust, trust);
    }
    assert!(handshake::parse(&mut bytes(3).as_slice()).is_err());
}

#[test]
fn each_message_is_understood_to_its_end() {
    let expected = [
        Step::Message(Message::Log(b"a line\n".to_vec())),
        Step::Message(Message::Start {
            id: 5,
            level: 3,
            kind: ActivityKind::Build,
            text: b"building".to_vec(),
            fields: vec![Field::Text(PATH.into()), Field::Number(9)],
            parent: 4,
        }),
        Step::Message(Message::Stop { id: 5 }),
        Step::Message(Message::Result {
            id: 5,
            kind: ResultKind::Progress,
            fields: (1..=4).map(Field::Number).collect(),
        }),
        Step::Last,
        Step::Failed(DaemonError {
            level: 0,
            message: "no".to_owned(),
            traces: vec!["while trying".to_owned()],
            status: 1,
        }),
        Step::Read(100),
        Step::Write(b"data".to_vec()),
    ];
    let bytes: Vec<u8> = Bytes::messages().into_iter().flat_map(|message| message.0).collect();
    let mut rest = bytes.as_slice();
    for step in expected {
        assert_eq!(message::parse(&mut rest).unwrap(), step);
    }
    assert!(rest.is_empty());
}

fn result(kind: ResultKind, fields: Vec<Field>) -> Message {
    Message::Result { id: 1, kind, fields }
}

#[test]
fn a_line_of_a_log_is_told_from_other_results() {
    let line = vec![Field::Text(b"caf\xe9".to_vec())];
    assert_eq!(result(ResultKind::BuildLogLine, line.clone()).log_line(), Some(&b"caf\xe9"[..]));
    assert_eq!(result(ResultKind::PostBuildLogLine, line).log_line(), None);
    for fields in [vec![], vec![Field::Number(1)]] {
        assert_eq!(result(ResultKind::BuildLogLine, fields).log_line(), None);
    }
}

#[test]
fn a_build_result_has_the_fields_of_its_version() {
    for minor in [34, 35, 36, 37, 38] {
        let bytes = Bytes::build_result(minor).0;
        let mut rest = bytes.as_slice();
        let result: BuildResult = parse(&mut rest, minor).unwrap();
        assert!(rest.is_empty(), "{minor}");
        assert_eq!((result.status, result.message.as_str()), (BuildStatus::PermanentFailure, "failed"));
        assert_eq!(result.stop_time, 160);
        assert_eq!(result.cpu_user, (minor >= 37).then_some(Duration::from_millis(2500)));
        assert_eq!(result.cpu_system, None);
        assert_eq!(result.built_outputs.len(), 2);
    }
}

#[test]
fn a_realisation_that_is_not_understood_costs_only_its_path() {
    let bytes = Bytes::build_result(38).0;
    let result: BuildResult = parse(&mut bytes.as_slice(), 38).unwrap();
    let paths: Vec<_> = result.built_outputs.iter().map(|built| built.path.is_some()).collect();
    assert_eq!(paths, [true, false]);
}

#[test]
fn a_status_of_a_later_nix_is_kept() {
    let mut bytes = Bytes::build_result(38).0;
    bytes[0] = 77;
    let result: BuildResult = parse(&mut bytes.as_slice(), 38).unwrap();
    assert_eq!(result.status, BuildStatus::Other(77));
    assert!(!result.status.is_success());
}
