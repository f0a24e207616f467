//! Bytes of a log as text.

/// The text at the beginning of some bytes, and how many of them it is. A character that is not whole yet is left for later,
/// unless nothing comes behind it. What can be no text is shown as `U+FFFD`.
pub fn text_of(bytes: &[u8], last: bool) -> (String, usize) {
    let (mut text, mut used) = (String::with_capacity(bytes.len()), 0);
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        if chunk.invalid().is_empty() {
            continue;
        }
        let at_end = used + chunk.invalid().len() == bytes.len();
        if at_end && !last && is_begun(chunk.invalid()) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        used += chunk.invalid().len();
    }
    (text, used)
}

/// Whether more bytes could make a character of these.
fn is_begun(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_are_cut_anywhere_come_out_whole() {
        let whole = "ab é € 𝄞\n".repeat(3);
        for size in 1..8 {
            let (mut held, mut text) = (Vec::new(), String::new());
            for piece in whole.as_bytes().chunks(size) {
                held.extend_from_slice(piece);
                let (more, used) = text_of(&held, false);
                text.push_str(&more);
                held.drain(..used);
                assert!(held.len() < 4);
            }
            assert_eq!(text, whole, "{size}");
        }
    }

    #[test]
    fn what_is_no_text_is_shown_and_holds_nothing_up() {
        assert_eq!(text_of(b"a\xffb", false), ("a\u{fffd}b".to_owned(), 3));
        assert_eq!(text_of(b"a\xff", false), ("a\u{fffd}".to_owned(), 2));
        assert_eq!(text_of(b"\xe2\x82", false), (String::new(), 0));
        assert_eq!(text_of(b"\xe2\x82", true), ("\u{fffd}".to_owned(), 2));
        assert_eq!(text_of(b"", true), (String::new(), 0));
    }
}
