use std::time::Duration;

/// No pause is longer than this many first ones.
const LONGEST: u32 = 50;

/// How long to wait after the try with this number, from 0: twice as long each time, less a random part of up to a half, so
/// that those who failed together do not come back together.
pub(super) fn pause(first: Duration, attempt: u32) -> Duration {
    let whole = first * LONGEST.min(1 << attempt.min(16));
    whole.mul_f64(1.0 - 0.5 * rand::random::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_are_never_nothing() {
        let first = Duration::from_millis(100);
        for attempt in 0..100 {
            let whole = first * [1, 2, 4, 8, 16, 32].get(attempt as usize).copied().unwrap_or(50);
            let pause = pause(first, attempt);
            assert!(pause <= whole && pause >= whole / 2, "{attempt}: {pause:?}");
        }
    }
}
