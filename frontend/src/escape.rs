//! Words in addresses.

/// One part of a path or of a query: a name may have anything that can be typed.
pub fn escape(word: &str) -> String {
    word.bytes().fold(String::with_capacity(word.len()), |path, byte| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'.' | b'_' | b'~' => {
            path + &char::from(byte).to_string()
        }
        _ => format!("{path}%{byte:02X}"),
    })
}
