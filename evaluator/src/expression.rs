//! The expression that a child evaluates.

use std::path::Path;

use serde::Serialize;

const WALK: &str = include_str!("walk.nix");
const SELECT: &str = include_str!("select.nix");

/// Where to look, and how far an earlier pass came there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Root {
    /// An attribute; empty: the whole set.
    pub path: Vec<String>,
    /// The last one below it that needs no look any more, as [`crate::event::At`] tells it.
    pub after: Vec<usize>,
    /// Whether somebody named it: then it must be something.
    pub asked: bool,
}

impl Root {
    /// From its beginning.
    pub fn new(path: Vec<String>) -> Self {
        Self { path, after: Vec::new(), asked: true }
    }
}

/// What `walk.nix` is told.
#[derive(Debug, Clone, Serialize)]
pub struct Walk<'a> {
    /// Before each line that is ours: what is evaluated cannot know it.
    pub mark: &'a str,
    /// Where to look.
    pub roots: &'a [Root],
    /// Sets are entered so far down whatever they say.
    pub levels: usize,
    /// Functions are called where they need no argument.
    pub calls: bool,
    /// An attribute that throws does not end the pass.
    pub catch: bool,
    /// Of so many processes that share the attributes
    pub parts: usize,
    /// this is that one.
    pub part: usize,
}

/// What `select.nix` is told.
#[derive(Debug, Clone, Serialize)]
pub struct Select<'a> {
    /// Before what nix-eval-jobs has no words for.
    pub mark: &'a str,
    /// An attribute; empty: the whole set.
    pub path: &'a [String],
    /// Sets are entered so far down whatever they say.
    pub levels: usize,
    /// Functions are called where they need no argument.
    pub calls: bool,
    /// A set may have so many attributes.
    pub most: usize,
}

/// What a source is, in Nix's language.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expression(String);

impl Expression {
    /// A file.
    pub fn file(path: &Path) -> Self {
        Self(format!("import (/. + {})", quoted(&path.to_string_lossy())))
    }

    /// The outputs of a flake, by a reference that is locked.
    pub fn flake(reference: &str) -> Self {
        Self(format!("(builtins.getFlake {}).outputs", quoted(reference)))
    }

    /// The whole of what a child evaluates.
    pub fn walked(&self, walk: &Walk<'_>) -> Result<String, serde_json::Error> {
        self.given_to(WALK, walk)
    }

    /// The whole of what nix-eval-jobs evaluates.
    pub fn selected(&self, select: &Select<'_>) -> Result<String, serde_json::Error> {
        self.given_to(SELECT, select)
    }

    fn given_to(&self, function: &str, settings: &impl Serialize) -> Result<String, serde_json::Error> {
        let settings = quoted(&serde_json::to_string(settings)?);
        Ok(format!("({function}) {{ root = {}; settings = builtins.fromJSON {settings}; }}\n", self.0))
    }
}

/// A text in Nix's language.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for char in text.chars() {
        match char {
            '"' | '\\' | '$' => quoted.extend(['\\', char]),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            char => quoted.push(char),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_is_code() {
        assert_eq!(quoted("a\"b${c}\\d\n"), "\"a\\\"b\\${c}\\\\d\\n\"");
    }
}
