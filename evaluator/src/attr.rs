//! Paths of attributes, as people write them: `checks.x86_64-linux."a.b"`.

use thiserror::Error;

/// Not a path of attributes.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is not a path of attributes: write names with dots between them, in double quotes where a name has a dot"
)]
pub struct AttrError(String);

/// Reads a path.
pub fn parse(text: &str) -> Result<Vec<String>, AttrError> {
    let error = || AttrError(text.to_owned());
    let mut path = Vec::new();
    let mut rest = text;
    loop {
        let (name, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').ok_or_else(error)?,
            None => rest.split_at(rest.find('.').unwrap_or(rest.len())),
        };
        let empty = name.is_empty() && !rest.starts_with('"');
        if empty || name.contains('"') {
            return Err(error());
        }
        path.push(name.to_owned());
        match after.strip_prefix('.') {
            Some(more) => rest = more,
            None if after.is_empty() => return Ok(path),
            None => return Err(error()),
        }
    }
}

/// Writes a path; the whole set has none.
pub fn show(path: &[String]) -> String {
    let plain =
        |name: &String| !name.is_empty() && !name.contains(['.', '"']) && !name.contains(char::is_whitespace);
    let names = path.iter().map(|name| if plain(name) { name.clone() } else { format!("\"{name}\"") });
    names.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_separated_by_dots() {
        assert_eq!(
            parse("checks.x86_64-linux.a"),
            Ok(["checks", "x86_64-linux", "a"].map(str::to_owned).into())
        );
        assert_eq!(parse("a.\"b.c\".d"), Ok(["a", "b.c", "d"].map(str::to_owned).into()));
    }

    #[test]
    fn what_is_not_a_path_is_refused() {
        for text in ["", ".", "a.", ".a", "a..b", "\"a", "\"a\"b", "a\"b"] {
            assert_eq!(parse(text), Err(AttrError(text.to_owned())), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(path in proptest::collection::vec("[a-z. _-]{0,5}", 1..4)) {
            prop_assert_eq!(parse(&show(&path)), Ok(path));
        }
    }
}
