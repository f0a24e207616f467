//! Times and sizes as Kubernetes writes them: `90s`, `1h30m`, `90d`, `100Gi`.
//!
//! The roles' settings have parsers of their own: people write `4GB` there, which is no quantity of Kubernetes.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// What a time looks like. The rules of the custom resources say the same.
pub(crate) const SPAN: &str = "^([0-9]{1,6}[smh]){1,3}$";

/// What a size looks like, in the rules of the custom resources.
pub(crate) const SIZE: &str = "^[0-9]{1,12}([.][0-9]{1,9})?([KMGT]i|[kMGT])?$";

/// A length of time in hours, minutes and seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// A number of days.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Days(pub u32);

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Not a time, or not a size.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("write {0}")]
pub struct QuantityError(&'static str);

impl Span {
    /// From seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

impl FromStr for Span {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        span(text).map(Self::seconds).ok_or(QuantityError("a time such as 90s, 30m, 2h or 1h30m"))
    }
}

fn span(text: &str) -> Option<u64> {
    let units = [('s', 1), ('m', 60), ('h', 3600)];
    let mut parts = text.split_inclusive(['s', 'm', 'h']).peekable();
    parts.peek()?;
    parts.try_fold(0_u64, |sum, part| {
        let (digits, unit) = units.iter().find_map(|(name, unit)| Some((part.strip_suffix(*name)?, unit)))?;
        sum.checked_add(number(digits)?.checked_mul(*unit)?)
    })
}

/// In the largest unit of which it is a whole number.
impl fmt::Display for Span {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let units = [("h", 3600), ("m", 60)];
        match units.into_iter().find(|(_, unit)| seconds > 0 && seconds.is_multiple_of(*unit)) {
            Some((name, unit)) => write!(to, "{}{name}", seconds / unit),
            None => write!(to, "{seconds}s"),
        }
    }
}

impl FromStr for Days {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let days = text.strip_suffix('d').and_then(number).and_then(|days| u32::try_from(days).ok());
        days.map(Self).ok_or(QuantityError("a number of days, such as 90d"))
    }
}

impl fmt::Display for Days {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}d", self.0)
    }
}

/// The largest first.
const UNITS: [(&str, u64); 9] = [
    ("Ti", 1 << 40),
    ("T", 1_000_000_000_000),
    ("Gi", 1 << 30),
    ("G", 1_000_000_000),
    ("Mi", 1 << 20),
    ("M", 1_000_000),
    ("Ki", 1 << 10),
    ("k", 1000),
    ("", 1),
];

impl FromStr for Size {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        size(text).map(Self).ok_or(QuantityError("a size such as 64Mi or 100Gi"))
    }
}

/// Fractions of bytes are rounded up, as Kubernetes does.
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let factor = UNITS.iter().find(|(name, _)| *name == &text[digits.len()..])?.1;
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    if part.len() > 9 {
        return None;
    }
    let part = match part {
        "" => 0,
        _ => {
            let scale = 10_u128.pow(u32::try_from(part.len()).ok()?);
            u64::try_from((u128::from(number(part)?) * u128::from(factor)).div_ceil(scale)).ok()?
        }
    };
    number(whole)?.checked_mul(factor)?.checked_add(part)
}

/// In the largest unit of which it is a whole number.
impl fmt::Display for Size {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.into_iter().find(|(_, unit)| self.0 > 0 && self.0.is_multiple_of(*unit));
        let (name, unit) = unit.unwrap_or(("", 1));
        write!(to, "{}{name}", self.0 / unit)
    }
}

fn number(digits: &str) -> Option<u64> {
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// A text in JSON, of so many characters at most. Rules look at it, so it needs a bound.
macro_rules! text {
    ($type:ident, $length:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = Cow::<'de, str>::deserialize(from)?;
                text.parse().map_err(|error| de::Error::custom(format!("{text:?}: {error}")))
            }
        }

        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "maxLength": $length })
            }
        }
    };
}

text!(Span, 16);
text!(Days, 8);
text!(Size, 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_may_have_several() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1h1m1s", 3661)] {
            assert_eq!(text.parse(), Ok(Span::seconds(seconds)), "{text}");
        }
        for text in ["", "90", "h", "2 h", "-1s", "2d", "1h30", "+1s", "18446744073709551615h", "é"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    #[test]
    fn days_are_days() {
        assert_eq!("90d".parse(), Ok(Days(90)));
        for text in ["", "d", "90", "90h", "1.5d", "-1d", "99999999999d"] {
            assert!(text.parse::<Days>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_quantities_of_kubernetes() {
        let sizes = [("7", 7), ("64Mi", 64 << 20), ("1.5Gi", 3 << 29), ("4G", 4_000_000_000), ("0.5k", 500)];
        for (text, bytes) in sizes {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "Gi", "4GB", "4GiB", "-1Gi", "1..5Gi", "1 Gi", "99999999Ti", "100m"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn they_are_written_as_they_are_read() {
        for text in ["0s", "61s", "30m", "2h", "90m"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
        for text in ["0", "7", "64Mi", "100Gi", "4G", "1536Mi"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        assert_eq!("90d".parse::<Days>().unwrap().to_string(), "90d");
        assert_eq!(Size(3 << 29).to_string(), "1536Mi");
    }
}
