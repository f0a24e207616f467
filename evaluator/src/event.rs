//! What `walk.nix` tells.

use serde::Deserialize;

/// Where a pass is. Of names alone that could not be said: some are no text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct At {
    /// The attribute.
    pub path: Vec<String>,
    /// Which of those that the pass was given,
    pub root: usize,
    /// and which of the attributes there, level by level.
    pub index: Vec<usize>,
}

/// One line of it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// This attribute is looked at now.
    At(At),
    /// It is a derivation.
    Found {
        /// The attribute.
        path: Vec<String>,
        /// The derivation, if what is evaluated tells the truth.
        drv: serde_json::Value,
    },
    /// It is a set that is entered.
    Within {
        /// The attribute.
        path: Vec<String>,
        /// How many attributes it has.
        count: usize,
    },
    /// It throws, or an assertion fails.
    Threw(Vec<String>),
    /// Somebody named it, and it is no derivation.
    Other {
        /// The attribute.
        path: Vec<String>,
        /// What it is instead.
        r#type: String,
    },
    /// Somebody named it, and it is not there.
    Missing {
        /// The attribute.
        path: Vec<String>,
        /// As far as it is there.
        within: Vec<String>,
        /// Some names of what is there instead.
        names: Vec<String>,
    },
}

impl Event {
    /// Whether of the attribute where the pass is nothing more is to be told.
    pub fn is_last(&self) -> bool {
        match self {
            Self::Found { .. } | Self::Threw(_) | Self::Other { .. } | Self::Missing { .. } => true,
            Self::At(_) | Self::Within { .. } => false,
        }
    }
}

/// Before each line that is ours: what is evaluated cannot know it.
pub fn mark() -> String {
    format!("{:032x} ", rand::random::<u128>())
}

/// Finds the one in an error; None if there is none.
pub fn within(error: &str, mark: &str) -> Option<Event> {
    let (_, rest) = error.split_once(mark)?;
    serde_json::Deserializer::from_str(rest).into_iter().next()?.ok()
}

/// Reads a line of a child's errors; None if it is not one of ours.
pub fn read(line: &str, mark: &str) -> Option<Event> {
    serde_json::from_str(line.strip_prefix("trace: ")?.strip_prefix(mark)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_the_mark_is_ours() {
        let at = At { path: vec!["a".to_owned()], root: 0, index: vec![2] };
        let line = "trace: m{\"at\":{\"index\":[2],\"path\":[\"a\"],\"root\":0}}";
        assert_eq!(read(line, "m"), Some(Event::At(at)));
        assert_eq!(read("trace: {\"at\":[\"a\"]}", "m"), None);
        assert_eq!(read("error: m", "m"), None);
    }

    #[test]
    fn an_error_may_have_one_in_it() {
        let error = "error:\n  error: m{\"other\":{\"path\":[\"a\"],\"type\":\"int\"}}\n at «string»:1:1";
        let other = Event::Other { path: vec!["a".to_owned()], r#type: "int".to_owned() };
        assert_eq!(within(error, "m{".trim_end_matches('{')), Some(other));
        assert_eq!(within("error: no", "mark"), None);
    }

    #[test]
    fn a_derivation_may_be_anything() {
        let event = read("trace: m{\"found\":{\"path\":[],\"drv\":{\"x\":1}}}", "m");
        assert!(matches!(event, Some(Event::Found { drv, .. }) if drv.as_str().is_none()));
    }
}
