//! Bytes that end early, that announce too much, and any others: an error each, and no memory for what never came.

use std::collections::BTreeSet;

use harmonia_nix::daemon::wire::message::{self, Step};
use harmonia_nix::daemon::wire::{Error, MAX_FIELDS, MAX_TEXT, handshake, parse};
use harmonia_nix::daemon::{BuildResult, Freed, Message};
use nix_derivation::StorePath;
use proptest::prelude::*;

use crate::bytes::{Bytes, ERROR, NEXT, PATH, RESULT};

fn is_closed<T>(outcome: Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::Closed))
}

#[test]
fn what_ends_early_is_closed() {
    let cut = |bytes: Vec<u8>, closed: &dyn Fn(&[u8]) -> bool| {
        for length in 0..bytes.len() {
            assert!(closed(&bytes[..length]), "{length} of {}", bytes.len());
        }
    };
    for minor in 34..=38 {
        cut(Bytes::hello(minor.into()).0, &|mut bytes| is_closed(handshake::parse(&mut bytes)));
        cut(Bytes::build_result(minor).0, &|mut bytes| is_closed(parse::<BuildResult>(&mut bytes, minor)));
    }
    for message in Bytes::messages() {
        cut(message.0, &|mut bytes| is_closed(message::parse(&mut bytes)));
    }
}

#[test]
fn an_announced_length_is_bounded_wherever_all_of_it_is_needed() {
    for length in [1 << 17, 1 << 40, u64::MAX] {
        let refused = |outcome: Option<Error>| matches!(outcome, Some(Error::TooLong { .. }));
        let path = Bytes::new().n(1).n(length).0;
        assert!(refused(parse::<BTreeSet<StorePath>>(&mut path.as_slice(), 38).err()), "{length}");
        let list = Bytes::new().n(1 << 21 | length).0;
        assert!(refused(parse::<BTreeSet<StorePath>>(&mut list.as_slice(), 38).err()), "{length}");
        assert!(refused(parse::<Freed>(&mut list.as_slice(), 38).err()), "{length}");
        let outputs = Bytes::new().n(0).s("").n(0).n(0).n(0).n(0).n(length).0;
        assert!(refused(parse::<BuildResult>(&mut outputs.as_slice(), 34).err()), "{length}");
    }
}

#[test]
fn nothing_is_allocated_for_bytes_that_never_come() {
    // Were it allocated, 16 EiB would abort the process.
    let bytes = Bytes::new().n(NEXT).n(u64::MAX).0;
    assert!(is_closed(message::parse(&mut bytes.as_slice())));
    let fields = Bytes::new().n(RESULT).n(1).n(101).n(u64::MAX).n(1).n(u64::MAX).0;
    assert!(is_closed(message::parse(&mut fields.as_slice())));
    let traces = Bytes::new().n(ERROR).s("Error").n(0).s("").s("no").n(0).n(u64::MAX).0;
    assert!(is_closed(message::parse(&mut traces.as_slice())));
}

#[test]
fn long_text_is_cut_and_read_to_its_end() {
    let bytes = Bytes::new().n(NEXT).s(vec![b'x'; MAX_TEXT + 1001]).0;
    let mut rest = bytes.as_slice();
    let Step::Message(Message::Log(line)) = message::parse(&mut rest).unwrap() else { panic!() };
    assert_eq!((line.len(), rest.len()), (MAX_TEXT, 0));
}

#[test]
fn all_text_of_a_message_shares_one_bound() {
    let text = vec![b'x'; MAX_TEXT / 2 + 8];
    let bytes = Bytes::new().n(RESULT).n(1).n(101).n(3).n(1).s(&text).n(1).s(&text).n(1).s(&text).0;
    let mut rest = bytes.as_slice();
    let Step::Message(Message::Result { fields, .. }) = message::parse(&mut rest).unwrap() else { panic!() };
    let lengths: Vec<usize> = fields
        .iter()
        .map(|field| match field {
            harmonia_nix::daemon::Field::Text(text) => text.len(),
            harmonia_nix::daemon::Field::Number(_) => 0,
        })
        .collect();
    assert_eq!(lengths, [MAX_TEXT / 2 + 8, MAX_TEXT / 2 - 8, 0]);
    assert!(rest.is_empty());
}

#[test]
fn fields_and_traces_beyond_reason_are_left_out() {
    let many = 1000;
    let mut bytes = Bytes::new().n(RESULT).n(1).n(101).n(many);
    for number in 0..many {
        bytes = bytes.n(0).n(number);
    }
    bytes = bytes.n(ERROR).s("Error").n(0).s("").s("no").n(0).n(many);
    for _ in 0..many {
        bytes = bytes.n(0).s("a trace");
    }
    let mut rest = bytes.0.as_slice();
    let Step::Message(Message::Result { fields, .. }) = message::parse(&mut rest).unwrap() else { panic!() };
    let Step::Failed(error) = message::parse(&mut rest).unwrap() else { panic!() };
    assert_eq!((fields.len(), error.traces.len(), rest.len()), (MAX_FIELDS, MAX_FIELDS, 0));
}

#[test]
fn padding_is_zeros() {
    let mut bytes = Bytes::new().n(NEXT).s("a").0;
    bytes[20] = 1;
    assert!(matches!(message::parse(&mut bytes.as_slice()), Err(Error::Unexpected { what: "padding", .. })));
}

#[test]
fn a_message_or_field_of_no_known_kind_is_refused() {
    for bytes in [Bytes::new().n(1), Bytes::new().n(RESULT).n(1).n(101).n(1).n(2).n(0)] {
        assert!(matches!(message::parse(&mut bytes.0.as_slice()), Err(Error::Unexpected { .. })));
    }
}

#[test]
fn what_is_no_store_path_is_refused_with_it() {
    for path in ["", "/nix/store", "/nix/store/..", "/etc/passwd", "\u{1b}[2J", &PATH[1..]] {
        let bytes = Bytes::new().list(&[path]).0;
        let error = parse::<BTreeSet<StorePath>>(&mut bytes.as_slice(), 38).unwrap_err();
        assert!(matches!(&error, Error::Unexpected { value, .. } if value == path), "{error}");
    }
}

#[test]
fn leftovers_of_any_name_may_be_collected() {
    let bytes = Bytes::new().list(&[PATH, "/nix/store/leftover"]).n(5).n(0).0;
    let freed: Freed = parse(&mut bytes.as_slice(), 38).unwrap();
    assert_eq!((freed.paths.len(), freed.bytes), (1, 5));
}

/// Words that look like the protocol, so that random bytes come further.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        4 => (0..4_u64).prop_map(|number| Bytes::new().n(number)),
        2 => ".{0,20}".prop_map(|text| Bytes::new().s(text)),
        1 => Just(Bytes::new().s(PATH)),
        1 => any::<u64>().prop_map(|number| Bytes::new().n(number)),
        1 => proptest::sample::select(Bytes::messages()),
        1 => any::<Vec<u8>>().prop_map(Bytes),
    ];
    proptest::collection::vec(word, 0..30)
        .prop_map(|words| words.into_iter().flat_map(|word| word.0).collect())
}

proptest! {
    #[test]
    fn no_bytes_are_the_end_of_us(bytes in plausible(), minor in any::<u8>()) {
        handshake::parse(&mut bytes.as_slice()).ok();
        parse::<BuildResult>(&mut bytes.as_slice(), minor).ok();
        parse::<Freed>(&mut bytes.as_slice(), minor).ok();
        parse::<BTreeSet<StorePath>>(&mut bytes.as_slice(), minor).ok();
        let mut rest = bytes.as_slice();
        while message::parse(&mut rest).is_ok() {}
    }
}
