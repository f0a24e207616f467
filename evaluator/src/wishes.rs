//! `.harmonia-ci.toml`: what a repository says about its own evaluation.

use std::time::Duration;

use harmonia_service::nearest::nearest;
use harmonia_service::quantity::Span;
use thiserror::Error;

/// The file, at the top of a source.
pub const FILE: &str = ".harmonia-ci.toml";
const KEYS: [&str; 4] = ["allow-ifd", "attrs", "eval-timeout", "retention"];

/// What a file says. What it leaves out is the project's or the evaluator's to say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wishes {
    /// The attributes to evaluate.
    pub attrs: Option<Vec<String>>,
    /// How long that may take, at most as long as the evaluator allows.
    pub timeout: Option<Duration>,
    /// Whether an evaluation may have something built.
    pub allow_ifd: bool,
    /// How long its results are kept, at most as long as the project's are.
    pub retention: Option<Duration>,
}

/// Why a file cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WishesError {
    /// Not TOML.
    #[error("{FILE} is not TOML: {0}")]
    Toml(String),
    /// A key that means nothing.
    #[error("{FILE} has a key {key}, which does not exist; the nearest is {nearest}")]
    Unknown {
        /// The key.
        key: String,
        /// What was meant, perhaps.
        nearest: &'static str,
    },
    /// A value of another kind.
    #[error("{FILE}: {key} must be {what}")]
    Value {
        /// The key.
        key: &'static str,
        /// What belongs there.
        what: &'static str,
    },
}

impl Wishes {
    /// Reads a file.
    pub fn parse(text: &str) -> Result<Self, WishesError> {
        let table: toml::Table =
            text.parse().map_err(|error: toml::de::Error| WishesError::Toml(error.message().to_owned()))?;
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let nearest = nearest(key, KEYS).unwrap_or_default();
            return Err(WishesError::Unknown { key: key.clone(), nearest });
        }
        let span = |key: &'static str| {
            let wrong =
                || WishesError::Value { key, what: "a length of time in quotes, such as \"20m\" or \"30d\"" };
            let read = |value: &toml::Value| {
                value.as_str().and_then(|text| text.parse::<Span>().ok()).ok_or_else(wrong)
            };
            table.get(key).map(read).transpose().map(|span| span.map(|span| span.0))
        };
        let list = |value: &toml::Value| {
            let names = value.as_array()?.iter().map(|name| Some(name.as_str()?.to_owned()));
            names.collect::<Option<Vec<_>>>()
        };
        let wrong = |key, what| WishesError::Value { key, what };
        let attrs = table.get("attrs").map(|value| {
            list(value).ok_or_else(|| wrong("attrs", "a list of attributes, such as [\"checks\"]"))
        });
        let allow_ifd = table
            .get("allow-ifd")
            .map(|value| value.as_bool().ok_or_else(|| wrong("allow-ifd", "true or false")));
        Ok(Self {
            attrs: attrs.transpose()?,
            timeout: span("eval-timeout")?,
            allow_ifd: allow_ifd.transpose()?.unwrap_or(false),
            retention: span("retention")?,
        })
    }

    /// What is evaluated is a commit's own to say; what it may take and do, the default branch's.
    pub fn trusting(self, default: Self) -> Self {
        Self { attrs: self.attrs, ..default }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn everything_can_be_said_and_nothing_must() {
        assert_eq!(Wishes::parse("").unwrap(), Wishes::default());
        let text = "attrs = [\"checks\"]\neval-timeout = \"20m\"\nallow-ifd = true\nretention = \"30d\"";
        let wishes = Wishes {
            attrs: Some(vec!["checks".to_owned()]),
            timeout: Some(Duration::from_secs(1200)),
            allow_ifd: true,
            retention: Some(Duration::from_secs(30 * 86_400)),
        };
        assert_eq!(Wishes::parse(text).unwrap(), wishes);
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_nearest() {
        let error = Wishes::parse("allow_ifd = true").unwrap_err().to_string();
        assert!(error.contains("allow_ifd") && error.contains("nearest is allow-ifd"), "{error}");
    }

    #[test]
    fn a_value_of_another_kind_is_answered_with_what_belongs_there() {
        for (text, what) in [
            ("attrs = \"checks\"", "a list"),
            ("eval-timeout = 20", "a length of time"),
            ("allow-ifd = \"yes\"", "true or false"),
            ("x", "not TOML"),
        ] {
            let error = Wishes::parse(text).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn a_commit_chooses_attributes_and_no_rights() {
        let own = Wishes::parse("attrs = [\"x\"]\nallow-ifd = true\neval-timeout = \"9h\"").unwrap();
        let together = own.trusting(Wishes::parse("retention = \"1d\"").unwrap());
        assert_eq!((together.attrs.unwrap().len(), together.allow_ifd, together.timeout), (1, false, None));
        assert_eq!(together.retention, Some(Duration::from_secs(86_400)));
    }
}
