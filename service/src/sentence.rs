//! Errors in words.

use std::error::Error;

/// An error with its causes, in one line. Some libraries repeat their source in their own text.
pub fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}
