//! What a draining builder does with what it holds. Pure: the time left is the earliest deadline's, whatever set it.

use std::time::Duration;

/// Uploads go on for longer than builds, for nothing has to be built again after them.
const UPLOAD_MARGIN: Duration = Duration::from_secs(10);

/// What is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A build.
    Building {
        /// How long it has run.
        elapsed: Duration,
        /// How long builds of its name take, half of them, if that is known.
        p50: Option<Duration>,
    },
    /// A build that is done, on its way to the cache.
    Uploading,
}

/// Whether to give something back now, with `left` until the deadline. A build that is not expected to end in time is given
/// back at once: another node can begin it sooner. One of which nothing is known may end any time, so it goes on until only
/// `margin` is left: its processes have to end, and the queue has to hear of it.
pub fn gives_back(work: Work, left: Option<Duration>, margin: Duration) -> bool {
    let Some(left) = left else { return false };
    match work {
        Work::Uploading => left <= UPLOAD_MARGIN.min(margin),
        Work::Building { elapsed, p50 } => {
            left <= margin || p50.is_some_and(|p50| left < p50.saturating_sub(elapsed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARGIN: Duration = Duration::from_secs(30);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn without_a_deadline_everything_ends() {
        assert!(!gives_back(Work::Building { elapsed: seconds(5), p50: Some(seconds(9999)) }, None, MARGIN));
        assert!(!gives_back(Work::Uploading, None, MARGIN));
    }

    #[test]
    fn a_build_that_cannot_end_in_time_is_given_back_at_once() {
        let build = Work::Building { elapsed: seconds(100), p50: Some(seconds(1000)) };
        assert!(gives_back(build, Some(seconds(899)), MARGIN));
        assert!(!gives_back(build, Some(seconds(901)), MARGIN));
    }

    #[test]
    fn an_unknown_build_goes_on_until_the_margin() {
        let build = Work::Building { elapsed: seconds(100), p50: None };
        assert!(!gives_back(build, Some(MARGIN + seconds(1)), MARGIN));
        assert!(gives_back(build, Some(MARGIN), MARGIN));
    }

    #[test]
    fn a_build_past_its_usual_time_goes_on_until_the_margin() {
        let build = Work::Building { elapsed: seconds(500), p50: Some(seconds(100)) };
        assert!(!gives_back(build, Some(seconds(60)), MARGIN));
        assert!(gives_back(build, Some(seconds(20)), MARGIN));
    }

    #[test]
    fn uploads_are_the_last_to_go() {
        assert!(!gives_back(Work::Uploading, Some(seconds(20)), MARGIN));
        assert!(gives_back(Work::Uploading, Some(seconds(10)), MARGIN));
    }

    #[test]
    fn uploads_go_after_builds_however_short_the_margin() {
        let short = seconds(5);
        assert!(!gives_back(Work::Uploading, Some(seconds(6)), short));
        assert!(gives_back(Work::Uploading, Some(seconds(5)), short));
    }
}
