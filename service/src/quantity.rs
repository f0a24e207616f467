//! Times and sizes as people write them: `30m`, `4h`, `64MB`, `20GiB`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// A length of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

/// Not a time, or not a size.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("write {0}")]
pub struct QuantityError(&'static str);

impl FromStr for Span {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400), ("w", 604_800), ("", 1)];
        let error = QuantityError("a number with s, m, h, d or w behind it, such as 30m");
        number(text, &units).map(|seconds| Self(Duration::from_secs(seconds))).ok_or(error)
    }
}

/// In the largest unit of which it is a whole number, weeks apart: nobody thinks of 91 days as 13 of them.
impl fmt::Display for Span {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let units = [("d", 86_400), ("h", 3600), ("m", 60)];
        match units.into_iter().find(|(_, unit)| seconds > 0 && seconds.is_multiple_of(*unit)) {
            Some((name, unit)) => write!(to, "{}{name}", seconds / unit),
            None => write!(to, "{seconds}s"),
        }
    }
}

impl FromStr for Size {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let units = [
            ("KiB", 1 << 10),
            ("MiB", 1 << 20),
            ("GiB", 1 << 30),
            ("TiB", 1 << 40),
            ("kB", 1000),
            ("KB", 1000),
            ("MB", 1_000_000),
            ("GB", 1_000_000_000),
            ("TB", 1_000_000_000_000),
            ("B", 1),
            ("", 1),
        ];
        let error = QuantityError("a number with MB, GB, MiB or GiB behind it, such as 4GB");
        number(text, &units).map(Self).ok_or(error)
    }
}

fn number(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.trim().trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let unit = text.trim()[digits.len()..].trim();
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    digits.trim().parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("30m", 1800), ("4 h", 14_400), ("1d", 86_400)] {
            assert_eq!(text.parse(), Ok(Span(Duration::from_secs(seconds))), "{text}");
        }
        for text in ["", "h", "4 hours", "-1s", "99999999999999999999", "18446744073709551615d"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_written_as_they_are_read() {
        for (seconds, text) in [(0, "0s"), (61, "61s"), (1800, "30m"), (7200, "2h"), (7_776_000, "90d")] {
            let span = Span(Duration::from_secs(seconds));
            assert_eq!(span.to_string(), text);
            assert_eq!(text.parse(), Ok(span));
        }
    }

    #[test]
    fn sizes_have_units() {
        let sizes = [("7", 7), ("64MB", 64_000_000), ("4 GB", 4_000_000_000), ("1GiB", 1 << 30), ("5B", 5)];
        for (text, bytes) in sizes {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GB", "4G", "1.5GB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
