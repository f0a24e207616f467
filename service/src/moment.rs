//! Moments and lengths of time, for people.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long ago a moment of the API (`2026-11-16T18:34:15Z`) is, in one word; the moment itself if it is none.
pub fn ago(moment: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match seconds(moment) {
        Some(then) => short(Duration::from_secs(now.saturating_sub(then))),
        None => moment.to_owned(),
    }
}

/// In the two largest units that matter: `3d 4h`, `12m 5s`, `8s`.
pub fn short(time: Duration) -> String {
    let all = time.as_secs();
    let (days, hours, minutes, seconds) = (all / 86_400, all / 3600 % 24, all / 60 % 60, all % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {seconds}s"),
        (0, _, _) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

/// Seconds since 1970.
fn seconds(moment: &str) -> Option<u64> {
    let (date, time) = moment.strip_suffix('Z')?.split_once('T')?;
    let number = |word: Option<&str>| word?.parse::<u64>().ok();
    let mut date = date.split('-');
    let (year, month, day) = (number(date.next())?, number(date.next())?, number(date.next())?);
    let mut time = time.split(':');
    let (hour, minute, second) = (number(time.next())?, number(time.next())?, number(time.next())?);
    Some(((days(year, month, day)? * 24 + hour) * 60 + minute) * 60 + second)
}

/// Days since 1970. Years begin in March, so that the day that is not always there is their last.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    if !(1970..10_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    // 719,468 days from the first of March of the year 0 to 1970.
    Some(365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_counted_from_1970() {
        assert_eq!(seconds("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(seconds("2000-02-29T12:00:00Z"), Some(951_825_600));
        assert_eq!(seconds("2026-11-16T18:34:15Z"), Some(1_794_854_055));
        for text in ["", "2026-11-16", "2026-13-01T00:00:00Z", "yesterday"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }

    #[test]
    fn lengths_have_two_units() {
        for (seconds, text) in [(8, "8s"), (725, "12m 5s"), (3600, "1h 0m"), (273_600, "3d 4h")] {
            assert_eq!(short(Duration::from_secs(seconds)), text);
        }
    }
}
